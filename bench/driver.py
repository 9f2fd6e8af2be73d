"""What Limosa adds to the bare driver on GPUs: a job with 0, 4 and 32 GB of device memory moved there and back.

    python bench/driver.py [--sizes 0,4,32] [--runs 3] [--touch GIB] [--minutes 8] [--out FOLDER]

Bare is the four driver calls made in this process (:class:`limosa.gpu.Process`); limosa is ``operation.move`` in the
same process, and the command beside it. They take turns on one and the same job, which stamps its memory, writes down
the time after each step and checks every page at the end. What Limosa may add to the pause by the job's own clock: 5 %
of the driver's own time, or 50 ms where that is more. All host memory that is needed is touched beforehand. Exit code
0 where everything is within the limits, 1 where not, 3 where time ran out (what was measured until then is written).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]
# Found by the command, the worker and what the worker becomes, from any folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
)

from report import Results, table, verdict  # noqa: E402
from touch import touch  # noqa: E402

from limosa import operation  # noqa: E402
from limosa.errors import GpuUnavailable  # noqa: E402
from limosa.gpu import (  # noqa: E402
    Inventory,
    Process,
    complete_map,
    driver,
    inventory,
    openable,
)

STAMPING = ROOT / "tests" / "gpu" / "victims" / "stamping.py"
SHARE, FLOOR = 0.05, 0.050
STEPS = ("lock", "checkpoint", "restore", "unlock")
NOTHING = 0.01  # GB: what "0 GB" is, for a job has something

jobs: list[Job] = []


class Job:
    """The stamping job."""

    def __init__(self, gigabytes: float, folder: Path):
        self.folder = folder
        self.log = folder / "log"
        folder.mkdir(parents=True)
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(STAMPING), str(folder), "--gb", str((gigabytes or NOTHING) * 1e9 / 2**30)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,
                start_new_session=True,
            )
        self.pid = self.process.pid
        jobs.append(self)
        self.until(lambda: len(self.ticks()) > 20, 90)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ticks(self) -> list[float]:
        whole = self.text().rpartition("\n")[0]
        return [float(line.split()[2]) for line in whole.splitlines() if line.startswith("tick ")]

    def until(self, true: Callable[[], bool], limit: float) -> None:
        end = time.monotonic() + limit
        while not true():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the job has ended or does not go on:\n{self.text()[-2000:]}")
            time.sleep(0.01)

    def goes_on(self) -> None:
        before = len(self.ticks())
        self.until(lambda: len(self.ticks()) > before + 5, 60)

    def gap(self, since: float) -> float:
        """Seconds that it stood still after ``since`` by its own clock, less what lies between two steps anyway."""
        pairs = list(itertools.pairwise(self.ticks()))
        usual = statistics.median(b - a for a, b in pairs if b < since)
        return max(b - a for a, b in pairs if b > since) - usual

    def finish(self) -> None:
        """Let it check all its pages and end."""
        (self.folder / "stop").touch()
        if self.process.wait(60) != 0 or "DONE" not in self.text():
            raise RuntimeError(f"the job ended badly:\n{self.text()[-2000:]}")

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def where(pid: int, gpus: Inventory) -> int:
    """The index of the GPU that it is on."""
    (index,) = [gpu.index for gpu in inventory().gpus if gpu.holds(pid)]
    return index


# --- one move, in three ways ------------------------------------------------------------------------------------------


def bare(job: Job, gpus: Inventory, here: int, there: int) -> dict[str, Any]:
    """The four calls of the driver."""
    a, b = gpus.gpus[here].uuid, gpus.gpus[there].uuid
    pairs = complete_map({a: b}, openable(gpus, job.pid), {a: 1}, gpus.gpus)
    process = Process(job.pid)
    calls: list[Callable[[], object]] = [
        lambda: process.lock(10_000),
        process.checkpoint,
        lambda: process.restore(pairs),
        process.unlock,
    ]
    found: dict[str, Any] = {}
    for step, call in zip(STEPS, calls, strict=True):
        begin = time.monotonic()
        call()
        found[step] = time.monotonic() - begin
    found["wall"] = sum(found[step] for step in STEPS)
    return found


def api(job: Job, gpus: Inventory, here: int, there: int) -> dict[str, Any]:
    """``operation.move`` in this process."""
    begin = time.monotonic()
    (outcome,) = operation.move(job.pid, to=str(there), timeout=150)
    wall = time.monotonic() - begin
    assert outcome.result is not None
    timings = outcome.result.timings
    return {**{step: timings[step] for step in STEPS}, "wall": wall, "pause": timings["pause_seconds"]}


def command(job: Job, gpus: Inventory, here: int, there: int) -> dict[str, Any]:
    """``limosa move``."""
    argv = [sys.executable, "-m", "limosa", "move", str(job.pid), "--to", str(there), "-o", "json"]
    begin = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, cwd="/", timeout=180, check=False)
    wall = time.monotonic() - begin
    if done.returncode:
        raise RuntimeError(f"limosa move exited with {done.returncode}: {done.stdout}{done.stderr}")
    timings = json.loads(done.stdout)["timings"]
    return {**{step: timings[step] for step in STEPS}, "wall": wall, "pause": timings["pause_seconds"]}


WAYS: dict[str, Callable[[Job, Inventory, int, int], dict[str, Any]]] = {"bare": bare, "api": api, "command": command}


def measure(results: Results, gpus: Inventory, gigabytes: float, runs: int, folder: Path, until: float) -> None:
    """One size: each way once there and once back without counting (not for large jobs), then ``runs`` in turns."""
    job = Job(gigabytes, folder / f"{gigabytes:g}")
    try:
        here = where(job.pid, gpus)
        slowest = 0.0
        for run in range(0 if gigabytes > 8 else -1, runs):
            order = list(WAYS) if run % 2 == 0 else list(reversed(WAYS))
            for way in order:
                if way == "command" and gigabytes > 8 and run > 0:
                    continue
                if time.monotonic() + 1.5 * slowest > until:
                    print(f"{gigabytes:g} GB: no time for run {run + 1} of {way}", flush=True)
                    continue
                there = 1 - here
                since = time.monotonic()
                figures = WAYS[way](job, gpus, here, there)
                job.goes_on()
                here = where(job.pid, gpus)
                if here != there:
                    raise RuntimeError(f"the job is on GPU {here}, not on {there}")
                slowest = max(slowest, time.monotonic() - since)
                if run >= 0:
                    results.add(gb=gigabytes, run=run, way=way, gap=job.gap(since), **figures)
                print(f"{gigabytes:g} GB {way} {run + 1}: {job.gap(since):.3f} s", flush=True)
        job.finish()
    finally:
        job.kill()


# --- the page ---------------------------------------------------------------------------------------------------------


def page(results: Results) -> tuple[str, bool]:
    """The page, and whether all is within the limits."""
    runs, good = results.raw["runs"], True
    steps: list[list[object]] = []
    pauses: list[list[object]] = []
    for gb in sorted({run["gb"] for run in runs}):
        of = {way: [r for r in runs if r["gb"] == gb and r["way"] == way] for way in WAYS}

        def median(way: str, what: str, of: dict[str, list[dict[str, Any]]] = of) -> float:
            return statistics.median(r[what] for r in of[way]) if of[way] else float("nan")

        for way in ("bare", "api"):
            cells = [f"{median(way, step):.3f}" for step in STEPS]
            steps.append([f"{gb:g} GB", "driver" if way == "bare" else "limosa", *cells, len(of[way])])
        if not of["bare"] or not of["api"]:
            good = False
            continue
        own, bare_gap, gap = median("bare", "wall"), median("bare", "gap"), median("api", "gap")
        allowed = max(SHARE * own, FLOOR)
        ok = gap - bare_gap <= allowed
        good &= ok
        said = median("api", "pause")
        pauses.append(
            [
                f"{gb:g} GB",
                f"{own:.3f}",
                f"{bare_gap:.3f}",
                f"{gap:.3f}",
                f"{(gap - bare_gap) * 1e3:+.0f} ms",
                f"{allowed * 1e3:.0f} ms",
                verdict(ok),
                f"{said:.3f}",
                f"{median('api', 'wall'):.2f}",
                f"{median('command', 'wall'):.2f}",
            ]
        )
    told = results.raw["machine"]
    head = [
        "device memory",
        "driver's own time, s",
        "pause with the bare driver, s",
        "with limosa, s",
        "added",
        "allowed",
        "",
        "`pause_seconds`",
        "whole call (API), s",
        "whole command, s",
    ]
    text = f"""# What Limosa adds to the bare driver, {results.date}

{told["gpus"]}, driver {told["driver"]}; {told["processor"]}, {told["cores"]} cores, {told["memory_gib"]} GiB, Linux
{told["kernel"]}, transparent huge pages {told["huge_pages"]}; commit {
        results.raw["commit"]
    }. A PyTorch process moved to
the other GPU and back, bare driver calls, `operation.move` in one process and `limosa move` in turns; medians. Touched
beforehand: {told["touched_gib"]:.0f} GiB of host memory in {told["touch_seconds"]:.0f} s. Every page was compared at
the end. Raw figures: `{results.path.name}`.

The pause by the job's own clock. Allowed: 5 % of the driver's own time or 50 ms, whichever is more.

{table(head, pauses)}

The steps, in seconds:

{table(["device memory", "", *STEPS, "runs"], steps)}
"""
    return text, good


def huge_pages() -> str:
    """The setting in brackets of transparent huge pages."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "not there"
    return text[text.find("[") + 1 : text.find("]")]


def watch(minutes: float, results: Results) -> None:
    """End everything when time is up: a driver call that hangs cannot be broken off."""

    def end() -> None:
        time.sleep(minutes * 60)
        for job in jobs:
            job.kill()
        results.save()
        print(f"time is up: {results.path} has what was measured", flush=True)
        os._exit(3)

    threading.Thread(target=end, daemon=True).start()


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="0,4,32")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--touch", type=float, default=80, help="GiB of host memory to touch beforehand")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    begin = time.monotonic()
    os.environ["LIMOSA_RUNTIME_DIR"] = os.environ.get("LIMOSA_RUNTIME_DIR") or tempfile.mkdtemp(prefix="limosa-run-")
    try:
        gpus = inventory()
    except GpuUnavailable as error:
        print(f"bench/driver.py: {error}", file=sys.stderr)
        return int(error.exit_code)
    if len(gpus.gpus) < 2:
        print("bench/driver.py: this needs two GPUs", file=sys.stderr)
        return 12
    driver.available()  # cuInit, which the first call would pay for
    results = Results("bench-driver", options.out)
    watch(options.minutes, results)
    size, seconds = touch(int(options.touch * 2**30))
    names = sorted({gpu.name for gpu in gpus.gpus})
    results.raw["machine"].update(
        gpus=f"{len(gpus.gpus)} × {', '.join(names)}",
        driver=gpus.driver_version,
        huge_pages=huge_pages(),
        touched_gib=size / 2**30,
        touch_seconds=seconds,
    )
    print(f"touched {size / 2**30:.0f} GiB of host memory in {seconds:.0f} s", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="limosa-bench-"))
    failed = ""
    try:
        for number in options.sizes.split(","):
            measure(results, gpus, float(number), options.runs, folder, begin + options.minutes * 60 - 30)
    except Exception as error:  # what was measured is worth a page all the same
        failed = f"{type(error).__name__}: {error}"
        print(failed, file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not results.raw["runs"]:
        return 1
    text, good = page(results)
    if failed:
        text += f"\nNot finished: {failed.splitlines()[0]}\n"
    print(text)
    print(f"written: {results.page(text)}")
    return 0 if good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())

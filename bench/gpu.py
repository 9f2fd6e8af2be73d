"""The parked way on two GPUs: every figure that Limosa promises, measured in one run, with the stock path beside it.

    python bench/gpu.py [--rows move,halves,pair,memory,suspend,disk,driver,hash,commands,cost] [--touch GIB]
        [--minutes 8] [--out FOLDER]
    python bench/gpu.py --rows nccl      (or some of nccl-swap,nccl-large,nccl-four,nccl-rate,nccl-disk,nccl-cost)
    python bench/gpu.py --rows containers --minutes 3.3      (or some of box-move,seen,box-disk)

The jobs are PyTorch processes that compute all the while, stamp their memory and check every page at the end
(``victim.py``), with ``nccl`` those of torchrun with two ranks or four (``nccl_rows.py``); pauses are by their own
clock. ``containers``: jobs in containers with the nodes of one GPU (``box_rows.py``), for which it needs a runc
(``scripts/gpu-carry``). All host memory is touched beforehand. A table, a picture and the raw figures go to
``docs/results/`` (as ``bench-nccl-…`` where all rows are ``nccl``, ``bench-containers-…`` likewise). Exit code 0 where
all was measured and is what it must be, 1 where not, 3 where time ran out (what was measured until then is written).
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
)

import box_rows  # noqa: E402
from driver import huge_pages  # noqa: E402
from jobs import end_helpers  # noqa: E402
from nccl_rows import GROUPS as NCCL_GROUPS  # noqa: E402
from nccl_rows import LIMITS as NCCL_LIMITS  # noqa: E402
from nccl_rows import ROWS as NCCL_ROWS  # noqa: E402
from plot import plot  # noqa: E402
from report import Results, table  # noqa: E402
from rows import BESIDE, Bench, Row, breakdown  # noqa: E402
from rows import GROUPS as USUAL_GROUPS  # noqa: E402
from rows import LIMITS as USUAL_LIMITS  # noqa: E402
from rows import ROWS as USUAL_ROWS  # noqa: E402
from rows import TWO_GPUS as USUAL_TWO_GPUS  # noqa: E402
from touch import touch  # noqa: E402

from limosa.errors import GpuUnavailable  # noqa: E402
from limosa.gpu import Inventory, driver, inventory  # noqa: E402

GROUPS = {**USUAL_GROUPS, **NCCL_GROUPS, **box_rows.GROUPS}
LIMITS = {**USUAL_LIMITS, **NCCL_LIMITS, **box_rows.LIMITS}
ROWS = {**USUAL_ROWS, **NCCL_ROWS, **box_rows.ROWS}
TWO_GPUS = (*USUAL_TWO_GPUS, *NCCL_GROUPS, *box_rows.GROUPS)
MANY = {"nccl": list(NCCL_GROUPS), "containers": list(box_rows.GROUPS)}
"""Names of several groups."""
TOUCHED = {"nccl": 24.0, "containers": 72.0, "gpu": 110.0}
"""GiB of host memory."""
PLOTTED = {
    "nccl-swap": 1.8,
    "nccl-large": 2.0,
    "nccl-four": 2.6,
    "move-4": None,
    "move": 0.6,
    "size": None,
    "pair": 0.9,
    "checkpoint": 1.8,
    "box-move": 0.7,
    "seen": 0.55,
}
PLOT_NAMES = {
    "nccl-swap": "two ranks, DDP, swapped",
    "nccl-large": "the same with 16 GB a rank",
    "nccl-four": "four ranks, 16 GB each, rotated",
    "move-4": "move, 4 GB",
    "move": "move, 64 GB",
    "size": "move, 100 GB",
    "pair": "two processes of 16 GB, swapped",
    "checkpoint": "checkpoint --leave-running, 32 + 0.5 GB",
    "box-move": "move in place, container, 64 GB",
    "seen": "move, one GPU seen, 64 GB",
}


def page(results: Results, rows: list[Row], failed: list[str], picture: str) -> str:
    """The page."""
    told = results.raw["machine"]
    order = [*LIMITS]
    rows = sorted(rows, key=lambda row: order.index(row.key) if row.key in order else len(order))
    lines = [[row.what, row.must, row.reach, row.text, row.word] for row in rows]
    misses = "".join(f"\n- {text}" for text in failed)
    return f"""# The parked way, {results.date}

{told["gpus"]}, driver {told["driver"]}; {told["processor"]}, {told["cores"]} cores, {told["memory_gib"]} GiB, Linux
{told["kernel"]}, transparent huge pages {told["huge_pages"]}; commit {results.raw["commit"]}. Host memory touched
beforehand: {told.get("touched_gib", 0):.0f} GiB in {told.get("touch_seconds", 0):.0f} s. The jobs are PyTorch
processes that compute all the while and check every page at the end; pauses are by their own clock; *stock* is the four
calls of the driver on the same program without the shim. Raw figures: `{results.path.name}`.

{table(["what", "must", "reach for", "measured", ""], lines)}

Where the time goes (medians, ms; *copy beside* runs beside the driver's steps, *ready before* is before the pause:
neither is added; *rest* is what none of the steps explains, the job's own way back to its next step among it):

{breakdown(rows)}

![where the pauses go]({picture})
{"What could not be measured, or ended badly:" + chr(10) + misses if failed else ""}
"""


class Writer:
    """Rows so far, and the page of them: written whenever a row has come, so that a run that is cut short has it."""

    def __init__(self, results: Results):
        self.results, self.rows, self.failed = results, [], []  # type: Results, list[Row], list[str]
        self.mutex = threading.Lock()

    def add(self, *rows: Row) -> None:
        """More rows."""
        for row in rows:
            print(f"== {row.what}: {row.text} (must {row.must}, reach for {row.reach}): {row.word}", flush=True)
        with self.mutex:
            self.rows += rows
        self.write()

    def write(self) -> str:
        """Page, picture, raw figures."""
        with self.mutex:
            self.results.raw["rows"] = [{**row._asdict(), "steps": dict(row.steps)} for row in self.rows]
            bars = [
                (PLOT_NAMES[key], {k: v for k, v in row.steps.items() if k not in BESIDE}, limit)
                for key, limit in PLOTTED.items()
                for row in self.rows
                if row.key == key and row.steps
            ]
            picture = self.results.path.with_suffix(".svg")
            if bars:
                picture.write_text(plot(bars))
            text = page(self.results, self.rows, self.failed, picture.name)
            self.results.page(text)
            return text


def watch(seconds: float, bench: Bench, writer: Writer) -> None:
    """Ends everything when time is up: a driver call that hangs cannot be broken off."""

    def end() -> None:
        time.sleep(seconds)
        for name in list(bench.jobs):
            bench.end_job(name)
        writer.failed.append("time ran out")
        writer.write()
        box_rows.containers.close()
        print(f"time is up: {writer.results.path} has what was measured", flush=True)
        os._exit(3)

    threading.Thread(target=end, daemon=True).start()


def run(chosen: list[str], bench: Bench, writer: Writer) -> None:
    """Measures the groups in their order; one that fails is told, and the next one comes all the same."""
    for name in chosen:
        measure, needs, jobs = GROUPS[name]
        seen: list[str] = []
        why = ""
        if bench.left() < needs:
            why = "not measured: not enough time was left"
        else:
            begun = time.monotonic()
            try:
                bench.rest()
                for row in measure(bench):
                    seen.append(row.key)
                    writer.add(row)
            except Exception as error:
                traceback.print_exc()
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                writer.failed.append(f"{name}: {why}")
                for job in jobs:
                    bench.end_job(job)
            print(f"-- {name}: {time.monotonic() - begun:.0f} s, {bench.left():.0f} left", flush=True)
        writer.add(*(LIMITS[key].of(None, why) for key in ROWS[name] if key not in seen))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default=",".join(USUAL_GROUPS))
    parser.add_argument("--touch", type=float, default=None, help="GiB of host memory to touch beforehand")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    begun = time.monotonic()
    chosen = [one for name in options.rows.split(",") for one in MANY.get(name, [name])]
    kind = next((name for name, groups in MANY.items() if not set(chosen) - set(groups)), "gpu")
    gib = options.touch if options.touch is not None else TOUCHED[kind]
    if unknown := [name for name in chosen if name not in GROUPS]:
        parser.error(f"no rows called {', '.join(unknown)}")
    os.environ["LIMOSA_RUNTIME_DIR"] = os.environ.get("LIMOSA_RUNTIME_DIR") or tempfile.mkdtemp(prefix="limosa-run-")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    try:
        gpus: Inventory = inventory()
    except GpuUnavailable as error:
        print(f"bench/gpu.py: {error}", file=sys.stderr)
        return int(error.exit_code)
    if len(gpus.gpus) < 4 and "nccl-four" in chosen:  # where there are no four, the others are all
        chosen.remove("nccl-four")
    if len(gpus.gpus) < 2 and (both := [name for name in chosen if name in TWO_GPUS]):
        print(f"bench/gpu.py: {', '.join(both)} need two GPUs; --rows names others", file=sys.stderr)
        return 12
    driver.available()  # cuInit, which the first call would pay for
    compileall.compile_dir(ROOT / "src", quiet=2)  # as pip leaves it: rows that begin with a command would pay for this
    results = Results(f"bench-{kind}", options.out)
    names = sorted({gpu.name for gpu in gpus.gpus})
    results.raw["machine"].update(
        gpus=f"{len(gpus.gpus)} × {', '.join(names)}", driver=gpus.driver_version, huge_pages=huge_pages()
    )
    folder = Path(tempfile.mkdtemp(prefix="limosa-bench-"))
    bench = Bench(results, gpus, folder, begun + options.minutes * 60 - 15)
    box_rows.prepare(bench)
    writer = Writer(results)
    watch(options.minutes * 60, bench, writer)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the jobs are ended
    try:
        # They come up while memory is touched; then they wait for orders and disturb nobody.
        bench.begin(*dict.fromkeys(job for name in chosen for job in GROUPS[name][2]))
        size, seconds = touch(int(gib * 2**30))
        results.raw["machine"].update(touched_gib=size / 2**30, touch_seconds=seconds)
        print(f"touched {size / 2**30:.0f} GiB of host memory in {seconds:.0f} s", flush=True)
        run(chosen, bench, writer)
        for name in list(bench.jobs):
            try:
                bench.jobs[name].finish()
            except RuntimeError as error:
                writer.failed.append(str(error).splitlines()[0])
    except Exception as error:
        traceback.print_exc()
        writer.failed.append(f"{type(error).__name__}: {error}")
    finally:
        for name in list(bench.jobs):
            bench.end_job(name)
        end_helpers(os.environ["LIMOSA_RUNTIME_DIR"])
        box_rows.containers.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(writer.write())
    print(f"written: {results.path.with_suffix('.md')}")
    return 0 if not writer.failed and all(row.ok for row in writer.rows) else 1


if __name__ == "__main__":
    sys.exit(main())

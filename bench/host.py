"""What Limosa adds to bare CRIU on the CPU: processes of 0.1, 1 and 4 GB of memory, images in memory (tmpfs).

    python bench/host.py [--sizes 0.1,1,4] [--runs 5] [--out FOLDER] [--folder /dev/shm]

Bare is the same CRIU with the same options, started as one command; limosa is ``operation.checkpoint`` and
``operation.restore`` in one warm process. They take turns on one and the same job, which each dump ends and each
restore brings back. Hashing (in a checkpoint) and verifying (before a restore) have figures of their own. Exit code 0
where everything is within the limits, 1 where not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from report import Results, table, verdict  # noqa: E402

from limosa import operation  # noqa: E402
from limosa.image import open_image, verify  # noqa: E402
from limosa.image.files import open_file  # noqa: E402
from limosa.image.hashing import hash_fd  # noqa: E402
from limosa.process.criu.find import find  # noqa: E402
from limosa.process.criu.program import Criu  # noqa: E402

GB = 10**9
SHARE, FLOOR = 0.10, 0.100  # what Limosa may add: a tenth, or 100 ms where that is more
RATE = 2.0 * GB  # bytes a second and core that hashing and verifying must reach
LIMIT = 120.0  # seconds for one run of CRIU

JOB = """
import mmap, os, sys, time
size = int(sys.argv[1])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block = bytearray(os.urandom(1 << 20))
for at in range(0, size, len(block)):
    block[:8] = at.to_bytes(8, "little")
    memory[at:at + len(block)] = block[:min(len(block), size - at)]
print("READY", flush=True)
while True:
    time.sleep(0.1)
"""


class Job:
    """A process with that much memory, all of it in use; whoever ends it, we reap it at once."""

    def __init__(self, size: int, folder: Path):
        log = folder / "log"
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", JOB, str(size)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,
                start_new_session=True,
            )
        self.pid = self.process.pid
        end = time.monotonic() + LIMIT
        while "READY" not in log.read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the job is not up: {log.read_text()}")
            time.sleep(0.05)

    def reaping(self) -> threading.Thread:
        """Reap it in a thread as soon as it has ended."""

        def reap() -> None:
            while True:
                try:
                    os.waitpid(self.pid, 0)
                    return
                except ChildProcessError:  # restored a moment ago, and not ours yet
                    if not os.path.exists(f"/proc/{self.pid}"):
                        return
                    time.sleep(0.002)

        thread = threading.Thread(target=reap, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """End it."""
        thread = self.reaping()
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        thread.join(10)


# --- bare -------------------------------------------------------------------------------------------------------------


def bare(criu: Criu, what: str, image: Path, arguments: list[str]) -> float:
    """Run CRIU as a command; seconds from its start to its end."""
    command = [
        *criu.argv,
        what,
        "--images-dir", str(image / "criu"),
        "--work-dir", str(image / "log"),
        "--log-file", f"{what}.log",
        "-v4",
        "--manage-cgroups=ignore",
        *(["--libdir", criu.plugin_dir] if criu.plugin_dir else []),
        *arguments,
    ]  # fmt: skip
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # No wait with a time-out: Python looks every 50 ms then, which would flatter us.
    guard = threading.Timer(LIMIT, process.kill)
    guard.start()
    code = process.wait()
    seconds = time.monotonic() - begin
    guard.cancel()
    if code:
        raise RuntimeError(f"bare criu {what} failed:\n{(image / 'log' / f'{what}.log').read_text()[-2000:]}")
    return seconds


def bare_cycle(criu: Criu, job: Job, image: Path) -> dict[str, float]:
    """Dump and restore by bare CRIU, with the options that Limosa gives it."""
    for name in ("criu", "log"):
        (image / name).mkdir(parents=True)
    reaper = job.reaping()
    options = ["--tree", str(job.pid), "--ghost-limit", str(1 << 20), "--link-remap"]
    dumped = bare(criu, "dump", image, [*options, "--network-lock", criu.network_lock])
    reaper.join(10)
    restored = bare(criu, "restore", image, ["--restore-detached", "--pidfile", "restore.pid"])
    return {"dump": dumped, "restore": restored}


# --- limosa -----------------------------------------------------------------------------------------------------------


def limosa_cycle(job: Job, image: Path) -> dict[str, Any]:
    """Dump and restore through the API in this process; hashing and verifying told apart."""
    reaper = job.reaping()
    begin = time.monotonic()
    written = operation.checkpoint(job.pid, image)
    dumped = time.monotonic() - begin
    reaper.join(10)
    with open_image(image) as opened:
        found = verify(opened)  # as restore does it, with all cores
        found.check()
        wall = found.seconds
        cpu = time.thread_time()
        verify(opened, threads=1).check()
        verify_one = time.thread_time() - cpu
        cpu, size = time.thread_time(), 0
        for file in opened.manifest.files:
            fd = open_file(file.path.removeprefix("criu/"), opened.criu_fd)
            size += hash_fd(fd, threads=1)[1]
            os.close(fd)
        hash_one = time.thread_time() - cpu
    begin = time.monotonic()
    restored = operation.restore(image, verify=False, adopt=True)
    took = time.monotonic() - begin
    timings = dict(written.timings)
    return {
        "dump": dumped - timings["hash"],
        "dump_with_hash": dumped,
        "hash": timings["hash"],
        "sync": timings["sync"],
        "restore": took,
        "verify": wall,
        "bytes": written.bytes,
        "verify_per_core": size / verify_one,
        "hash_per_core": size / hash_one,
        "dump_timings": timings,
        "restore_timings": dict(restored.timings),
    }


# --- all of it --------------------------------------------------------------------------------------------------------


def measure(results: Results, criu: Criu, gigabytes: float, runs: int, base: Path) -> None:
    """One size: a first round that does not count, then ``runs`` in turns."""
    folder = Path(tempfile.mkdtemp(prefix="limosa-bench-", dir=base))
    job = None
    try:
        job = Job(int(gigabytes * GB), folder)
        for run in range(-1, runs):
            image = folder / "image"
            order = ("bare", "limosa") if run % 2 else ("limosa", "bare")
            for which in order:
                figures = bare_cycle(criu, job, image) if which == "bare" else limosa_cycle(job, image)
                shutil.rmtree(image)
                if run >= 0:
                    results.add(gb=gigabytes, run=run, which=which, load=os.getloadavg()[0], **figures)
            print(f"{gigabytes} GB: round {run + 1} of {runs}", flush=True)
    finally:
        if job is not None:
            job.end()
        shutil.rmtree(folder, ignore_errors=True)


def page(results: Results, criu: Criu) -> tuple[str, bool]:
    """The page, and whether all is within the limits."""
    runs, good = results.raw["runs"], True
    rows: list[list[object]] = []
    rates: list[list[object]] = []
    for gb in sorted({run["gb"] for run in runs}):
        of = {which: [r for r in runs if r["gb"] == gb and r["which"] == which] for which in ("bare", "limosa")}
        for what in ("dump", "restore"):
            bare_s, ours = (statistics.median(r[what] for r in of[which]) for which in ("bare", "limosa"))
            least = [min(r[what] for r in of[which]) for which in ("bare", "limosa")]
            allowed = max(SHARE * bare_s, FLOOR)
            ok = ours - bare_s <= allowed
            good &= ok
            rows.append(
                [
                    f"{gb:g} GB",
                    "dump without hashing" if what == "dump" else "restore without verifying",
                    f"{bare_s:.3f}",
                    f"{ours:.3f}",
                    f"{(ours - bare_s) * 1e3:+.0f} ms",
                    f"{allowed * 1e3:.0f} ms",
                    verdict(ok),
                    f"{least[0]:.3f} / {least[1]:.3f}",
                ]
            )
        for name, title in (("hash", "hashing"), ("verify", "verifying")):
            rate = statistics.median(r[f"{name}_per_core"] for r in of["limosa"])
            wall = statistics.median(r[name] for r in of["limosa"])
            size = of["limosa"][0]["bytes"]
            ok = rate >= RATE
            good &= ok
            rates.append(
                [f"{gb:g} GB", title, f"{wall:.3f}", f"{size / wall / 1e9:.1f}", f"{rate / 1e9:.2f}", verdict(ok)]
            )
    told = results.raw["machine"]
    count = len([r for r in runs if r["which"] == "bare" and r["gb"] == runs[0]["gb"]])
    shown = {"dump": ("plan", "dump", "commit", "hash", "sync", "reap", "total"), "restore": ("plan", "criu", "total")}
    steps: list[list[object]] = []
    for gb in sorted({run["gb"] for run in runs}):
        ours_only = [r for r in runs if r["gb"] == gb and r["which"] == "limosa"]
        for what, names in shown.items():
            medians = {n: statistics.median(r[f"{what}_timings"].get(n, 0.0) for r in ours_only) for n in names}
            steps.append([f"{gb:g} GB", what, ", ".join(f"{n} {s * 1e3:.0f}" for n, s in medians.items())])
    text = f"""# What Limosa adds to bare CRIU, {results.date}

{told["processor"]}, {told["cores"]} cores, {told["memory_gib"]} GiB, Linux {told["kernel"]}, Python {told["python"]},
CRIU {criu.version}; commit {results.raw["commit"]}. A process with that much memory in use, images in tmpfs; medians of
{count} runs, bare and limosa in turns on the same process; one warm process calls `limosa.operation`. Load of the
machine at the beginning: {told["load"]:.1f} (these at nice {told["nice"]}). Allowed: 10 % or 100 ms over bare,
whichever is more; hashing and verifying at 2 GB a second of one core's time. Raw figures: `{results.path.name}`.

{table(["memory", "what", "bare, s", "limosa, s", "added", "allowed", "", "least, bare / limosa"], rows)}

{table(["memory", "what", "s", "GB/s, all cores", "GB/s a core", ""], rates)}

Where limosa's time goes (medians, ms; `dump` contains `commit`, which contains `hash` and `sync` side by side):

{table(["memory", "", "steps"], steps)}
"""
    return text, good


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="0.1,1,4")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    os.environ.setdefault("LIMOSA_RUNTIME_DIR", tempfile.mkdtemp(prefix="limosa-bench-run-"))
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what bare CRIU restores is ours to reap, too
    criu = find()
    results = Results("bench-host", options.out)
    for size in options.sizes.split(","):
        measure(results, criu, float(size), options.runs, options.folder)
    text, good = page(results, criu)
    print(text)
    print(f"written: {results.page(text)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

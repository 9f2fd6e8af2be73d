"""The rows of ``gpu.py`` about jobs of several ranks over NCCL: swapped, ended and brought back, and what it costs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nccl_jobs import Ranks, reaped
from rows import GB, RUNS, Bench, Limit, Row, cost_rows, median, parked, typed

from limosa import operation

SWAP, ROTATE = "0=1,1=0", "0=1,1=2,2=3,3=0"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
NOT_PARTS = ("pause_seconds", "total", "copy", "ready", "park", "reconcile")
"""What timings have that is no part of the pause, or beside it, or a sum."""

LIMITS = {
    limit.key: limit
    for limit in (
        Limit(
            "nccl-swap",
            "DDP, two ranks, GPUs swapped: longest gap in the ranks' own stamps, median of 5",
            "<",
            1.8,
            1.1,
            "s",
        ),
        Limit("nccl-large", "the same with 16 GB a rank", "<", 2.0, 1.2, "s"),
        Limit("nccl-four", "four ranks on four GPUs rotated, 16 GB each, median of 5", "<", 2.6, 1.5, "s"),
        Limit("nccl-rate", "all-reduce of 1 GB after the swap, against before", ">", 98, 100, "%"),
        Limit(
            "nccl-disk",
            "torchrun, two ranks, FSDP2: checkpoint → end → restore onto swapped GPUs, from the command to the first "
            "step of all ranks after, median of 3",
            "<",
            10,
            6,
            "s",
        ),
    )
}


@contextlib.contextmanager
def computing(bench: Bench, name: str, *argv: str, ranks: int = 2) -> Iterator[Ranks]:
    """A job that computes until the end, when each rank compares what it holds with what it wrote."""
    bench.n += 1
    job = Ranks(f"{name}-{bench.n}", bench.folder, [argv[0], "--record", "FOLDER/trace", *argv[1:]], ranks=ranks)
    bench.jobs[name] = job
    try:
        job.up()
        yield job
        job.finish()
    finally:
        bench.end_job(name)


def swap(bench: Bench, job: Ranks, what: str, counts: bool = True) -> dict[str, Any]:
    """Has the ranks change their GPUs; figures by their own clocks."""
    since = time.monotonic()
    (outcome,) = operation.move(job.pid, gpu_map=SWAP if len(job.ranks) == 2 else ROTATE, timeout=100)
    wall = time.monotonic() - since
    assert outcome.result is not None
    job.goes_on()
    longest, usual = job.longest(since)
    found = {
        "what": what,
        "gap": longest,
        "usual": usual,
        "wall": wall,
        "way": outcome.result.way,
        "bytes": outcome.result.bytes,
        "counts": counts,
        "timings": dict(outcome.result.timings),
    }
    bench.note(**found)
    return found


def steps_of(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The medians of all steps that are told, what lies beside them, and what none of them explains."""
    names = [k for k, v in runs[-1]["timings"].items() if isinstance(v, (int, float)) and k not in NOT_PARTS]
    found = {name: median(runs, "timings", name) for name in names}
    rest = median(runs, "gap") - sum(found.values())
    found["copy beside"] = median(runs, "timings", "copy")
    return {**found, "rest": rest}


def swapped(bench: Bench, key: str, gigabytes: float, ranks: int = 2) -> Iterator[Row]:
    """A small model; what else lies on each GPU is ``gigabytes``."""
    options = ("--kind", "conv", "--pause", "0", "--gigabytes", str(gigabytes))
    with computing(bench, key, "ddp.py", *options, ranks=ranks) as job:
        swap(bench, job, key, counts=False)
        runs = [swap(bench, job, key) for _ in range(RUNS)]
    pause, gaps = median(runs, "gap"), [run["gap"] for run in runs]
    told = median(runs, "timings", "pause_seconds")
    text = f"{pause:.3f} s ({min(gaps):.3f} to {max(gaps):.3f}; by limosa {told:.3f}; "
    text += f"a step {runs[-1]['usual'] * 1e3:.1f} ms)"
    yield LIMITS[key].of(pause, text + parked(runs[0]), steps=steps_of(runs))


def rate(bench: Bench) -> Iterator[Row]:
    """GB/s of the bus, all the time: two seconds before a swap, two seconds after, three times."""
    after = []
    with computing(bench, "nccl-rate", "rate.py", "--pause", "0.1", "--gigabytes", "0") as job:

        def seen(since: float) -> float:
            return statistics.median(float.fromhex(said.split(":")[0]) for at, said in job.steps(0) if at > since)

        time.sleep(2)
        before = seen(time.monotonic() - 1.8)
        for _ in range(3):
            (outcome,) = operation.move(job.pid, gpu_map=SWAP, timeout=100)
            assert outcome.result is not None
            job.goes_on(3)  # the first one connects
            since = time.monotonic()
            time.sleep(2)
            after.append(seen(since))
            bench.note(what="nccl-rate", before=before, after=after[-1])
    part = 100 * statistics.median(after) / before
    each = ", ".join(f"{value:.0f}" for value in after)
    yield LIMITS["nccl-rate"].of(part, f"{part:.1f} % ({before:.0f} GB/s before; after each of three swaps {each})")


def to_disk(bench: Bench) -> Iterator[Row]:
    """By the command line, image in tmpfs: written, ended, brought back on the other's GPU."""
    base = Path(tempfile.mkdtemp(prefix="limosa-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    try:
        with computing(bench, "nccl-disk", "fsdp.py", "--pause", "0", "--gigabytes", "0") as job:
            runs = [there_and_back(bench, job, base / f"image{turn}", turn > 0) for turn in range(4)]
    finally:
        ctypes.CDLL(None).prctl(_SUBREAPER, 0)
        shutil.rmtree(base, ignore_errors=True)
    whole, out = median(runs[1:], "gap"), median(runs[1:], "out")
    text = (
        f"{whole:.2f} s (checkpoint {out:.2f} s, image {runs[-1]['bytes'] / GB:.1f} GB; first {runs[0]['gap']:.2f} s)"
    )
    steps = {
        name: median(runs[1:], "timings", name)
        for name, value in runs[-1]["timings"].items()
        if isinstance(value, (int, float)) and name.split(": ")[1] not in NOT_PARTS
    }
    yield LIMITS["nccl-disk"].of(whole, text, steps=steps)


def there_and_back(bench: Bench, job: Ranks, image: Path, counts: bool) -> dict[str, Any]:
    """Once; the job's own clock stands still while it is on disk: what counts is when its steps are seen."""
    time.sleep(1)
    with reaped(job.family()):
        begun = time.monotonic()
        out, said = typed("checkpoint", str(job.pid), "--output", str(image), "-o", "json")
        stood = [job.count(part) for part in (0, 1)]
        back = subprocess.Popen(
            [sys.executable, "-m", "limosa", "restore", str(image), "--map", SWAP, "-o", "json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        limit = time.monotonic() + 90
        while not all(job.count(part) > stood[part] for part in (0, 1)):
            if back.poll() or time.monotonic() > limit:
                back.kill()
                raise RuntimeError(f"limosa restore: {back.communicate()[1][-500:]}")
            time.sleep(0.002)
        took = time.monotonic() - begun
        answer, problem = back.communicate(timeout=60)
    if back.returncode:
        raise RuntimeError(f"limosa restore: {problem[-500:]}")
    both = [json.loads(text).get("timings", {}) for text in (said, answer)]
    timings = {f"{verb}: {k}": v for verb, t in zip(("out", "in"), both, strict=True) for k, v in t.items()}
    found = {"what": "nccl-disk", "gap": took, "out": out, "counts": counts, "timings": timings}
    found["bytes"] = sum(path.stat().st_size for path in image.rglob("*") if path.is_file())
    bench.note(**found)
    shutil.rmtree(image)
    return found


GROUPS: dict[str, tuple[Callable[[Bench], Iterator[Row]], float, Sequence[str]]] = {
    "nccl-swap": (lambda bench: swapped(bench, "nccl-swap", 0), 60, ()),
    "nccl-large": (lambda bench: swapped(bench, "nccl-large", 16), 75, ()),
    "nccl-four": (lambda bench: swapped(bench, "nccl-four", 16, ranks=4), 90, ()),
    "nccl-rate": (rate, 50, ()),
    "nccl-disk": (to_disk, 90, ()),
    "nccl-cost": (lambda bench: cost_rows(bench, "nccl_cost.py", "nccl-cost", 240), 180, ()),
}
"""As in ``rows.py``; a job of these groups is there only while its group is measured."""
ROWS: dict[str, tuple[str, ...]] = {name: (name,) if name in LIMITS else () for name in GROUPS}

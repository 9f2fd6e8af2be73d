"""The rows of the table of ``gpu.py``: what is measured, how, and what it must be.

Each group is a function that takes a :class:`Bench` and gives rows as they come; an exception ends its group alone.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from driver import bare
from jobs import Job
from report import Results, table, verdict

from limosa import operation
from limosa.errors import LimosaError
from limosa.gpu import Inventory, inventory
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

GB = 10**9
MOVE_STEPS = ("gate", "unmap", "lock", "checkpoint", "copy-wait", "restore", "unlock", "map", "open")
BESIDE = ("copy beside", "ready before")
"""What is not a part of the pause."""
POOL = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
RUNS = 5
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Row(NamedTuple):
    """A line of the table; ``found`` is None where it was not measured, and ``text`` says why."""

    key: str
    what: str
    found: float | None
    text: str
    must: str
    reach: str
    ok: bool = False
    reached: bool = False
    steps: Mapping[str, float] = MappingProxyType({})

    @property
    def word(self) -> str:
        """PASS, MISS, that it was not measured, or nothing where it is told beside."""
        if not self.must:
            return ""
        if self.found is None:
            return "not measured"
        return f"{verdict(self.ok)}{', reached' if self.ok and self.reached else ''}"


class Limit(NamedTuple):
    """What a row must be and what it may reach for: at most (``<``) or at least (``>``)."""

    key: str
    what: str
    sign: str
    must: float
    reach: float
    unit: str

    def of(self, found: float | None, text: str, also: bool = True, steps: dict[str, float] | None = None) -> Row:
        """The row for what was found; ``also`` is what else it must be."""
        sign = "≤" if self.sign == "<" else "≥"
        must, reach = (f"{sign} {value:g} {self.unit}".strip() for value in (self.must, self.reach))

        def holds(limit: float) -> bool:
            return found is not None and (found <= limit if self.sign == "<" else found >= limit)

        ok = holds(self.must) and also
        return Row(self.key, self.what, found, text, must, reach, ok, ok and holds(self.reach), steps or {})


LIMITS = {
    limit.key: limit
    for limit in (
        Limit("move", "pause of `move`, 64 GB, median of 5 (and ≥ 40 × shorter than stock)", "<", 0.6, 0.35, "s"),
        Limit("size", "pause of `move` at 100 GB / at 4 GB", "<", 1.4, 1.15, ""),
        Limit("copy", "copy GPU → GPU", ">", 350, 390, "GB/s"),
        Limit("driver", "driver way under `limosa run`, 32 GB: checkpoint faster than without", ">", 1.5, 1.75, "×"),
        Limit("out", "suspend, 32 GB, warm arena (and ≥ 12 × the stock path out)", ">", 45, 52, "GB/s"),
        Limit("in", "resume, 32 GB, warm arena (and ≥ 5 × the stock path in)", ">", 45, 52, "GB/s"),
        Limit("memory", "`suspend --release=memory-only` + resume, 4 GB", "<", 0.25, 0.17, "s"),
        Limit("checkpoint", "checkpoint `--leave-running`, 32 GB still + 0.5 GB changing: pause", "<", 1.8, 1.3, "s"),
        Limit("rate", "… the job's step rate while it is copied", ">", 90, 90, "%"),
        Limit("hash", "chunk hash on the GPU", ">", 1.5, 3, "TB/s"),
        Limit("restore", "restore of that image from the page cache, every byte verified", ">", 8, 20, "GB/s"),
        Limit(
            "command",
            "`limosa move JOB --to GPU`, 4 GB, from the command to its exit, median of 5",
            "<",
            0.75,
            0.55,
            "s",
        ),
        Limit("call", "`limosa.move()` in a process that has Limosa loaded, 4 GB, median of 5", "<", 0.5, 0.42, "s"),
        Limit(
            "eight-move",
            "`limosa move --gpu A --to B`, eight jobs of 0.5 GB (no pause > 1.5 × one alone)",
            "<",
            3.5,
            2.5,
            "s",
        ),
        Limit("eight-suspend", "`limosa suspend --all`, the same eight", "<", 3.5, 2.5, "s"),
        Limit("eight-resume", "`limosa resume --all`, the same eight", "<", 3.5, 2.5, "s"),
        Limit("ps", "`limosa ps`, eight jobs, median of 5", "<", 0.6, 0.3, "s"),
        Limit("dump", "`limosa checkpoint` of a small CPU process, median of 5", "<", 0.25, 0.15, "s"),
        Limit("undump", "`limosa restore` of it, median of 5", "<", 0.25, 0.15, "s"),
        Limit("help", "`limosa move --help`, median of 5", "<", 0.12, 0.08, "s"),
        Limit("version", "`limosa --version`, median of 5", "<", 0.12, 0.08, "s"),
        Limit("pair", "job of two processes, 16 GB each, swapped between two GPUs: pause", "<", 0.9, 0.5, "s"),
    )
}


ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
HALVES: dict[str, tuple[dict[str, Any], str]] = {
    "helped": ({}, ""),
    "unhelped": ({"run": ["--without", "bulk", "--without", "stack"]}, ", without the shim's help"),
    "no-bulk": ({"run": ["--without", "bulk"]}, ", without memory made ready"),
    "no-stack": ({"run": ["--without", "stack"]}, ", without a lower stack limit"),
    "hidden": ({"run": ["--gpus", "0"]}, ", `limosa run --gpus 0`"),
    "one": ({"env": ONE_CONNECTION}, ", CUDA_DEVICE_MAX_CONNECTIONS=1"),
    "hidden-one": ({"run": ["--gpus", "0"], "env": ONE_CONNECTION}, ", both of them"),
    "contexts": ({"arguments": ["--contexts"]}, ", a context on each of two GPUs"),
}
"""What makes the driver's halves longer or shorter: how the job is started, and words."""


class Bench:
    """What the groups share: jobs, time, results."""

    def __init__(self, results: Results, gpus: Inventory, folder: Path, end: float):
        self.results, self.gpus, self.folder, self.end = results, gpus, folder, end
        self.jobs: dict[str, Job] = {}
        self.makers: dict[str, Callable[[str], Job]] = {}  # of jobs that are not started by ``limosa run``
        self.at: dict[str, int] = {}
        self.n = 0

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def begin(self, *names: str) -> None:
        """Starts jobs without waiting for them."""
        how: dict[str, dict[str, Any]] = {
            "plain": {"run": ["--no-shim"]},
            "pool": {"env": POOL},
            "pool-plain": {"run": ["--no-shim"], "env": POOL},
            "pair": {"arguments": ["--pair"]},
            "seen": {"env": {"CUDA_VISIBLE_DEVICES": "0"}},
            **{name: settings for name, (settings, _) in HALVES.items()},
        }
        for name in names:
            if name not in self.jobs:
                self.n += 1
                called = f"{name}-{self.n}"
                made = self.makers.get(name)
                self.jobs[name] = made(called) if made else Job(called, self.folder, **how.get(name, {}))
                self.at[name] = 0

    def job(self, name: str) -> Job:
        """A job that is up; another one where the last has ended."""
        if name in self.jobs and not self.jobs[name].alive():
            self.end_job(name)
        self.begin(name)
        self.jobs[name].up()
        return self.jobs[name]

    def rest(self) -> None:
        """Nobody computes beside what is measured next; those who are part of it are told what to hold."""
        for job in self.jobs.values():
            if job.orders and job.alive():
                job.rest()

    def end_job(self, name: str) -> None:
        """Ends it for sure."""
        if name in self.jobs:
            self.jobs.pop(name).kill()

    def note(self, **figures: Any) -> None:
        """One run's figures, on disk at once."""
        self.results.add(**figures)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}, flush=True)

    def move(self, name: str, what: str, counts: bool = True, swap: bool = False) -> dict[str, Any]:
        """Moves a job to the other GPU, or what it has on each to the other; figures by its own clock."""
        job, there = self.jobs[name], 1 - self.at[name]
        since = time.monotonic()
        where = {"gpu_map": "0=1,1=0"} if swap else {"to": str(there)}
        (outcome,) = operation.move(job.pid, **where, timeout=100)  # type: ignore[arg-type]
        wall = time.monotonic() - since
        assert outcome.result is not None
        self.at[name] = there
        job.goes_on()
        found = {
            "what": what,
            "gap": job.gap(since)[0],
            "wall": wall,
            "way": outcome.result.way,
            "bytes": outcome.result.bytes,
            "counts": counts,
            "timings": dict(outcome.result.timings),
        }
        self.note(**found)
        return found

    def stock(self, name: str, what: str) -> dict[str, Any]:
        """Moves a job to the other GPU by the four calls of the driver."""
        job, here = self.jobs[name], self.at[name]
        since = time.monotonic()
        found = bare(job, self.gpus, here, 1 - here)  # type: ignore[arg-type]
        self.at[name] = 1 - here
        job.goes_on()
        found = {"what": what, "gap": job.gap(since)[0], **found}
        self.note(**found)
        return found


def median(runs: Sequence[dict[str, Any]], *path: str) -> float:
    """The median of a figure."""
    values = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value.get(key, 0.0) if isinstance(value, dict) else 0.0
        values.append(float(value))
    return statistics.median(values)


def parked(found: dict[str, Any]) -> str:
    """A word where a move did not go the parked way."""
    return "" if found["way"] == "parked" else f" (by the {found['way'] or 'driver'} way)"


def steps_of(runs: Sequence[dict[str, Any]], names: Sequence[str] = MOVE_STEPS) -> dict[str, float]:
    """The medians of the steps that there were, and what none of them explains."""
    found = {name: median(runs, "timings", name) for name in names if any(name in r["timings"] for r in runs)}
    if "gate" in found and "unmap" not in found and any("park" in r["timings"] for r in runs):
        found["unmap"] = median(runs, "timings", "park") - found["gate"]
    found["copy beside"] = median(runs, "timings", "copy")
    if any("ready" in run["timings"] for run in runs):
        found["ready before"] = median(runs, "timings", "ready")
    pause = median(runs, "gap") if "gap" in runs[0] else median(runs, "timings", "pause_seconds")
    found["rest"] = pause - sum(seconds for name, seconds in found.items() if name not in BESIDE)
    return found


# --- the groups -------------------------------------------------------------------------------------------------------


def moves(bench: Bench) -> Iterator[Row]:
    """64 GB there and back, the stock path once on the same victim, then 100 GB (72 where a GPU has 80) and 4 GB."""
    job = bench.job("shim")
    runs: dict[float, list[dict[str, Any]]] = {}
    most = 100 if min(gpu.memory_total for gpu in inventory().gpus) > 110 * GB else 72
    for gb in (64, most, 4):
        job.hold(gb)
        bench.move("shim", f"move {gb} GB", counts=False)
        runs[gb] = [bench.move("shim", f"move {gb} GB") for _ in range(RUNS)]
        if gb == 64:
            rates = [run["bytes"] / run["timings"]["copy"] / GB for run in runs[64] if run["timings"].get("copy")]
            rate = statistics.median(rates) if rates else None
            yield LIMITS["copy"].of(rate, f"{rate:.0f} GB/s" if rate else "no copy was made by the parked way")
    job.rest()
    plain = bench.job("plain")
    plain.hold(64)
    stock = bench.stock("plain", "stock 64 GB")
    plain.rest()
    pause, long = median(runs[64], "gap"), stock["gap"]
    text = f"{pause:.3f} s; stock {long:.1f} s: {long / pause:.0f} ×{parked(runs[64][0])}"
    yield LIMITS["move"].of(pause, text, long / pause >= 40, steps_of(runs[64]))
    large, small = median(runs[most], "gap"), median(runs[4], "gap")
    text = f"{large / small:.2f} ({most} GB: {large:.3f} s / {small:.3f} s)"
    yield LIMITS["size"].of(large / small, text, steps=steps_of(runs[most]))
    yield Row("move-4", "(pause of `move`, 4 GB)", small, f"{small:.3f} s", "", "", True, False, steps_of(runs[4]))


def halves(bench: Bench) -> Iterator[Row]:
    """What is left of a pause, and what makes it shorter: the driver's checkpoint and restore of a job of 4 GB."""
    bench.begin(*HALVES)  # those that wait for their turn do nothing
    for name, (_, words) in HALVES.items():
        bench.job(name).hold(4)
        runs = [bench.move(name, f"halves {name}", counts=n > 0, swap=name == "contexts") for n in range(4)][1:]
        own = [median(runs, "timings", step) for step in ("checkpoint", "restore")]
        pause = median(runs, "gap")
        text = f"{own[0]:.3f} + {own[1]:.3f} s, pause {pause:.3f} s"
        what = f"(checkpoint + restore by the driver, 4 GB{words})"
        yield Row(f"halves-{name}", what, pause, text, "", "", True, False)
        bench.end_job(name)


def pair(bench: Bench) -> Iterator[Row]:
    """One job, a process on each GPU, both to the other's."""
    job = bench.job("pair")
    job.hold(16)
    runs = []
    for turn in range(4):
        since = time.monotonic()
        (outcome,) = operation.move(job.pid, gpu_map="0=1,1=0", timeout=100)
        assert outcome.result is not None
        job.goes_on()
        found = {"what": "pair", "gap": job.gap(since)[0], "way": outcome.result.way, "bytes": outcome.result.bytes}
        found.update(timings=dict(outcome.result.timings), counts=turn > 0)
        bench.note(**found)
        runs.append(found)
    job.finish()
    pause = median(runs[1:], "gap")
    yield LIMITS["pair"].of(pause, f"{pause:.3f} s{parked(runs[0])}", steps=steps_of(runs[1:]))


def warm(bench: Bench, bytes_: int) -> None:
    """Has the arena made and pinned; 0: what nobody uses is given back."""
    try:
        from limosa.operation.arena import arena
    except ImportError:
        return
    begun, why = time.monotonic(), ""
    try:
        arena(bytes_)
    except LimosaError as error:  # then the first round, which does not count, warms it
        why = str(error)
    bench.note(what="arena", bytes=bytes_, seconds=time.monotonic() - begun, error=why)


def aside(bench: Bench) -> Iterator[Row]:
    """32 GB to the arena and back; the stock path once."""
    job = bench.job("shim")
    job.hold(32)
    warm(bench, 33 * GB)
    rounds: list[dict[str, dict[str, Any]]] = []
    for turn in range(4):
        found: dict[str, dict[str, Any]] = {}
        for verb, act in (("suspend", operation.suspend), ("resume", operation.resume)):
            begun = time.monotonic()
            (outcome,) = act(job.pid, timeout=120)
            assert outcome.result is not None
            found[verb] = {
                "what": f"{verb} 32 GB",
                "wall": time.monotonic() - begun,
                "way": outcome.result.way,
                "bytes": outcome.result.bytes,
                "counts": turn > 0,
                "timings": dict(outcome.result.timings),
            }
            bench.note(**found[verb])
        job.goes_on()
        rounds.append(found)
    plain = bench.job("plain")
    plain.hold(32)
    stock = bench.stock("plain", "stock 32 GB")
    plain.rest()
    job.rest()
    warm(bench, 0)
    for key, verb, least, long in (
        ("out", "suspend", 12, stock["lock"] + stock["checkpoint"]),
        ("in", "resume", 5, stock["restore"] + stock["unlock"]),
    ):
        runs = [r[verb] for r in rounds[1:]]
        rates = [r["bytes"] / r["timings"]["copy"] / GB for r in runs if r["timings"].get("copy")]
        rate = statistics.median(rates) if rates else None
        whole, cold = median(runs, "timings", "pause_seconds"), rounds[0][verb]
        text = f"{rate or 0:.1f} GB/s; in all {whole:.2f} s, stock {long:.1f} s: {long / whole:.1f} ×"
        text += f"; first: {cold['timings'].get('pause_seconds', 0):.2f} s, whole call {cold['wall']:.1f} s"
        yield LIMITS[key].of(rate, text + parked(runs[0]), long / whole >= least, steps_of(runs))


def memory_only(bench: Bench) -> Iterator[Row]:
    """4 GB let go of with the context kept, and taken back."""
    if "release" not in inspect.signature(operation.suspend).parameters:
        yield LIMITS["memory"].of(None, "suspend has no `release` in this version")
        return
    job = bench.job("shim")
    job.hold(4)
    runs = []
    for turn in range(4):
        since = time.monotonic()
        (out,) = operation.suspend(job.pid, release="memory-only", timeout=60)  # type: ignore[call-arg]
        (back,) = operation.resume(job.pid, timeout=60)
        assert out.result is not None
        assert back.result is not None
        job.goes_on()
        both = [out.result.timings, back.result.timings]
        timings = {f"{verb}: {k}": v for verb, t in zip(("out", "in"), both, strict=True) for k, v in t.items()}
        found = {"what": "memory-only 4 GB", "gap": job.gap(since)[0], "counts": turn > 0, "timings": timings}
        found["both"] = sum(t.get("pause_seconds", 0.0) for t in both)
        bench.note(**found)
        runs.append(found)
    together = median(runs[1:], "both")
    names = [k for k in runs[-1]["timings"] if k.split(": ")[1] in MOVE_STEPS]
    steps = {name: median(runs[1:], "timings", name) for name in names}
    text = f"{together:.3f} s (by its own clock, with what lies between the two calls, {median(runs[1:], 'gap'):.3f} s)"
    yield LIMITS["memory"].of(together, text, steps=steps)


def to_disk(bench: Bench) -> Iterator[Row]:
    """32 GB that nobody writes and 0.5 GB that changes, copied to tmpfs while it computes; then brought back."""
    job = bench.job("disk")
    job.hold(0.5, 32)
    base = Path(tempfile.mkdtemp(prefix="limosa-bench-", dir="/dev/shm"))
    try:
        time.sleep(3)
        since = time.monotonic()
        written = operation.checkpoint(job.pid, base / "image", leave_running=True, timeout=150)
        wall = time.monotonic() - since
        job.goes_on(30)
        gap, begun = job.gap(since)
        usual = job.rate(since - 3, since)
        copying = float(written.timings.get("copy", 0.0))
        rate = 100 * job.rate(max(since, begun - copying), begun) / usual if copying else None
        rounds = getattr(written, "rounds", [])
        found = {"what": "checkpoint", "gap": gap, "wall": wall, "bytes": written.bytes, "rate": rate}
        found.update(way=getattr(written, "way", ""), timings=dict(written.timings), rounds=str(rounds))
        bench.note(**found)
        names = ("gate", "unmap", "lock", "copy_in_pause", "checkpoint", "dump", "restore", "unlock", "map", "open")
        steps = {name: written.timings[name] for name in names if name in written.timings}
        steps["rest"] = gap - sum(steps.values())
        text = f"{gap:.2f} s; {written.bytes / GB:.1f} GB in {wall:.1f} s{parked(found)}"
        yield LIMITS["checkpoint"].of(gap, text, steps=steps)
        why = "nothing was copied while it ran"
        yield LIMITS["rate"].of(rate, why if rate is None else f"{rate:.0f} % of {usual:.0f} steps/s, {copying:.1f} s")
        job.kill()
        end = time.monotonic() + 15
        while Path(f"/proc/{job.pid}").exists() and time.monotonic() < end:
            time.sleep(0.01)
        begun = time.monotonic()
        back = operation.restore(base / "image", timeout=150)
        took = time.monotonic() - begun
        job.goes_on()
        job.finish()  # it checks all its pages
        speed = written.bytes / took / GB
        bench.note(what="restore", wall=took, bytes=written.bytes, timings=dict(back.timings))
        steps = {k: v for k, v in back.timings.items() if isinstance(v, float) and k != "total"}
        yield LIMITS["restore"].of(speed, f"{speed:.1f} GB/s ({written.bytes / GB:.1f} GB, {took:.2f} s)", steps=steps)
    finally:
        bench.end_job("disk")
        shutil.rmtree(base, ignore_errors=True)


def by_the_driver(bench: Bench) -> Iterator[Row]:
    """32 GB of stream-ordered memory, which the shim leaves to the driver, with and without the shim in turns."""
    runs: dict[str, list[dict[str, Any]]] = {"pool": [], "pool-plain": []}
    for name in runs:
        bench.job(name).hold(32)
    with Shim(Identity.of(bench.jobs["pool"].pid)) as shim:
        parkable = shim.hello().bytes
    for turn in range(2):
        for name in runs if turn % 2 == 0 else reversed(runs):
            if turn and bench.left() < 60:
                continue
            runs[name].append(bench.move(name, f"driver way, {name}"))
    for name in runs:
        bench.jobs[name].finish()
    if parkable > GB:
        why = f"it was not left to the driver: {parkable / GB:.1f} GB of it can be parked"
        yield LIMITS["driver"].of(None, why)
        return
    with_shim, without = (median(runs[name], "timings", "checkpoint") for name in runs)
    back = " / ".join(f"{median(runs[name], 'timings', 'restore'):.2f}" for name in runs)
    text = f"{without / with_shim:.2f} × ({with_shim:.2f} s / {without:.2f} s; restore {back} s)"
    yield LIMITS["driver"].of(without / with_shim, text, steps=steps_of(runs["pool"]))


def typed(*words: str) -> tuple[float, str]:
    """Seconds from the start of a command line to its exit, and what it printed.

    Raises:
        RuntimeError: it failed.
    """
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "limosa", *words],
        capture_output=True, text=True, timeout=100, check=False, cwd="/",
    )  # fmt: skip
    took = time.monotonic() - begun
    if done.returncode:
        raise RuntimeError(f"limosa {' '.join(words)}: {(done.stderr or done.stdout).strip()[:500]}")
    return took, done.stdout


def commands(bench: Bench) -> Iterator[Row]:
    """What somebody waits for who types a command: one job, eight jobs, and those that move nothing."""
    for name in list(bench.jobs):
        bench.end_job(name)  # what is on a GPU is moved with it
    job = bench.job("shim")
    job.hold(4)
    typed("move", str(job.pid), "--to", "1")
    spans, gaps = [], []
    for turn in range(RUNS):
        since = time.monotonic()
        took, _ = typed("move", str(job.pid), "--to", str(turn % 2))
        job.goes_on()
        spans.append(took)
        gaps.append(job.gap(since)[0])
    alone = statistics.median(gaps)
    bench.note(what="command", spans=spans, gaps=gaps)
    took = statistics.median(spans)
    yield LIMITS["command"].of(took, f"{took:.3f} s (pause {alone:.3f} s; {min(spans):.3f} to {max(spans):.3f} s)")
    bench.at["shim"] = (RUNS - 1) % 2
    runs = [bench.move("shim", "call", counts=turn > 0) for turn in range(RUNS + 1)][1:]
    took = median(runs, "wall")
    yield LIMITS["call"].of(took, f"{took:.3f} s (pause {median(runs, 'gap'):.3f} s)")
    if bench.at["shim"]:
        bench.move("shim", "back", counts=False)
    yield from eight(bench)
    spans = [typed("ps")[0] for _ in range(RUNS)]
    bench.note(what="ps", spans=spans)
    yield LIMITS["ps"].of(statistics.median(spans), f"{statistics.median(spans):.3f} s")
    yield from small(bench)


def eight(bench: Bench) -> Iterator[Row]:
    """Eight jobs of 0.5 GB by one command: there, back, aside and back again."""
    bench.end_job("shim")
    names = [f"eight{n}" for n in range(8)]
    bench.begin(*names)
    for name in names:
        bench.job(name).hold(0.5)
    jobs = [bench.jobs[name] for name in names]

    def all_of(what: str, *words: str) -> tuple[float, list[float]]:
        since = time.monotonic()
        took, _ = typed(*words)
        for job in jobs:
            job.goes_on()
        gaps = [job.gap(since)[0] for job in jobs]
        bench.note(what=what, wall=took, gaps=gaps)
        return took, gaps

    found = [all_of("eight", "move", "--gpu", str(n % 2), "--to", str(1 - n % 2)) for n in range(4)]
    took, longest = statistics.median(t for t, _ in found), max(max(gaps) for _, gaps in found[1:])
    in_turn, gaps = all_of("eight in turn", "move", "--gpu", "0", "--to", "1", "--one-by-one")
    alone = statistics.median(gaps)  # the other seven compute meanwhile
    text = f"{took:.2f} s, longest pause {longest:.3f} s, alone {alone:.3f} s; one by one {in_turn:.2f} s"
    yield LIMITS["eight-move"].of(took, text, longest <= 1.5 * alone)
    out, back = [], []
    for _ in range(3):
        out.append(typed("suspend", "--all")[0])
        back.append(all_of("eight back", "resume", "--all")[0])
    bench.note(what="eight out", spans=out)
    for key, spans in (("eight-suspend", out), ("eight-resume", back)):
        took = statistics.median(spans)
        yield LIMITS[key].of(took, f"{took:.2f} s (first {spans[0]:.2f} s)")


def small(bench: Bench) -> Iterator[Row]:
    """A small CPU process to disk and back, and what moves nothing at all."""
    base = Path(tempfile.mkdtemp(prefix="limosa-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    program = "import time\nwhile True: time.sleep(0.01)"
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    try:
        _, said = typed("run", "-d", "-o", "json", "--log", str(base / "log"), "--", sys.executable, "-c", program)
        pid, out, back = json.loads(said)["pid"], [], []
        for n in range(RUNS + 1):
            reaper = threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True)
            reaper.start()  # at once: Limosa waits until its pid is free, and some machines' init takes a second
            out.append(typed("checkpoint", str(pid), "--output", str(base / f"image{n}"))[0])
            reaper.join(10)
            took, said = typed("restore", str(base / f"image{n}"), "-o", "json")
            back.append(took)
            pid = json.loads(said)["pid"]
        bench.note(what="small", out=out, back=back)
        reaper = threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True)
        reaper.start()
        typed("stop", str(pid))
    finally:
        ctypes.CDLL(None).prctl(_SUBREAPER, 0)
        shutil.rmtree(base, ignore_errors=True)
    spans = {"dump": out[1:], "undump": back[1:]}
    for key, words in (("help", ("move", "--help")), ("version", ("--version",))):
        spans[key] = [typed(*words)[0] for _ in range(RUNS)]
        bench.note(what=key, spans=spans[key])
    for key, taken in spans.items():
        took = statistics.median(taken)
        yield LIMITS[key].of(took, f"{took:.3f} s")


def hash_rate(bench: Bench) -> Iterator[Row]:
    """The hash of 32 GB on a GPU, in a process of its own."""
    program = Path(__file__).with_name("hash_rate.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=90, check=False)
    if done.returncode:
        yield LIMITS["hash"].of(None, (done.stderr or done.stdout).strip().splitlines()[-1][:200])
        return
    said = json.loads(done.stdout.splitlines()[-1])
    bench.note(what="hash", **said)
    rate = said["bytes"] / said["seconds"] / 1e12
    yield LIMITS["hash"].of(rate, f"{rate:.2f} TB/s ({said['bytes'] / GB:.0f} GB, {said['seconds'] * 1e3:.1f} ms)")


def cost(bench: Bench) -> Iterator[Row]:
    """What the shim costs a program that nobody moves (``cost.py``)."""
    yield from cost_rows(bench, "cost.py", "cost", 150)


def cost_rows(bench: Bench, name: str, prefix: str, limit: float) -> Iterator[Row]:
    """The rows of a program that measures such costs."""
    program = Path(__file__).with_name(name)
    path = bench.folder / f"{prefix}.json"
    command = [sys.executable, str(program), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    if not path.exists():
        raise RuntimeError((done.stderr or done.stdout).strip()[-300:] or f"exit code {done.returncode}")
    said = json.loads(path.read_text())
    bench.note(what=prefix, rows=said["rows"])
    for number, r in enumerate(said["rows"]):
        key, must = f"{prefix}-{number}", str(r["must"])
        if r["ok"] is None:
            yield Row(key, f"cost of the shim: {r['what']}", None, str(r.get("error")), must, "")
            continue
        unit = must.rsplit(maxsplit=1)[-1]
        text = f"{r['added']:+.2f} {unit} ({r['with']:.4g} {r['unit']}, without {r['without']:.4g})"
        yield Row(key, f"cost of the shim: {r['what']}", float(r["with"]), text, must, "", bool(r["ok"]))


GROUPS: dict[str, tuple[Callable[[Bench], Iterator[Row]], float, Sequence[str]]] = {
    "move": (moves, 90, ("shim", "plain")),
    "halves": (halves, 40, ("helped",)),
    "pair": (pair, 30, ("pair",)),
    "memory": (memory_only, 20, ("shim",)),
    "suspend": (aside, 75, ("shim", "plain")),
    "disk": (to_disk, 75, ("disk",)),
    "driver": (by_the_driver, 60, ("pool", "pool-plain")),
    "hash": (hash_rate, 20, ()),
    "commands": (commands, 90, ()),
    "cost": (cost, 90, ()),
}
"""Name → what measures it, seconds that it may need, the jobs that it uses."""
TWO_GPUS = ("move", "halves", "pair", "driver", "commands")
"""What moves from one GPU to another."""
ROWS = {
    "move": ("move", "size", "copy"),
    "halves": (),
    "pair": ("pair",),
    "memory": ("memory",),
    "suspend": ("out", "in"),
    "disk": ("checkpoint", "rate", "restore"),
    "driver": ("driver",),
    "hash": ("hash",),
    "commands": (
        *("command", "call", "eight-move", "eight-suspend", "eight-resume"),
        *("ps", "dump", "undump", "help", "version"),
    ),
    "cost": (),
}
"""The rows that a group owes."""


def breakdown(rows: Sequence[Row]) -> str:
    """Where the time goes, row by row."""
    lines = [
        [
            row.what[1:-1] if row.what[0] == "(" else row.what,
            ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in row.steps.items()),
        ]
        for row in rows
        if row.steps
    ]
    return table(["", "steps, ms"], lines)

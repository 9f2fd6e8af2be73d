"""The rows of ``gpu.py`` about jobs in containers that have the nodes of one GPU, and about jobs that see one only.

The containers are runc's, with this machine's own root folder (``tests/gpu/boxes.py``); each has a parent that reaps
what ends in it, as conmon is one (until 2026-11-27 that was the machine's first process, in its own time). Pauses are
by the job's own clock, as in all rows. A restored job's clock is another (CRIU gives it a time namespace), so how long
a checkpoint and a restore take is by ours: from the command to the first step after it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu")]

import msgspec  # noqa: E402
from jobs import VICTIM, Job  # noqa: E402
from rows import Bench, Limit, Row, median, parked, steps_of  # noqa: E402

from limosa import operation  # noqa: E402
from limosa.errors import LimosaError  # noqa: E402

if TYPE_CHECKING:
    from boxes import Box, Boxes

LIMITS = {
    limit.key: limit
    for limit in (
        Limit("box-move", "pause of `move` in place, container with one GPU's nodes, 64 GB", "<", 0.7, 0.4, "s"),
        Limit(
            "seen",
            "the same job outside, CUDA_VISIBLE_DEVICES of one GPU: there and back, the longer median",
            "<",
            0.55,
            0.4,
            "s",
        ),
        Limit(
            "box-disk",
            "container checkpoint → removed → restored on the other GPU, 30 GB, until it computes",
            "<",
            6,
            3,
            "s",
        ),
        Limit("box-clone", "second clone beside the first, 30 GB, by one restore", "<", 1.3, 1.1, "×"),
    )
}
RUNS = 6
LARGE, DISK = 64, (0.5, 29.5)
NAMES = ("box", "box-disk")


class BoxJob(Job):
    """One ``victim.py`` in a container with GPU 0."""

    def __init__(self, boxes: Boxes, name: str, box: Box | None = None):
        self.boxes, self.name, self.orders = boxes, name, 0
        env = {key: value for key, value in os.environ.items() if key.startswith("LIMOSA_BENCH_")}
        self.box = box or boxes.start(name, [sys.executable, str(VICTIM), "/job"], gpus=[0], env=env)
        self._is(self.box)

    def _is(self, box: Box) -> None:
        self.box, self.pid, self.folder, self.log = box, box.pid, box.folder, box.log
        self.parts = [self.folder]

    def came_back(self) -> None:
        """It is in another container of the same name now."""
        self._is(self.boxes.back(self.name, self.box))

    def clone(self, name: str, bundle: Path) -> BoxJob:
        """The clone that has come up in a bundle of its own."""
        made = BoxJob(self.boxes, name, self.boxes.back(name, self.box, bundle))
        made.orders = self.orders
        return made

    def kill(self) -> None:
        self.box.remove()


class Containers:
    """The boxes of a run, made with the first job that needs them; ``close`` ends all."""

    def __init__(self) -> None:
        self._boxes: Boxes | None = None

    def __call__(self) -> Boxes:
        if self._boxes is None:
            from boxes import Boxes  # with what tests need

            self._boxes = Boxes()
        return self._boxes

    def close(self) -> None:
        """Ends all of them."""
        if self._boxes is not None:
            self._boxes.close()
            self._boxes = None


containers = Containers()


def prepare(bench: Bench) -> None:
    """Has the benchmark know how jobs in containers are started."""
    for name in NAMES:
        bench.makers[name] = lambda called: BoxJob(containers(), called)


def there_and_back(bench: Bench, name: str) -> dict[str, list[dict[str, Any]]]:
    """Moves a job to the other GPU and back, three times; the first of each does not count."""
    runs: dict[str, list[dict[str, Any]]] = {"there": [], "back": []}
    for turn in range(RUNS + 2):
        way = "back" if turn % 2 else "there"
        found = bench.move(name, f"{name} {way}", counts=turn > 1)
        if turn > 1:
            runs[way].append(found)
    return runs


def told(runs: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, float], str]:
    """The medians, and a text of them with the longest of all."""
    medians = {way: median(found, "gap") for way, found in runs.items()}
    every = [run["gap"] for found in runs.values() for run in found]
    text = ", ".join(f"{way} {seconds:.3f} s" for way, seconds in medians.items())
    made = " / ".join(f"{median(found, 'timings', 'make'):.3f}" for found in runs.values())
    return medians, f"{text} (at most {max(every):.3f} s; made in the pause {made} s)"


def in_place(bench: Bench) -> Iterator[Row]:
    """A container's job of 64 GB."""
    bench.job("box").hold(LARGE)
    runs = there_and_back(bench, "box")
    both = [run for found in runs.values() for run in found]
    pause = statistics.median(run["gap"] for run in both)
    _, text = told(runs)
    yield LIMITS["box-move"].of(pause, f"{pause:.3f} s: {text}{parked(both[0])}", steps=steps_of(both))
    bench.jobs["box"].finish()
    bench.end_job("box")


def seen(bench: Bench) -> Iterator[Row]:
    """The same outside of a container, with CUDA_VISIBLE_DEVICES=0."""
    bench.job("seen").hold(LARGE)
    runs = there_and_back(bench, "seen")
    medians, text = told(runs)
    longer = max(medians, key=lambda way: medians[way])
    steps = steps_of(runs[longer])
    yield LIMITS["seen"].of(medians[longer], text + parked(runs["there"][0]), steps=steps)
    bench.jobs["seen"].finish()
    bench.end_job("seen")


def until_it_computes(job: Job, count: int, limit: float = 60) -> None:
    """Waits for its first step."""
    job.until(lambda: job.count() > count, limit, "step")


def restored(bench: Bench, image: Path, job: BoxJob, gpu: int, name: str) -> tuple[BoxJob, float]:
    """Brings a clone back on a GPU; seconds until it computes."""
    bundle = job.boxes.same_bundle(job.box, name)
    count = ticks_in(bundle)
    since = time.monotonic()
    result = operation.restore(image, to=str(gpu), name=name, bundle=str(bundle), timeout=90)
    clone = job.clone(name, bundle)
    until_it_computes(clone, count)
    took = time.monotonic() - since
    bench.note(what=f"clone on GPU {gpu}", wall=took, timings=dict(result.timings))
    return clone, took


def ticks_in(bundle: Path) -> int:
    """How many bytes of ticks a bundle begins with."""
    path = bundle / "rootfs" / "job" / "ticks"
    return path.stat().st_size if path.exists() else 0


def to_disk(bench: Bench) -> Iterator[Row]:
    """30 GB to a tmpfs, ended, brought back on the other GPU; then clones of the image, in turn and at once."""
    job = bench.job("box-disk")
    assert isinstance(job, BoxJob)
    image, clones = job.boxes.images / "bench", []
    try:
        job.hold(*DISK)
        time.sleep(2)
        since = time.monotonic()
        written = operation.checkpoint(job.box.called, image, timeout=90)
        ended = time.monotonic() - since
        count = job.count()
        back = operation.restore(image, to="1", timeout=90)
        job.came_back()
        until_it_computes(job, count)
        took = time.monotonic() - since
        both = (("out", written.timings), ("in", back.timings))
        timings = {f"{verb}: {k}": v for verb, t in both for k, v in t.items()}
        rounds = [msgspec.to_builtins(one) for one in written.rounds]
        bench.note(
            what="box-disk",
            wall=took,
            ended=ended,
            way=written.way,
            bytes=written.bytes,
            rounds=rounds,
            timings=timings,
        )
        text = f"{took:.2f} s: ended after {ended:.2f} s, {written.bytes / 1e9:.1f} GB{parked({'way': written.way})}"
        shown = {k: v for k, v in timings.items() if v >= 0.001 and not k.endswith(("total", "pause_seconds"))}
        yield LIMITS["box-disk"].of(took, text, steps=shown)
        job.goes_on()
        job.kill()
        first, alone = restored(bench, image, job, 0, f"{job.name}-a")
        clones.append(first)
        second, beside = restored(bench, image, job, 1, f"{job.name}-b")
        clones.append(second)
        for clone in clones:
            clone.goes_on()
        text = f"{beside / alone:.2f} × ({beside:.2f} s / {alone:.2f} s)"
        yield LIMITS["box-clone"].of(beside / alone, text)
        yield from at_once(bench, image, job, alone)
        for clone in clones:
            clone.finish()  # it checks all its pages
    finally:
        for clone in clones:
            clone.kill()
        bench.end_job("box-disk")
        shutil.rmtree(image, ignore_errors=True)


def at_once(bench: Bench, image: Path, job: BoxJob, alone: float) -> Iterator[Row]:
    """Two more at the same time, if memory and time suffice: told beside."""
    if bench.left() < 30:
        return
    found: dict[int, tuple[BoxJob, float]] = {}

    said: list[str] = []

    def one(gpu: int) -> None:
        try:
            found[gpu] = restored(bench, image, job, gpu, f"{job.name}-at-once-{gpu}")
        except LimosaError as error:
            said.append(str(error))

    since = time.monotonic()
    threads = [threading.Thread(target=one, args=(gpu,)) for gpu in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    both = time.monotonic() - since
    for clone, _ in found.values():
        clone.kill()
    text = f"{both / alone:.2f} × one ({both:.2f} s)" if len(found) == 2 else f"not both: {', '.join(said)}"
    yield Row("box-at-once", "(two clones at once, 30 GB each)", both / alone, text, "", "", True, False)


GROUPS: dict[str, tuple[Callable[[Bench], Iterator[Row]], float, Sequence[str]]] = {
    "box-move": (in_place, 45, ("box",)),
    "seen": (seen, 35, ("seen",)),
    "box-disk": (to_disk, 70, ("box-disk",)),
}
"""Name → what measures it, seconds that it may need, the jobs that it uses."""
ROWS = {"box-move": ("box-move",), "seen": ("seen",), "box-disk": ("box-disk", "box-clone")}
"""The rows that a group owes."""

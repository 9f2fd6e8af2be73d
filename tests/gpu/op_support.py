"""What the tests of operations on GPUs share: the command line as JSON, images in memory, GPUs filled by others."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from limosa.gpu import Inventory, inventory

VICTIMS = Path(__file__).parent / "victims"
MIB, GIB = 1 << 20, 1 << 30
ONE_GPU = bool(os.environ.get("LIMOSA_ONE_GPU"))
"""Only the tests that one GPU is enough for; where others move a job there and back, it is suspended and resumed."""
OTHER = 0 if ONE_GPU else 1
"""Where a job that is on GPU 0 comes back."""
BENCH = Path(__file__).parents[2] / "bench"

# The main thread gets the time-out as an exception: one test that hangs does not end the others.
limits = [pytest.mark.gpu, pytest.mark.timeout(90, method="signal")]
"""For a module of these tests."""


# --- looking ----------------------------------------------------------------------------------------------------------


def on(pid: int) -> set[int]:
    """The indices of the GPUs on which a process holds memory, by NVML."""
    return {gpu.index for gpu in inventory().gpus if gpu.holds(pid)}


def children(pid: int) -> list[int]:
    """The children of a process, youngest last."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(name))
    return sorted(found)


def longest_gap(victim: Any, since: float) -> float:
    """Seconds of the longest time between two of a victim's own stamps, the later one after ``since`` (monotonic)."""
    pairs = itertools.pairwise(victim.ticks())
    return max((later - earlier for earlier, later in pairs if later > since), default=0.0)


def usual_gap(victim: Any, before: float) -> float:
    """Seconds between two stamps when nobody disturbs it: the median of those before ``before``."""
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(victim.ticks()) if later < before)
    return gaps[len(gaps) // 2] if gaps else 0.0


def pause_is_true(pause: float, victim: Any, since: float) -> None:
    """Fails unless ``pause`` is within 20 % or 50 ms of the longest gap in the victim's own stamps."""
    gap = longest_gap(victim, since) - usual_gap(victim, since)
    assert abs(gap - pause) <= max(0.05, 0.2 * gap), f"limosa says {pause:.3f} s, the victim felt {gap:.3f} s"


def wait_until(true: Callable[[], Any], limit: float = 30, what: str = "") -> Any:
    """Waits for something that is not about a victim; fails after ``limit`` seconds."""
    end = time.monotonic() + limit
    while not (found := true()):
        assert time.monotonic() < end, f"no {what or 'answer'} within {limit} s"
        time.sleep(0.005)
    return found


def journals(runtime: Path) -> list[Path]:
    """The journals of operations under way or dead."""
    return list(runtime.glob("*/journals/*.jsonl"))


def reached(runtime: Path, step: str, phase: str = "begin") -> bool:
    """Whether a journal says that a step has come so far."""
    for path in journals(runtime):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                if record.get("step") == step and record.get("phase") == phase:
                    return True
    return False


def driver_workers(pid: int) -> list[int]:
    """The driver workers of a limosa process: nobody's children, with the same runtime folder, which is one test's."""
    mark, found = _runtime_of(pid), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "comm").read_text() == "limosa-worker\n" and _runtime_of(int(entry.name)) == mark:
                found.append(int(entry.name))
    return found


def _runtime_of(pid: int) -> bytes:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((word for word in words if word.startswith(b"LIMOSA_RUNTIME_DIR=")), b"")


# --- acting -----------------------------------------------------------------------------------------------------------


def reaped(victim: Any) -> None:
    """Reaps a victim as soon as it ends: a restore needs its pid, and we are the parent."""
    threading.Thread(target=victim._process.wait, daemon=True).start()


@pytest.fixture
def do(limosa: Callable[..., Any]) -> Callable[..., Any]:
    """``do("move", pid, "--to", 1)``: the command line with ``-o json``, which must succeed (or exit with ``rc=``)."""

    def go(*arguments: object, rc: int = 0, limit: float = 80) -> Any:
        result = limosa(*arguments, "-o", "json", rc=rc, limit=limit)
        found = result.json
        assert found["schema"] == 1
        assert isinstance(found["warnings"], list)
        if rc and "error" in found:
            assert found["error"]["exit_code"] == rc
        return found

    return go


@pytest.fixture
def images() -> Iterator[Path]:
    """A folder for images, in memory where there is room (a test is not to wait for the disk)."""
    base = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 12 * GIB else None
    folder = Path(tempfile.mkdtemp(prefix="limosa-images-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- others on the GPUs -----------------------------------------------------------------------------------------------


class Filler:
    """Another process that takes the free memory of GPUs when told to, and lets go of it when told to."""

    def __init__(self, start: Callable[..., Any], folder: Path, leave: int):
        argv = [sys.executable, str(VICTIMS / "op_filler.py"), str(folder), str(leave)]
        self.victim = start(argv, folder=folder, limit=60)
        self._count = 0

    def fill(self, *gpus: int, limit: float = 40) -> None:
        """Takes all but ``leave`` bytes of these GPUs; returns when it has."""
        self._ask("fill", gpus, limit)

    def empty(self, *gpus: int, limit: float = 40) -> None:
        """Lets go of what it took of these GPUs."""
        self._ask("empty", gpus, limit)

    def _ask(self, what: str, gpus: tuple[int, ...], limit: float) -> None:
        self._count += 1
        order = self.victim.folder / "order"
        order.with_suffix(".new").write_text(f"{self._count} {what} {' '.join(map(str, gpus))}")
        os.replace(order.with_suffix(".new"), order)
        self.victim.wait_for(f"done {self._count}\n", limit)


@pytest.fixture
def filler(start: Callable[..., Any], tmp_path: Path, gpus: Inventory) -> Callable[..., Filler]:
    """``filler(leave=1 << 30)``: starts one; it holds only its contexts until it is told to fill."""
    return lambda leave=600 * MIB: Filler(start, tmp_path / "filler", leave)


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def touched() -> None:
    """Host memory that was used once: machines whose memory is backed at first use are slow the first time."""
    sys.path.insert(0, str(BENCH))
    from touch import touch

    touch(int(os.environ.get("LIMOSA_TOUCH_GB", "48")) * GIB)


def interrupt(process: Any) -> None:
    """Ctrl-C."""
    process.send_signal(signal.SIGINT)


# --- jobs that limosa itself started, and things to happen in the middle ----------------------------------------------


class NotOurs:
    """Stands for the ``Popen`` of a victim that is not our child: nothing can be waited for."""

    returncode = None

    def poll(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        time.sleep(0.01)
        return 0


def as_victim(like: Any, pid: int, folder: Path, log: Path) -> Any:
    """What can be done with a started victim, for a job that ``limosa run`` started."""
    found = object.__new__(type(like))
    found.__dict__.update(argv=[f"job {pid}"], pid=pid, folder=folder, log=log, _process=NotOurs())
    return found


class At:
    """A progress function that does something once, when a step begins; the operation waits for it."""

    def __init__(self, step: str, action: Callable[[], object]):
        self.step, self.action, self.done = step, action, False

    def __call__(self, event: Any) -> None:
        if event.step == self.step and not self.done:
            self.done = True
            self.action()

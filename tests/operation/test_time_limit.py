"""``--timeout`` is for the whole command: looking, touching host memory, hashing and tries that are repeated count."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_double import DriverDouble

from limosa import operation
from limosa.errors import CancelledUndone, DriverHung, LimosaError, TimedOutUndone
from limosa.operation import rules
from limosa.operation.holding import TRIES, Grew
from limosa.operation.work import Clock, Work

GpuLike = Callable[..., int]

# The modules: the names in the package are the verbs.
STEPS, CHECKPOINT, WORK = (
    importlib.import_module(f"limosa.operation.{name}") for name in ("steps.driver", "checkpoint", "work")
)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has seconds pass for the clocks of operations, at once: the limits are far from what a busy machine takes."""
    passed = [0.0]

    def more(seconds: float) -> None:
        passed[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], time_ns=time.time_ns)
    monkeypatch.setattr(WORK, "time", clock)
    return more


def test_tries_of_a_job_that_grows_share_one_limit(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch, passes: Callable[[float], None]
) -> None:
    pid, tries, each = gpu_like(), [], 200.0

    def grown(*_: object) -> None:
        tries.append(1)
        passes(each)
        raise Grew(pids=str(pid))

    monkeypatch.setattr(STEPS, "refuse_growth", grown)
    with pytest.raises(TimedOutUndone, match=r"longer than 300 s"):
        operation.suspend(pid, timeout=300)
    assert 1 <= len(tries) <= 2  # with a limit of its own for each there were three
    assert double.states[pid] == "running"
    tries.clear()
    each = 0.0
    with pytest.raises(LimosaError) as caught:
        operation.suspend(pid)
    assert (caught.value.id, len(tries)) == ("grew", TRIES)


def test_a_checkpoint_of_a_job_that_grows_keeps_to_it_too(
    gpu_like: GpuLike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: Callable[[float], None]
) -> None:
    tries = []

    def grown(*_: object) -> None:
        tries.append(1)
        passes(500)
        raise Grew(pids="1")

    monkeypatch.setattr(CHECKPOINT, "look_at", grown)
    with pytest.raises(TimedOutUndone):
        operation.checkpoint(gpu_like(), tmp_path / "image", timeout=300)
    assert len(tries) == 1


@pytest.mark.parametrize("cancelled", [False, True])
def test_making_host_memory_grow_ends_with_the_time_or_a_cancel(
    gpu_like: GpuLike, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """What then stands against it is not the memory, which might have grown further."""

    def grow(needed: int, *, stop: Callable[[], bool]) -> int:
        end = time.monotonic() + 60
        while not stop():
            assert time.monotonic() < end, "never told to stop"
            time.sleep(0.01)
        return 0

    monkeypatch.setattr(rules, "grow_host_memory", grow)
    cancel = threading.Event()
    if cancelled:
        threading.Timer(0.3, cancel.set).start()
    pid = gpu_like(size=1 << 50)  # more than any machine has
    with pytest.raises(CancelledUndone if cancelled else TimedOutUndone):
        operation.suspend(pid, timeout=None if cancelled else 1.0, cancel=cancel)


def test_a_driver_that_does_not_answer_while_we_look_is_not_waited_for(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch, passes: Callable[[float], None]
) -> None:
    limits = []

    def hang(limit: float | None = None) -> None:
        assert limit is not None
        limits.append(limit)
        passes(limit)
        raise DriverHung(call="cuInit", pid=0, seconds=limit)

    pid = gpu_like()
    monkeypatch.setattr(double, "available", hang)
    with pytest.raises(TimedOutUndone):
        operation.suspend(pid, timeout=3)
    assert limits
    assert max(limits) <= 3
    assert double.calls == []


def test_a_stopped_hash_is_a_time_out_where_nobody_cancelled() -> None:
    def stop(work: Work) -> None:
        with work:
            while not work.is_set():
                time.sleep(0.01)
            raise CancelledUndone(what="writing the image")

    with pytest.raises(TimedOutUndone):
        stop(Work("checkpoint", timeout=0.05))
    event = threading.Event()
    event.set()
    with pytest.raises(CancelledUndone):
        stop(Work("checkpoint", timeout=60, cancel=event))


@pytest.mark.parametrize(("timeout", "left"), [(None, 5.0), (60.0, 5.0), (2.0, 2.0), (0.0, 0.001)])
def test_no_question_may_take_longer_than_what_is_left(timeout: float | None, left: float) -> None:
    begun = time.monotonic()
    clock: Any = Clock("move", timeout=timeout)
    found = clock.at_most(5.0)
    assert max(0.001, left - (time.monotonic() - begun if timeout else 0)) - 0.001 <= found <= left

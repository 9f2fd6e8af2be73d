"""A user whose processes the driver does not answer about keeps nobody waiting for each of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from driver_double import DriverDouble

from limosa import operation
from limosa.errors import DriverHung, Refused
from limosa.gpu import State
from limosa.operation import members
from limosa.parking.patience import Patience
from limosa.process.identity import read_stat


@pytest.fixture
def waits(double: DriverDouble, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the driver is asked about one process, each time; it never answers about those that are "hung"."""
    asked: list[float] = []
    whole = double.state
    clock = [1000.0]

    def state(pid: int, timeout: float | None = 5.0) -> State:
        if double.states.get(pid) != "hung":
            return whole(pid)
        asked.append(timeout or 0.0)
        clock[0] += timeout or 0.0
        raise DriverHung(call="state", pid=pid, seconds=timeout)

    monkeypatch.setattr(double, "state", state)
    monkeypatch.setattr(members, "_patience", Patience(12.0))
    monkeypatch.setattr(members, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return asked


def test_ps_does_not_ask_again_about_who_has_not_answered(
    gpu_like: Callable[..., int], double: DriverDouble, waits: list[float]
) -> None:
    hung, other = [gpu_like() for _ in range(3)], gpu_like()
    double.states.update(dict.fromkeys(hung, "hung"))
    listed = {one.pid: one for one in operation.ps(double)}  # type: ignore[arg-type]
    assert len(waits) == len(hung)  # of all at once, in ``cuda_states``
    assert listed[other].state == "running"
    for pid in hung:
        assert listed[pid].state == "unknown"
        (reason,) = [r for r in listed[pid].reasons if r.id == "cannot-be-asked"]
        assert "did not answer" in reason.text


def test_a_user_has_some_seconds_for_all_of_them(
    gpu_like: Callable[..., int], double: DriverDouble, waits: list[float]
) -> None:
    for _ in range(5):
        pid = gpu_like()
        double.states[pid] = "hung"
        with pytest.raises(Refused):
            operation.suspend(pid, driver=double)  # type: ignore[arg-type]
    assert waits == [5.0, 5.0, 2.0, 0.25, 0.25]


def test_a_stopped_one_is_refused_for_that_and_not_asked(
    gpu_like: Callable[..., int], double: DriverDouble, waits: list[float]
) -> None:
    pid = gpu_like()
    double.states[pid] = "hung"
    os.kill(pid, signal.SIGSTOP)
    while not read_stat(pid).stopped:
        time.sleep(0.01)
    with pytest.raises(Refused) as error:
        operation.suspend(pid, driver=double)  # type: ignore[arg-type]
    assert (error.value.reasons[0].id, error.value.exit_code) == ("stopped", 13)
    assert waits == []

"""The driver does not take a process back, or one process of several ends in the middle: what Limosa says is true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_double import PROGRAM, DriverDouble, failure

from limosa import operation
from limosa.errors import DriverError, DriverNoSuchProcess, LimosaError, NoCudaState, NoSuchProcess, UndoFailed
from limosa.operation import claims, journal
from limosa.operation.steps import carry
from limosa.operation.steps.on_gpus import OnGpus
from limosa.process.identity import Identity
from limosa.process.records import SuspendRecord

GpuLike = Callable[..., int]
CALLS = {name: f"cuCheckpointProcess{name.capitalize()}" for name in ("lock", "checkpoint", "restore", "unlock")}


def nothing_left() -> bool:
    return not journal.under_way() and not claims.everybodys()


def answered(call: str, pid: int, result: str, code: int) -> DriverError:
    return DriverError(call=CALLS[call], pid=pid, result=result, code=code, meaning="made to fail")


# --- a process that the driver does not take back -------------------------------------------------------------


@pytest.mark.parametrize(("result", "code"), [("CUDA_ERROR_NOT_SUPPORTED", 801), ("CUDA_ERROR_UNKNOWN", 999)])
def test_a_resume_whose_restore_has_failed_does_not_promise_that_the_job_is_as_it_was(
    gpu_like: GpuLike, double: DriverDouble, result: str, code: int
) -> None:
    """It said 21, "undone", or even 13, "it runs on", of a job that nobody can bring back."""
    pid = gpu_like()
    operation.suspend(pid)
    double.faults["restore", 0] = answered("restore", pid, result, code)
    with pytest.raises(UndoFailed) as caught:
        operation.resume(pid)
    assert (caught.value.exit_code, caught.value.job_state) == (40, "checkpointed")
    assert "runs on" not in str(caught.value)
    assert "limosa resume" in caught.value.hint
    assert SuspendRecord.of(Identity.of(pid)) is not None
    assert nothing_left()  # there is nothing that recover could do about it
    operation.resume(pid)
    assert double.states[pid] == "running"


def test_a_resume_whose_restore_was_done_in_spite_of_its_answer_is_undone(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = gpu_like()
    operation.suspend(pid)
    real = double.restore

    def restore(*arguments: object, **options: object) -> None:
        real(*arguments, **options)  # type: ignore[arg-type]
        raise failure("restore", pid)

    monkeypatch.setattr(double, "restore", restore)
    with pytest.raises(LimosaError) as caught:
        operation.resume(pid)
    assert caught.value.exit_code == 21
    assert double.states[pid] == "checkpointed"


def test_a_restore_that_is_not_supported_is_not_told_as_a_job_that_runs_on(
    gpu_like: GpuLike, double: DriverDouble
) -> None:
    pid = gpu_like()
    for n in range(2):
        double.faults["restore", n] = answered("restore", pid, "CUDA_ERROR_NOT_SUPPORTED", 801)
    with pytest.raises(UndoFailed) as caught:
        operation.move(pid, to="1")
    assert caught.value.exit_code == 40
    assert double.states[pid] == "checkpointed"


@pytest.mark.parametrize("lost", [0, 1])
def test_the_other_job_of_a_swap_goes_on_where_one_is_lost(gpu_like: GpuLike, double: DriverDouble, lost: int) -> None:
    """It stayed locked, for ever: ``recover`` failed at the lost one as well."""
    pids = [gpu_like(on=0), gpu_like(on=1)]
    real = double.restore

    def restore(pid: int, *arguments: object, **options: object) -> None:
        if pid == pids[lost]:
            raise failure("restore", pid)
        real(pid, *arguments, **options)  # type: ignore[arg-type]

    double.restore = restore  # type: ignore[method-assign, assignment]
    outcomes = operation.move(pids, swap=True)
    assert [outcome.error.exit_code for outcome in outcomes if outcome.error] == [40, 40]
    other = pids[1 - lost]
    assert (double.states[pids[lost]], double.states[other]) == ("checkpointed", "running")
    assert double.where(other) == [1 - lost]
    (entry,) = operation.recover()
    assert entry.exit_code == 40
    assert (double.states[pids[lost]], double.states[other]) == ("checkpointed", "running")
    os.kill(pids[lost], signal.SIGKILL)
    os.waitpid(pids[lost], os.WNOHANG)
    ended(pids[lost])
    double.states.pop(pids[lost])
    (entry,) = operation.recover()
    assert (entry.exit_code, double.states[other]) == (0, "running")
    assert nothing_left()


# --- one process of several ends in the middle ----------------------------------------------------------------

ROOT = """
import pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
for n in range(2):
    (folder / str(n)).mkdir()
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(folder / str(n))], stdout=open(folder / f"out{n}", "w"))
while not all("READY" in (folder / f"out{n}").read_text() for n in range(2)):
    time.sleep(0.01)
print("READY", flush=True)
while True:
    time.sleep(0.01)
    print("tick", 0, time.monotonic(), flush=True)
"""
ANSWERS: list[Callable[[str, int], DriverError]] = [
    lambda call, pid: answered(call, pid, "CUDA_ERROR_OPERATING_SYSTEM", 304),
    lambda call, pid: NoCudaState(call=CALLS[call], pid=pid, result="CUDA_ERROR_NOT_INITIALIZED", code=3, meaning="x"),
    lambda call, pid: DriverNoSuchProcess(call=CALLS[call], pid=pid, result="OS", code=304, meaning="none"),
]
MOMENTS = ["before lock", "after lock", "after all locks", "in checkpoint", "after checkpoint"]


def ended(pid: int) -> None:
    """Waits until it is no more than a zombie."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.005)
    raise AssertionError(f"{pid} lives on")


@pytest.fixture
def family(start: Callable[..., object], double: DriverDouble, tmp_path: Path) -> tuple[int, int, int]:
    """A process without CUDA state and its two children with."""
    folder = tmp_path / "family"
    folder.mkdir()
    root = start([sys.executable, "-c", ROOT, str(folder), PROGRAM], folder=folder)
    pid = int(root.pid)  # type: ignore[attr-defined]
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    first, second = sorted(int(word) for word in listed.stdout.split())
    for child in (first, second):
        double.adopt(child)
    return pid, first, second


@pytest.mark.parametrize("answer", ANSWERS, ids=["304", "3", "none"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("verb", ["move", "suspend"])
def test_the_end_of_one_process_of_several_has_one_answer(
    family: tuple[int, int, int],
    double: DriverDouble,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    moment: str,
    answer: Callable[[str, int], DriverError],
) -> None:
    """It was 10, 21 or 0, by which step had noticed first: the rest is as it was, and 21 says so."""
    root, first, second = family
    doomed = second if moment in ("before lock", "after all locks") else first
    call, ask = double._call, double.state

    def die() -> None:
        if doomed in double.states:
            os.kill(doomed, signal.SIGKILL)
            ended(doomed)
            double.states.pop(doomed)
            double.held.pop(doomed)

    def called(name: str, pid: int, need: str, then: str) -> None:
        if (moment, name, pid) in (("before lock", "lock", first), ("in checkpoint", "checkpoint", doomed)):
            die()
        if pid == doomed and doomed not in double.states:
            raise answer(name, pid)
        call(name, pid, need, then)
        if (moment, name, pid) in (("after lock", "lock", doomed), ("after all locks", "lock", doomed)):
            die()
        if moment == "after checkpoint" and name == "checkpoint" and pid == doomed:
            die()

    monkeypatch.setattr(double, "_call", called)
    monkeypatch.setattr(double, "state", lambda pid, timeout=5.0: ask(pid, timeout))
    with pytest.raises(LimosaError) as caught:
        getattr(operation, verb)(root, **({"to": "1"} if verb == "move" else {}))
    assert (caught.value.exit_code, caught.value.job_state) == (21, "running"), caught.value
    assert f"process {doomed} of the job has ended in the middle" in str(caught.value)
    rest = second if doomed == first else first
    assert (double.states[rest], double.where(rest)) == ("running", [0])
    assert nothing_left()
    assert not list(SuspendRecord.all())
    getattr(operation, verb)(root, **({"to": "1"} if verb == "move" else {}))  # what is left of it
    assert double.states[rest] == {"move": "running", "suspend": "checkpointed"}[verb]


def test_one_process_of_several_ends_before_anything_was_touched(
    family: tuple[int, int, int], double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answer: it was 10, "there is no process"."""
    root, first, second = family
    prepare = carry.Prepare.do

    def do(step: carry.Prepare, op: OnGpus) -> None:
        os.kill(second, signal.SIGKILL)
        ended(second)
        double.states.pop(second)
        double.held.pop(second)
        prepare(step, op)
        raise NoSuchProcess(pid=second)

    monkeypatch.setattr(carry.Prepare, "do", do)
    with pytest.raises(LimosaError) as caught:
        operation.move(root, to="1")
    assert (caught.value.exit_code, caught.value.job_state) == (21, "running"), caught.value
    assert f"process {second} of the job has ended in the middle" in str(caught.value)
    assert (double.states[first], double.where(first)) == ("running", [0])
    assert nothing_left()

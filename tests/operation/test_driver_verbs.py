"""move, suspend, resume, toggle: the step engine and its undo, on real processes and a driver double."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_double import GB, DriverDouble, failure

from limosa import gpu, operation
from limosa.errors import (
    CancelledUndone,
    DriverError,
    DriverHung,
    FailedUndone,
    InvalidMap,
    LeftSuspended,
    LimosaError,
    NoCudaState,
    NoRoomOnGpu,
    NotSupported,
    Reason,
    Refused,
    TimedOutUndone,
    UndoFailed,
    UsageError,
)
from limosa.gpu import LockResult
from limosa.operation import claims, driver_steps, journal
from limosa.operation.move import AT_ONCE
from limosa.process.identity import Identity
from limosa.process.observe import JobObservation, observe
from limosa.process.records import SuspendRecord

GpuLike = Callable[..., int]


def names(double: DriverDouble) -> list[str]:
    return [name for name, _ in double.calls]


def nothing_left() -> bool:
    return not journal.under_way() and not claims.everybodys()


def test_move_runs_the_four_steps_in_order_and_leaves_nothing_behind(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0)
    (outcome,) = operation.move(pid, to="1")
    assert outcome.result is not None
    assert names(double) == ["lock", "checkpoint", "restore", "unlock"]
    assert double.states[pid] == "running"
    assert double.where(pid) == [1]
    assert outcome.result.map == {double.uuids[0]: double.uuids[1], double.uuids[1]: double.uuids[0]}
    assert outcome.result.timings["pause_seconds"] > 0
    assert outcome.result.bytes == GB
    assert nothing_left()
    assert double.will is None


def test_several_jobs_are_looked_at_and_moved_by_one_worker(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [gpu_like(on=0), gpu_like(on=0), gpu_like(on=0)]
    double.faults["checkpoint", 1] = failure("checkpoint", pids[1])
    made: list[DriverDouble] = []
    closed: list[int] = []
    monkeypatch.setattr(gpu, "Driver", lambda **_: made.append(double) or double)
    monkeypatch.setattr(double, "close", lambda: closed.append(len(double.calls)))
    outcomes = operation.move(pids, to="1", one_by_one=True)
    assert [o.error is None for o in outcomes] == [True, False, True], "one that fails fails alone"
    assert [double.where(pid) for pid in pids] == [[1], [0], [1]]
    assert (len(made), closed) == (1, [len(double.calls)])
    assert double.will is None
    assert nothing_left()


def test_of_several_jobs_one_goes_while_another_comes_and_one_that_fails_fails_alone(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [gpu_like(on=0, size=GB) for _ in range(AT_ONCE)]
    real, first = double.restore, threading.Lock()
    next_has_gone = threading.Event()
    double.after_checkpoint = lambda: next_has_gone.set() if first.locked() else None

    def restore(pid: int, mapping: Any = None, limit: float | None = None) -> None:
        if first.acquire(blocking=False):
            assert next_has_gone.wait(60), "nobody went off its GPU while this one came onto its own"
        real(pid, mapping, limit)

    monkeypatch.setattr(double, "restore", restore)
    double.faults["unlock", 1] = failure("unlock", 0)
    told: list[str] = []
    outcomes = operation.move(pids, to="1", progress=lambda event: told.append(event.step))
    assert sorted(o.error is None for o in outcomes) == [False, *([True] * (len(pids) - 1))]
    for pid, outcome in zip(pids, outcomes, strict=True):
        assert outcome.pid == pid
        assert double.where(pid) == [0 if outcome.error else 1]
        assert double.states[pid] == "running"
        assert any(step.startswith(f"{pid}: ") for step in told), "which job it is about is said"
    assert nothing_left()


def test_host_memory_of_one_job_counts_before_the_next_is_looked_at(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [gpu_like(on=0, size=6 * GB), gpu_like(on=1, size=6 * GB)]

    def in_use() -> int:
        return 6 * GB * sum(state == "checkpointed" for state in double.states.values())

    def hazards(observation: Any, needed: Any, **_: Any) -> list[Reason]:
        short = sum(needed.values()) > 10 * GB - in_use()
        return [Reason(id="host-memory", text="short", exit_code=15, forceable=True)] if short else []

    monkeypatch.setattr(importlib.import_module("limosa.operation.rules").hazards, "memory_hazards", hazards)
    outcomes = operation.suspend(pids)
    assert sorted(o.error.exit_code if o.error else 0 for o in outcomes) == [0, 15]


def test_three_jobs_come_back_side_by_side_to_a_gpu_that_has_room_for_them(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is just coming counts twice for a moment: in its claim, and on the GPU."""
    pids = [gpu_like(on=0, size=3 * GB) for _ in range(3)]
    operation.suspend(pids)
    real = double.restore
    monkeypatch.setattr(double, "restore", lambda *a, **o: (real(*a, **o), time.sleep(0.5))[0])
    assert [o.error for o in operation.resume(pids)] == [None] * 3


def test_however_often_somebody_presses_ctrl_c_all_is_undone_before_the_driver_is_let_go(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever these tests were started with
    pids = [gpu_like(on=0, size=GB) for _ in range(2)]
    closed: list[list[str]] = []
    monkeypatch.setattr(double, "close", lambda wait=5.0: closed.append(sorted(double.states.values())))
    real, begun = double.checkpoint, threading.Event()
    monkeypatch.setattr(double, "checkpoint", lambda *a, **o: (begun.set(), time.sleep(1.0), real(*a, **o))[2])

    def press() -> None:
        begun.wait(60)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        operation.move(pids, to="1")
    presses.join()
    assert closed == [["running", "running"]]
    assert nothing_left()


def test_who_found_no_room_while_another_had_not_left_yet_is_moved_in_the_end(
    gpu_like: GpuLike, double: DriverDouble
) -> None:
    double.uuids.append("GPU-20000000-0000-0000-0000-000000000000")
    double.names = (*double.names, "Test GPU")
    one, two = gpu_like(on=0, size=6 * GB), gpu_like(on=1, size=6 * GB)
    outcomes = operation.move([one, two], gpu_map="0=1,1=2,2=0", one_by_one=True)
    assert [o.error for o in outcomes] == [None, None]
    assert (double.where(one), double.where(two)) == ([1], [2])
    assert [pid for call, pid in double.calls if call == "restore"] == [two, one]
    assert nothing_left()


def test_move_to_where_it_is_touches_nothing(gpu_like: GpuLike, double: DriverDouble) -> None:
    (outcome,) = operation.move(gpu_like(on=1), to="1")
    assert outcome.result is not None
    assert outcome.result.already
    assert names(double) == []


def test_suspend_resume_and_both_again(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0)
    assert operation.suspend(pid)[0].result.state == "checkpointed"  # type: ignore[union-attr]
    again = operation.suspend(pid)[0].result
    assert again is not None
    assert again.already
    assert again.way == ""  # nothing was carried
    record = SuspendRecord.of(Identity.of(pid))
    assert record is not None
    assert record.bytes == {double.uuids[0]: GB}
    (listed,) = operation.ps()
    assert (listed.state, listed.gpus[0]["memory_used"]) == ("checkpointed", GB)
    assert listed.suspended is not None
    assert operation.resume(pid)[0].result.state == "running"  # type: ignore[union-attr]
    assert operation.resume(pid)[0].result.already  # type: ignore[union-attr]
    assert SuspendRecord.of(Identity.of(pid)) is None
    assert double.where(pid) == [0]


def test_an_ancestor_of_limosa_that_uses_cuda_does_not_hide_its_children(
    gpu_like: GpuLike, double: DriverDouble
) -> None:
    pid = gpu_like(on=0)
    double.adopt(os.getpid(), 1)
    double.adopt(os.getppid(), 1)
    assert [job.pid for job in operation.ps()] == [pid]
    assert [job.root.pid for job in operation.resolve(everything=True)] == [pid]


def test_a_suspended_job_is_resumed_on_another_gpu_by_move(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0)
    operation.suspend(pid)
    operation.move(pid, to="1")
    assert double.states[pid] == "running"
    assert double.where(pid) == [1]


def test_toggle_suspends_and_resumes(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like()
    assert operation.toggle(pid)[0].result.operation == "suspend"  # type: ignore[union-attr]
    assert double.states[pid] == "checkpointed"
    assert operation.toggle(pid)[0].result.operation == "resume"  # type: ignore[union-attr]
    assert double.states[pid] == "running"


def test_what_a_toggle_would_do_is_known_or_it_is_refused(gpu_like: GpuLike, double: DriverDouble, monkeypatch) -> None:
    """Once it took a suspended job whose state was not told for a running one, and said that it was suspended."""
    pid = gpu_like()
    operation.suspend(pid)
    ask, count = double.state, iter(range(9))

    def once(pid: int, timeout: float | None = 5.0) -> object:
        if next(count) == 0:
            raise failure("cuCheckpointProcessGetState", pid)
        return ask(pid, timeout)

    monkeypatch.setattr(double, "state", once)
    with pytest.raises(LimosaError) as refused:
        operation.toggle(pid)
    assert (refused.value.exit_code, refused.value.id) == (12, "cannot-be-asked")
    monkeypatch.undo()


def test_a_toggle_is_not_chosen_by_one_wrong_answer(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a suspended job holds no CUDA state made a suspend of it, which was done already."""
    pid, ask, asked = gpu_like(on=0), double.state, iter(range(99))
    operation.suspend(pid)

    def denied_once(pid: int, timeout: float | None = 5.0) -> object:
        if next(asked) == 0:
            raise NoCudaState(call="cuCheckpointProcessGetState", pid=pid, result="X", code=3, meaning="none")
        return ask(pid, timeout)

    monkeypatch.setattr(double, "state", denied_once)
    assert operation.toggle(pid)[0].result.state == "running"  # type: ignore[union-attr]


def test_a_job_that_ends_while_it_is_looked_at_has_ended(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CUDA state goes first: it is no job that never had any."""
    pid = gpu_like(on=0)

    def ends(pid: int, timeout: float | None = 5.0) -> object:
        os.kill(pid, signal.SIGKILL)
        raise NoCudaState(call="cuCheckpointProcessGetState", pid=pid, result="X", code=3, meaning="none")

    monkeypatch.setattr(double, "state", ends)
    with pytest.raises(LimosaError) as refused:
        operation.suspend(pid)
    assert (refused.value.exit_code, refused.value.id) == (10, "no-such-process")


def test_a_move_around_three_gpus_is_brought_back_to_the_first(gpu_like: GpuLike, double: DriverDouble) -> None:
    """The way back is not the way on: only of an exchange of two the map is its own inverse."""
    three = DriverDouble(gpus=3)
    double.uuids, double.names = three.uuids, three.names
    pid = gpu_like(on=0)
    double.faults["unlock", 0] = failure("unlock", pid)
    with pytest.raises(FailedUndone):
        operation.move(pid, gpu_map="0=1,1=2,2=0")
    assert double.states[pid] == "running"
    assert double.where(pid) == [0]


def test_while_it_works_the_worker_has_its_will(gpu_like: GpuLike, double: DriverDouble) -> None:
    """Killed now, nobody needs to call recover: the worker does. Afterwards there is nothing to undo."""
    pid, wills = gpu_like(on=0), []
    double.after_checkpoint = lambda: wills.append(double.will)
    operation.move(pid, to="1")
    (will,) = wills
    assert will is not None
    assert "limosa.operation.orphan" in will
    assert will[-1].startswith("move-")
    assert double.will is None


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
def test_each_step_that_fails_is_undone(gpu_like: GpuLike, double: DriverDouble, call: str) -> None:
    pid = gpu_like(on=0)
    double.faults[call, 0] = failure(call, pid)
    with pytest.raises(FailedUndone) as caught:
        operation.move(pid, to="1")
    assert caught.value.exit_code == 21
    assert double.states[pid] == "running"
    assert double.where(pid) == [0]
    assert nothing_left()
    operation.move(pid, to="1")  # and the same command without the fault succeeds
    assert double.where(pid) == [1]


def test_what_the_driver_cannot_checkpoint_runs_on(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like()
    double.faults["checkpoint", 0] = NotSupported(
        call="checkpoint", pid=pid, result="CUDA_ERROR_NOT_SUPPORTED", code=801, meaning="managed memory"
    )
    with pytest.raises(LimosaError) as caught:
        operation.suspend(pid)
    assert caught.value.exit_code == 13
    assert double.states[pid] == "running"


def test_when_the_undo_fails_too_everything_is_left_for_recover(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0)
    double.faults["restore", 0] = failure("restore", pid)
    double.faults["restore", 1] = failure("restore", pid)
    with pytest.raises(UndoFailed) as caught:
        operation.move(pid, to="1")
    assert caught.value.exit_code == 40
    assert double.states[pid] == "checkpointed"
    (left,) = journal.under_way()
    assert left.pids == [pid]
    (entry,) = operation.recover()
    assert (entry.exit_code, entry.state) == (0, "running")
    assert double.states[pid] == "running"
    assert double.where(pid) == [0]
    assert nothing_left()


def out_of_memory(pid: int) -> DriverError:
    return DriverError(call="restore", pid=pid, result="CUDA_ERROR_OUT_OF_MEMORY", code=2, meaning="out of memory")


def test_a_map_that_changes_nothing_and_is_refused_is_left_out(gpu_like: GpuLike, double: DriverDouble) -> None:
    """A GPU that was off the bus when the job was suspended is back: the driver knows the job with fewer GPUs."""
    pid = gpu_like()
    operation.suspend(pid)
    refused = DriverError(call="restore", pid=pid, result="CUDA_ERROR_INVALID_VALUE", code=1, meaning="an argument")
    double.faults["restore", 0] = refused
    operation.resume(pid)
    assert double.states[pid] == "running"
    operation.suspend(pid)
    double.faults["restore", 2] = refused
    with pytest.raises(FailedUndone):
        operation.resume(pid, to="1")
    assert double.states[pid] == "checkpointed"


def test_a_journal_that_cannot_be_removed_does_not_undo_what_is_done(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch
) -> None:
    """It ended with 1, an internal error, although the job was where it should be; now it is emptied."""
    pid = gpu_like()
    unlink = os.unlink

    def broken(path: object, **options: object) -> None:
        if str(path).endswith(".jsonl"):
            raise OSError(5, "Input/output error")
        unlink(path, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as failing:
        failing.setattr(os, "unlink", broken)
        operation.suspend(pid)
    assert double.states[pid] == "checkpointed"
    operation.resume(pid)  # nobody works on it any more
    assert operation.recover() == []


def test_one_answer_that_a_member_has_no_cuda_state_is_not_believed(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch
) -> None:
    pid = gpu_like()
    ask, answers = double.state, iter([True, False])

    def no_state_once(asked: int, timeout: float | None = 5.0) -> object:
        if next(answers, False):
            raise NoCudaState(call="cuCheckpointProcessGetState", pid=pid, result="X", code=3, meaning="none")
        return ask(asked, timeout)

    monkeypatch.setattr(double, "state", no_state_once)
    assert driver_steps.settled_state(double, pid) == "running"  # type: ignore[arg-type]


def test_a_call_that_never_comes_back_is_not_called_undone(gpu_like: GpuLike, double: DriverDouble) -> None:
    """A lock that was given up on was taken after everything had been "undone", and the job stood still for good."""
    pid = gpu_like()
    double.faults["lock", 0] = DriverHung(call="lock", pid=pid, seconds=20.0)
    double.hanging[pid] = "lock"
    with pytest.raises(UndoFailed, match="still under way") as failed:
        operation.suspend(pid)
    assert failed.value.exit_code == 40
    double.hanging.clear()
    double.states[pid] = "locked"  # it came after all
    (recovered,) = operation.recover()
    assert (recovered.exit_code, double.states[pid]) == (0, "running")


def test_a_resume_that_runs_out_of_device_memory_promises_nothing(gpu_like: GpuLike, double: DriverDouble) -> None:
    """It is suspended as before, but the driver may never take it back: 40, and every copy left where it is."""
    pid = gpu_like()
    operation.suspend(pid)
    double.faults["restore", 0] = out_of_memory(pid)
    with pytest.raises(UndoFailed) as caught:
        operation.resume(pid)
    assert caught.value.job_state == "checkpointed"
    assert f"limosa resume {pid}" in caught.value.hint
    assert nothing_left()  # there is nothing that recover could do
    operation.resume(pid)  # this driver does take it back
    assert double.states[pid] == "running"


def test_a_move_that_does_and_is_brought_back_is_as_it_was(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0)
    double.faults["restore", 0] = out_of_memory(pid)
    with pytest.raises(FailedUndone):
        operation.move(pid, to="1")
    assert (double.states[pid], double.where(pid)) == ("running", [0])


def test_a_lock_that_times_out_is_undone_with_18(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = gpu_like()
    monkeypatch.setattr(double, "lock", lambda *a, **k: LockResult.TIMED_OUT)
    with pytest.raises(TimedOutUndone):
        operation.suspend(pid)
    assert double.states[pid] == "running"


def test_a_cancel_during_the_checkpoint_is_undone_with_22(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like()
    cancel = threading.Event()
    double.after_checkpoint = cancel.set
    with pytest.raises(CancelledUndone):
        operation.move(pid, to="1", cancel=cancel)
    assert double.states[pid] == "running"
    assert double.where(pid) == [0]


def test_a_destination_filled_meanwhile_brings_it_back_where_it_was(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0, size=6 * GB)
    double.after_checkpoint = lambda: double.others.update({double.uuids[1]: 9 * GB})
    with pytest.raises(NoRoomOnGpu) as caught:
        operation.move(pid, to="1")
    assert caught.value.exit_code == 14
    assert double.states[pid] == "running"
    assert double.where(pid) == [0]


def test_both_gpus_filled_meanwhile_leaves_it_suspended_with_41(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0, size=6 * GB)
    double.after_checkpoint = lambda: double.others.update(dict.fromkeys(double.uuids, 9 * GB))
    with pytest.raises(LeftSuspended) as caught:
        operation.move(pid, to="1")
    assert caught.value.exit_code == 41
    assert double.states[pid] == "checkpointed"
    assert nothing_left()
    with pytest.raises(Refused) as still:
        operation.resume(pid)
    assert still.value.exit_code == 14
    double.after_checkpoint = lambda: None
    double.others.clear()
    operation.resume(pid)
    assert double.states[pid] == "running"


def test_swap_moves_two_that_fill_their_gpus(gpu_like: GpuLike, double: DriverDouble) -> None:
    a, b = gpu_like(on=0, size=9 * GB), gpu_like(on=1, size=9 * GB)
    with pytest.raises(Refused) as caught:
        operation.move(a, to="1")
    assert caught.value.exit_code == 14
    first, second = operation.move([a, b], swap=True)
    assert first.result is not None
    assert second.result is not None
    assert (double.where(a), double.where(b)) == ([1], [0])
    assert [n for n, _ in double.calls] == [
        "lock",
        "lock",
        "checkpoint",
        "checkpoint",
        "restore",
        "restore",
        "unlock",
        "unlock",
    ]


@pytest.mark.parametrize("nth", [0, 1])
def test_a_swap_that_fails_half_way_brings_both_back(gpu_like: GpuLike, double: DriverDouble, nth: int) -> None:
    a, b = gpu_like(on=0, size=9 * GB), gpu_like(on=1, size=9 * GB)
    double.faults["unlock", nth] = failure("unlock")
    outcomes = operation.move([a, b], swap=True)
    assert [o.pid for o in outcomes] == [a, b]
    assert all(isinstance(o.error, FailedUndone) for o in outcomes)
    assert (double.where(a), double.where(b)) == ([0], [1])
    assert {double.states[a], double.states[b]} == {"running"}


def test_several_jobs_have_a_result_each_and_the_first_failure_is_the_exit_code(
    gpu_like: GpuLike, double: DriverDouble
) -> None:
    a, b = gpu_like(on=0), gpu_like(on=0)
    double.faults["checkpoint", 0] = failure("checkpoint", a)
    outcomes = operation.move([a, b], to="1")
    codes = [o.error.exit_code if o.error else 0 for o in outcomes]
    assert sorted(codes) == [0, 21]
    assert operation.worst_exit_code(outcomes) == 21
    assert [double.where(pid) for pid in (a, b)] == [[0] if code else [1] for code in codes]


def test_one_job_in_a_list_is_looked_at_once(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second look costs a second worker: as long again."""
    looks = []
    module = importlib.import_module("limosa.operation.move")  # there is a function of that name
    look = module.look_at
    monkeypatch.setattr(module, "look_at", lambda *a, **o: looks.append(a) or look(*a, **o))
    pid = gpu_like(on=0)
    (done,) = operation.suspend([pid])
    assert done.result is not None
    double.others[double.uuids[0]] = double.memory
    (refused,) = operation.resume([pid])
    assert len(looks) == 2
    assert refused.error is not None
    assert (refused.pid, refused.error.exit_code, refused.error.job_state) == (pid, 14, "checkpointed")


def test_of_several_jobs_those_move_that_fit_together(gpu_like: GpuLike, double: DriverDouble) -> None:
    a, b = gpu_like(on=0, size=6 * GB), gpu_like(on=0, size=3 * GB)
    double.others[double.uuids[1]] = 3 * GB
    plans = operation.move([a, b], to="1", dry_run=True)
    assert [o.plan.verdict for o in plans if o.plan] == ["ok", "refused"]  # each would fit alone
    codes = [o.error.exit_code if o.error else 0 for o in operation.move([a, b], to="1")]
    assert sorted(codes) == [0, 14], "side by side: whoever claims the room first"
    assert [double.where(pid) for pid in (a, b)] == [[1] if code == 0 else [0] for code in codes]


def test_one_by_one_the_first_of_several_jobs_has_the_room(gpu_like: GpuLike, double: DriverDouble) -> None:
    a, b = gpu_like(on=0, size=6 * GB), gpu_like(on=0, size=3 * GB)
    double.others[double.uuids[1]] = 3 * GB
    outcomes = operation.move([a, b], to="1", one_by_one=True)
    assert [o.error.exit_code if o.error else 0 for o in outcomes] == [0, 14]
    assert (double.where(a), double.where(b)) == ([1], [0])


def test_a_dry_run_touches_nothing_and_says_the_steps(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(size=4 * GB)
    (outcome,) = operation.move(pid, to="1", dry_run=True)
    assert outcome.plan is not None
    assert outcome.plan.verdict == "ok"
    assert [s.split()[0] for s in outcome.plan.steps] == ["lock", "checkpoint", "restore", "unlock"]
    assert outcome.plan.estimate.pause_seconds == pytest.approx(0.755 + (4 * GB - 0.55e9) * (1 / 2.4e9 + 1 / 6.8e9))
    assert names(double) == []


def test_a_resume_unlocks_what_another_tool_has_locked(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like()
    double.states[pid] = "locked"
    (outcome,) = operation.resume([pid])
    assert outcome.result is not None
    assert [w.id for w in outcome.result.warnings] == ["locked"]
    assert [name for name in names(double) if name != "state"] == ["unlock"]
    assert double.states[pid] == "running"


def test_max_pause_refuses_beforehand(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(size=4 * GB)
    with pytest.raises(Refused) as caught:
        operation.move(pid, to="1", max_pause=0.5)
    assert caught.value.exit_code == 18
    assert names(double) == []


def test_another_chip_is_refused(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like()
    double.names = ("Test GPU", "Other GPU")
    with pytest.raises(Refused) as caught:
        operation.move(pid, to="1")
    assert "Other GPU" in str(caught.value)
    assert (caught.value.id, caught.value.exit_code) == ("chip", 12)
    assert names(double) == []


def test_a_map_and_a_destination_together_are_refused(gpu_like: GpuLike, double: DriverDouble) -> None:
    with pytest.raises(LimosaError) as caught:
        operation.move(gpu_like(), to="1", gpu_map="0=1")
    assert caught.value.exit_code == 2
    with pytest.raises((UsageError, InvalidMap)):
        operation.move(gpu_like())


def test_a_second_operation_on_the_same_job_is_refused_as_busy(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like()
    seen: list[int] = []

    def meanwhile() -> None:
        double.after_checkpoint = lambda: None
        with pytest.raises(Refused) as caught:
            operation.suspend(pid)
        seen.append(caught.value.exit_code)

    double.after_checkpoint = meanwhile
    operation.suspend(pid)
    assert seen == [19]


def test_large_memory_on_two_gpus_is_refused_and_may_be_forced(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0, size=GB)
    double.held[pid][double.uuids[1]] = GB // 2
    with pytest.raises(Refused) as caught:
        operation.suspend(pid)
    assert (caught.value.id, caught.value.exit_code) == ("peer-access", 13)
    operation.suspend(pid, force=["peer-access"])
    assert double.states[pid] == "checkpointed"
    operation.resume(pid)  # what is suspended already is not refused


def test_room_that_another_operation_claims_is_not_given_twice(
    gpu_like: GpuLike, double: DriverDouble, own_runtime: Path
) -> None:
    pid = gpu_like(on=0, size=6 * GB)
    claims.Claim(id="other", operation="move", holder=Identity.of(1), gpus={double.uuids[1]: 5 * GB}).save()
    with pytest.raises(Refused) as caught:
        operation.move(pid, to="1")
    assert caught.value.exit_code == 14
    assert "promised" in str(caught.value)


def test_a_swap_that_cannot_be_is_planned_as_refused(gpu_like: GpuLike, double: DriverDouble) -> None:
    a, b = gpu_like(on=0), gpu_like(on=0)
    plans = operation.move([a, b], swap=True, dry_run=True)
    assert [o.plan.verdict for o in plans if o.plan] == ["refused", "refused"]


def test_a_process_that_gets_a_context_while_we_lock_is_taken_along(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    from limosa.operation import facts, holding

    pid, late = gpu_like(on=0), gpu_like(on=0)
    calls = iter([[pid], [pid, late], [pid, late], [pid, late], [pid, late]])

    def tree(root: Identity) -> list[Identity]:
        return [Identity.of(p) for p in next(calls)]

    monkeypatch.setattr(holding, "job_tree", tree)
    monkeypatch.setattr(facts, "job_tree", tree)
    real = facts.observe

    def both(root: Identity) -> object:
        seen, more = real(root), real(Identity.of(late))
        seen.processes += more.processes
        return seen

    monkeypatch.setattr(facts, "observe", both)
    operation.suspend(pid)
    assert double.states == {pid: "checkpointed", late: "checkpointed"}
    assert names(double)[:3] == ["lock", "unlock", "lock"]  # undone once, then both


def with_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen of a process says that the driver has mapped what it maps for a context."""

    def seen(root: Identity) -> JobObservation:
        found = observe(root)
        found.processes[0].n_uvm_maps = 1
        return found

    monkeypatch.setattr("limosa.operation.facts.observe", seen)


def test_that_a_job_with_a_context_holds_nothing_is_asked_twice_and_then_refused(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once believed, its host memory alone was written to disk, and it was ended."""
    pid, ask, asked = gpu_like(), double.state, iter(range(9))
    with_a_context(monkeypatch)
    none = NoCudaState(call="cuCheckpointProcessGetState", pid=pid, result="X", code=3, meaning="none")

    def denied(pid: int, timeout: float | None = 5.0) -> object:
        raise none

    monkeypatch.setattr(double, "state", denied)
    with pytest.raises(LimosaError) as refused:
        operation.checkpoint(pid, tmp_path / "image")
    assert (refused.value.exit_code, refused.value.id) == (12, "state-denied")

    def once(pid: int, timeout: float | None = 5.0) -> object:
        if next(asked) == 0:
            raise none
        return ask(pid, timeout)

    monkeypatch.setattr(double, "state", once)
    operation.suspend(pid)
    monkeypatch.undo()
    assert double.states[pid] == "checkpointed"


@pytest.mark.parametrize(
    ("refused", "wanted"),
    [
        (0, [{"there": "home", "home": "there"}]),
        (1, [{"there": "home", "home": "there"}] * 2),  # it would be restored where it is by any other map
        (2, [*[{"there": "home", "home": "there"}] * 2, {"home": "home", "there": "there"}]),
    ],
)
def test_the_way_home_of_a_containers_process_that_the_driver_refuses(
    monkeypatch: pytest.MonkeyPatch, refused: int, wanted: list[dict[str, str]]
) -> None:
    """Refused once it may be away; refused each time it is at home, and its state was told wrongly."""
    for name in ("add", "leave"):
        monkeypatch.setattr(driver_steps.container_gpus, name, lambda *_: None)
    asked: list[dict[str, str]] = []

    class Refusing:
        def restore(self, pid: int, mapping: dict[str, str], *, limit: float) -> None:
            asked.append(mapping)
            if len(asked) <= refused:
                result = "CUDA_ERROR_INVALID_VALUE"
                raise DriverError(call="restore", pid=pid, result=result, code=1, meaning="made to fail")

    member = journal.Member(
        identity=Identity.of(os.getpid()),
        home={"home": "home", "there": "there"},
        map={"home": "there", "there": "home"},
        boxed=True,
    )
    driver_steps._restore_home(Refusing(), member, True, lambda _: None)  # type: ignore[arg-type]
    assert asked == wanted

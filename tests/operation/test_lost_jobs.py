"""Ways in which a job could be lost: it changes under our hands, an undo goes wrong, an operation is killed.

Real processes and a driver double; after each the job runs, or is suspended where its record says, or is whole in the
hands of ``recover``.
"""

from __future__ import annotations

import getpass
import importlib
import os
import pwd
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from driver_double import GB, DriverDouble, failure

from limosa import operation
from limosa.errors import Busy, DriverNoSuchProcess, LeftSuspended, LimosaError, NoRoomOnGpu, Refused, UndoFailed
from limosa.operation import claims, journal
from limosa.operation.journal import Header, Journal, Member
from limosa.operation.remove_image import remove_image
from limosa.operation.results import Outcome
from limosa.operation.work import Work
from limosa.process.identity import Identity
from limosa.process.records import SuspendRecord
from limosa.progress import Progress

GpuLike = Callable[..., int]
GONE = Identity(1, 999)  # never alive: process 1 has another start time


def names(double: DriverDouble) -> list[str]:
    return [name for name, _ in double.calls]


def nothing_left() -> bool:
    return not journal.under_way() and not claims.everybodys()


def dead_journal(name: str) -> None:
    """What a killed operation leaves."""
    Journal.create(Header(id=name, operation="move", roots=[], controller=GONE)).close()


def before_claim(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Lets something happen once, between an operation's look at the job and its claim."""
    real = Work.begin
    todo = [happens]

    def begin(work: Work, members: Sequence[Member], **more: Any) -> Journal:
        if todo:
            todo.pop()()
        return real(work, members, **more)

    monkeypatch.setattr(Work, "begin", begin)


def before_lock(double: DriverDouble, happens: Callable[[], object]) -> None:
    """Lets something happen before each lock."""
    real = double.lock

    def lock(*arguments: object, **options: object) -> object:
        happens()
        return real(*arguments, **options)  # type: ignore[arg-type]

    double.lock = lock  # type: ignore[method-assign, assignment]


def source_fills_before_unlock(double: DriverDouble, pid: int) -> None:
    """The first unlock fails, and by then others have taken the GPU that the job came from."""
    double.faults["unlock", 0] = failure("unlock", pid)
    real = double.unlock

    def unlock(*arguments: object, **options: object) -> None:
        double.others[double.uuids[0]] = 9 * GB
        double.unlock = real  # type: ignore[method-assign]
        real(*arguments, **options)  # type: ignore[arg-type]

    double.unlock = unlock  # type: ignore[method-assign]


def record_of(pid: int) -> SuspendRecord:
    record = SuspendRecord.of(Identity.of(pid))
    assert record is not None
    return record


# --- the job changes between look and lock --------------------------------------------------------------------


def test_a_job_that_grows_before_it_is_locked_and_does_not_fit_any_more_runs_on(
    gpu_like: GpuLike, double: DriverDouble
) -> None:
    pid = gpu_like(on=0, size=GB)
    double.others[double.uuids[1]] = 5 * GB
    before_lock(double, lambda: double.held.update({pid: {double.uuids[0]: 8 * GB}}))
    with pytest.raises(NoRoomOnGpu) as caught:
        operation.move(pid, to="1")
    assert (caught.value.exit_code, caught.value.job_state) == (14, "running")
    assert names(double) == ["lock", "unlock"]
    assert (double.states[pid], double.where(pid)) == ("running", [0])
    assert nothing_left()


def test_a_job_that_grows_before_it_is_locked_and_fits_is_moved_whole(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0, size=GB)
    before_lock(double, lambda: double.held.update({pid: {double.uuids[0]: 8 * GB}}))
    (outcome,) = operation.move(pid, to="1")
    assert outcome.result is not None
    assert outcome.result.bytes == 8 * GB
    assert double.where(pid) == [1]


def test_a_job_that_grows_before_it_is_suspended_is_recorded_with_all_that_it_holds(
    gpu_like: GpuLike, double: DriverDouble
) -> None:
    pid = gpu_like(on=0, size=GB)
    before_lock(double, lambda: double.held.update({pid: {double.uuids[0]: 8 * GB}}))
    operation.suspend(pid)
    assert record_of(pid).bytes == {double.uuids[0]: 8 * GB}


def test_a_job_moved_by_another_operation_before_the_claim_is_suspended_from_where_it_is(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = gpu_like(on=0, size=6 * GB)

    def moved() -> None:
        operation.move(pid, to="1")
        double.others[double.uuids[0]] = 9 * GB

    before_claim(monkeypatch, moved)
    operation.suspend(pid)
    assert record_of(pid).held == {str(pid): {double.uuids[1]: 6 * GB}}
    operation.resume(pid)
    assert (double.states[pid], double.where(pid)) == ("running", [1])


def test_a_job_moved_by_another_operation_before_the_claim_is_not_moved_again(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = gpu_like(on=0)
    before_claim(monkeypatch, lambda: operation.move(pid, to="1"))
    (outcome,) = operation.move(pid, to="1")
    assert outcome.result is not None
    assert outcome.result.already
    assert double.where(pid) == [1]


@pytest.mark.parametrize("verb", [operation.resume, operation.suspend])
def test_a_job_resumed_or_suspended_by_another_operation_before_the_claim_is_looked_at_again(
    gpu_like: GpuLike,
    double: DriverDouble,
    monkeypatch: pytest.MonkeyPatch,
    verb: Callable[..., list[Outcome]],
) -> None:
    pid = gpu_like(on=0)
    if verb is operation.resume:
        operation.suspend(pid)
    before_claim(monkeypatch, lambda: verb(pid))
    (outcome,) = verb(pid)
    assert outcome.result is not None
    assert outcome.result.already
    assert nothing_left()


@pytest.mark.parametrize("verb", [operation.resume, operation.move])
def test_a_suspended_job_taken_elsewhere_and_suspended_again_before_the_claim_is_not_restored_where_it_does_not_fit(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch, verb: Callable[..., object]
) -> None:
    pid = gpu_like(on=0, size=6 * GB)
    operation.suspend(pid)

    def elsewhere() -> None:
        operation.resume(pid, to="1")
        operation.suspend(pid)
        double.others[double.uuids[1]] = 9 * GB

    before_claim(monkeypatch, elsewhere)
    if verb is operation.resume:
        with pytest.raises(Refused) as caught:
            operation.resume(pid)
        assert caught.value.exit_code == 14
        assert double.states[pid] == "checkpointed"
    else:
        operation.move(pid, to="0")
        assert (double.states[pid], double.where(pid)) == ("running", [0])
    assert nothing_left()


@pytest.mark.parametrize("verb", ["suspend", "move"])
def test_a_process_of_the_tree_that_begins_to_use_cuda_before_the_lock_is_taken_along(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    holding, facts = (importlib.import_module(f"limosa.operation.{name}") for name in ("holding", "facts"))
    pid, late = gpu_like(on=0), gpu_like(on=0)
    del double.states[late]
    held = double.held.pop(late)
    both = [Identity.of(pid), Identity.of(late)]
    real = facts.observe

    def observe(root: Identity) -> object:
        seen = real(root)
        seen.processes += real(both[1]).processes
        return seen

    monkeypatch.setattr(facts, "observe", observe)
    for module in (holding, facts):
        monkeypatch.setattr(module, "job_tree", lambda _: both)

    def begins() -> None:
        double.states.setdefault(late, "running")
        double.held.setdefault(late, held)

    before_lock(double, begins)
    if verb == "suspend":
        operation.suspend(pid)
        assert double.states == {pid: "checkpointed", late: "checkpointed"}
        assert set(record_of(pid).held) == {str(pid), str(late)}
    else:
        operation.move(pid, to="1")
        assert double.states == {pid: "running", late: "running"}
        assert double.where(pid) == double.where(late) == [1]
    assert names(double)[:3] == ["lock", "unlock", "lock"]  # undone once, then both


# --- left suspended: on which GPU? ----------------------------------------------------------------------------


def test_a_move_that_cannot_go_on_nor_back_leaves_the_job_where_a_plain_resume_brings_it_up(
    gpu_like: GpuLike, double: DriverDouble
) -> None:
    pid = gpu_like(on=0, size=6 * GB)
    source_fills_before_unlock(double, pid)
    with pytest.raises(LeftSuspended) as caught:
        operation.move(pid, to="1")
    assert (caught.value.exit_code, caught.value.job_state) == (41, "checkpointed")
    assert double.states[pid] == "checkpointed"
    assert double.where(pid) == [1]
    assert record_of(pid).held == {str(pid): {double.uuids[1]: 6 * GB}}
    assert nothing_left()
    operation.resume(pid)
    assert (double.states[pid], double.where(pid)) == ("running", [1])


@pytest.mark.parametrize("to", ["0", "1"])
def test_after_41_a_resume_to_either_gpu_lands_there_or_is_refused(
    gpu_like: GpuLike, double: DriverDouble, to: str
) -> None:
    pid = gpu_like(on=0, size=6 * GB)
    source_fills_before_unlock(double, pid)
    with pytest.raises(LeftSuspended):
        operation.move(pid, to="1")
    if to == "0":
        with pytest.raises(Refused) as caught:
            operation.resume(pid, to="0")
        assert caught.value.exit_code == 14
        double.others.clear()
    operation.resume(pid, to=to)
    assert (double.states[pid], double.where(pid)) == ("running", [int(to)])


@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_a_resume_elsewhere_that_failed_is_recorded_on_the_gpu_that_the_driver_knows(
    gpu_like: GpuLike, double: DriverDouble, call: str
) -> None:
    pid = gpu_like(on=0, size=6 * GB)
    operation.suspend(pid)
    double.faults[call, 0] = failure(call, pid)
    with pytest.raises(LimosaError) as caught:
        operation.resume(pid, to="1")
    expected = {"restore": 40, "unlock": 21}[call]  # nobody knows whether it will be restored the next time
    assert (caught.value.exit_code, caught.value.job_state) == (expected, "checkpointed")
    (here,) = double.where(pid)
    assert list(record_of(pid).bytes) == [double.uuids[here]]
    double.others[double.uuids[here]] = 9 * GB
    with pytest.raises(Refused) as refused:
        operation.resume(pid)
    assert refused.value.exit_code == 14
    assert double.states[pid] == "checkpointed"
    double.others = {double.uuids[1 - here]: 9 * GB}
    operation.resume(pid)
    assert (double.states[pid], double.where(pid)) == ("running", [here])


# --- an undo that is broken off -------------------------------------------------------------------------------


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "not noted"])
def test_an_undo_broken_off_after_the_way_home_is_not_taken_home_twice(
    gpu_like: GpuLike, double: DriverDouble, noted: bool
) -> None:
    pid = gpu_like(on=0)
    double.faults["unlock", 0] = failure("unlock", pid)
    real = double.restore
    if noted:
        double.faults["unlock", 1] = failure("unlock", pid)
    else:

        def restore(*arguments: object, **options: object) -> None:
            real(*arguments, **options)  # type: ignore[arg-type]
            if names(double).count("restore") == 2:
                raise failure("restore", pid)  # as good as killed before it could write that down

        double.restore = restore  # type: ignore[method-assign]
    with pytest.raises(UndoFailed):
        operation.move(pid, to="1")
    (home,) = [s for s in journal.dead() if s.began("restore-home", pid)]
    assert home.last("restore-home", pid).phase == ("done" if noted else "begin")  # type: ignore[union-attr]
    home.close()
    assert (double.states[pid], double.where(pid)) == ("locked", [0])
    (entry,) = operation.recover()
    assert (entry.exit_code, entry.state) == (0, "running")
    assert (double.states[pid], double.where(pid)) == ("running", [0])
    assert nothing_left()


def test_an_undo_broken_off_before_the_way_home_is_taken_home(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0)
    double.faults["unlock", 0] = failure("unlock", pid)
    double.faults["restore", 1] = failure("restore", pid)
    with pytest.raises(UndoFailed):
        operation.move(pid, to="1")
    assert (double.states[pid], double.where(pid)) == ("checkpointed", [1])
    (entry,) = operation.recover()
    assert entry.exit_code == 0
    assert (double.states[pid], double.where(pid)) == ("running", [0])


@pytest.mark.parametrize("nth", [2, 3])
@pytest.mark.parametrize("happened", [True, False], ids=["done unheard", "not done"])
def test_a_swap_whose_undo_is_broken_off_between_the_two_brings_both_home(
    gpu_like: GpuLike, double: DriverDouble, nth: int, happened: bool
) -> None:
    a, b = gpu_like(on=0, size=4 * GB), gpu_like(on=1, size=4 * GB)
    double.faults["unlock", 0] = failure("unlock")
    count = iter(range(100))
    real = double.restore

    def restore(*arguments: object, **options: object) -> None:
        fails = next(count) == nth
        if happened or not fails:
            real(*arguments, **options)  # type: ignore[arg-type]
        if fails:
            raise failure("restore")

    double.restore = restore  # type: ignore[method-assign]
    outcomes = operation.move([a, b], swap=True)
    assert all(isinstance(o.error, UndoFailed) for o in outcomes)
    (entry,) = operation.recover()
    assert entry.exit_code == 0
    assert {double.states[a], double.states[b]} == {"running"}
    assert (double.where(a), double.where(b)) == ([0], [1])
    assert nothing_left()


def test_a_progress_function_that_raises_keeps_nothing_from_being_undone(
    gpu_like: GpuLike, double: DriverDouble
) -> None:
    pid = gpu_like(on=0)
    told: list[str] = []

    def progress(event: Progress) -> None:
        told.append(event.step)
        raise RuntimeError("the caller's own fault")

    double.faults["unlock", 0] = failure("unlock", pid)
    with pytest.raises(LimosaError) as caught:
        operation.move(pid, to="1", progress=progress)
    assert caught.value.exit_code == 21
    assert {"restore", "undo"} <= set(told)
    assert (double.states[pid], double.where(pid), double.will) == ("running", [0], None)
    operation.move(pid, to="1", progress=progress)
    assert double.where(pid) == [1]
    assert nothing_left()


def test_a_job_that_dies_in_the_middle_is_gone_with_10(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like()
    root = Identity.of(pid)

    def checkpoint(*_: object, **__: object) -> None:
        os.kill(pid, signal.SIGKILL)
        while root.alive():
            pass
        raise DriverNoSuchProcess(call="checkpoint", pid=pid, result="X", code=1, meaning="gone")

    double.checkpoint = checkpoint  # type: ignore[method-assign]
    with pytest.raises(LimosaError) as caught:
        operation.move(pid, to="1")
    assert (caught.value.exit_code, caught.value.job_state) == (10, "gone")
    assert str(pid) in str(caught.value)
    assert nothing_left()


def test_a_user_whom_no_passwd_knows_can_suspend(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = gpu_like()

    def unknown(*_: object) -> None:
        raise KeyError("getpwuid(): uid not found: 0")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(getpass, "getuser", unknown)
    operation.suspend(pid)
    assert double.states[pid] == "checkpointed"
    assert record_of(pid).by == "0"


# --- what killed operations leave -----------------------------------------------------------------------------


def test_room_that_a_killed_operation_claimed_counts_until_it_is_recovered(own_runtime: Path) -> None:
    dead_journal("move-a")
    claims.Claim(id="move-a", operation="move", holder=GONE, gpus={"GPU": 5}).save()
    claims.Claim(id="litter", operation="move", holder=GONE, gpus={"GPU": 7}).save()
    assert claims.reserved("GPU") == 5
    assert claims.reserved("GPU", but="move-a") == 0
    assert [c.id for c in claims.stale()] == ["litter"]


def test_recovering_one_dead_operation_does_not_hold_another(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(gpu_like, double)
    dead_journal("move-other")
    seen: list[bool] = []
    real = double.state

    def state(*arguments: object, **options: object) -> object:
        other = Journal.take(journal.path_of("move-other"))
        seen.append(other is not None)
        if other is not None:
            other.close()
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(double, "state", state)
    (first,) = [s.id for s in journal.under_way() if s.id != "move-other"]
    (entry,) = operation.recover(only=first)
    assert (entry.id, entry.exit_code) == (first, 0)
    assert seen
    assert all(seen)
    assert [s.id for s in journal.under_way()] == ["move-other"]


def test_a_dead_operation_that_cannot_be_recovered_does_not_block_another(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = broken(gpu_like, double), broken(gpu_like, double)
    real = double.restore

    def restore(pid: int, *arguments: object, **options: object) -> None:
        if pid == stuck:
            raise failure("restore", pid)
        real(pid, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(double, "restore", restore)
    found = operation.recover()
    assert {e.pid: e.exit_code for e in found} == {stuck: 40, other: 0}
    (said,) = [e.error for e in found if e.pid == stuck]
    assert f"end the job (kill -KILL {stuck}): recover exits with 40 as long as it lives" in said
    assert double.states == {stuck: "checkpointed", other: "running"}
    assert [s.pids for s in journal.under_way()] == [[stuck]]
    monkeypatch.setattr(double, "restore", real)
    (entry,) = operation.recover()
    assert entry.exit_code == 0
    assert double.states[stuck] == "running"


def broken(gpu_like: GpuLike, double: DriverDouble) -> int:
    """A job that a move has left checkpointed, with a journal of it."""
    pid = gpu_like(on=0)
    real = double.restore

    def fails(*_: object, **__: object) -> None:
        raise failure("restore", pid)

    double.restore = fails  # type: ignore[method-assign]
    with pytest.raises(UndoFailed):
        operation.move(pid, to="1")
    double.restore = real  # type: ignore[method-assign]
    return pid


def test_a_checkpoint_that_leaves_its_job_suspended_leaves_no_draft(
    gpu_like: GpuLike, double: DriverDouble, tmp_path: Path
) -> None:
    pid = gpu_like(on=0, size=64 << 20)  # what the test's disk has in any case
    place = tmp_path / "images"
    place.mkdir()
    during: list[list[str]] = []

    def full() -> None:
        during.append(os.listdir(place))
        double.others[double.uuids[0]] = double.memory - (32 << 20)
        raise failure("checkpoint", pid)

    double.after_checkpoint = full
    with pytest.raises(LeftSuspended) as caught:
        operation.checkpoint(pid, place / "image")
    assert caught.value.exit_code == 41
    assert len(during[0]) == 1, "there was no draft"
    assert os.listdir(place) == []
    assert double.states[pid] == "checkpointed"
    assert nothing_left()
    double.others.clear()
    operation.resume(pid)
    assert double.states[pid] == "running"


@pytest.mark.parametrize("way", ["direct", "through a link"])
def test_an_image_that_a_living_restore_works_on_is_not_removed(own_runtime: Path, tmp_path: Path, way: str) -> None:
    image = tmp_path / "images" / "image"
    (image / "criu").mkdir(parents=True)
    (image / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to(image.parent)
    named = image if way == "direct" else tmp_path / "link" / "image"
    claim = claims.Claim(id="restore-a", operation="restore", holder=Identity.of(os.getpid()), paths=[str(image)])
    claim.save()
    with pytest.raises(Busy) as caught:
        remove_image(named)
    assert caught.value.exit_code == 19
    assert (image / "manifest.json").exists()
    claim.release()
    remove_image(named)
    assert not image.exists()

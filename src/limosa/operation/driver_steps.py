"""The driver's half of every operation: lock in order, checkpoint in parallel, restore in parallel, unlock in order.

And the way back, :func:`bring_back`, which asks the driver what state each process is in and leads it to the state it
had before. Undo and ``recover`` both use it, so that what a crash leaves and what a failure leaves are brought back by
the same code. Order and parallelism: facts measured in ``docs/caveats.md`` (ranks one after another cost three times
as much).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from limosa import gpu
from limosa.errors import (
    DriverError,
    DriverHung,
    DriverTimeout,
    IllegalState,
    LeftSuspended,
    LimosaError,
    NoCudaState,
    NoSuchProcess,
    Reason,
    UndoFailed,
)
from limosa.operation import container_gpus, places, room
from limosa.operation.estimate import device_bytes
from limosa.operation.jobs import user_of
from limosa.operation.journal import Journal, Member, Noted, Phase, added_up
from limosa.operation.refusals import MOVE_DRIVER
from limosa.operation.work import Work
from limosa.parking.shim import Shim
from limosa.process import device_nodes, sees_inside
from limosa.process.identity import Identity, has_gone
from limosa.process.records import SuspendRecord
from limosa.progress import Progress, ProgressFn, silent
from limosa.terms import JobState, Release

LOCK_SECONDS = 10.0
"""How long a lock may take by default: a process at work is locked in milliseconds, one in a collective never."""

LOCK_GRACE = 10.0
"""How much later than its own time-out a lock counts as hung: a stopped process keeps the driver past it."""

CALL_SECONDS = 30.0
"""What a checkpoint or restore may take beside its copying before it counts as hung."""

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
"""What a restore says that has run out of device memory in the middle: the driver may never take that process back."""

TellFn = Callable[[Reason], object]
"""Told of what is a warning."""

_REFUSED_MAP = "CUDA_ERROR_INVALID_VALUE"

_ONE_AT_A_TIME = threading.Lock()  # members share a file

_SURPRISES = 3  # how often a process may be in another state than it was a moment before, on its way back

_ASKED = 2  # times: before a refused map is believed

_PATIENCE = 900.0  # seconds: a driver call under way ends some time, or the machine needs looking at

SLOWEST_RATE = 0.3e9
"""Bytes a second under which a driver copy counts as hung; a cold machine was measured at 1.7e9 and more."""


def call_limit(member: Member) -> float:
    """Seconds after which a checkpoint or restore of that process counts as hung."""
    return CALL_SECONDS + member.bytes / SLOWEST_RATE


def lock(work: Work, members: Sequence[Member]) -> None:
    """Locks in order, once their undo is made ready. Raises DriverTimeout (not in time) and DriverError."""
    for member in members:
        if member.was != gpu.State.RUNNING:
            continue
        work.check()
        member.identity.check()
        seconds = LOCK_SECONDS if work.left is None else min(LOCK_SECONDS, max(work.left, 0.001))
        work.note(Noted.LOCK, Phase.BEGIN, member.pid)
        if not _lock_one(work.driver, member.pid, seconds):
            raise DriverTimeout(
                call="cuCheckpointProcessLock",
                pid=member.pid,
                result="CUDA_ERROR_NOT_READY",
                code=600,
                meaning=f"not locked within {seconds:g} s",
            )
        work.note(Noted.LOCK, Phase.DONE, member.pid)


def _lock_one(driver: gpu.Driver, pid: int, seconds: float | None = None) -> bool:
    """Locks one process; returns whether the driver could within these seconds (None: ``LOCK_SECONDS``)."""
    seconds = LOCK_SECONDS if seconds is None else seconds
    result = driver.lock(pid, timeout_ms=max(1, int(seconds * 1000)), limit=seconds + LOCK_GRACE)
    return result is not gpu.LockResult.TIMED_OUT


def checkpoint(work: Work, members: Sequence[Member]) -> None:
    """Checkpoints in parallel all that are not checkpointed: device memory goes to each process's host memory."""
    todo = [m for m in members if m.was != gpu.State.CHECKPOINTED]

    def call(m: Member) -> None:
        work.driver.checkpoint(m.pid, limit=call_limit(m))

    _parallel(work, Noted.CHECKPOINT, todo, call, total=device_bytes(members), rate=2.6e9)


def restore(work: Work, members: Sequence[Member], shims: Mapping[int, Shim] | None = None) -> None:
    """Restores in parallel with each one's map, and tells it where it is; ``shims``: connections that there are.

    Looks at the room right before (measured): NoRoomOnGpu, none tried.
    """
    inventory = work.driver.inventory()
    room.check(inventory, members, work.id, made=work.made)

    def call(m: Member) -> None:
        mapping = m.map if m.changes_gpu or inventory.driver_major >= MOVE_DRIVER else None  # older: takes none
        try:
            restore_one(work.driver, m, mapping, work.warnings.append)
        except DriverError as error:
            if _may_be_lost(work.driver, m, error):
                work.doubtful[m.pid] = error
            raise

    _parallel(work, Noted.RESTORE, members, call, total=device_bytes(members), rate=7e9, data=lambda m: {"map": m.map})
    moved = [m for m in members if m.changes_gpu or work.brings_job]
    places.tell(work.id, moved, shims, inventory=inventory)


def _may_be_lost(driver: gpu.Driver, member: Member, error: DriverError) -> bool:
    """Whether the driver may never take a process back whose restore has failed: many such failures are for good.

    Not where it refused to change GPUs, which harms nothing, nor where the work was done in spite of the answer.
    """
    if error.result == OUT_OF_MEMORY:
        return True
    if error.result == _REFUSED_MAP and member.changes_gpu:
        return False
    try:
        return settled_state(driver, member.pid) == gpu.State.CHECKPOINTED
    except LimosaError:
        return True


def unlock(work: Work, members: Sequence[Member]) -> None:
    """Unlocks in order."""
    for member in members:
        work.note(Noted.UNLOCK, Phase.BEGIN, member.pid)
        work.driver.unlock(member.pid, limit=CALL_SECONDS)
        work.note(Noted.UNLOCK, Phase.DONE, member.pid)


def _parallel(
    work: Work,
    step: Noted,
    members: Sequence[Member],
    call: Callable[[Member], object],
    *,
    total: int,
    rate: float,
    data: Callable[[Member], dict[str, Any]] = lambda _: {},
) -> None:
    """Makes one call for each member, all at once; every one is waited for, then the first error is raised."""
    if not members:
        return
    for member in members:
        member.identity.check()
        work.note(step, Phase.BEGIN, member.pid, **data(member))
    errors: list[BaseException] = []
    begun = time.monotonic()
    asked = False
    with ThreadPoolExecutor(len(members), thread_name_prefix=f"limosa-{step}") as pool:
        pending = {pool.submit(call, m): m for m in members}
        while pending:
            for future in [f for f in pending if f.done()]:
                member = pending.pop(future)
                error = future.exception()
                work.note(step, Phase.FAILED if error else Phase.DONE, member.pid)
                if error is not None:
                    errors.append(error)
            if not pending:
                break
            if work.stop_asked() and not asked:
                asked = True
                text = f"stopping: waiting for the driver's {step}, which cannot be broken off"
                work.progress(Progress(step, message=text))
            elif total:
                # The driver tells nothing while it copies: bytes by the rate it was measured at.
                guess = min(total, int((time.monotonic() - begun) * rate))
                work.progress(Progress(step, done=guess, total=total))
            wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
    if errors:
        raise errors[0]
    if total:
        work.progress(Progress(step, done=total, total=total))


# --- the way back ---------------------------------------------------------------------------------------------


def settled_state(driver: gpu.Driver, pid: int, progress: ProgressFn = silent, patience: float | None = None) -> str:
    """The state of a process once no call on it is under way any more; "gone" or "" (no CUDA state) included.

    A state query blocks while a checkpoint or restore is in flight (measured), also one by a dead controller.
    DriverHung: no answer within ``patience`` seconds (None: a quarter of an hour).
    """
    deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
    none_before = False
    while True:
        try:
            state = driver.state(pid, timeout=min(5.0, max(0.01, deadline - time.monotonic())))
        except NoCudaState:
            if has_gone(pid):
                return JobState.GONE
            # It is asked about processes that had some: one such answer would leave them locked for good.
            if none_before:
                return ""
            none_before = True
            continue
        except NoSuchProcess:
            return JobState.GONE
        except DriverHung:
            if time.monotonic() > deadline:
                raise
            progress(Progress("undo", message=f"waiting for the driver to finish with process {pid}"))
            continue
        except DriverError:
            if has_gone(pid):
                return JobState.GONE
            raise
        if state in (gpu.State.CHECKPOINTING, gpu.State.RESTORING):
            time.sleep(0.05)
            continue
        return str(state)


def bring_back(
    driver: gpu.Driver,
    members: Sequence[Member],
    journal: Journal | None,
    operation_id: str = "",
    progress: ProgressFn = silent,
    shims: Mapping[int, Shim] | None = None,
) -> None:
    """Leads every member to the state and the GPU it had before the operation, whatever state it is in now.

    Where a process stands is told by the journal (each restore notes where it leads to, and how it ended) and by its
    state: a restore of which no end is known has happened if the process is not checkpointed any more. Its shim is told
    where it is then (``shims``: connections that there are).

    What could not be taken from a container on the way (:func:`restore_one`) is said by a message of progress.

    Raises LeftSuspended (no room on its GPU any more; it stays checkpointed, with a record) and UndoFailed (the state
    afterwards is not what it was). One that ends meanwhile needs nothing, and keeps no other from being led home.
    """
    living = [m for m in members if m.identity.alive()]
    surprises = 0
    while True:
        try:
            return _bring_back(driver, living, journal, operation_id, progress, shims)
        except LimosaError as error:
            # The worker of a killed limosa may have been in a call: where all stands is asked anew.
            surprises += isinstance(error, IllegalState)
            before, living = len(living), [m for m in living if not has_gone(m.pid)]
            if len(living) == before and not (isinstance(error, IllegalState) and surprises <= _SURPRISES):
                raise


def _bring_back(
    driver: gpu.Driver,
    members: Sequence[Member],
    journal: Journal | None,
    operation_id: str,
    progress: ProgressFn,
    shims: Mapping[int, Shim] | None,
) -> None:
    alive = [m for m in members if m.identity.alive()]
    for member in alive:
        # A call that was given up on may still be taken: a lock that comes after this would be nobody's to undo.
        if not driver.wait_under_way(member.pid, _PATIENCE):
            under_way = f"a {driver.under_way(member.pid)} of process {member.pid} is still under way in the driver"
            raise UndoFailed(
                what="bringing the job back", detail="see above", undo_detail=under_way, job_state=JobState.UNKNOWN
            )
    states = {m.pid: settled_state(driver, m.pid, progress) for m in alive}
    alive = [m for m in alive if states[m.pid] not in (JobState.GONE, "")]
    away = [m for m in alive if is_away(m, states[m.pid], journal)]

    again = [
        m for m in alive if states[m.pid] != gpu.State.CHECKPOINTED and (m in away or m.was == gpu.State.CHECKPOINTED)
    ]
    told = by_progress(progress)
    leave_where_it_is([m for m in alive if states[m.pid] != gpu.State.CHECKPOINTED], away, told)
    hold(driver, again, states)
    back = [m for m in alive if states[m.pid] == gpu.State.CHECKPOINTED and m.was != gpu.State.CHECKPOINTED]
    short = room.shortage(gpu.inventory(), back, operation_id, home=True) if back else ""
    if short:
        # Suspended as a whole, or not at all.
        hold(driver, [m for m in alive if states[m.pid] == gpu.State.LOCKED], states)
        _tell_where(alive, away, operation_id, shims)
        leave_suspended(alive, away)
        raise LeftSuspended(detail=short, pid=back[0].root or back[0].pid, job_state=JobState.CHECKPOINTED)
    for member in back:
        if journal is not None:
            journal.try_note(Noted.RESTORE_HOME, Phase.BEGIN, member.pid)
    failed = _try_each(back, lambda m: _restore_home(driver, m, m in away, told))
    if journal is not None:
        _note_home(journal, back, failed)
    _tell_where(alive, [m for m in away if m not in back or m.pid in failed], operation_id, shims)
    # Of a job that is not whole nothing goes on; another job of the same operation has nothing to do with that.
    broken = {m.root for m in back if m.pid in failed}
    for member in alive:
        whole = member.was == gpu.State.RUNNING and member.root not in broken
        if whole and settled_state(driver, member.pid, progress) == gpu.State.LOCKED:
            driver.unlock(member.pid, limit=CALL_SECONDS)
    show_where_it_is([m for m in alive if m.was == gpu.State.CHECKPOINTED], away, told)
    still = [m for m in away if m.was == gpu.State.CHECKPOINTED]
    if still:  # suspended as before, on the GPU that it was being resumed on: the driver knows it there now
        leave_suspended(alive, still)
    for error in failed.values():
        raise error
    wrong = {
        m.pid: now
        for m in alive
        if m.identity.alive() and (now := settled_state(driver, m.pid, progress)) not in (m.was, JobState.GONE)
    }
    if wrong:
        now_is = ", ".join(f"process {pid} is {state}" for pid, state in wrong.items())
        raise UndoFailed(
            what="bringing the job back", detail="see above", undo_detail=now_is, job_state=JobState.UNKNOWN
        )


def _note_home(journal: Journal, members: Sequence[Member], failed: Mapping[int, BaseException]) -> None:
    """Notes which were restored home, and of which the driver would hear nothing: those are where they were."""
    for member in members:
        if member.pid not in failed:
            journal.try_note(Noted.RESTORE_HOME, Phase.DONE, member.pid)
        elif isinstance(failed[member.pid], IllegalState):
            journal.try_note(Noted.RESTORE_HOME, Phase.FAILED, member.pid, refused=True)


def _restore_home(driver: gpu.Driver, member: Member, away: bool, tell: TellFn) -> None:
    """Restores a member where it was, from where it is believed to be.

    A state that the driver has told wrongly may be why it is believed away. One that has a container's GPU alone has a
    map of one pair, which the driver refuses then, each time: it is at home, and is restored there. Where it is refused
    once it may be away all the same, and would be restored there.
    """
    for _ in range(_ASKED if away else 0):
        try:
            return restore_one(driver, member, {b: a for a, b in member.map.items()}, tell)
        except DriverError as error:
            if error.result != _REFUSED_MAP or not member.boxed:
                raise
    return restore_one(driver, member, member.home, tell)


def _tell_where(
    members: Sequence[Member], away: Sequence[Member], operation: str, shims: Mapping[int, Shim] | None
) -> None:
    """Tells those that an operation was to move where they are now."""
    moved = [m for m in members if m.changes_gpu]
    places.tell(operation, [m for m in moved if m in away], shims)
    places.tell(operation, [m for m in moved if m not in away], shims, home=True)


def hold(driver: gpu.Driver, members: Sequence[Member], states: dict[int, str]) -> None:
    """Brings members that run or are locked to "checkpointed"."""
    for member in members:
        if states[member.pid] == gpu.State.RUNNING and not _lock_one(driver, member.pid):
            raise UndoFailed(what="", detail="", undo_detail=f"process {member.pid} cannot be locked again")
    for error in _try_each(members, lambda m: driver.checkpoint(m.pid, limit=call_limit(m))).values():
        raise error
    states.update({m.pid: gpu.State.CHECKPOINTED for m in members})


def is_away(member: Member, state: str, journal: Journal | None) -> bool:
    """Whether the driver knows the process on its destination rather than where it was."""
    if journal is None or not member.changes_gpu:
        return False
    away, open_step, before = False, None, None
    for record in journal.records:
        if record.pid != member.pid or record.step not in (Noted.RESTORE, Noted.RESTORE_HOME):
            continue
        if record.phase == Phase.DONE:
            away, open_step = record.step == Noted.RESTORE, None
        elif record.data.get("refused"):  # it has done nothing: what was open before it still is
            open_step = before
        else:  # begun, or failed: a call that was given up on may have been done later
            if record.phase == Phase.BEGIN:
                before = open_step
            open_step = Noted(record.step)
    if open_step and state in (gpu.State.LOCKED, gpu.State.RUNNING):
        away = open_step == Noted.RESTORE
        journal.try_note(open_step, Phase.DONE, member.pid)
    return away


def restore_one(driver: gpu.Driver, member: Member, mapping: dict[str, str] | None, tell: TellFn) -> None:
    """Restores with an explicit map, or with none where it changes nothing and the driver does not accept it.

    A device cgroup can hide what the job can really open, and a GPU that was gone when it was checkpointed may be back;
    no map means "where it was". After a refused map the process is still whole (measured). Where GPUs are hidden from
    the job it sees those that the map leads to, whatever becomes of the restore: each one says it anew.
    What could not be taken from its container is told.
    """
    to = list((mapping or member.home).values())
    _show(member, to)
    container_gpus.add(member, to)
    try:
        driver.restore(member.pid, mapping or None, limit=call_limit(member))
    except DriverError as error:
        changes = mapping is None or any(a != b for a, b in mapping.items())
        if error.result != _REFUSED_MAP or changes:
            raise
        driver.restore(member.pid, None, limit=call_limit(member))
    _leave(member, to, tell)


def _show(member: Member, uuids: Iterable[str]) -> None:
    """Lets a job from which GPUs are hidden see these and no others. Raises NoSuchProcess, OSError (no permission)."""
    wanted = [member.nodes[u] for u in uuids if u in member.nodes]
    try:
        with _ONE_AT_A_TIME:
            if member.sees_inside and member.changes_gpu:
                sees_inside.show(member.identity, member.sees_inside, wanted)
            if member.sees:
                device_nodes.show(member.sees, wanted)
    except OSError:
        member.identity.check()
        raise


def _leave(member: Member, uuids: Iterable[str], tell: TellFn) -> None:
    """Takes from a container all GPUs but these; what cannot be taken stays, which is told, and no reason to go back.

    One that has ended has nothing that could be taken.
    """
    try:
        container_gpus.leave(member, uuids)
    except (OSError, LimosaError) as error:
        tell_what_stays(member.pid, error, tell)


def tell_what_stays(pid: int, error: Exception, tell: TellFn) -> None:
    """Tells that a container keeps a GPU which its job is not on, unless that process has ended."""
    if not has_gone(pid):
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        text = f"the container of process {pid} can still open a GPU that its job is not on: {why}"
        hint = "it goes with the container, or with the next move"
        tell(Reason(id="container-devices", text=text, hint=hint, pid=pid))


def by_progress(progress: ProgressFn) -> TellFn:
    """What is told where there is no result that could have a warning."""
    return lambda reason: progress(Progress("undo", message=reason.text))


def leave_where_it_is(members: Iterable[Member], away: Sequence[Member] = (), tell: TellFn = lambda _: None) -> None:
    """Takes from containers what an operation that was killed has left: the GPUs that members are not on.

    The driver wants a map over all GPUs that a process can open when it is checkpointed.
    """
    for member in members:
        _leave(member, (member.map if member in away else member.home).values(), tell)


def show_where_it_is(members: Sequence[Member], away: Sequence[Member] = (), tell: TellFn = lambda _: None) -> None:
    """Shows suspended jobs the GPUs on which the driver knows them, however far an operation had come."""
    for member in members:
        with contextlib.suppress(OSError, LimosaError):
            _show(member, (member.map if member in away else member.home).values())
    leave_where_it_is(members, away, tell)


def _try_each(members: Sequence[Member], call: Callable[[Member], object]) -> dict[int, BaseException]:
    """Makes a call for each member, all at once, and waits for every one; the errors by pid."""
    if not members:
        return {}
    with ThreadPoolExecutor(len(members), thread_name_prefix="limosa-undo") as pool:
        futures = {m.pid: pool.submit(call, m) for m in members}
    return {pid: error for pid, future in futures.items() if (error := future.exception()) is not None}


def _moved(member: Member) -> dict[str, str]:
    """Where each GPU of when it was suspended is, once its map has been applied."""
    before = {**{a: a for a in member.map if a not in member.moved.values()}, **member.moved}
    return {a: member.map.get(b, b) for a, b in before.items() if member.map.get(b, b) != a}


def leave_suspended(members: Sequence[Member], away: Sequence[Member] = (), release: Release = Release.ALL) -> None:
    """Notes that these stay suspended: since when, by whom, their bytes, on which GPUs the driver knows them.

    ``away``: those that stand on the GPU they were moved to. ``release``: what was given back.
    """
    for root in {m.root or m.pid for m in members}:
        of_root = [m for m in members if (m.root or m.pid) == root]
        held = {str(m.pid): {m.map.get(u, u) if m in away else u: size for u, size in m.held.items()} for m in of_root}
        try:
            identity = Identity.of(root)
        except LimosaError:
            continue
        SuspendRecord(
            root=identity,
            by=user_of(os.getpid()),
            release=release,
            bytes=added_up(held.values()),
            members=[m.identity for m in of_root],
            held=held,
            moved={str(m.pid): _moved(m) if m in away else m.moved for m in of_root},
        ).save()

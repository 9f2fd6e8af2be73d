"""What ``move``, ``suspend`` and ``resume`` do once nothing stands against it: steps, each with its undo."""

from __future__ import annotations

from collections.abc import Sequence

from limosa.errors import (
    CannotBeMoved,
    LimosaError,
    NoRoomOnGpu,
    NoRoomOnHost,
    NoSuchProcess,
    Reason,
)
from limosa.operation import driver_steps, estimate, idle, room
from limosa.operation.claims import Claim
from limosa.operation.holding import Grew, refuse_growth, refuse_stale, stand_still
from limosa.operation.journal import Header, Member
from limosa.operation.parked.aside import aside_shims
from limosa.operation.parked.gates import refuse_shut
from limosa.operation.parked.halves import Ready
from limosa.operation.parked.moving import Moving
from limosa.operation.parked.parkable import shims_of
from limosa.operation.parked.resuming import Resuming
from limosa.operation.parked.suspending import Suspending
from limosa.operation.prepare import Prepared
from limosa.operation.results import JobResult
from limosa.operation.work import Work, myself
from limosa.process.identity import ending
from limosa.process.records import SuspendRecord


def transfer(work: Work, prepared: Sequence[Prepared]) -> None:
    """Does ``move``, ``suspend`` or ``resume`` for one job, or for several as one."""
    operation = prepared[0].operation
    members = [m for p in prepared for m in p.members]
    begin(work, prepared, members)
    refuse_stale(work, prepared)
    parked = _park(work, prepared, members)
    halved = operation != "resume" and prepared[0].release == "all"
    ready = Ready(members if halved else [], parked.shims if parked is not None else {})
    work.push("ready", ready.let_go)
    with work.spent("ready"):
        ready.prepare()
    work.push("driver", lambda: driver_steps.bring_back(work.driver, members, work.journal, work.id, work.progress))
    if operation != "resume":
        if isinstance(parked, (Moving, Suspending)):
            work.pause_begins()
            with work.spent("park"):
                parked.hold_still()
            if prepared[0].release != "all":
                for p in prepared:
                    refuse_growth(work.driver, p)
            parked.start_copy()
        if prepared[0].release == "all":
            stand_still(work, prepared, members)
    else:
        work.pause_begins()
        if parked is not None:
            parked.start_copy()
    if parked is not None and operation != "resume":
        with work.spent("copy-wait"):
            parked.wait_for_copy()
    if operation == "suspend":
        work.check()
        for member in members:
            member.identity.check()
        if isinstance(parked, Suspending):
            parked.keep()
        driver_steps.leave_suspended(members, release=prepared[0].release)
        work.pause_ends()
        work.drop("driver")
        ready.let_go()
        work.drop("ready")
        if parked is not None:
            work.drop("parked")
            parked.let_go()
        return
    # A resume is all of its pause; a move has spent the larger part: from here going on is the shorter way.
    work.check()
    asleep = [m for m in members if operation == "move" or m.was == "checkpointed"]
    begun = work.paused_at
    if asleep:
        driver_steps.restore(work, asleep)
        if operation == "resume":
            work.has_taken(room.needs(members))
    locked = [m for m in members if m in asleep or m.was == "locked"]
    if locked or parked is None:
        driver_steps.unlock(work, locked)
    ours = {*(parked.shims if parked is not None else ()), *ready.pids}
    refuse_shut([m for m in members if m.pid not in ours])
    if isinstance(parked, (Moving, Resuming)):
        work.paused_at = begun  # it goes on when its gate opens
        with work.spent("copy-wait"):
            parked.wait_for_copy()
        if operation == "resume":
            work.check()  # the copy is what takes long, and it can still stay suspended
        work.push("parked-target", parked.leave_target)
        with work.spent("map"):
            parked.arrive()
        with work.spent("open"):
            parked.open()
        work.pause_ends()
        work.drop("parked-target")
    work.drop("driver")
    ready.let_go()
    work.drop("ready")
    if parked is not None:
        work.drop("parked")
        parked.let_go()
    for p in prepared:
        SuspendRecord(root=p.root).forget()


def _park(work: Work, prepared: Sequence[Prepared], members: Sequence[Member]) -> Moving | Suspending | Resuming | None:
    """Has what the shim looks after ready on both sides; None where the driver carries everything.

    Raises:
        CannotBeMoved: the parked way is not open, and the driver would lose what came by it.
    """
    parked: Moving | Suspending | Resuming
    operation, release = prepared[0].operation, prepared[0].release
    if operation == "resume":
        shims = aside_shims([m for m in members if m.was == "checkpointed" or m.away])
        if not shims:
            return None
        parked = Resuming(work, members, shims)
        work.push("parked", parked.stay)
        with work.timed("prepare", "memory on the GPU"):
            parked.prepare()
        work.parked_bytes = parked.bytes
        return parked
    shims = shims_of([m for m in members if m.was == "running" and (operation == "suspend" or m.changes_gpu)])
    if not shims:
        if release != "all":
            raise Grew(pids=", ".join(str(m.pid) for m in members))
        return None
    pieces = {pid: shim.memories() for pid, shim in shims.items()}
    came_so = any(piece.imported for own in pieces.values() for piece in own)
    parked = Suspending(work, members, shims, release) if operation == "suspend" else Moving(work, members, shims)
    work.push("parked", parked.home)
    try:
        with work.timed("prepare", "memory on the other side"):
            parked.prepare()
    except (LimosaError, OSError) as error:
        work.drop("parked")
        if isinstance(parked, Suspending):
            parked.let_arenas_go()
        parked.let_go()  # no gate was closed yet
        for member in members:
            if ending(member.pid):  # nothing else is in the way
                raise NoSuchProcess(pid=member.pid) from error
        alone = release != "all" or not all(p.driver_can for p in prepared)
        if alone or isinstance(error, (CannotBeMoved, NoRoomOnHost)):
            raise
        if came_so and isinstance(error, NoRoomOnGpu):
            raise
        if came_so:
            text = f"its memory came by the parked way, which is not open now ({error}); the driver would lose it"
            raise CannotBeMoved(detail=text) from error
        size = sum(piece.bytes for own in pieces.values() for piece in own if not piece.shared)
        cost = estimate.by_the_driver(operation, members, size)
        text = f"the parked way is not open ({error}): the driver carries the memory, {cost}"
        work.warnings.append(Reason(id="driver-way", text=text))
        return None
    work.parked_bytes = parked.bytes
    return parked


def begin(work: Work, prepared: Sequence[Prepared], members: Sequence[Member]) -> None:
    """Claims the jobs and their destination, and opens the journal."""
    header = Header(
        id=work.id,
        operation=prepared[0].operation,
        roots=[p.root for p in prepared],
        members=list(members),
        tree=[i for p in prepared for i in p.tree],
        controller=myself(),
    )
    coming = prepared[0].operation in ("move", "resume")
    claim = Claim(
        id=work.id,
        operation=prepared[0].operation,
        holder=header.controller,
        pids=header.tree,
        gpus=room.needs(members) if coming else {},
    )

    def room_is_there() -> None:
        if coming and members:
            short = idle.shortage(members, work.id, room.held_now(members))
            if short:
                raise NoRoomOnGpu(detail=short, hint="limosa ps shows who holds it")

    work.begin(header, claim, room_is_there)


def result_of(work: Work, prepared: Prepared, *, already: bool = False, of_two: bool = False) -> JobResult:
    """The result for one job.

    Args:
        work: the operation's.
        prepared: the job's.
        already: there was nothing to do.
        of_two: another job was part of the operation: what was parked of this one is what had been seen of it.
    """
    operation = prepared.operation
    parked = min(work.parked_bytes, prepared.parked) if of_two else work.parked_bytes
    map_ = {a: b for m in prepared.members for a, b in m.map.items()}
    return JobResult(
        operation=operation,
        pid=prepared.root.pid,
        name=prepared.job.name,
        state=_state_after(prepared),
        map={} if already or operation == "suspend" else map_,
        gpus=[] if operation == "suspend" else room.places(prepared.members),
        timings=work.timings,
        bytes=0 if already else max(parked, estimate.device_bytes(prepared.members)),
        already=already,
        way="parked" if parked and not already else "driver",
        other=None if already else estimate.other_way(operation, prepared.members, parked=parked),
        release=prepared.release if operation == "suspend" else "",
        warnings=[*work.warnings, *prepared.warnings()],
    )


def _state_after(prepared: Prepared) -> str:
    if prepared.operation != "suspend":
        return "running"
    return "checkpointed" if prepared.states == {"checkpointed"} or prepared.release == "all" else "parked"

"""``move``, ``suspend`` and ``resume`` once nothing speaks against them: claimed, done step by step, and reported."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from limosa.errors import NoRoomOnGpu
from limosa.gpu import State
from limosa.operation import idle, room
from limosa.operation.claims import Claim
from limosa.operation.estimate import device_bytes
from limosa.operation.holding import refuse_stale
from limosa.operation.journal import Header, Member
from limosa.operation.prepare import Prepared
from limosa.operation.results import JobResult
from limosa.operation.step import Verb, run
from limosa.operation.steps.on_gpus import OnGpus
from limosa.operation.work import Work, myself
from limosa.terms import JobState, Release, Route


def transfer(work: Work, prepared: Sequence[Prepared]) -> None:
    """Does ``move``, ``suspend`` or ``resume`` for one job, or for several as one."""
    verb = prepared[0].verb
    op = OnGpus(work, verb, prepared)
    _begin(work, verb, prepared, op.members)
    refuse_stale(work, prepared)
    run(verb, op)


def _begin(work: Work, verb: Verb, prepared: Sequence[Prepared], members: Sequence[Member]) -> None:
    """Claims the jobs and their destination, and opens the journal."""
    header = Header(
        id=work.id,
        operation=verb.name,
        roots=[p.root for p in prepared],
        members=list(members),
        tree=[i for p in prepared for i in p.tree],
        controller=myself(),
    )
    claim = Claim(
        id=work.id,
        operation=verb.name,
        holder=header.controller,
        pids=header.tree,
        gpus=room.needs(members) if verb.comes else {},
    )

    def room_is_there() -> None:
        if verb.comes and members:
            short = idle.shortage(work.driver, members, work.id, room.held_now(members))
            if short:
                raise NoRoomOnGpu(detail=short, hint="limosa ps shows who holds it")

    work.begin(header, claim, room_is_there)


def result_of(work: Work, prepared: Prepared, *, already: bool = False, of_two: bool = False) -> JobResult:
    """The result for one job; ``already``: there was nothing to do.

    ``of_two``: another job was part of the operation: what was parked of this one is what had been seen of it.
    """
    verb = prepared.verb
    parked = min(work.parked_bytes, prepared.parked) if of_two else work.parked_bytes
    map_ = {a: b for m in prepared.members for a, b in m.map.items()}
    return JobResult(
        operation=verb.name,
        pid=prepared.root.pid,
        name=prepared.job.name,
        state=_state_after(prepared),
        map={} if already or not verb.comes else map_,
        gpus=[] if not verb.comes else room.places(prepared.members),
        timings=work.timings,
        bytes=0 if already else max(parked, device_bytes(prepared.members)),
        already=already,
        way=Route.PARKED if parked and not already else Route.DRIVER,
        other=None if already else verb.other_way(msgspec.structs.replace(prepared.shape, parked=parked)),
        release="" if verb.comes else prepared.release,
        warnings=[*work.warnings, *prepared.warnings()],
    )


def _state_after(prepared: Prepared) -> str:
    if prepared.verb.comes:
        return JobState.RUNNING
    return (
        JobState.CHECKPOINTED
        if prepared.states == {State.CHECKPOINTED} or prepared.release == Release.ALL
        else JobState.PARKED
    )

"""``move``, ``suspend`` and ``resume`` once nothing speaks against them: claimed, done step by step, and reported."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from limosa.containers import calls
from limosa.gpu import State
from limosa.operation import container_gpus, idle, room
from limosa.operation.estimate import device_bytes
from limosa.operation.holding import refuse_stale
from limosa.operation.prepare import Prepared
from limosa.operation.results import JobResult, OtherWay
from limosa.operation.step import run
from limosa.operation.steps.on_gpus import OnGpus
from limosa.operation.work import Work
from limosa.terms import JobState, Release, Route


def transfer(work: Work, prepared: Sequence[Prepared]) -> None:
    """Does ``move``, ``suspend`` or ``resume`` for one job, or for several as one."""
    verb = prepared[0].verb
    op = OnGpus(work, verb, prepared)
    members = op.members

    def check() -> None:
        if verb.comes and members:
            idle.refuse_shortage(work.driver, members, work.id, room.held_now(members))

    work.begin(
        members,
        roots=[p.root for p in prepared],
        tree=[i for p in prepared for i in p.tree],
        gpus=room.needs(members) if verb.comes else {},
        configured=calls.settings() if container_gpus.are_given(members) else {},
        check=check,
    )
    refuse_stale(work, prepared)
    for one in prepared:
        one.other = verb.other_way(one.shape) if one.parked else None
    run(verb, op)
    if verb.comes:
        for one in prepared:
            one.reasons = container_gpus.tell(one.members, one.reasons, one.inventory)


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
        way="" if already else Route.PARKED if parked else Route.DRIVER,
        other=None if already else _other_way(prepared, parked),
        release="" if verb.comes else prepared.release,
        warnings=[*work.warnings, *prepared.warnings()],
    )


def _other_way(prepared: Prepared, parked: int) -> OtherWay | None:
    """What the way that was not taken would have cost; of what was parked that was told beforehand."""
    if parked and prepared.other is not None:
        return prepared.other
    return prepared.verb.other_way(msgspec.structs.replace(prepared.shape, parked=parked))


def _state_after(prepared: Prepared) -> str:
    if prepared.verb.comes:
        return JobState.RUNNING
    whole = prepared.states == {State.CHECKPOINTED} or prepared.release == Release.ALL
    return JobState.CHECKPOINTED if whole else JobState.PARKED

"""The findings about a job, as ``plan`` and ``--dry-run`` show them."""

from __future__ import annotations

from limosa.operation import room
from limosa.operation.prepare import Prepared
from limosa.operation.results import Estimate, Plan
from limosa.terms import Release, Route, Verdict


def plan_of(prepared: Prepared) -> Plan:
    """The result of ``plan`` and ``--dry-run``."""
    verb, shape = prepared.verb, prepared.shape
    return Plan(
        operation=verb.name,
        pid=prepared.root.pid,
        name=prepared.job.name,
        verdict=Verdict.REFUSED if prepared.is_refused() else Verdict.OK,
        reasons=sorted(prepared.reasons, key=lambda r: not r.refuses),
        steps=[] if prepared.done else verb.words(shape),
        estimate=Estimate(pause_seconds=0.0) if prepared.done else verb.estimate(shape),
        map={a: b for m in prepared.members for a, b in m.map.items()},
        gpus=room.places(prepared.members) if verb.comes or verb.image else [],
        way=Route.PARKED if prepared.parked else Route.DRIVER if prepared.members else Route.HOST,
        other=None if prepared.done or prepared.release != Release.ALL else verb.other_way(shape),
        already=prepared.done,
    )

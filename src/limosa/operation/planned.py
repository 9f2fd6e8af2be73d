"""The findings about a job, as ``plan`` and ``--dry-run`` show them."""

from __future__ import annotations

from limosa.operation import room
from limosa.operation.prepare import Prepared
from limosa.operation.results import Estimate, Plan


def plan_of(prepared: Prepared) -> Plan:
    """The result of ``plan`` and ``--dry-run``."""
    verb, shape = prepared.verb, prepared.shape
    return Plan(
        operation=verb.name,
        pid=prepared.root.pid,
        name=prepared.job.name,
        verdict="refused" if prepared.is_refused() else "ok",
        reasons=sorted(prepared.reasons, key=lambda r: not r.refuses),
        steps=[] if prepared.done else verb.words(shape),
        estimate=Estimate(pause_seconds=0.0) if prepared.done else verb.estimate(shape),
        map={a: b for m in prepared.members for a, b in m.map.items()},
        gpus=room.places(prepared.members) if verb.comes or verb.image else [],
        way="parked" if prepared.parked else "driver" if prepared.members else "host",
        other=None if prepared.done or prepared.release != "all" else verb.other_way(shape),
        already=prepared.done,
    )

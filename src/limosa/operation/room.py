"""Room on the GPUs: whether what is to be restored fits.

A restore that runs out of device memory leaves its target checkpointed for ever (measured), so this is looked at when
planning and again right before every restore, counting what other operations have claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from limosa.errors import NoRoomOnGpu
from limosa.gpu import Gpu, Inventory, State
from limosa.operation import claims
from limosa.operation.journal import Member, added_up
from limosa.process import memory
from limosa.process.candidates import is_own

gib = memory.gib
MARGIN = 64 << 20
"""Bytes kept free on a GPU that what is restored comes to for the first time: contexts differ by a few MiB between
GPUs, and a restore that runs out of memory loses its process."""
NEAR = 4 << 20
"""The same where it comes home beside others: of each process NVML counts a few MiB for nobody, and others may have
grown into these. Alone at home nothing is kept free: it has fitted before."""


def needs(members: Sequence[Member], *, home: bool = False) -> dict[str, int]:
    """Bytes by GPU UUID that these members need where their maps (or, with ``home``, their old GPUs) put them."""
    wanted: dict[str, int] = {}
    for member in members:
        for uuid, size in member.held.items():
            target = _target(member, uuid, home=home)
            wanted[target] = wanted.get(target, 0) + size
    return wanted


def places(members: Sequence[Member]) -> list[str]:
    """UUIDs of the GPUs where these members have memory once their maps are carried out."""
    return sorted({member.map.get(uuid, uuid) for member in members for uuid in member.held})


def _target(member: Member, uuid: str, *, home: bool) -> str:
    return uuid if home else member.map.get(uuid, uuid)


def shortage(
    inventory: Inventory,
    members: Sequence[Member],
    operation_id: str,
    *,
    home: bool = False,
    vacated: Mapping[str, int] | None = None,
) -> str:
    """What does not fit, in a sentence; "" where everything fits.

    ``home``: ask for the way back instead of the map. ``vacated``: bytes by GPU UUID that the operation (whose own
    claims do not count) will have let go of by then.
    """
    by_uuid = inventory.by_uuid()
    told = []
    for uuid, held in needs(members, home=home).items():
        if uuid not in by_uuid:
            told += [f"GPU {uuid} does not answer any more"] if held else []
            continue
        there = by_uuid[uuid]
        spoken_for = claims.reserved(uuid, but=operation_id, most=there.memory_total, whole=not home)
        available = there.memory_free + (vacated or {}).get(uuid, 0) - spoken_for
        spare = _spare(inventory, there, members, spoken_for, home=home)
        if held + spare > available:
            free, needed = memory.two(max(0, available), held + spare)
            others = f" ({gib(spoken_for)} of it promised to other operations)" if spoken_for else ""
            to_spare = f" ({gib(spare)} of it to stay free)" if spare else ""
            told.append(f"GPU {there.index} has {free} free{others} and {needed} are needed{to_spare}")
    return "; ".join(told)


def _spare(inventory: Inventory, there: Gpu, members: Sequence[Member], spoken_for: int, *, home: bool) -> int:
    """The bytes to be kept free on a GPU beside what comes there: once, however many processes come."""
    before = {uuid for member in members for uuid in member.held}
    coming = {uuid for m in members for uuid in m.held if _target(m, uuid, home=home) == there.uuid}
    alone = not spoken_for and not _others(there, members)
    if coming == {there.uuid}:
        return 0 if alone else NEAR
    # The job's own GPUs change places: each has had as much as a GPU of that kind has.
    by_uuid = inventory.by_uuid()
    kinds = {(g.name, g.memory_total) for uuid in coming if (g := by_uuid.get(uuid)) is not None}
    freed = there.uuid in before and coming <= by_uuid.keys() and kinds == {(there.name, there.memory_total)}
    return NEAR if freed and alone else MARGIN


def _others(there: Gpu, members: Sequence[Member]) -> bool:
    """Whether anybody but these members, and Limosa itself, has memory on a GPU: also who NVML does not name."""
    pids = {m.pid for m in members}
    seen = there.processes + there.mps_processes
    if any(p.pid not in pids and not is_own(p.pid) for p in seen):
        return True
    return there.memory_used - sum(p.memory_used for p in seen) >= MARGIN  # an idle GPU shows a few MiB


def no_way_back(inventory: Inventory, members: Sequence[Member]) -> str:
    """A sentence about what would not fit on its own GPU even if nobody else were there; "" if everything would.

    Asked before a job leaves its GPUs: a job that could never come back does not leave.
    """
    by_uuid = inventory.by_uuid()
    told = []
    for uuid, held in needs(members, home=True).items():
        there = by_uuid.get(uuid)
        if there is None:
            continue  # it is not to leave from there
        pids = {m.pid for m in members}
        others = sum(p.memory_used for p in there.processes + there.mps_processes if p.pid not in pids)
        idle = min(max(0, there.memory_used - others - held), MARGIN)  # what an empty GPU shows as used
        most = there.memory_free + there.memory_used - idle
        if held > most:
            free, needed = memory.two(most, held)
            told.append(f"GPU {there.index} has {free} when it is empty, and {needed} would have to come back")
    return "; ".join(told)


def check(
    inventory: Inventory, members: Sequence[Member], operation_id: str, *, made: Mapping[str, int] | None = None
) -> None:
    """Raises NoRoomOnGpu, with what is free and what is needed, where the members do not fit right now.

    ``made``: bytes by GPU UUID of what they held that the same operation has made there already.
    """
    short = shortage(inventory, members, operation_id, vacated=made)
    if short:
        raise no_room(short)


def no_room(short: str) -> NoRoomOnGpu:
    """The error for what is short."""
    return NoRoomOnGpu(detail=short, hint="limosa ps shows who holds it")


def held_now(members: Sequence[Member]) -> dict[str, int]:
    """Bytes by GPU UUID that members still on the GPUs will let go of."""
    return added_up(m.held for m in members if m.was != State.CHECKPOINTED and not m.away)

"""Room on the GPUs: whether what is to be restored fits.

A restore that runs out of device memory leaves its target checkpointed for ever (measured), so this is looked at when
planning and again right before every restore, counting what other operations have claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from limosa.errors import NoRoomOnGpu
from limosa.gpu import Gpu, Inventory
from limosa.operation import claims
from limosa.operation.journal import Member, added_up
from limosa.process import memory

gib = memory.gib
MARGIN = 64 << 20
"""Bytes kept free for each restored process beside what it held: contexts differ by a few MiB between GPUs.

Not asked for where a process comes back to its own GPU and nobody else is there: it has fitted before."""


def needs(members: Sequence[Member], *, home: bool = False) -> dict[str, int]:
    """Bytes by GPU UUID that these members need where their maps (or, with ``home``, their old GPUs) put them."""
    wanted: dict[str, int] = {}
    for member in members:
        for uuid, size in member.held.items():
            target = uuid if home else member.map.get(uuid, uuid)
            wanted[target] = wanted.get(target, 0) + size + MARGIN
    return wanted


def places(members: Sequence[Member]) -> list[str]:
    """UUIDs of the GPUs where these members have memory once their maps are carried out."""
    return sorted({member.map.get(uuid, uuid) for member in members for uuid in member.held})


def shortage(
    inventory: Inventory,
    members: Sequence[Member],
    operation_id: str,
    *,
    home: bool = False,
    vacated: Mapping[str, int] | None = None,
) -> str:
    """What does not fit, in a sentence; "" where everything fits.

    Args:
        inventory: as NVML sees it now.
        members: what is to be restored.
        operation_id: whose own claims do not count.
        home: ask for the way back instead of the map.
        vacated: bytes by GPU UUID that the same operation will have let go of by then.
    """
    by_uuid = inventory.by_uuid()
    told = []
    for uuid, wanted in needs(members, home=home).items():
        if uuid not in by_uuid:
            told += [f"GPU {uuid} does not answer any more"] if wanted else []
            continue
        there = by_uuid[uuid]
        spoken_for = claims.reserved(uuid, but=operation_id)
        available = there.memory_free + (vacated or {}).get(uuid, 0) - spoken_for
        spare = 0 if spoken_for else _margin_at_home(there, members, home=home)
        if wanted - spare > available:
            others = f" ({gib(spoken_for)} of it promised to other operations)" if spoken_for else ""
            need = f"{gib(wanted - spare)} are needed{_of_that(wanted - spare, members, uuid, home=home)}"
            told.append(f"GPU {there.index} has {gib(max(0, available))} free{others} and {need}")
    return "; ".join(told)


def _of_that(wanted: int, members: Sequence[Member], uuid: str, *, home: bool) -> str:
    """What of it is margin, in brackets; "" where none is asked for."""
    held = [size for m in members for u, size in m.held.items() if (u if home else m.map.get(u, u)) == uuid]
    if wanted == sum(held):
        return ""
    each = "" if len(held) == 1 else f" for each of {len(held)} processes"
    return f" ({gib(MARGIN)} of it{each} to spare)"


def _margin_at_home(there: Gpu, members: Sequence[Member], *, home: bool) -> int:
    """The margin in what these members need on a GPU, where they can do without: all were there, and nobody else is."""
    pids = {m.pid for m in members}
    coming = [m for m in members for uuid in m.held if (uuid if home else m.map.get(uuid, uuid)) == there.uuid]
    at_home = all(there.uuid in m.held and (home or m.map.get(there.uuid, there.uuid) == there.uuid) for m in coming)
    others = {p.pid for p in there.processes + there.mps_processes} - pids
    unseen = there.memory_used - sum(there.used_by(pid) for pid in pids)  # an idle GPU shows a few MiB
    return MARGIN * len(coming) if at_home and not others and unseen < MARGIN else 0


def check(
    inventory: Inventory, members: Sequence[Member], operation_id: str, *, made: Mapping[str, int] | None = None
) -> None:
    """Refuses to go on where the members do not fit right now.

    Args:
        inventory: as NVML sees it now.
        members: what is to be restored.
        operation_id: whose own claims do not count.
        made: bytes by GPU UUID of what they held that are there already, made by the same operation.

    Raises:
        NoRoomOnGpu: naming the GPU, what is free and what is needed.
    """
    short = shortage(inventory, members, operation_id, vacated=made)
    if short:
        raise NoRoomOnGpu(detail=short, hint="limosa ps shows who holds it")


def held_now(members: Sequence[Member]) -> dict[str, int]:
    """Bytes by GPU UUID that members still on the GPUs will let go of."""
    return added_up(m.held for m in members if m.was != "checkpointed" and not m.away)

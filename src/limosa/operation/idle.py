"""Movers that nobody needs at the moment, and the device memory that their contexts take.

A mover stays for a while after an operation. If it is in the way of a job, it is told to end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain

from limosa import gpu
from limosa.errors import LimosaError
from limosa.ipc.side_by_side import SECONDS, within
from limosa.operation import room
from limosa.operation.journal import Member, added_up
from limosa.parking.mover import Mover
from limosa.parking.shim import under_shim

END_SECONDS = 5.0


def spare(seen: gpu.Inventory, members: Sequence[Member]) -> dict[str, int]:
    """Device memory by GPU UUID of movers that nobody needs, nor will for these members: those under the shim will."""
    needed = {_owner(m.pid) for m in members if under_shim(m.pid)}
    found: dict[str, int] = {}
    for mover in _idle_ones():
        with mover:
            if mover.uid not in needed:
                found = added_up([found, seen.held({mover.identity.pid})])
    return found


def _idle_ones() -> list[Mover]:
    """The movers that nobody needs, as far as they say so at once."""

    def asked(mover: Mover) -> list[Mover]:
        if _is_idle(mover):
            return [mover]
        with mover:
            return []

    return list(chain.from_iterable(within(SECONDS, [partial(asked, one) for one in Mover.all()])))


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _is_idle(mover: Mover) -> bool:
    """Whether nobody needs it: one that holds something may be the last that does, and ``recover`` has to find it."""
    with contextlib.suppress(LimosaError):
        return not mover.said.sessions and not mover.held()
    return False


def end_idle(gpus: Collection[str]) -> bool:
    """Ends movers that nobody needs and that are on one of these GPUs; returns whether there were any."""
    told = []
    for mover in _idle_ones():
        with mover, contextlib.suppress(LimosaError):
            if set(mover.said.gpus) & set(gpus):
                mover.end()
                told.append(mover.identity)
    end = time.monotonic() + END_SECONDS
    while any(one.alive() for one in told) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(told)


def shortage_seen(seen: gpu.Inventory, members: Sequence[Member], vacated: Mapping[str, int]) -> str:
    """As :func:`room.shortage` of what was seen; what idle movers have is as good as free."""
    short = room.shortage(seen, members, "", vacated=vacated)
    return short and room.shortage(seen, members, "", vacated=added_up([vacated, spare(seen, members)]))


def refuse_shortage(
    driver: gpu.Driver, members: Sequence[Member], operation_id: str, vacated: Mapping[str, int] | None = None
) -> None:
    """Raises NoRoomOnGpu where what NVML says now is short, also once idle movers have been ended."""
    short = room.shortage(driver.inventory(), members, operation_id, vacated=vacated)
    if short and end_idle(room.needs(members)):
        short = room.shortage(driver.inventory(), members, operation_id, vacated=vacated)
    if short:
        raise room.no_room(short)

"""Memory put away by the control socket and taken back."""

from __future__ import annotations

import os

from limosa.parking.protocol import Stand
from limosa.parking.shim import GateStaysOpen, Shim


def away(shim: Shim, seconds: float = 60) -> tuple[list[int], list[int]]:
    """Close, put everything away: ids and descriptors."""
    shim.close_gate(seconds)
    ids = [memory.id for memory in shim.memories() if not memory.shared]
    fds = shim.export(ids)
    assert shim.unmap() == (Stand.AWAY if ids else Stand.CLOSED)
    return ids, fds


def back(shim: Shim, ids: list[int], fds: list[int]) -> None:
    """Take it back and open."""
    if ids:
        assert shim.map(ids, fds) == Stand.CLOSED
    shim.open_gate()
    for fd in fds:
        os.close(fd)


def cycle(shim: Shim, seconds: float = 60) -> None:
    """Everything away and back.

    Raises:
        GateStaysOpen: the gate did not close in time.
    """
    back(shim, *away(shim, seconds))


def cycled(shim: Shim, seconds: float = 60) -> bool:
    """The same; False where the gate did not close in time."""
    try:
        cycle(shim, seconds)
    except GateStaysOpen:
        return False
    return True

"""A process is told where its GPUs are once a restore has changed that: the driver (580) goes on saying the old bus id.

The shim answers the process so (``native/shim/places.c``). Whoever does not run under it, or under one that does not
know this yet, keeps what the driver says. It never makes an operation fail.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence

from limosa import gpu
from limosa.errors import LimosaError
from limosa.operation.journal import Member
from limosa.parking.shim import Place, Shim, under_shim

_ANSWER, _PATIENCE = 1.0, 0.5
"""Seconds for one that nobody is connected to."""


def tell(
    operation: str,
    members: Sequence[Member],
    shims: Mapping[int, Shim] | None = None,
    *,
    inventory: gpu.Inventory | None = None,
    home: bool = False,
) -> None:
    """Tell these, while the driver or a gate holds them, that they are where their map leads, or (``home``) came from.

    Args:
        operation: its id: what is told again within the same one takes the place of what was told before.
        members: who is told.
        shims: connections that there are already, by pid: a shim serves one client at a time.
        inventory: the machine's GPUs, where they are known.
        home: whether they are where they were before the operation.
    """
    held = shims or {}
    if not (told := [m for m in members if m.pid in held or under_shim(m.pid)]):
        return
    number = int.from_bytes(hashlib.blake2b(operation.encode(), digest_size=8).digest(), "little")
    with contextlib.suppress(LimosaError, OSError):
        bus_ids = {one.uuid: one.pci_bus_id for one in (inventory or gpu.inventory()).gpus if one.pci_bus_id}
        for member in told:
            led = {was: was if home else now for was, now in member.map.items()}
            places = [Place(was, now, bus_ids[now]) for was, now in sorted(led.items()) if now in bus_ids]
            if places:
                with contextlib.suppress(LimosaError, OSError):
                    _tell(member, number, places, held.get(member.pid))


def _tell(member: Member, number: int, places: Sequence[Place], shim: Shim | None) -> None:
    if shim is not None:
        shim.places(number, places)
    else:
        with Shim.to_look(member.identity, _ANSWER, _PATIENCE) as own:
            own.places(number, places)

"""Which way a process's memory goes, and why: what its shim says, or that it has none."""

from __future__ import annotations

import msgspec

from limosa.errors import LimosaError
from limosa.parking import LIBRARY
from limosa.parking.protocol import Role
from limosa.parking.shim import Shim, under_shim
from limosa.process.identity import Identity
from limosa.terms import Route

ANSWER_SECONDS = 1.0
"""Somebody who only looks does not wait until an operation under way lets go of a process."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """What can be parked of one process, and what the driver has to carry."""

    way: Route = Route.DRIVER  # "parked" or "driver"
    why: str = ""  # why it is the driver's, or what is not known; "" where there is nothing to say
    parkable: int = 0  # bytes that can be parked; what several processes have counts for the one that allocated it
    # bytes left to the driver, by cause (``parking/protocol.py`` has the names), where there are any
    left: dict[str, int] = {}
    calls: dict[str, int] = {}  # of causes that no bytes are known of, how many
    unknown: list[str] = []  # functions of the driver that were called and that the shim's list does not have


def way_of(identity: Identity, worker: str = "") -> Way:
    """Asks a process that holds CUDA state, unless a ``worker`` is at it; not for long, and nothing is raised."""
    if not under_shim(identity.pid):
        return Way(why=f"without {LIBRARY.name}: not started by limosa run, or with --no-shim, or linked statically")
    if worker:
        return Way(way=Route.PARKED, why=f"its library is not asked while a {worker} is under way")
    try:
        with Shim.to_look(identity, ANSWER_SECONDS, 0.0) as shim:
            pieces, counts, called = shim.memories(), shim.counts(), shim.called()
    except LimosaError as error:
        if "refused" in str(error):
            why = "the library in it looks after nothing: switched off (LIMOSA_SHIM), or the driver is too old for it"
            return Way(why=why)
        return Way(way=Route.PARKED, why=f"its library did not answer: {error}")
    return Way(
        way=Route.PARKED,
        parkable=sum(m.bytes for m in pieces if not m.shared and not m.owner),
        left={cause: size for cause, (_, size) in counts.items() if size},
        calls={cause: n for cause, (n, size) in counts.items() if n and not size},
        unknown=[one.name for one in called if one.called and one.role is Role.UNKNOWN],
    )

"""What ``recover`` does with memory that is away: it goes where it was to go, back home, or into an arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from limosa.errors import LeftSuspended
from limosa.operation import driver_steps
from limosa.operation.journal import Journal, Member
from limosa.operation.parked import holders
from limosa.operation.parked.calls import each
from limosa.operation.parked.gates import leave, stand_of
from limosa.operation.parked.holders import key_of
from limosa.operation.parked.pieces import put_back
from limosa.operation.parked.stranded import has_arena, let_arena_go, strand
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, under_shim


def bring_home(dead: Journal, driver_home: Callable[[], None]) -> bool:
    """What ``recover`` does for parked jobs: finishes what had begun to go on, else undoes it.

    Args:
        dead: the journal of the operation.
        driver_home: brings the driver's half back to where it was.

    Returns:
        Whether it was finished.

    Raises:
        LeftSuspended: there is no room for it at home any more; it stays suspended.
    """
    members = [m for m in dead.header.members if m.identity.alive() and under_shim(m.pid)]
    stands = {m.pid: stand_of(m) for m in members}
    # One that runs with what was mapped there would be lost by the driver on the way back.
    ran = any(stands[m.pid] is Stand.OPEN and dead.began("map", m.pid) for m in members)
    if dead.began("open") or ran:
        each([(m, partial(_go_on, dead, m)) for m in members])
        holders.forget(dead.header.id)
        return True
    each([(m, partial(_leave, m)) for m in members if dead.began("map", m.pid)])
    left: LeftSuspended | None = None
    try:
        driver_home()
    except LeftSuspended as error:
        left = error
    # What was suspended before lies in its arena, and stays there.
    mine = [m for m in members if m.was == "running" and not m.away]
    each([(m, partial(_give_back, dead, m, stays=left is not None)) for m in mine])
    holders.forget(dead.header.id)
    if left is not None:
        raise left
    return False


def all_in_arenas(members: Sequence[Member]) -> bool:
    """Whether what is away of each of these lies in an arena: then nobody needs what an operation held of it."""
    for member in members:
        if under_shim(member.pid):
            with Shim(member.identity) as shim:
                if shim.hello().stand is not Stand.OPEN and not has_arena(member, shim):
                    return False
    return True


def _leave(member: Member) -> None:
    with Shim(member.identity) as shim:
        leave([(member, shim)])


def _go_on(dead: Journal, member: Member) -> None:
    """It has its memory there, or is given it; its gate is opened, and nobody needs what was kept for a way back."""
    with Shim(member.identity) as shim:
        _map_and_open(dead, member, shim, "target")
        let_arena_go(member, shim)


def _give_back(dead: Journal, member: Member, *, stays: bool) -> None:
    with Shim(member.identity) as shim:
        if stays and shim.hello().stand is Stand.AWAY:
            if not has_arena(member, shim):
                fds, pieces = holders.get(member, shim.owner, key_of(dead.header.id, member, "source"))
                try:
                    strand(member, shim, pieces, fds, away=driver_steps.is_away(member, "checkpointed", dead))
                finally:
                    holders.close_all(fds)
            return
        _map_and_open(dead, member, shim, "source")
        let_arena_go(member, shim)


def _map_and_open(dead: Journal, member: Member, shim: Shim, side: str) -> None:
    stand = shim.hello().stand
    if stand is Stand.AWAY:
        fds, pieces = holders.get(member, shim.owner, key_of(dead.header.id, member, side))
        try:
            stand = put_back(shim, pieces, fds)
        finally:
            holders.close_all(fds)
    if stand is Stand.CLOSED:
        shim.open_gate()

"""What ``recover`` does with memory that is away: it goes where it was to go, back home, or into an arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from limosa.errors import FailedUndone, LeftSuspended, LimosaError
from limosa.gpu import State
from limosa.ipc.packet import close_all
from limosa.operation import driver_steps
from limosa.operation.journal import Journal, Member, Noted, Phase
from limosa.operation.parked import holders
from limosa.operation.parked.calls import each
from limosa.operation.parked.gates import leave, open_whole, stand_of
from limosa.operation.parked.holders import key_of
from limosa.operation.parked.pieces import put_back
from limosa.operation.parked.stranded import has_arena, let_arena_go, strand
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, under_shim
from limosa.terms import Release

_DRIVER = "driver"
"""The undo that comes after what was mapped there was taken away, and before any gate opens."""


def go_on(dead: Journal) -> bool:
    """Finishes what had begun to go on: gives every process its memory there, if it lacks it, and opens it.

    Returns whether it had begun to. If not, nothing was done, and :func:`go_back` is the way.
    """
    members = _parked(dead)
    # One that runs with what was mapped there would be lost by the driver on the way back. Once an undo has taken that
    # away again it is the other way round: whoever runs has come home.
    ran = not _undone(dead) and any(dead.began(Noted.MAP, m.pid) and _runs(m) for m in members)
    if not (dead.began(Noted.OPEN) or ran):
        return False
    each([(m, partial(_go_on, dead, m)) for m in members])
    _refuse_lost(dead, members)
    holders.forget(dead.header.id, but=holders.ARENA)
    return True


def go_back(dead: Journal, driver_home: Callable[[], None]) -> None:
    """Leads every process home: its memory from where it was to go, then the driver's half, then what was held for it.

    ``driver_home`` brings the driver's half back. Raises LeftSuspended: there is no room for it at home any more; it
    stays suspended.
    """
    members = _parked(dead)
    each([(m, partial(_leave, m)) for m in members if dead.began(Noted.MAP, m.pid)])
    if dead.began(Noted.MAP):
        dead.note(Noted.UNDO, Phase.BEGIN, name=_DRIVER)  # gates may be open soon, and we killed
    left: LeftSuspended | None = None
    try:
        driver_home()
    except LeftSuspended as error:
        left = error
    # What was suspended before lies in its arena, and stays there.
    mine = [m for m in members if m.was == State.RUNNING and not m.away]
    each([(m, partial(_give_back, dead, m, stays=left is not None)) for m in mine])
    _refuse_lost(dead, mine)
    holders.forget(dead.header.id, but=holders.ARENA)
    if left is not None:
        raise left


def is_suspended(operation: str, release: Release, alive: Sequence[Member], states: Mapping[int, str]) -> bool:
    """Whether that much of each is away, and lies in an arena."""
    if not all_in_arenas(operation, alive):
        return False
    if release == Release.ALL:
        return all(s == State.CHECKPOINTED for s in states.values())
    stands = [stand_of(m) for m in alive if under_shim(m.pid)]
    return Stand.AWAY in stands and Stand.CLOSED not in stands  # one that stands at its gate has its memory


def _parked(dead: Journal) -> list[Member]:
    """Those of its processes that live and run under the shim."""
    return [m for m in dead.header.members if m.identity.alive() and under_shim(m.pid)]


def let_go(operation: str, members: Sequence[Member]) -> None:
    """Lets everybody release what they hold for an operation that is over, and the arenas of jobs that run.

    Raises FailedUndone: a vault or mover of the caller's that may hold something of these members could not be told.
    """
    living = [m for m in members if m.identity.alive()]
    try:
        holders.forget(operation, of=living)
    finally:
        holders.forget_arenas([m for m in living if under_shim(m.pid) and _runs(m)])


def all_in_arenas(operation: str, members: Sequence[Member]) -> bool:
    """Whether what is away of each of these lies in an arena: then nobody needs what an operation held of it.

    What was not suspended before lies there since that operation: an older arena has what it held at another time.
    """
    for member in members:
        if under_shim(member.pid):
            before = member.was != State.RUNNING or member.away
            with Shim(member.identity) as shim:
                if shim.hello().stand is Stand.AWAY and not has_arena(shim, "" if before else operation):
                    return False
    return True


def _undone(dead: Journal) -> bool:
    """Whether an undo was past taking away what had been mapped there."""
    return any(r.step == Noted.UNDO and r.phase == Phase.BEGIN and r.data.get("name") == _DRIVER for r in dead.records)


def _runs(member: Member) -> bool:
    """Whether its gate is open; one that does not say so is stuck, and does not run."""
    try:
        return stand_of(member) is Stand.OPEN
    except LimosaError:
        return False


def _refuse_lost(dead: Journal, members: Sequence[Member]) -> None:
    """What was held is let go of where everybody has his memory.

    Raises FailedUndone: somebody's is away, and in no arena.
    """
    if not all_in_arenas(dead.header.id, [m for m in members if m.identity.alive()]):
        raise FailedUndone("a process of it has not got its device memory back, which is still held")


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
        if stays:  # nothing of one whose gate alone is closed is away
            id_ = dead.header.id
            if shim.hello().stand is Stand.AWAY and not has_arena(shim, id_):
                fds, pieces = holders.get(member, shim.owner, key_of(id_, member, "source"))
                away = driver_steps.is_away(member, "checkpointed", dead)
                try:
                    strand(member, shim, pieces, fds, away=away, operation=id_)
                finally:
                    close_all(fds)
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
            close_all(fds)
    open_whole(member, shim, stand)

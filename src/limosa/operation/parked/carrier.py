"""Carriers move device memory beside the driver's steps: one protocol for all ways.

:class:`Moving` from GPU to GPU, :class:`Suspending` to an arena, :class:`Resuming` from one; :class:`Saving` into an
image and :class:`Loading` from one have the same names for the same things. The steps (``operation/steps/carry.py``)
call the methods in the order of this module.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

import msgspec

from limosa.errors import FailedUndone
from limosa.gpu import State
from limosa.ipc.packet import close_all
from limosa.operation import driver_steps
from limosa.operation.background import Background
from limosa.operation.journal import Member, Noted, Phase
from limosa.operation.parked import gates, shares
from limosa.operation.parked.calls import each, each_at_once, together
from limosa.operation.parked.gates import Gates, open_whole
from limosa.operation.parked.holders import Held, key_of
from limosa.operation.parked.pieces import put_back
from limosa.operation.parked.stranded import strand
from limosa.operation.work import Work
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.shim import Shim


class Process:
    """One process of a job, as a carrier knows it: what leads to each piece of its memory, and to its arena.

    Attributes:
        source, target: descriptors of its memory where it was, and where it goes to, by the pieces' numbers.
        mapped: whether it was going to be given memory where it goes to.
        touched: whether its gate was going to be closed.
        sides: what of it vault and mover hold.
    """

    sides: ClassVar[tuple[str, ...]] = ("source",)

    def __init__(self, member: Member, shim: Shim, arena: Sequence[int] = ()):
        self.member, self.shim, self.arena = member, shim, list(arena)
        self.source: dict[int, int] = {}
        self.target: dict[int, int] = {}
        self.mapped = self.touched = False

    def held(self, side: str) -> list[Held]:
        """The pieces of "source" or "target", in the order in which they are held."""
        raise NotImplementedError

    def close(self) -> None:
        fds = {*self.source.values(), *self.target.values(), *self.arena}
        for of in (self.source, self.target, self.arena):
            of.clear()
        close_all(fds)
        self.shim.close()


P = TypeVar("P", bound=Process)
Connected = tuple[Member, Shim]
"""A member, with a connection to its shim."""


class Carrier(abc.ABC):
    """Who carries memory in one operation."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Device memory that is carried."""

    @property
    @abc.abstractmethod
    def shims(self) -> dict[int, Shim]:
        """The connections to processes that are held still, by pid."""

    @property
    def others(self) -> Collection[int]:
        """Those of them that are held still alone, by pid: the driver carries what they have."""
        return ()

    @abc.abstractmethod
    def prepare(self) -> None:
        """Makes both sides ready while the job runs, and has everything held by vault and mover."""

    def hold(self) -> None:  # noqa: B027 - nothing, usually
        """Holds the job still and takes its memory away; nothing where it stands still already."""

    @abc.abstractmethod
    def copy(self) -> None:
        """Begins to copy, in the background; the driver does its part meanwhile."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits until all is copied. Raises FailedUndone: it was not."""

    @abc.abstractmethod
    def arrive(self) -> None:
        """Puts what was copied in its place: mapped in the job, in an arena that the job keeps, in the image."""

    def disconnect(self) -> None:  # noqa: B027 - nothing, where CRIU dumps nobody
        """Lets the job have nothing of ours: no connection, no descriptor. CRIU dumps it now."""

    def leave(self) -> None:  # noqa: B027 - nothing, where nothing was mapped
        """Undoes :meth:`arrive`, before the driver takes the process back: once nothing is copied any more.

        Raises UndoFailed: a gate was opened: the job may run, and ``recover`` opens the others.
        """

    def open(self) -> None:  # noqa: B027 - nothing, where the job does not go on by it
        """Opens the gates; from the first one on there is no way back.

        Raises UndoFailed: one could not be opened: ``recover`` opens it.
        """

    @abc.abstractmethod
    def back(self) -> None:
        """Gives every process what it had, however far this has come; the driver is back before."""

    @abc.abstractmethod
    def release(self) -> None:
        """Lets go of everything that was held for a way back."""


class Beside(Carrier, Generic[P]):
    """What the carriers beside the driver's steps have in common.

    Args:
        work: the operation.
        others: members under the shim that have nothing to park, with connections. Their gates are closed as well: a
            thread that synchronises while the driver has checkpointed its process would end it.
    """

    def __init__(self, work: Work, others: Sequence[Connected] = ()):
        self._work = work
        self._parts: list[P] = []
        self._others = [Process(member, shim) for member, shim in others]
        self._residents = Residents()
        self._gates = Gates(work)
        self._copying = Background("limosa-copy")
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def shims(self) -> dict[int, Shim]:
        return {one.member.pid: one.shim for one in self._still}

    @property
    def others(self) -> Collection[int]:
        return {other.member.pid for other in self._others}

    @property
    def _still(self) -> list[Process]:
        """All that are held still."""
        return [*self._parts, *self._others]

    def wait(self) -> None:
        self._copying.wait()

    def disconnect(self) -> None:
        for one in self._still:
            one.shim.leave()

    def leave(self) -> None:
        self._copying.settle()  # it reads what is about to be given back
        self._gates.leave([(part.member, part.shim) for part in self._parts if part.mapped])

    def open(self) -> None:
        self._gates.open([(one.member, one.shim) for one in self._still])

    def back(self) -> None:
        self._copying.settle()  # it reads what is about to be given back
        self._all_home()
        self.release()

    def release(self) -> None:
        self._forget()
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        for one in self._still:
            one.close()
        self._residents.close()

    def _refuse_outside(self) -> None:
        """Raises CannotBeMoved: somebody whose memory does not go has some of what goes, or gave it."""
        of_others = {other.member.pid: other.shim for other in self._others}
        shares.refuse_outside({pid: shim for pid, shim in self.shims.items() if pid not in of_others}, of_others)

    def _all_home(self) -> None:
        try:  # there is nothing to bring back to these
            each_at_once([(other.member, partial(self._opened, other)) for other in self._others])
        finally:
            each([(part.member, partial(self._home, part)) for part in self._parts])

    def _forget(self) -> None:
        """Has vault and mover let go; one that was killed has."""
        for part in self._parts:
            for side in part.sides:
                self._residents.drop(part.shim.owner, key_of(self._work.id, part.member, side))

    def _hold(self, part: P) -> None:
        for side in part.sides:
            pieces, fds = part.held(side), getattr(part, side)
            key = key_of(self._work.id, part.member, side)
            self._residents.put(part.shim.owner, key, [fds[p.id] for p in pieces], msgspec.json.encode(pieces))

    def _hold_again(self) -> None:
        """Vault and mover may have been killed since, and others be in their place."""
        for part in self._parts:
            sides = {key_of(self._work.id, part.member, side): len(getattr(part, side)) for side in part.sides}
            if self._residents.missing(part.shim.owner, sides):
                self._hold(part)

    def _close_gates(self, parts: Sequence[P], *, stacks: bool = True) -> None:
        """Closes these processes' gates, and the others', at once; ``stacks``: the driver saves what they have left.

        That is noted before the first one: whoever finds this journal looks where it stands.
        """
        still: list[Process] = [*parts, *self._others]
        for other in self._others:
            other.member.beside = {}  # the driver carries all that it has
        for one in still:
            self._work.note(Noted.PARK, Phase.BEGIN, one.member.pid)
            one.touched = True
        shims = [one.shim for one in still]
        gates.close(shims, self._work)
        if stacks:
            gates.lower_stacks(shims)

    @staticmethod
    def _take_away(parts: Sequence[P]) -> None:
        """Of all processes at once: the job stands still for the longest alone, not for all one after the other."""

        def one(part: P) -> None:
            if part.shim.unmap() is not Stand.AWAY and part.source:
                raise FailedUndone(f"process {part.member.pid} did not let go of its memory")

        together([partial(one, part) for part in parts])

    def _opened(self, other: Process) -> bool:
        """Opens the gate of one that was held still alone, unless the driver could not bring it home."""
        if not other.touched:
            return True
        stand = other.shim.hello().stand
        if stand is Stand.CLOSED and self._stays_suspended(other.member):
            return False
        open_whole(other.member, other.shim, stand)
        return True

    def _stays_suspended(self, member: Member) -> bool:
        """Whether the driver had it and has it still; it is not asked about one that it never had."""
        journal = self._work.journal
        if journal is not None and not journal.began(Noted.CHECKPOINT, member.pid):
            return False
        return driver_steps.settled_state(self._work.driver, member.pid) == State.CHECKPOINTED

    def _stacks_back(self) -> None:
        """Puts the others' stack limits back, while there is still a way back. Else their gates see to it."""
        together([partial(other.shim.stack, 0) for other in self._others])

    def _home(self, part: P) -> bool:
        """Gives a process its own memory back and opens its gate; the driver has brought it home before.

        Where the driver could not, for want of room, its memory goes into an arena and it stays suspended. Returns
        whether it is at home.
        """
        member, shim = part.member, part.shim
        if not part.touched:  # it may not even answer: stopped by somebody, say
            return True
        stand = shim.hello().stand
        stays = stand is not Stand.OPEN and self._stays_suspended(member)
        if stand is Stand.AWAY:
            pieces = part.held("source")
            fds = [part.source[p.id] for p in pieces]
            if stays:
                away = driver_steps.is_away(member, "checkpointed", self._work.journal)
                strand(member, shim, pieces, fds, away=away, operation=self._work.id)
                return False
            stand = put_back(shim, pieces, fds)
        if stays:
            return False
        open_whole(member, shim, stand)
        return True

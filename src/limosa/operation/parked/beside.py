"""What the parked parts of a move, a suspend and a resume have in common: they work beside the driver's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from limosa.errors import FailedUndone
from limosa.operation import driver_steps
from limosa.operation.background import Background
from limosa.operation.journal import Member
from limosa.operation.parked.gates import Gates
from limosa.operation.parked.holders import Held
from limosa.operation.parked.pieces import put_back
from limosa.operation.parked.stranded import strand
from limosa.operation.work import Work
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.shim import Shim


class Process(Protocol):
    """One process of a job, as each of them knows it."""

    member: Member
    shim: Shim


P = TypeVar("P", bound=Process)


class Beside(Generic[P]):
    """The parked part of one operation.

    Args:
        work: the operation.

    Attributes:
        bytes: device memory that is copied.
    """

    def __init__(self, work: Work):
        self._work = work
        self._parts: list[P] = []
        self._residents = Residents()
        self._gates = Gates(work)
        self._copying = Background("limosa-copy")
        self._touched: set[int] = set()
        self.bytes = 0

    @property
    def shims(self) -> dict[int, Shim]:
        """The connections, by pid."""
        return {part.member.pid: part.shim for part in self._parts}

    def _begin_to_park(self) -> None:
        """Notes it before the first gate is closed: whoever finds this journal looks where it stands."""
        for part in self._parts:
            self._work.note("park", "begin", part.member.pid)
            self._touched.add(part.member.pid)

    def wait_for_copy(self) -> None:
        """Waits until all is copied.

        Raises:
            FailedUndone: it was not.
        """
        self._copying.wait()

    def open(self) -> None:
        """Opens the gates; from the first one on there is no way back.

        Raises:
            UndoFailed: one could not be opened: ``recover`` opens it.
        """
        self._gates.open([(part.member, part.shim) for part in self._parts])

    def _leave(self, parts: Sequence[P]) -> None:
        """Takes what was mapped out again, once nothing is copied any more.

        Raises:
            UndoFailed: a gate was opened: the job may run, and ``recover`` opens the others.
        """
        self._copying.settle()  # it reads what is about to be given back
        self._gates.leave([(part.member, part.shim) for part in parts])

    def _go_home(self, part: P, pieces: Sequence[Held], fds: Sequence[int]) -> bool:
        """Gives a process its own memory back and opens its gate; the driver has brought it home before.

        Where the driver could not, for want of room, its memory goes into an arena and it stays suspended.

        Returns:
            Whether it is at home.
        """
        member, shim = part.member, part.shim
        if member.pid not in self._touched:  # it may not even answer: stopped by somebody, say
            return True
        stand = shim.hello().stand
        if stand is Stand.AWAY:
            if driver_steps.settled_state(self._work.driver, member.pid) == "checkpointed":
                away = driver_steps.is_away(member, "checkpointed", self._work.journal)
                strand(member, shim, pieces, fds, away=away, operation=self._work.id)
                return False
            stand = put_back(shim, pieces, fds)
        if stand is Stand.CLOSED:
            shim.open_gate()
        elif stand is not Stand.OPEN:
            raise FailedUndone(f"not all of the memory of process {member.pid} came back to it")
        return True

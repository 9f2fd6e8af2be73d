"""The vault from Limosa's side: found or started, given descriptors, asked for them.

Each user has one of his own (``resident.py``). It ends a minute after it holds nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from limosa.errors import FailedUndone, LimosaError, NoRoomOnHost
from limosa.ipc.messages import MOST_DESCRIPTORS, receive_all, send
from limosa.ipc.packet import Given
from limosa.parking import vault_protocol as protocol
from limosa.parking.resident import Found, Resident, understood
from limosa.parking.segments import fits, room_for, sizes_for
from limosa.parking.vault_protocol import NO_ROOM, Arena, Noted, Nothing, Number, Refusal, Request
from limosa.process.memory import gib

_T = TypeVar("_T")
_WHO = "the vault, which holds a job's memory,"


class Vault(Resident):
    """A connection to a user's vault, which answers within so many seconds.

    Attributes:
        lost: whether the connection is of no use any more; another may be.
    """

    kind = "vault"

    def __init__(self, uid: int | None = None, limit: float = 10.0, *, found: Found | None = None):
        super().__init__(uid, found=found)
        self._limit = limit
        self.lost = False

    def get(self, key: str) -> tuple[list[int], bytes]:
        """Return descriptors, which are the caller's to close, and the note.

        Raises KeyError: nothing is held under that key; FailedUndone: it does not say.
        """

        def refused(said: Refusal) -> Exception:
            return _failed(said) if said.there else KeyError(key)

        said, given = self._ask(protocol.Get(key=key), Noted, wanted=MOST_DESCRIPTORS, refused=refused)
        with given:
            if said.n != len(given):
                raise FailedUndone(f"the vault gave {len(given)} of {said.n} descriptors of {key}")
            return given.take(), said.note

    def drop(self, key: str, *, again: bool = False) -> int:
        """Let go of a key; returns how many descriptors it held.

        ``again``: segments of the arena may be another's: nobody writes to them or reads them any more.
        """
        return self._tell(protocol.Drop(key=key, again=again), Number).n

    def segments(self, key: str, bytes_: int, cap: int) -> list[int]:
        """Return segments of the arena for so many bytes, held as that key ("aside/…") from now on; ours to close.

        Raises NoRoomOnHost: the arena may not grow so far, to ``cap`` in all.
        """
        sizes = sizes_for(bytes_)
        message = protocol.Segments(key=key, sizes=sizes, cap=cap, again=True)
        _, given = self._ask(message, Nothing, wanted=len(sizes), refused=_no_room(bytes_, cap))
        with given:
            fds = given.take()
            given.add(Given(fds))
            if len(fds) != len(sizes) or not all(map(fits, fds, sizes)):
                raise FailedUndone(f"{_WHO} gave something else for {len(sizes)} segments of the arena")
            return given.take()

    def reserve(self, bytes_: int, seconds: float, cap: int) -> list[int]:
        """Have the arena that large for so long, and return the segments that nobody uses; ours to close.

        Raises NoRoomOnHost: it may not be so large.
        """
        self._ask(protocol.Reserve(bytes=bytes_, seconds=seconds, cap=cap), Nothing, refused=_no_room(bytes_, cap))
        return self._ask(protocol.AskArena(with_free=True), Nothing, wanted=MOST_DESCRIPTORS)[1].take()

    def arena(self) -> Arena:
        """Return what there is of the arena."""
        return self._tell(protocol.AskArena(), Arena)

    def _tell(self, message: Request, type_: type[_T], *, fds: Sequence[int] = ()) -> _T:
        return self._ask(message, type_, fds)[0]

    def _ask(
        self,
        message: Request,
        type_: type[_T],
        fds: Sequence[int] = (),
        *,
        wanted: int = 0,
        refused: Callable[[Refusal], Exception] | None = None,
    ) -> tuple[_T, Given]:
        """What it answers, with so many descriptors at most; raises what ``refused`` makes of a refusal."""
        try:
            self._connection.settimeout(self._limit)
            send(self._connection, message, fds)
            answer = receive_all(self._connection, self._limit, fds=wanted, memory=True)
        except (OSError, EOFError, ValueError) as error:
            self.lost = True
            raise FailedUndone(f"{_WHO} does not answer ({str(error) or 'it was killed'})") from error
        with answer.given:
            refusal = understood(answer, Refusal, _WHO)
            if refusal.error is not None:
                raise (refused or _failed)(refusal)
            return understood(answer, type_, _WHO), Given(answer.given.take())


def _failed(said: Refusal) -> LimosaError:
    return FailedUndone(f"vault: {said.error}")


def _no_room(bytes_: int, cap: int) -> Callable[[Refusal], LimosaError]:
    return lambda said: no_room(bytes_, said.used, cap) if said.error == NO_ROOM else _failed(said)


def no_room(bytes_: int, used: int, cap: int) -> NoRoomOnHost:
    """What is said where the arena may not grow so far."""
    return NoRoomOnHost(
        detail=f"the arena may take {gib(cap)}, {gib(used)} of it are in use, and {gib(room_for(bytes_))} are needed",
        hint="resume a suspended job, or let the arena be larger: LIMOSA_ARENA_MAX",
    )

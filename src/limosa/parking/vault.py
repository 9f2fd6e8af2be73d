"""The vault from Limosa's side: found or started, given descriptors, asked for them.

Each user has one of his own (``resident.py``). It ends a minute after it holds nothing any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from limosa.errors import FailedUndone, LimosaError, NoRoomOnHost
from limosa.ipc.messages import (
    MOST_DESCRIPTORS,
    receive_all,
    send,
)
from limosa.ipc.packet import Given, hang_up, peer
from limosa.parking.resident import Found, Holding, all_of, connect, residents, understood
from limosa.parking.segments import fits, room_for, sizes_for
from limosa.parking.vault_protocol import (
    NO_ROOM,
    Arena,
    AskArena,
    Asked,
    Drop,
    Get,
    Keys,
    Noted,
    Nothing,
    Number,
    Put,
    Refusal,
    Reserve,
    Segments,
)
from limosa.process.memory import gib

_T = TypeVar("_T")
_WHO = "the vault, which holds a job's memory,"


class Vault:
    """A connection to a user's vault.

    Its answers are its user's word: whatever they are, the worst result is a :class:`LimosaError`.

    Args:
        uid: whose; the caller's own, or, for root, anybody's.
        limit: seconds for an answer.
        found: one that was looked for; else it is started where it is not there.

    Attributes:
        lost: whether the connection is of no use any more; another may be.

    Raises:
        FailedUndone: it is not there and cannot be started.
    """

    def __init__(self, uid: int | None = None, limit: float = 10.0, *, found: Found | None = None):
        self.uid = os.geteuid() if uid is None else uid
        self._connection, self.identity, self.said = found or connect("vault", self.uid)
        self._limit = limit
        self.lost = False

    @classmethod
    def all(cls) -> list[Vault]:
        """Return connections to the vaults that live: the caller's own; for root, everybody's."""
        return [cls(peer(found.connection)[1], found=found) for found in residents("vault")]

    @classmethod
    def all_of(cls, uid: int) -> tuple[list[Vault], LimosaError | None]:
        """Return connections to all vaults of a user.

        Returns:
            Those that answer, and an error where one does not.
        """
        found, silent = all_of("vault", uid)
        return [cls(uid, found=one) for one in found], silent

    def put(self, key: str, fds: Sequence[int], note: bytes = b"") -> None:
        """Have descriptors held under a key, instead of what it held; ours stay ours.

        Raises:
            FailedUndone: it does not hold all of them.
        """
        n = self._tell(Put(key=key, note=note, n=len(fds)), Number, fds).n
        if n != len(fds):
            raise FailedUndone(f"the vault holds {n} of {len(fds)} descriptors of {key}")

    def get(self, key: str) -> tuple[list[int], bytes]:
        """Return descriptors, which are the caller's to close, and the note.

        Raises:
            KeyError: nothing is held under that key.
            FailedUndone: it does not say.
        """
        said, given = self._ask(Get(key=key), Noted, wanted=MOST_DESCRIPTORS)
        with given:
            if isinstance(said, Refusal):
                if not said.there:
                    raise KeyError(key)
                raise FailedUndone(f"vault: {said.error}")
            if said.n != len(given):
                raise FailedUndone(f"the vault gave {len(given)} of {said.n} descriptors of {key}")
            return given.take(), said.note

    def drop(self, key: str, *, again: bool = False) -> int:
        """Let go of a key; returns how many descriptors it held.

        Args:
            key: what it is held as.
            again: whether segments of the arena may be another's: nobody writes to them or reads them any more.
        """
        return self._tell(Drop(key=key, again=again), Number).n

    def segments(self, key: str, bytes_: int, cap: int) -> list[int]:
        """Return segments of the arena for so many bytes, held as that key from now on; ours to close.

        Args:
            key: "aside/…", of a process.
            bytes_: how much is to go into them.
            cap: how large the arena may be in all.

        Raises:
            NoRoomOnHost: it may not grow so far.
        """
        sizes = sizes_for(bytes_)
        message = Segments(key=key, sizes=sizes, cap=cap, again=True)
        said, given = self._ask(message, Nothing, wanted=len(sizes))
        with given:
            if isinstance(said, Refusal):
                raise self._no_room(said, bytes_, cap)
            fds = given.take()
            given.add(Given(fds))
            if len(fds) != len(sizes) or not all(map(fits, fds, sizes)):
                raise FailedUndone(f"{_WHO} gave something else for {len(sizes)} segments of the arena")
            return given.take()

    def reserve(self, bytes_: int, seconds: float, cap: int) -> list[int]:
        """Have the arena that large for so long, and return the segments that nobody uses; ours to close.

        Raises:
            NoRoomOnHost: it may not be so large.
        """
        said, _ = self._ask(Reserve(bytes=bytes_, seconds=seconds, cap=cap), Nothing)
        if isinstance(said, Refusal):
            raise self._no_room(said, bytes_, cap)
        said, given = self._ask(AskArena(with_free=True), Nothing, wanted=MOST_DESCRIPTORS)
        if isinstance(said, Refusal):
            raise FailedUndone(f"vault: {said.error}")
        return given.take()

    def arena(self) -> Arena:
        """Return what there is of the arena."""
        return self._tell(AskArena(), Arena)

    def held(self) -> dict[str, int]:
        """Return how many descriptors are held, by key."""
        return self._tell(Keys(), Holding).keys

    def close(self) -> None:
        """End the connection; what is held stays held."""
        hang_up(self._connection)

    def __enter__(self) -> Vault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, message: Asked, type_: type[_T], fds: Sequence[int] = ()) -> _T:
        said, _ = self._ask(message, type_, fds)
        if isinstance(said, Refusal):
            raise FailedUndone(f"vault: {said.error}")
        return said

    def _ask(
        self, message: Asked, type_: type[_T], fds: Sequence[int] = (), *, wanted: int = 0
    ) -> tuple[_T | Refusal, Given]:
        """What it answers, with so many descriptors at most; or that it refuses."""
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
                return refusal, Given()
            return understood(answer, type_, _WHO), Given(answer.given.take())

    @staticmethod
    def _no_room(said: Refusal, bytes_: int, cap: int) -> LimosaError:
        return no_room(bytes_, said.used, cap) if said.error == NO_ROOM else FailedUndone(f"vault: {said.error}")


def no_room(bytes_: int, used: int, cap: int) -> NoRoomOnHost:
    """What is said where the arena may not grow so far."""
    return NoRoomOnHost(
        detail=f"the arena may take {gib(cap)}, {gib(used)} of it are in use, and {gib(room_for(bytes_))} are needed",
        hint="resume a suspended job, or let the arena be larger: LIMOSA_ARENA_MAX",
    )

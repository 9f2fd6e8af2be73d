"""The mover from Limosa's side: finds it, and tells it what to make, map and copy.

What a connection has made and taken belongs to it, and is released when the connection ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from limosa.errors import FailedUndone, NoRoomOnGpu
from limosa.ipc.messages import MOST_DESCRIPTORS, Message, receive_all, send
from limosa.parking import mover_protocol as protocol
from limosa.parking import resident
from limosa.parking.mover_protocol import Copied, Took
from limosa.parking.resident import Found, Resident, replace, understood
from limosa.parking.vault_protocol import CALL_SECONDS, Get, Nothing, Number, Request

SLOWEST_PIN = 0.5e9
"""Bytes a second; 2.2 to 2.6e9 were measured."""

_T = TypeVar("_T")
WHO = "the mover, which copies device memory,"


class Mover(Resident):
    """A connection to a user's mover, which is started if there is none. What it has made or taken for us goes with it.

    Args:
        uid, found: as :class:`Resident` has them.
    """

    kind = "mover"

    def __init__(self, uid: int | None = None, *, found: Found | None = None):
        super().__init__(uid, found=found)
        self._sizes: dict[str, int] = {}  # what is to be copied is known here as well

    def prepare(self, gpus: Sequence[str]) -> None:
        """Have contexts on these GPUs (UUIDs) ready."""
        self._tell(protocol.Prepare(gpus=list(gpus)), Nothing)

    def take(self, key: str, fds: Sequence[int], sizes: Sequence[int], gpu: str) -> None:
        """Have it map memory, to be used from a GPU; the descriptors stay ours."""
        self._tell(protocol.Take(key=key, sizes=list(sizes), gpu=gpu), Nothing, fds=fds)
        self._sizes[key] = self._sizes.get(key, 0) + sum(sizes)

    def make(self, key: str, sizes: Sequence[int], gpu: str) -> list[int]:
        """Have it make memory on a GPU; returns descriptors, which are ours to close.

        Raises NoRoomOnGpu: there is none.
        """
        with self.ask(protocol.Make(key=key, sizes=list(sizes), gpu=gpu), wanted=len(sizes)).given as given:
            if len(given) != len(sizes):
                raise FailedUndone(f"the mover made {len(given)} of {len(sizes)} pieces of memory")
            self._sizes[key] = self._sizes.get(key, 0) + sum(sizes)
            return given.take()

    def copy(self, copies: Sequence[tuple[str, str, str]], limit: float) -> int:
        """Have it copy, all at once, what keys hold to what others hold; returns how many bytes.

        A copy is a source's key, a target's, and the GPU that copies. After ``limit`` seconds the mover counts as hung.
        Raises FailedUndone: not all of it was copied.
        """
        message = protocol.Copy(copies=list(copies))
        return self._all(self._tell(message, Copied, limit).bytes, [source for source, _, _ in copies])

    def hold(self, key: str, fds: Sequence[int], bytes_: int, gpu: str, *, pin: bool) -> float:
        """Have it map segments of the arena, as one piece of memory; the descriptors stay ours. Returns seconds.

        So many bytes of them will be used; the GPU is one whose context is there. ``pin``: have what is not pinned yet
        pinned, which takes its time (2 GB/s and more).
        """
        message = protocol.Hold(key=key, bytes=bytes_, gpu=gpu, pin=pin)
        return self._tell(message, Took, CALL_SECONDS + bytes_ / SLOWEST_PIN, fds).seconds

    def warm(self, fds: Sequence[int], bytes_: int, gpu: str, keep: float) -> float:
        """Have it pin segments that nobody uses yet, and not end for so many seconds; returns what it took."""
        message = protocol.Warm(gpu=gpu, seconds=keep)
        return self._tell(message, Took, CALL_SECONDS + bytes_ / SLOWEST_PIN, fds).seconds

    def pinned(self) -> int:
        """Return how many bytes of the arena it has pinned."""
        return self._tell(protocol.Pinned(), Copied).bytes

    def host(self, way: Literal["out", "in"], copies: Sequence[tuple[str, str, int, str]], limit: float) -> int:
        """Have it copy, all at once, what keys hold to arenas ("out") or back ("in"); returns how many bytes.

        Each copy is a key, the arena's key, where in it, and the GPU that copies; the rest is as :meth:`copy` has it.
        """
        message = protocol.Host(way=way, copies=list(copies))
        return self._all(self._tell(message, Copied, limit).bytes, [key for key, _, _, _ in copies])

    def _all(self, done: int, keys: Sequence[str]) -> int:
        wanted = sum(self._sizes.get(key, 0) for key in keys)
        if done != wanted:
            raise FailedUndone(f"the mover copied {done} of {wanted} bytes")
        return done

    def get(self, key: str) -> tuple[list[int], bytes]:
        """Return what it holds so; descriptors are the caller's to close.

        Raises KeyError: nothing under that key; FailedUndone: it does not say.
        """
        answer = self.ask(Get(key=key), wanted=MOST_DESCRIPTORS)
        with answer.given as given:
            said = understood(answer, protocol.Noted, WHO)
            if not said.there:
                raise KeyError(key)
            if said.n != len(given):
                raise FailedUndone(f"the mover gave {len(given)} of {said.n} descriptors of {key}")
            return given.take(), said.note

    def unput(self, key: str) -> None:
        """Have it no longer hold what it held so."""
        self._tell(protocol.Unput(key=key), Number)

    def drop(self, key: str) -> None:
        """Have it let go of a key."""
        self._tell(protocol.Drop(key=key), Nothing)
        self._sizes.pop(key, None)

    def end(self) -> None:
        """Have it end as soon as nobody needs it."""
        self._tell(protocol.End(), Nothing)

    def leave(self) -> None:
        """Let the mover release what it made or took for us, and end the connection.

        Device memory that nobody else holds is free when this returns, unless the mover hangs: then it is free when the
        mover goes on.
        """
        try:
            self._connection.settimeout(resident.ANSWER_SECONDS)
            send(self._connection, protocol.DropAll())
            receive_all(self._connection, resident.ANSWER_SECONDS, fds=0, memory=True)
        except (OSError, EOFError, ValueError):
            pass
        self.close()

    def ask(self, message: Request, limit: float | None = None, fds: Sequence[int] = (), *, wanted: int = 0) -> Message:
        """Ask something; returns the answer, whose descriptors (so many as are ``wanted``) are ours to close.

        A mover that has not answered after ``limit`` seconds is ended. Raises FailedUndone: it could not do it, has
        gone or hangs; NoRoomOnGpu: there is no device memory for it.
        """
        limit = CALL_SECONDS if limit is None else limit
        try:
            self._connection.settimeout(limit)
            message.limit = limit
            send(self._connection, message, fds)
            answer = receive_all(self._connection, limit, fds=wanted, memory=True)
        except TimeoutError as error:
            raise self.hung(f"has not answered for {limit:g} s ({type(message).__struct_config__.tag})") from error
        except (EOFError, OSError, ValueError) as error:
            text = str(error) or "it was killed"
            raise FailedUndone(f"the mover, which copies device memory, has gone ({text})") from error
        try:
            said = understood(answer, protocol.Refusal, WHO)
            if said.result == "CUDA_ERROR_OUT_OF_MEMORY" and said.error is not None:
                raise NoRoomOnGpu(detail="a GPU has no room left for the copy, or for the mover's own context")
            if said.error is not None:
                raise FailedUndone(f"the mover: {said.error}")
        except BaseException:
            answer.given.close()
            raise
        return answer

    def hung(self, how: str) -> FailedUndone:
        """End it, and return what is to be raised: ``how`` says what it has not done for how long."""
        replace("mover", self.uid, self.identity)
        return FailedUndone(f"the mover, which copies device memory, {how}; it was ended")

    def _tell(self, message: Request, type_: type[_T], limit: float | None = None, fds: Sequence[int] = ()) -> _T:
        return understood(self.ask(message, limit, fds), type_, WHO)

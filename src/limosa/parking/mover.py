"""The mover from Limosa's side: connected to, told what to make, map and copy.

What one connection has made and taken is its own, and let go of when the connection ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from limosa.errors import FailedUndone, NoRoomOnGpu
from limosa.parking import resident
from limosa.parking.packets import MOST, peer, receive, send
from limosa.parking.resident import Found, connect, replace, residents, socket_path

CALL_SECONDS = 60.0
SLOWEST_PIN = 0.5e9
"""Bytes a second; 2.2 to 2.6e9 were measured."""


class Mover:
    """A connection to a user's mover, which is started where there is none.

    Args:
        uid: whose; the caller's own, or, for root, anybody's.
        found: one that was looked for; else it is started where it is not there.

    Raises:
        FailedUndone: it is not there and cannot be started.
    """

    def __init__(self, uid: int | None = None, *, found: Found | None = None) -> None:
        self.uid = os.geteuid() if uid is None else uid
        self._connection, self.identity, self.said = found or connect("mover", self.uid)

    @classmethod
    def all(cls) -> list[Mover]:
        """Return connections to the movers that live: the caller's own; for root, everybody's."""
        return [cls(peer(found.connection)[1], found=found) for found in residents("mover")]

    def prepare(self, gpus: Sequence[str]) -> None:
        """Have contexts on these GPUs (UUIDs) ready."""
        self.ask({"verb": "prepare", "gpus": list(gpus)})

    def take(self, key: str, fds: Sequence[int], sizes: Sequence[int], gpu: str) -> None:
        """Have it map memory, to be used from a GPU; the descriptors stay ours."""
        self.ask({"verb": "take", "key": key, "sizes": list(sizes), "gpu": gpu}, fds=fds)

    def make(self, key: str, sizes: Sequence[int], gpu: str) -> list[int]:
        """Have it make memory on a GPU; returns descriptors, which are ours to close.

        Raises:
            NoRoomOnGpu: there is none.
        """
        return self.ask({"verb": "make", "key": key, "sizes": list(sizes), "gpu": gpu})[1]

    def copy(self, copies: Sequence[tuple[str, str, str]], limit: float, rate: float = 0.0) -> float:
        """Have it copy, all at once, what keys hold to what others hold; returns seconds.

        Args:
            copies: source's key, target's key, the GPU that copies.
            limit: seconds after which it counts as hung.
            rate: bytes a second; 0: as fast as it goes.
        """
        message = {"verb": "copy", "copies": [list(one) for one in copies], "rate": rate}
        return float(self.ask(message, limit)[0]["seconds"])

    def hold(self, key: str, fds: Sequence[int], bytes_: int, gpu: str, *, pin: bool) -> float:
        """Have it map segments of the arena, as one piece of memory; the descriptors stay ours.

        Args:
            key: what it is held as.
            fds: the segments.
            bytes_: how much of them will be used.
            gpu: one whose context is there.
            pin: have what is not pinned yet pinned: takes its time (2 GB/s and more).

        Returns:
            Seconds.
        """
        message = {"verb": "hold", "key": key, "bytes": bytes_, "gpu": gpu, "pin": pin}
        return float(self.ask(message, CALL_SECONDS + bytes_ / SLOWEST_PIN, fds)[0]["seconds"])

    def warm(self, fds: Sequence[int], bytes_: int, gpu: str, keep: float) -> float:
        """Have it pin segments that nobody uses yet, and not end for so many seconds; returns what it took."""
        message = {"verb": "warm", "gpu": gpu, "seconds": keep}
        return float(self.ask(message, CALL_SECONDS + bytes_ / SLOWEST_PIN, fds)[0]["seconds"])

    def pinned(self) -> int:
        """Return how many bytes of the arena it has pinned."""
        return int(self.ask({"verb": "pinned"})[0]["bytes"])

    def host(self, way: str, copies: Sequence[tuple[str, str, int, str]], limit: float, rate: float = 0.0) -> float:
        """Have it copy, all at once, what keys hold to arenas ("out") or back ("in"); returns seconds.

        Args:
            way: "out" or "in".
            copies: key, the arena's key, where in it, the GPU that copies.
            limit: seconds after which it counts as hung.
            rate: bytes a second; 0: as fast as it goes.
        """
        message = {"verb": "host", "way": way, "copies": [list(one) for one in copies], "rate": rate}
        return float(self.ask(message, limit)[0]["seconds"])

    def put(self, key: str, fds: Sequence[int], note: bytes = b"") -> None:
        """Have it hold descriptors, also when we have ended; ours stay ours.

        Raises:
            FailedUndone: it does not hold all of them.
        """
        answer, _ = self.ask({"verb": "put", "key": key, "note": note}, fds=fds)
        if answer.get("n") != len(fds):
            raise FailedUndone(f"the mover holds {answer.get('n')} of {len(fds)} descriptors of {key}")

    def get(self, key: str) -> tuple[list[int], bytes]:
        """Return what it holds so; descriptors are the caller's to close.

        Raises:
            KeyError: nothing under that key.
        """
        answer, fds = self.ask({"verb": "get", "key": key})
        if not answer["there"]:
            raise KeyError(key)
        return fds, answer["note"]

    def held(self) -> dict[str, int]:
        """Return how many descriptors it holds so, by key."""
        found: dict[str, int] = self.ask({"verb": "keys"})[0]["keys"]
        return found

    def unput(self, key: str) -> None:
        """Have it no longer hold what it held so."""
        self.ask({"verb": "unput", "key": key})

    def drop(self, key: str) -> None:
        """Have it let go of a key."""
        self.ask({"verb": "drop", "key": key})

    def end(self) -> None:
        """Have it end as soon as nobody needs it."""
        self.ask({"verb": "end"})

    def leave(self) -> None:
        """Have it let go of what it had made or taken for us, and end the connection.

        Device memory that nobody else holds is free when this returns, not a moment later, except where the mover
        hangs: it lets go then when it can.
        """
        try:
            self._connection.settimeout(resident.ANSWER_SECONDS)
            send(self._connection, {"verb": "drop-all"})
            for fd in receive(self._connection)[1]:
                os.close(fd)
        except (OSError, EOFError, ValueError):
            pass
        self.close()

    def close(self) -> None:
        """End the connection; what it held for us and nobody else holds is let go of soon."""
        self._connection.close()

    def __enter__(self) -> Mover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(
        self, message: dict[str, Any], limit: float | None = None, fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Ask something; returns the answer, and descriptors that are ours to close.

        Args:
            message: ``verb`` and what it takes.
            limit: seconds after which the mover counts as hung: it is ended then.
            fds: descriptors to send along; they stay ours.

        Raises:
            FailedUndone: it could not do it, has gone or hangs.
            NoRoomOnGpu: there is no device memory for it.
        """
        limit = CALL_SECONDS if limit is None else limit
        message = {**message, "limit": limit}
        found: list[int] = []
        try:
            self._connection.settimeout(limit)
            for start in range(0, len(fds) - MOST, MOST):
                send(self._connection, {"more": True}, fds[start : start + MOST])
            rest = fds[(len(fds) - 1) // MOST * MOST :] if fds else ()
            send(self._connection, message, rest)
            while True:
                answer, some = receive(self._connection)
                found += some
                if not answer.get("more"):
                    break
            self._raise(answer)
        except BaseException as error:
            for fd in found:
                os.close(fd)
            if isinstance(error, TimeoutError):
                raise self.hung(f"has not answered for {limit:g} s ({message['verb']})") from error
            if isinstance(error, (EOFError, OSError, ValueError)):
                text = str(error) or "it was killed"
                raise FailedUndone(f"the mover, which copies device memory, has gone ({text})") from error
            raise
        return answer, found

    def hung(self, how: str) -> FailedUndone:
        """End it, and return what is to be raised.

        Args:
            how: what it has not done for how long.
        """
        replace(socket_path("mover", self.uid), self.identity)
        return FailedUndone(f"the mover, which copies device memory, {how}; it was ended")

    @staticmethod
    def _raise(answer: dict[str, Any]) -> None:
        if "error" in answer:
            if answer.get("result") == "CUDA_ERROR_OUT_OF_MEMORY":
                raise NoRoomOnGpu(detail="the destination filled up while memory was made there")
            raise FailedUndone(f"the mover: {answer['error']}")

"""The vault from Limosa's side: found or started, given descriptors, asked for them.

Each user has one of his own (``resident.py``). It ends a minute after it holds nothing any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from limosa.errors import FailedUndone, NoRoomOnHost
from limosa.parking.packets import MOST, peer, receive, send
from limosa.parking.resident import Found, connect, residents
from limosa.parking.segments import room_for, sizes_for
from limosa.process.memory import gib


class Vault:
    """A connection to a user's vault.

    Args:
        uid: whose; the caller's own, or, for root, anybody's.
        limit: seconds for an answer.
        found: one that was looked for; else it is started where it is not there.

    Raises:
        FailedUndone: it is not there and cannot be started.
    """

    def __init__(self, uid: int | None = None, limit: float = 10.0, *, found: Found | None = None):
        self.uid = os.geteuid() if uid is None else uid
        self._connection, self.identity, self.said = found or connect("vault", self.uid)
        self._connection.settimeout(limit)

    @classmethod
    def all(cls) -> list[Vault]:
        """Return connections to the vaults that live: the caller's own; for root, everybody's."""
        return [cls(peer(found.connection)[1], found=found) for found in residents("vault")]

    def put(self, key: str, fds: Sequence[int], note: bytes = b"") -> None:
        """Have descriptors held under a key, instead of what it held; ours stay ours."""
        for start in range(0, max(1, len(fds)), MOST):
            part = fds[start : start + MOST]
            more = start + MOST < len(fds)
            send(self._connection, {"verb": "put", "key": key, "note": note, "more": more}, part)
        answer = self._answer()[0]
        if answer.get("n") != len(fds):
            raise FailedUndone(f"the vault holds {answer.get('n')} of {len(fds)} descriptors of {key}")

    def get(self, key: str) -> tuple[list[int], bytes]:
        """Return descriptors, which are the caller's to close, and the note.

        Raises:
            KeyError: nothing is held under that key.
        """
        send(self._connection, {"verb": "get", "key": key})
        message, fds = self._answer_in_parts()
        if "error" in message:
            raise KeyError(key)
        return fds, message["note"]

    def drop(self, key: str, *, again: bool = False) -> int:
        """Let go of a key; returns how many descriptors it held.

        Args:
            key: what it is held as.
            again: whether segments of the arena may be another's: nobody writes to them or reads them any more.
        """
        return int(self._ask({"verb": "drop", "key": key, "again": again})["n"])

    def segments(self, key: str, bytes_: int, cap: int) -> list[int]:
        """Return segments of the arena for so many bytes, held as that key from now on; ours to close.

        Args:
            key: "aside/…", of a process.
            bytes_: how much is to go into them.
            cap: how large the arena may be in all.

        Raises:
            NoRoomOnHost: it may not grow so far.
        """
        send(self._connection, {"verb": "segments", "key": key, "sizes": sizes_for(bytes_), "cap": cap, "again": True})
        message, fds = self._answer_in_parts()
        if "error" in message:
            raise no_room(bytes_, message.get("used", 0), cap)
        return fds

    def reserve(self, bytes_: int, seconds: float, cap: int) -> list[int]:
        """Have the arena that large for so long, and return the segments that nobody uses; ours to close.

        Raises:
            NoRoomOnHost: it may not be so large.
        """
        send(self._connection, {"verb": "reserve", "bytes": bytes_, "seconds": seconds, "cap": cap})
        message, _ = self._answer_in_parts()
        if "error" in message:
            raise no_room(bytes_, message.get("used", 0), cap)
        send(self._connection, {"verb": "arena", "with_free": True})
        return self._answer_in_parts()[1]

    def arena(self) -> dict[str, Any]:
        """Return what there is of the arena: bytes ``used``, ``free``, ``reserved`` (for ``seconds``), ``inodes``."""
        return self._ask({"verb": "arena"})

    def held(self) -> dict[str, int]:
        """Return how many descriptors are held, by key."""
        found: dict[str, int] = self._ask({"verb": "keys"})["keys"]
        return found

    def close(self) -> None:
        """End the connection; what is held stays held."""
        self._connection.close()

    def __enter__(self) -> Vault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        send(self._connection, message)
        return self._answer()[0]

    def _answer_in_parts(self) -> tuple[dict[str, Any], list[int]]:
        found: list[int] = []
        while True:
            message, fds = receive(self._connection)
            found += fds
            if not message.get("more"):
                return message, found

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        message, fds = receive(self._connection)
        if "error" in message:
            raise FailedUndone(f"vault: {message['error']}")
        return message, fds


def no_room(bytes_: int, used: int, cap: int) -> NoRoomOnHost:
    """What is said where the arena may not grow so far."""
    return NoRoomOnHost(
        detail=f"the arena may take {gib(cap)}, {gib(used)} of it are in use, and {gib(room_for(bytes_))} are needed",
        hint="resume a suspended job, or let the arena be larger: LIMOSA_ARENA_MAX",
    )

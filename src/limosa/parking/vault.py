"""The vault from Limosa's side: found or started, given descriptors, asked for them.

Each user has one of his own (``resident.py``). It ends a minute after it holds nothing any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from limosa.errors import FailedUndone
from limosa.parking.packets import MOST, peer, receive, send
from limosa.parking.resident import Found, connect, residents


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
        found: list[int] = []
        while True:
            message, fds = receive(self._connection)
            found += fds
            if "error" in message:
                raise KeyError(key)
            if not message["more"]:
                return found, message["note"]

    def drop(self, key: str) -> int:
        """Let go of a key; returns how many descriptors it held."""
        return int(self._ask({"verb": "drop", "key": key})["n"])

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

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        message, fds = receive(self._connection)
        if "error" in message:
            raise FailedUndone(f"vault: {message['error']}")
        return message, fds

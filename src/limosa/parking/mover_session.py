"""The mover's side of a connection: one controller, one thread, what it holds, and the verbs that it is asked.

Verbs come in groups, each a module with a table ``VERBS``: what is asked with a verb, and a function that takes the
session, that, and the descriptors that came with it (closed after it), and returns what is said, or that and
descriptors to be given away.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from limosa.errors import DriverError, FailedUndone, LimosaError
from limosa.gpu.vmm import Contexts
from limosa.parking.packets import MOST_DESCRIPTORS, Message, Seconds, Word, receive, send_all
from limosa.parking.receive import Given

Reply = dict[str, Any] | tuple[dict[str, Any], list[int]]
STUCK_GRACE = 10.0
"""Seconds after its time limit from which a call counts as hung."""
_HARMLESS = frozenset({"CUDA_ERROR_OUT_OF_MEMORY"})


class Nothing(msgspec.Struct):
    """What is asked where the verb says all."""


class Key(msgspec.Struct):
    """What is asked about a key."""

    key: Word


class _Asked(msgspec.Struct):
    verb: Word
    limit: Seconds = 60.0


class Shared:
    """What all sessions of the mover share.

    Attributes:
        contexts: on the GPUs in use.
        retiring: no new connections: another mover takes over. Set where the driver has said something from which a
            process may not recover, where it is told to end, and where another has its name.
        stay_until: not to end before (monotonic seconds), however idle: an arena is kept warm.
        resident: what is to outlive sessions; not to end before it is empty.
        parts: what groups of verbs share between sessions, by a name of theirs.
    """

    def __init__(self) -> None:
        self.contexts = Contexts()
        self.retiring = False
        self.sessions: set[Session] = set()
        self.last = time.monotonic()
        self.lock = threading.Lock()
        self.stay_until = 0.0
        self.resident: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}

    def stuck(self) -> bool:
        """Return whether a call of each session that is left has been under way for longer than it may."""
        with self.lock:
            return bool(self.sessions) and all(session.until < time.monotonic() for session in self.sessions)


class Session:
    """One controller.

    Attributes:
        pieces: what it has had made or taken, by key: its own keys, dropped when it is gone.
        until: when the call under way counts as hung.
    """

    def __init__(self, connection: socket.socket, shared: Shared, verbs: Mapping[str, Verb]):
        self.shared, self.pieces = shared, dict[str, list[Any]]()
        self.until = float("inf")
        self._needed = False
        self._connection, self._verbs = connection, verbs
        self._coming = Given()

    @property
    def contexts(self) -> Contexts:
        """The contexts of the process."""
        return self.shared.contexts

    def run(self) -> None:
        """Answer until the controller is gone; then let go of what it had."""
        try:
            while self._one():
                pass
        finally:
            self._connection.close()
            for key in list(self.pieces):
                try:
                    self.drop(key)
                except Exception:  # a GPU that is lost, say: what is still mapped goes with this process
                    self.shared.retiring = True
            self._coming.close()
            with self.shared.lock:
                self.shared.sessions.discard(self)
                if self._needed:
                    self.shared.last = time.monotonic()

    def held(self, key: str) -> list[Any]:
        """Return what it has had made or taken under a key.

        Raises:
            FailedUndone: nothing, ever: to copy it would seem to succeed.
        """
        if key not in self.pieces:
            raise FailedUndone(f"nothing was made or taken as {key}")
        return self.pieces[key]

    def drop(self, key: str) -> None:
        """Let go of a key."""
        failed: Exception | None = None
        for piece in self.pieces.pop(key, []):
            try:
                if piece.close() is False:  # the memory goes when this process does
                    self.shared.retiring = True
            except Exception as error:  # a GPU that is lost, say; others are not
                failed = error
        if failed is not None:
            raise failed

    def _one(self) -> bool:
        try:
            message = receive(self._connection)
            self._coming.add(message.given)
            if len(self._coming) > MOST_DESCRIPTORS:
                return False
            if message.more:
                return True
            with Given(self._coming.take()) as came:
                said, given = self._do(message, came)
            try:
                send_all(self._connection, said, given)
            finally:
                for fd in given:
                    os.close(fd)
        except (EOFError, OSError, ValueError):
            return False
        return True

    def _do(self, message: Message, came: Given) -> tuple[dict[str, Any], list[int]]:
        try:
            asked = message.read_as(_Asked)
            self.until = time.monotonic() + asked.limit + STUCK_GRACE
            if asked.verb not in self._verbs:
                return {"error": f"the mover knows no {asked.verb}"}, []
            self._needed |= asked.verb != "ping"  # to be looked at is no reason to stay
            type_, verb = self._verbs[asked.verb]
            reply = verb(self, message.read_as(type_), came.fds)
            return reply if isinstance(reply, tuple) else (reply, [])
        except LimosaError as error:
            result = str(error.fields.get("result", ""))
            if isinstance(error, DriverError) and result not in _HARMLESS:
                self.shared.retiring = True
            return {"error": error.message[:1000], "result": result, "id": error.id}, []
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:1000]}, []
        finally:
            self.until = float("inf")


Verb = tuple[type[Any], Callable[[Session, Any, Sequence[int]], Reply]]
"""What is asked with it, and what does it."""

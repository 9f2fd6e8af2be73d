"""The mover's side of a connection: one controller, one thread, what it holds, and its verbs.

Verbs come in groups, each a module with a table ``VERBS``: a request of ``mover_protocol.py``, and a function that
takes the session, the request and the descriptors that came with it (closed afterwards), and returns the answer, or
the answer and descriptors to give away.
"""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from limosa.errors import DriverError, FailedUndone, LimosaError
from limosa.gpu.vmm import Contexts
from limosa.ipc.messages import Message
from limosa.ipc.packet import Given
from limosa.ipc.sessions import Answer, Sessions
from limosa.parking.vault_protocol import Request

Reply = dict[str, Any] | tuple[dict[str, Any], list[int]]
STUCK_GRACE = 10.0
"""Seconds after its time limit from which a call counts as hung."""
_HARMLESS = frozenset({"CUDA_ERROR_OUT_OF_MEMORY"})


class Shared:
    """What all sessions of the mover share.

    Attributes:
        contexts: on the GPUs in use.
        retiring: no new connections: another mover takes over. Set where the driver has said something from which a
            process may not recover, where it is told to end, and where another has its name.
        last: when it was last of use (monotonic seconds).
        stay_until: not to end before (monotonic seconds), however idle: an arena was asked for.
        resident: what is to outlive sessions; not to end before it is empty.
        parts: what groups of verbs share between sessions, by a name of theirs.
    """

    def __init__(self) -> None:
        self.contexts = Contexts()
        self.retiring = False
        self.sessions: Sessions[Session] | None = None
        self.last = time.monotonic()
        self.lock = threading.Lock()
        self.stay_until = 0.0
        self.resident: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}

    def stuck(self) -> bool:
        """Return whether a call of each session that is left has been under way for longer than it may."""
        left = self.all()
        return bool(left) and all(session.until < time.monotonic() for session in left)

    def all(self) -> list[Session]:
        """Return the sessions that there are."""
        return self.sessions.all() if self.sessions is not None else []


class Session:
    """One controller.

    Attributes:
        pieces: what it has had made or taken, by key: its own keys, dropped when it is gone.
        until: when the call under way counts as hung.
        needed: whether it has done more than look.
    """

    def __init__(self, shared: Shared, verbs: Mapping[type[Request], Verb]):
        self.shared, self.pieces = shared, dict[str, list[Any]]()
        self.until = float("inf")
        self.needed = False
        self._verbs = verbs
        self._asked: Any = functools.reduce(operator.or_, verbs)

    @property
    def contexts(self) -> Contexts:
        """The contexts of the process."""
        return self.shared.contexts

    def gone(self) -> None:
        """Let go of what it had."""
        for key in list(self.pieces):
            try:
                self.drop(key)
            except Exception:  # a GPU that is lost, say: what is still mapped goes with this process
                self.shared.retiring = True
        if self.needed:
            self.shared.last = time.monotonic()

    def held(self, key: str) -> list[Any]:
        """Return what it has had made or taken under a key.

        Raises FailedUndone: nothing, ever: to copy it would seem to succeed.
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

    def answer(self, message: Message, came: Given) -> Answer:
        """Do what is asked."""
        try:
            asked: Request = message.read_as(self._asked)
            self.until = time.monotonic() + asked.limit + STUCK_GRACE
            self.needed |= not asked.looks
            reply = self._verbs[type(asked)](self, asked, came.fds)
            return Answer(*reply) if isinstance(reply, tuple) else Answer(reply)
        except LimosaError as error:
            result = str(error.fields.get("result", ""))
            if isinstance(error, DriverError) and result not in _HARMLESS:
                self.shared.retiring = True
            return Answer({"error": error.message[:1000], "result": result, "id": error.id})
        except Exception as error:
            return Answer({"error": f"{type(error).__name__}: {error}"[:1000]})
        finally:
            self.until = float("inf")


Verb = Callable[[Session, Any, Sequence[int]], Reply]
"""What does what is asked."""

"""What saving and loading chunks of device memory have in common, and the mover's verbs for both.

A controller has one of them at a time. Long work is started, and then asked about.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from limosa.errors import LimosaError
from limosa.gpu.vmm import Contexts
from limosa.image.chunks import Chunks
from limosa.parking.crew import Crew, Hand, Ring
from limosa.parking.mover_protocol import Close, Failed, Poll, Progress, Stop
from limosa.parking.mover_session import Reply, Session, Verb
from limosa.parking.vault_protocol import Request

KEY = "staging"
POLL_SECONDS = 0.25
_Kind = TypeVar("_Kind", bound="Staging")


class Staging:
    """Device memory on its way into an image's folder of chunks, which stays the caller's, or out of it."""

    def __init__(self, contexts: Contexts, folder: int, chunk: int):
        self._contexts, self._chunk = contexts, chunk
        self._chunks = Chunks(folder)
        self._ring = Ring(chunk)
        self._crew: Crew | None = None

    def poll(self, asked: Poll, fds: Sequence[int]) -> dict[str, Any]:
        """Say how far it is; waits a moment."""
        said, crew = Progress(done=0, total=0, running=False), self._crew
        if crew is not None:
            over = crew.wait(POLL_SECONDS)
            failed = _why(crew.failed) if over and crew.failed is not None else None
            said = Progress(crew.done, crew.total, not over, crew.chunks, crew.seconds, failed)
        found: dict[str, Any] = msgspec.to_builtins(said)
        return found

    def stop(self, asked: Stop | None = None, fds: Sequence[int] = ()) -> None:
        """Stop what was begun."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def close(self) -> None:
        """Let go of all of it; files stay, and memory that somebody has a descriptor of."""
        self.stop()
        with contextlib.suppress(LimosaError):
            self._any_context()
        self._close_pieces()
        self._ring.close()
        self._chunks.close()

    def _hand(self, n: int) -> Hand:
        """What the n-th thread works with: its pinned memory is kept for the next time."""
        self._any_context()
        return Hand(self._contexts, self._ring.slot(n))

    def _any_context(self) -> None:
        """Pinning needs a context: any GPU's will do."""
        gpus = sorted(self._gpus())
        if gpus:
            self._contexts.use(gpus[0])

    def _gpus(self) -> set[str]:
        """The GPUs that the pieces are on."""
        raise NotImplementedError

    def _close_pieces(self) -> None:
        """Let go of what is the kind's own."""
        raise NotImplementedError


def _why(error: BaseException) -> Failed:
    if isinstance(error, OSError):
        return Failed(error.strerror or "?", "OSError", error.errno or 0)
    result = str(error.fields.get("result", "")) if isinstance(error, LimosaError) else ""
    return Failed(str(error), type(error).__name__, result=result)


def read_whole(fd: int, view: memoryview, offset: int) -> None:
    """Fill a buffer from a file. Raises OSError: it ends before."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if not got:
            raise OSError(0, "it is shorter than it was")
        done += got


def only(fds: Sequence[int]) -> int:
    """The one descriptor that has come. Raises ValueError: none, or more."""
    if len(fds) != 1:
        raise ValueError(f"{len(fds)} descriptors instead of one")
    return fds[0]


def held(session: Session, kind: type[_Kind]) -> _Kind:
    """What the session has under way. Raises ValueError: nothing of that kind."""
    found: list[Any] = session.pieces.get(KEY, [])
    if not found or not isinstance(found[0], kind):
        raise ValueError(f"nothing of the kind is under way: {kind.__name__}")
    return found[0]


def begin(session: Session, staging: Staging) -> None:
    """Have it instead of what was under way before."""
    session.drop(KEY)
    session.pieces[KEY] = [staging]


def staging_close(session: Session, asked: Close, fds: Sequence[int]) -> Reply:
    """Let go of all of it."""
    session.drop(KEY)
    return {}


def of(kind: type[_Kind], does: Callable[[_Kind, Any, Sequence[int]], Reply | None]) -> Verb:
    """The verb that is a method of what is under way."""
    return lambda session, asked, fds: does(held(session, kind), asked, fds) or {}


VERBS: dict[type[Request], Verb] = {
    Poll: of(Staging, Staging.poll),
    Stop: of(Staging, Staging.stop),
    Close: staging_close,
}

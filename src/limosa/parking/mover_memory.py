"""What the mover does with device memory: makes it, takes it from descriptors, copies it between GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from limosa.gpu.vmm import Contexts, Piece, call
from limosa.ipc.packet import close_all
from limosa.parking.mover_protocol import Copy, Drop, DropAll, Make, Prepare, Take
from limosa.parking.mover_session import Reply, Session, Verb
from limosa.parking.vault_protocol import Request

STREAMS = 4
CHUNK = 64 << 20
_T = TypeVar("_T")


def prepare(session: Session, asked: Prepare, fds: Sequence[int]) -> Reply:
    """Have contexts ready."""
    for uuid in asked.gpus:
        session.contexts.use(uuid)
    return {}


def take(session: Session, asked: Take, fds: Sequence[int]) -> Reply:
    """Map memory that descriptors lead to, to be used from a GPU."""
    session.contexts.use(asked.gpu)
    user = [session.contexts.ordinal(asked.gpu)]
    held = session.pieces.setdefault(asked.key, [])
    for fd, size in zip(fds, asked.sizes, strict=True):
        held.append(Piece.take(fd, size, user))
    return {}


def make(session: Session, asked: Make, fds: Sequence[int]) -> Reply:
    """Make memory on a GPU and give descriptors of it away."""
    pieces, given = made(session.contexts, asked.gpu, asked.sizes)
    session.pieces.setdefault(asked.key, []).extend(pieces)
    return {}, given


def made(contexts: Contexts, gpu: str, sizes: Iterable[int]) -> tuple[list[Piece], list[int]]:
    """Return new pieces of memory on a GPU, all of them or none, and descriptors of them."""
    contexts.use(gpu)
    ordinal = contexts.ordinal(gpu)
    pieces: list[Piece] = []
    given: list[int] = []
    try:
        for size in sizes:
            pieces.append(Piece.make(size, ordinal, [ordinal]))
            given.append(pieces[-1].export())
    except BaseException:
        close_all(given)
        for piece in pieces:
            piece.close()
        raise
    return pieces, given


def copy(session: Session, asked: Copy, fds: Sequence[int]) -> Reply:
    """Copy, all at once, what keys hold to what others hold, in their order."""
    work = []
    for source, target, gpu in asked.copies:
        pairs = zip(session.held(source), session.held(target), strict=True)
        spans = [(b.at + i, a.at + i, min(CHUNK, a.bytes - i)) for a, b in pairs for i in range(0, a.bytes, CHUNK)]
        work.append((gpu, spans))
    with Streams(session) as streams:
        streams.in_turns(work, lambda span, stream: call("cuMemcpyDtoDAsync", *span, stream))
    return {"bytes": sum(size for _, spans in work for _, _, size in spans)}


def drop(session: Session, asked: Drop, fds: Sequence[int]) -> Reply:
    """Let go of a key."""
    session.drop(asked.key)
    return {}


def drop_all(session: Session, asked: DropAll, fds: Sequence[int]) -> Reply:
    """Let go of all that this controller had made or taken."""
    for key in list(session.pieces):
        session.drop(key)
    return {}


class Streams:
    """Streams on several GPUs, taken in turns; at the end of the block all that was put on them is done."""

    def __init__(self, session: Session):
        self._session = session
        self._made: dict[str, list[Any]] = {}
        self._turn = 0

    def next(self, gpu: str) -> Any:
        """Return a stream on a GPU, whose context is the calling thread's then."""
        self._session.contexts.use(gpu)
        if gpu not in self._made:
            self._made[gpu] = [call("cuStreamCreate", 1) for _ in range(STREAMS)]
        self._turn += 1
        return self._made[gpu][self._turn % STREAMS]

    def in_turns(self, work: Sequence[tuple[str, Sequence[_T]]], copy_: Callable[[_T, Any], None]) -> None:
        """Put the parts of each GPU's work on its streams, in turns: all of them are at work at once."""
        for turn in range(max((len(parts) for _, parts in work), default=0)):
            for gpu, parts in work:
                if turn < len(parts):
                    copy_(parts[turn], self.next(gpu))

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for gpu, streams in self._made.items():
            self._session.contexts.use(gpu)
            for stream in streams:
                call("cuStreamSynchronize", stream)
                call("cuStreamDestroy", stream)


VERBS: dict[type[Request], Verb] = {Prepare: prepare, Take: take, Make: make, Copy: copy, Drop: drop, DropAll: drop_all}

"""What the mover does with host memory: pins the arena's segments, and copies device memory there and back.

A pinned segment stays pinned, for its next user, until the vault has released it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from limosa.errors import DriverError, FailedUndone, LimosaError
from limosa.gpu.vmm import Contexts, HostPiece, call
from limosa.parking.mover_memory import CHUNK, Streams
from limosa.parking.mover_protocol import Hold, Host, Pinned, Warm
from limosa.parking.mover_session import Reply, Session, Shared, Verb
from limosa.parking.resident import look_for
from limosa.parking.segments import LARGE, is_segment
from limosa.parking.vault import Vault
from limosa.parking.vault_protocol import Request

TOUCH = 64 << 20
"""What one thread has the kernel back at a time."""
TOUCHERS = max(1, min(8, (os.cpu_count() or 1) - 1))
PINNERS = 2
COPIERS = 4
"""Threads that copy what is not pinned."""


class Segment:
    """One segment as the mover has it; ``users`` are sessions, and threads that are pinning it now.

    Otherwise the part of its last segment that a process does not fill would still have the bytes of its last user.
    """

    def __init__(self, fd: int, bytes_: int, fresh: bool):
        self.piece = HostPiece(fd, bytes_)
        self.users, self._filled = 0, 0 if fresh else bytes_
        self.busy = threading.Lock()

    def touch(self, threads: ThreadPoolExecutor) -> list[Future[None]]:
        """Have it touched by several threads."""
        size = self.piece.bytes if not self.piece.pinned else 0
        return [threads.submit(self.piece.touch, p, min(TOUCH, size - p)) for p in range(0, size, TOUCH)]

    def pin(self, touched: Sequence[Future[None]]) -> None:
        """Pin it once it has been touched; where that is not possible it is copied more slowly."""
        for one in touched:
            with contextlib.suppress(OSError):
                one.result()
        with self.busy, contextlib.suppress(DriverError):
            self.piece.pin()

    def will_be_filled(self, bytes_: int) -> None:
        """Make what lies behind so many bytes zero, where it is not."""
        if bytes_ < self._filled:
            self.piece.clear(bytes_, self._filled)
        self._filled = bytes_


class Segments:
    """The segments that the mover has mapped, by inode."""

    def __init__(self) -> None:
        self._there: dict[int, Segment] = {}
        self._lock = threading.Lock()

    def take(self, fds: Sequence[int]) -> list[Segment]:
        """Return segments, each with one user more."""
        found: list[Segment] = []
        with self._lock:
            try:
                for fd in fds:
                    if not is_segment(fd):  # one that is cut off would end whoever has it mapped
                        raise FailedUndone("a descriptor is of no segment of the arena")
                    info = os.fstat(fd)
                    if info.st_ino not in self._there:
                        self._there[info.st_ino] = Segment(fd, info.st_size, not info.st_blocks)
                    self._there[info.st_ino].users += 1
                    found.append(self._there[info.st_ino])
            except BaseException:
                for segment in found:
                    segment.users -= 1
                raise
        return found

    def leave(self, segments: Sequence[Segment]) -> None:
        """One user less of each."""
        with self._lock:
            for segment in segments:
                segment.users -= 1

    def bytes(self) -> int:
        """Return how many bytes are pinned."""
        return sum(s.piece.bytes for s in list(self._there.values()) if s.piece.pinned)

    def trim(self, known: Sequence[int], contexts: Contexts) -> None:
        """Let go of those that the vault has let go of."""
        keep = set(known)
        with self._lock:
            for inode, segment in list(self._there.items()):
                if segment.users == 0 and inode not in keep:
                    for uuid in contexts.gpus()[:1]:
                        contexts.use(uuid)
                    segment.piece.close()
                    del self._there[inode]

    def any(self) -> bool:
        """Return whether there are any."""
        return bool(self._there)


class Held:
    """Segments of one process in a session, one after the other as one piece of memory."""

    def __init__(self, segments: Segments, held: list[Segment]):
        self._segments, self._held = segments, held

    def spans(self, offset: int, size: int, chunk: int) -> Iterator[tuple[int, int, bool]]:
        """Return what lies from an offset on, in parts: address, bytes, whether pinned."""
        while size:
            piece = self._held[offset // LARGE].piece
            within = offset % LARGE
            part = min(size, chunk, piece.bytes - within)
            if part <= 0:
                raise ValueError("behind the end of the arena")
            yield piece.at + within, part, piece.pinned
            offset, size = offset + part, size - part

    def close(self) -> None:
        """Leave them to others."""
        self._segments.leave(self._held)
        self._held = []


def _segments(shared: Shared) -> Segments:
    """The process's segments, and who looks after them."""
    found: Segments = shared.parts.setdefault("segments", Segments())
    return found


def look_after(shared: Shared) -> None:
    """Let go of segments that the vault has let go of; learn how long what is there is to be kept.

    What a suspended job has there is a use: not pinned, it would be copied back more slowly. What waits for the next
    suspend is none: its ten minutes are those of the mover. Called now and then by a thread of the mover.
    """
    segments = _segments(shared)
    if not segments.any():
        return
    known: list[int] = []
    with contextlib.suppress(LimosaError):
        found = look_for("vault", os.geteuid())
        if found is not None:
            with Vault(found=found) as vault:
                said = vault.arena()
                known = said.inodes
                shared.stay_until = time.monotonic() + said.seconds
                if said.used:
                    shared.last = time.monotonic()
    segments.trim(known, shared.contexts)


def hold(session: Session, asked: Hold, fds: Sequence[int]) -> Reply:
    """Map segments, as one piece of memory."""
    session.contexts.use(asked.gpu)
    session.drop(asked.key)
    segments = _segments(session.shared)
    begun = time.monotonic()
    taken = segments.take(fds)
    session.pieces[asked.key] = [Held(segments, taken)]
    if asked.pin:
        _pin(session, taken, asked.gpu)
        for number, segment in enumerate(taken):
            segment.will_be_filled(max(0, min(segment.piece.bytes, asked.bytes - LARGE * number)))
    return {"seconds": time.monotonic() - begun, "pinned": sum(s.piece.bytes for s in taken if s.piece.pinned)}


def _pin(session: Session, segments: Sequence[Segment], gpu: str) -> None:
    """Have segments pinned, each as soon as it has been touched."""

    def pin(segment: Segment, touched: Sequence[Future[None]]) -> None:
        session.contexts.use(gpu)
        segment.pin(touched)

    with ThreadPoolExecutor(TOUCHERS) as touchers, ThreadPoolExecutor(PINNERS) as pinners:
        work = [(segment, segment.touch(touchers)) for segment in segments if not segment.piece.pinned]
        for done in [pinners.submit(pin, *one) for one in work]:
            done.result()


def warm(session: Session, asked: Warm, fds: Sequence[int]) -> Reply:
    """Pin segments that nobody uses yet, and stay for them."""
    session.shared.stay_until = max(session.shared.stay_until, time.monotonic() + asked.seconds)
    session.contexts.use(asked.gpu)
    segments, begun = _segments(session.shared), time.monotonic()
    taken = segments.take(fds)
    try:
        _pin(session, taken, asked.gpu)
    finally:
        segments.leave(taken)
    return {"seconds": time.monotonic() - begun, "pinned": sum(s.piece.bytes for s in taken if s.piece.pinned)}


def pinned(session: Session, asked: Pinned, fds: Sequence[int]) -> Reply:
    """Say how many bytes of the arena are pinned."""
    return {"bytes": _segments(session.shared).bytes()}


def host(session: Session, asked: Host, fds: Sequence[int]) -> Reply:
    """Copy keys to an arena ("out") or back ("in"), all at once."""
    work: list[tuple[str, list[tuple[int, int, int]]]] = []
    slow: list[tuple[str, tuple[int, int, int]]] = []
    for key, arena, begin, gpu in asked.copies:
        held, spans, offset = session.held(arena)[0], [], begin
        for piece in session.held(key):
            at = piece.at
            for there, size, is_pinned in held.spans(offset, piece.bytes, CHUNK):
                if is_pinned:
                    spans.append((at, there, size))
                else:
                    slow.append((gpu, (at, there, size)))
                at += size
            offset += piece.bytes
        work.append((gpu, spans))

    def one(span: tuple[int, int, int], *stream: Any) -> None:
        device, there, size = span
        way, target, source = ("DtoH", there, device) if asked.way == "out" else ("HtoD", device, there)
        call(f"cuMemcpy{way}Async" if stream else f"cuMemcpy{way}", target, source, size, *stream)

    def some(share: list[tuple[str, tuple[int, int, int]]]) -> None:
        for gpu, span in share:
            session.contexts.use(gpu)
            one(span)

    # What is not pinned is copied by the driver through memory of its own while the caller waits: several threads.
    with ThreadPoolExecutor(COPIERS) as threads:
        waited = [threads.submit(some, slow[i::COPIERS]) for i in range(COPIERS if slow else 0)]
        with Streams(session) as streams:
            streams.in_turns(work, one)
        for task in waited:
            task.result()
    spans = [span for _, span in slow] + [span for _, some_ in work for span in some_]
    return {"bytes": sum(size for _, _, size in spans)}


VERBS: dict[type[Request], Verb] = {Hold: hold, Warm: warm, Pinned: pinned, Host: host}

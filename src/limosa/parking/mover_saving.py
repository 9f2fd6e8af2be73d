"""What the mover does for a checkpoint: device memory, or what is in an arena, into the chunks of an image."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from limosa.errors import FailedUndone
from limosa.gpu.vmm import Contexts, Piece
from limosa.parking import mover_protocol as protocol
from limosa.parking.crew import ALL, BESIDE, ENDING, Crew, Hand, Pinned, Slot, default_threads
from limosa.parking.hashes import GpuHash, Key, host
from limosa.parking.mover_chunks import Staging, begin, of, only, read_whole
from limosa.parking.mover_session import Reply, Session, Verb
from limosa.parking.rate import Rate
from limosa.parking.segments import LARGE, fits
from limosa.parking.vault_protocol import Request


class Aside:
    """A piece of memory that is in host memory: at an offset of all segments of an arena.

    Those that it is in are held by descriptors of our own.
    """

    def __init__(self, segments: Sequence[int], offset: int, bytes_: int):
        self.bytes, self._first = bytes_, offset % LARGE
        first, last = offset // LARGE, (offset + max(1, bytes_) - 1) // LARGE
        # They come from another user's vault or process: read, never mapped, and not what may have us wait.
        own = segments[first : last + 1] if last < len(segments) else []
        ends = [LARGE] * (len(own) - 1) + [(offset + max(1, bytes_) - 1) % LARGE + 1]
        if not own or not all(map(fits, own, ends)):
            raise FailedUndone("a piece of memory lies behind the end of the arena")
        self._fds = [os.dup(fd) for fd in own]

    def read(self, view: memoryview, offset: int) -> None:
        """Read a part of it."""
        at, done = self._first + offset, 0
        while done < len(view):
            part = min(len(view) - done, LARGE - at % LARGE)
            read_whole(self._fds[at // LARGE], view[done : done + part], at % LARGE)
            at, done = at + part, done + part

    def close(self) -> None:
        """Let it go."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


class _Staged:
    """A piece of memory on its way into the image, and what is known of each of its chunks."""

    def __init__(self, memory: Piece | Aside, gpu: str, chunk: int):
        self.memory, self.gpu = memory, gpu
        count = -(-memory.bytes // chunk)
        self.names = [""] * count
        self.digests: list[bytes] = [b""] * count
        self.expected: list[bytes] = [b""] * count
        self.held: dict[int, Slot] = {}


class _Spot(NamedTuple):
    piece: _Staged
    n: int


class Differs(Exception):
    """What arrived is not what was sent."""


class Save(Staging):
    """A job's device memory on its way into an image's folder of chunks; without a key nothing is copied twice."""

    def __init__(self, contexts: Contexts, folder: int, chunk: int, key: bytes | None):
        super().__init__(contexts, folder, chunk)
        self._key = Key(key) if key is not None else None
        self._pieces: dict[tuple[int, int], _Staged] = {}
        self._kept: Pinned | None = None
        self._free: deque[Slot] = deque()
        self._hashes: dict[str, GpuHash] = {}
        self._rate, self._rate_lock = Rate(), threading.Lock()

    def take(self, asked: protocol.SaveTake, fds: Sequence[int]) -> None:
        """Have pieces of a process's memory on a GPU, by their descriptors."""
        self._contexts.use(asked.gpu)
        user = [self._contexts.ordinal(asked.gpu)]
        for id_, size, fd in zip(asked.ids, asked.sizes, fds, strict=True):
            self._pieces[asked.pid, id_] = _Staged(Piece.take(fd, size, user), asked.gpu, self._chunk)

    def aside(self, asked: protocol.SaveAside, fds: Sequence[int]) -> None:
        """Have pieces of a suspended process's memory, in the segments that the descriptors are of."""
        for id_, size, offset in asked.places:
            self._pieces[asked.pid, id_] = _Staged(Aside(fds, offset, size), asked.gpu, self._chunk)

    def drop(self, asked: protocol.SaveDrop, fds: Sequence[int]) -> None:
        """Forget pieces that the process has freed."""
        for id_ in asked.ids:
            staged = self._pieces.pop((asked.pid, id_), None)
            if staged is not None:
                staged.memory.close()

    def ready(self, asked: protocol.SaveReady, fds: Sequence[int]) -> None:
        """Have pinned memory, and what hashing needs, in place: nothing is allocated in the pause."""
        for gpu, pieces in self._on_gpus().items():
            if self._key is not None:
                chunks = sum(len(piece.names) for piece in pieces)
                self._hash(gpu).prepare(self._key, self._chunk, chunks)
        self._any_context()
        total = sum(len(piece.names) for piece in self._pieces.values())
        for n in range(min(total, default_threads(ALL))):
            self._ring.slot(n)
        slots = -(-asked.hold // self._chunk)
        if slots > (self._kept.slots if self._kept is not None else 0):
            if self._kept is not None:
                self._kept.close()
            self._free.clear()
            self._kept = Pinned(slots, self._chunk)
            self._free.extend(self._kept.slot(n) for n in range(slots))

    def differ(self, asked: protocol.SaveDiffer, fds: Sequence[int]) -> dict[str, Any]:
        """Hash all of it on the GPUs and mark what is not what has arrived."""
        begun = time.monotonic()
        changed = self._mark()
        size = sum(size for _, size in changed)
        return {"changed": len(changed), "bytes": size, "seconds": time.monotonic() - begun}

    def start(self, asked: protocol.SaveStart, fds: Sequence[int]) -> None:
        """Begin to "copy" what is marked into files, to "keep" what has changed in memory, or to "write" what was kept.

        Only one at a time.
        """
        self.stop()
        threads = default_threads(ENDING if asked.ends else BESIDE)
        if asked.rate != self._rate.bytes_per_second:  # else round after round counts as one
            self._rate = Rate(asked.rate)
        if asked.what == "copy":
            self._crew = Crew(self._marked(), self._copy, self._hand, threads=threads, nice=asked.nice)
        elif asked.what == "keep":
            self._crew = Crew([], self._keep, self._hand, threads=default_threads(ALL), first=self._mark)
        else:
            kept = [_Spot(piece, i) for piece in self._pieces.values() for i in sorted(piece.held)]
            held = [(spot, self._size(*spot)) for spot in kept]
            self._crew = Crew(held, self._write, self._hand, threads=threads, nice=asked.nice)

    def names(self, asked: protocol.SaveNames, fds: Sequence[int]) -> dict[str, Any]:
        """The names of chunks, 32 bytes each."""
        found = [self._pieces[pid, id_].names[start : start + count] for pid, id_, start, count in asked.parts]
        return {"names": b"".join(bytes.fromhex(name) for part in found for name in part)}

    # -- what the threads do -------------------------------------------------------------------------------------

    def _copy(self, hand: Hand, spot: _Spot) -> None:
        """One chunk into its file; the hash is of the bytes that arrived: they may be older than what is there now."""
        size = self._size(*spot)
        if self._rate.bytes_per_second:
            with self._rate_lock:
                self._rate.spend(size)
        piece, i = spot
        self._out(hand, spot, size, hand.slot)
        if self._key is not None:
            piece.digests[i] = host(hand.slot.at, size, self._key, self._chunk)[0]
        piece.names[i] = self._chunks.add(hand.slot.view[:size])[0]

    def _keep(self, hand: Hand, spot: _Spot) -> None:
        """One chunk in the pause: into memory that is kept, or where there is none left into its file."""
        piece, i = spot
        try:
            slot = self._free.popleft()
        except IndexError:
            self._copy(hand, spot)
        else:
            size = self._size(piece, i)
            self._out(hand, spot, size, slot)
            piece.held[i] = slot
            if self._key is not None:
                piece.digests[i] = host(slot.at, size, self._key, self._chunk)[0]
        if piece.expected[i] and piece.digests[i] != piece.expected[i]:
            raise Differs("what arrived of the device memory is not what its hash on the GPU says")

    def _write(self, hand: Hand, spot: _Spot) -> None:
        piece, i = spot
        slot = piece.held[i]
        piece.names[i] = self._chunks.add(slot.view[: self._size(piece, i)])[0]
        del piece.held[i]
        self._free.append(slot)

    def _out(self, hand: Hand, spot: _Spot, size: int, slot: Slot) -> None:
        (memory, gpu), offset = (spot.piece.memory, spot.piece.gpu), spot.n * self._chunk
        if isinstance(memory, Aside):
            memory.read(slot.view[:size], offset)
        else:
            hand.out(memory, offset, size, gpu, slot)

    # -- inside --------------------------------------------------------------------------------------------------

    def _marked(self) -> list[tuple[_Spot, int]]:
        spots = (_Spot(piece, i) for piece in self._pieces.values() for i, name in enumerate(piece.names) if not name)
        return [(spot, self._size(*spot)) for spot in spots]

    def _mark(self) -> list[tuple[_Spot, int]]:
        """Take the names from chunks that have changed, and note what they are now; return all without a name."""
        for gpu, pieces in self._on_gpus().items():
            if self._key is None:
                break
            ranges = [(piece.memory.at, piece.memory.bytes) for piece in pieces if isinstance(piece.memory, Piece)]
            for piece, now in zip(pieces, self._hash(gpu).digests(ranges, self._key, self._chunk), strict=True):
                piece.expected = now
                for i, (before, digest) in enumerate(zip(piece.digests, now, strict=True)):
                    if before != digest:
                        piece.names[i] = ""
        return self._marked()

    def _on_gpus(self) -> dict[str, list[_Staged]]:
        found: dict[str, list[_Staged]] = {}
        for piece in self._pieces.values():
            if isinstance(piece.memory, Piece):
                found.setdefault(piece.gpu, []).append(piece)
        return found

    def _hash(self, gpu: str) -> GpuHash:
        if gpu not in self._hashes:
            self._hashes[gpu] = GpuHash(self._contexts, gpu)
        return self._hashes[gpu]

    def _gpus(self) -> set[str]:
        return {piece.gpu for piece in self._pieces.values()}

    def _close_pieces(self) -> None:
        for piece in self._pieces.values():
            piece.memory.close()
        self._pieces.clear()
        for hashes in self._hashes.values():
            hashes.close()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _size(self, piece: _Staged, i: int) -> int:
        return min(self._chunk, piece.memory.bytes - i * self._chunk)


def save_open(session: Session, asked: protocol.SaveOpen, fds: Sequence[int]) -> Reply:
    """Begin to save; the descriptor is of the folder."""
    begin(session, Save(session.contexts, only(fds), asked.chunk, asked.key or None))
    return {}


VERBS: dict[type[Request], Verb] = {
    protocol.SaveOpen: save_open,
    protocol.SaveTake: of(Save, Save.take),
    protocol.SaveAside: of(Save, Save.aside),
    protocol.SaveDrop: of(Save, Save.drop),
    protocol.SaveReady: of(Save, Save.ready),
    protocol.SaveDiffer: of(Save, Save.differ),
    protocol.SaveStart: of(Save, Save.start),
    protocol.SaveNames: of(Save, Save.names),
}

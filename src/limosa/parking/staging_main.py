"""What the mover does with the chunks of an image: device memory into files, and files into device memory.

Several threads, each with pinned memory for one chunk: one copies from the GPU, hashes what has arrived and writes it,
while others do the same with other chunks; on the way back one reads, compares and copies. A controller has one
:class:`Save` or :class:`Load` at a time. What takes long is started, and then asked about.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from limosa.errors import LimosaError
from limosa.gpu.vmm import Contexts, Piece, call
from limosa.image.chunks import Chunks, chunk_path, name_of
from limosa.parking.hashes import GpuHash, Key, host
from limosa.parking.mover_session import Reply, Session
from limosa.parking.rate import Rate
from limosa.parking.segments import LARGE

KEY = "staging"
POLL_SECONDS = 0.25
MOST_THREADS = 16
NICE = 10
"""What the threads that work beside a running job give way by."""


class Pinned:
    """Host memory of this process alone, pinned, in slots of one chunk each."""

    def __init__(self, slots: int, chunk: int):
        self.slots, self.chunk = slots, chunk
        self._memory = mmap.mmap(-1, slots * chunk, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # pinned at several times the speed
        self._view = memoryview(self._memory)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        call("cuMemHostRegister", self._at, slots * chunk, 1)  # CU_MEMHOSTREGISTER_PORTABLE

    def slot(self, n: int) -> Slot:
        """The n-th slot."""
        return Slot(self._at + n * self.chunk, self._view[n * self.chunk : (n + 1) * self.chunk])

    def close(self) -> None:
        """Unpin it; it goes with the last slot."""
        if self._at:
            from limosa.gpu.binding import find

            find().cuMemHostUnregister(self._at)
            self._at = 0


class Slot(NamedTuple):
    """Pinned memory for one chunk: where it is, and its bytes."""

    at: int
    view: memoryview


class Aside:
    """A piece of memory that is in host memory: in segments of an arena.

    Args:
        segments: all of them; those that it is in are held by descriptors of our own.
        offset: where it begins, counted through all of them.
        bytes_: its size.
    """

    def __init__(self, segments: Sequence[int], offset: int, bytes_: int):
        self.bytes, self._first = bytes_, offset % LARGE
        first, last = offset // LARGE, (offset + max(1, bytes_) - 1) // LARGE
        self._fds = [os.dup(fd) for fd in segments[first : last + 1]]

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


class Hand:
    """What one thread works with: pinned memory for a chunk, a stream on each GPU."""

    def __init__(self, contexts: Contexts, slot: Slot):
        self.slot = slot
        self._contexts = contexts
        self._streams: dict[str, Any] = {}

    def out(self, memory: Piece | Aside, offset: int, size: int, gpu: str, slot: Slot) -> None:
        """Copy a part of a piece to pinned memory."""
        if isinstance(memory, Aside):
            memory.read(slot.view[:size], offset)
            return
        stream = self._stream(gpu)
        call("cuMemcpyDtoHAsync", slot.at, memory.at + offset, size, stream)
        call("cuStreamSynchronize", stream)

    def into(self, places: Iterable[Place], size: int) -> None:
        """Copy what is in our pinned memory to these places."""
        used = set()
        for place in places:
            stream = self._stream(place.gpu)
            used.add(place.gpu)
            call("cuMemcpyHtoDAsync", place.memory.at + place.offset, self.slot.at, size, stream)
        for gpu in used:
            call("cuStreamSynchronize", self._stream(gpu))

    def close(self) -> None:
        """Destroy the streams."""
        for gpu, stream in self._streams.items():
            self._contexts.use(gpu)
            call("cuStreamDestroy", stream)
        self._streams.clear()

    def _stream(self, gpu: str) -> Any:
        self._contexts.use(gpu)
        if gpu not in self._streams:
            self._streams[gpu] = call("cuStreamCreate", 1)
        return self._streams[gpu]


class Place(NamedTuple):
    """Where a chunk goes."""

    memory: Piece
    offset: int
    gpu: str


class Crew:
    """Threads that work through tasks; the first error stops all.

    Args:
        tasks: what is to be done, and its bytes.
        work: does one; called by several threads.
        hands: one for each thread.
        nice: what the threads give way to others by.
        first: done by one of them before the others begin; returns further tasks.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[Any, int]],
        work: Callable[[Hand, Any], None],
        hands: Callable[[int], Hand],
        *,
        threads: int,
        nice: int = 0,
        first: Callable[[], Sequence[tuple[Any, int]]] | None = None,
    ):
        self._left = deque(tasks)
        self._work, self._hands, self._nice, self._first = work, hands, nice, first
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._over = threading.Event()
        self.done = self.chunks = 0
        self.total = sum(size for _, size in tasks)
        self.failed: BaseException | None = None
        self._begun, self.seconds = time.monotonic(), 0.0
        self._threads = threading.Thread(target=self._run, args=(threads,), name="staging")
        self._threads.start()

    def wait(self, seconds: float) -> bool:
        """Return whether all is done (or has failed) within that time."""
        return self._over.wait(seconds)

    def close(self) -> None:
        """Stop: each thread ends with what it is at."""
        self._stop.set()
        self._threads.join()

    def _run(self, threads: int) -> None:
        try:
            if self._first is not None:
                more = self._first()
                self.total += sum(size for _, size in more)
                self._left.extend(more)
            count = max(1, min(threads, len(self._left)))
            others = [threading.Thread(target=self._one, args=(n,), name=f"staging-{n}") for n in range(1, count)]
            for other in others:
                other.start()
            self._one(0)
            for other in others:
                other.join()
        except BaseException as error:
            self._fail(error)
        finally:
            self.seconds = time.monotonic() - self._begun
            self._over.set()

    def _one(self, n: int) -> None:
        if not self._left:
            return
        if self._nice:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        try:
            hand = self._hands(n)
            try:
                while not self._stop.is_set():
                    try:
                        task, size = self._left.popleft()
                    except IndexError:
                        return
                    self._work(hand, task)
                    with self._lock:
                        self.done += size
                        self.chunks += 1
            finally:
                hand.close()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failed = self.failed or error
        self._stop.set()


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


class Save:
    """A job's device memory on its way into the folder of chunks of an image.

    Args:
        contexts: the process's.
        folder: descriptor of the folder; stays the caller's.
        chunk: bytes of a chunk.
        key: what finds changes; None where nothing is copied twice.
    """

    def __init__(self, contexts: Contexts, folder: int, chunk: int, key: bytes | None):
        self._contexts, self._chunk = contexts, chunk
        self._key = Key(key) if key is not None else None
        self._chunks = Chunks(folder)
        self._pieces: dict[tuple[int, int], _Staged] = {}
        self._ring: Pinned | None = None
        self._kept: Pinned | None = None
        self._free: deque[Slot] = deque()
        self._hashes: dict[str, GpuHash] = {}
        self._rate, self._rate_lock = Rate(), threading.Lock()
        self._crew: Crew | None = None

    def take(self, pid: int, ids: Sequence[int], sizes: Sequence[int], gpu: str, fds: Sequence[int]) -> None:
        """Have pieces of a process's memory on a GPU."""
        self._contexts.use(gpu)
        user = [self._contexts.ordinal(gpu)]
        for id_, size, fd in zip(ids, sizes, fds, strict=True):
            self._pieces[pid, id_] = _Staged(Piece.take(fd, size, user), gpu, self._chunk)

    def aside(self, pid: int, places: Sequence[tuple[int, int, int]], gpu: str, fds: Sequence[int]) -> None:
        """Have pieces of a suspended process's memory: each is (id, bytes, where in the segments)."""
        for id_, size, offset in places:
            self._pieces[pid, id_] = _Staged(Aside(fds, offset, size), gpu, self._chunk)

    def drop(self, pid: int, ids: Sequence[int]) -> None:
        """Forget pieces that the process has freed."""
        for id_ in ids:
            staged = self._pieces.pop((pid, id_), None)
            if staged is not None:
                staged.memory.close()

    def ready(self, hold: int) -> None:
        """Have pinned memory, and what hashing needs, in place: nothing is allocated in the pause.

        Args:
            hold: bytes of changed chunks that can wait in memory until the job runs again.
        """
        for gpu, pieces in self._on_gpus().items():
            if self._key is not None:
                chunks = sum(len(piece.names) for piece in pieces)
                self._hash(gpu).prepare(self._key, self._chunk, chunks)
        slots = -(-hold // self._chunk)
        if slots > (self._kept.slots if self._kept is not None else 0):
            if self._kept is not None:
                self._kept.close()
            self._any_context()
            self._free.clear()
            self._kept = Pinned(slots, self._chunk)
            self._free.extend(self._kept.slot(n) for n in range(slots))

    def differ(self) -> dict[str, Any]:
        """Hash all of it on the GPUs and mark what is not what has arrived."""
        begun = time.monotonic()
        changed = self._mark()
        size = sum(size for _, size in changed)
        return {"changed": len(changed), "bytes": size, "seconds": time.monotonic() - begun}

    def start(self, what: str, rate: float, nice: int, threads: int) -> None:
        """Begin to "copy" what is marked into files, to "keep" what has changed in memory, or to "write" what was kept.

        Only one at a time.
        """
        self.stop()
        threads = threads or default_threads()
        if self._ring is None or self._ring.slots < threads:
            self._any_context()
            self._ring = Pinned(threads, self._chunk)
        ring = self._ring

        def hands(n: int) -> Hand:
            return Hand(self._contexts, ring.slot(n))

        if rate != self._rate.bytes_per_second:  # else round after round counts as one
            self._rate = Rate(rate)
        if what == "copy":
            self._crew = Crew(self._marked(), self._copy, hands, threads=threads, nice=nice)
        elif what == "keep":
            self._crew = Crew([], self._keep, hands, threads=threads, first=self._mark)
        else:
            held = [
                (_Spot(piece, i), self._size(piece, i)) for piece in self._pieces.values() for i in sorted(piece.held)
            ]
            self._crew = Crew(held, self._write, hands, threads=threads, nice=nice)

    def poll(self) -> dict[str, Any]:
        """Say how far it is; waits a moment."""
        return poll(self._crew)

    def stop(self) -> None:
        """Stop what was begun."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def names(self, parts: Sequence[tuple[int, int, int, int]]) -> bytes:
        """The names of chunks, 32 bytes each: of each part (pid, id, from which chunk on, how many)."""
        found = [self._pieces[pid, id_].names[start : start + count] for pid, id_, start, count in parts]
        return b"".join(bytes.fromhex(name) for part in found for name in part)

    def close(self) -> None:
        """Let go of all of it; the files stay."""
        self.stop()
        for piece in self._pieces.values():
            piece.memory.close()
        self._pieces.clear()
        for hashes in self._hashes.values():
            hashes.close()
        if self._ring is not None or self._kept is not None:
            self._any_context()
        for pinned in (self._ring, self._kept):
            if pinned is not None:
                pinned.close()
        self._ring = self._kept = None
        self._chunks.close()

    # -- what the threads do -------------------------------------------------------------------------------------

    def _copy(self, hand: Hand, spot: _Spot) -> None:
        """One chunk into its file; the hash is of the bytes that arrived: they may be older than what is there now."""
        size = self._size(*spot)
        if self._rate.bytes_per_second:
            with self._rate_lock:
                self._rate.spend(size)
        piece, i = spot
        hand.out(piece.memory, i * self._chunk, size, piece.gpu, hand.slot)
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
            hand.out(piece.memory, i * self._chunk, size, piece.gpu, slot)
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

    # -- inside --------------------------------------------------------------------------------------------------

    def _marked(self) -> list[tuple[_Spot, int]]:
        return [
            (_Spot(piece, i), self._size(piece, i))
            for piece in self._pieces.values()
            for i, name in enumerate(piece.names)
            if not name
        ]

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

    def _any_context(self) -> None:
        """Pinning needs a context: any GPU's will do."""
        gpus = sorted({piece.gpu for piece in self._pieces.values()})
        if gpus:
            self._contexts.use(gpus[0])

    def _size(self, piece: _Staged, i: int) -> int:
        return min(self._chunk, piece.memory.bytes - i * self._chunk)


class Load:
    """The chunks of an image on their way into device memory: what is not what its name says does not get there.

    Args:
        contexts: the process's.
        folder: descriptor of the folder of chunks; stays the caller's.
        chunk: bytes of a chunk.
    """

    def __init__(self, contexts: Contexts, folder: int, chunk: int):
        self._contexts, self._chunk = contexts, chunk
        self._chunks = Chunks(folder)
        self._pieces: dict[tuple[int, int], tuple[Piece, str]] = {}
        self._wanted: dict[str, tuple[int, list[Place]]] = {}
        self._ring: Pinned | None = None
        self._crew: Crew | None = None

    def make(self, pid: int, ids: Sequence[int], sizes: Sequence[int], gpu: str) -> list[int]:
        """Make memory on a GPU for pieces of a process; returns descriptors.

        Raises:
            DriverError: CUDA_ERROR_OUT_OF_MEMORY above all.
        """
        self._contexts.use(gpu)
        ordinal = self._contexts.ordinal(gpu)
        given: list[int] = []
        try:
            for id_, size in zip(ids, sizes, strict=True):
                piece = Piece.make(size, ordinal, [ordinal])
                self._pieces[pid, id_] = piece, gpu
                given.append(piece.export())
        except BaseException:
            for fd in given:
                os.close(fd)
            raise
        return given

    def take(self, pid: int, ids: Sequence[int], sizes: Sequence[int], gpu: str, fds: Sequence[int]) -> None:
        """Have memory that a process has made itself."""
        self._contexts.use(gpu)
        user = [self._contexts.ordinal(gpu)]
        for id_, size, fd in zip(ids, sizes, fds, strict=True):
            self._pieces[pid, id_] = Piece.take(fd, size, user), gpu

    def want(self, pid: int, id_: int, start: int, names: bytes) -> None:
        """Say what belongs into a piece, from a chunk on: 32 bytes of a name each."""
        memory, gpu = self._pieces[pid, id_]
        for n in range(len(names) // 32):
            offset = (start + n) * self._chunk
            name = names[32 * n : 32 * n + 32].hex()
            size = min(self._chunk, memory.bytes - offset)
            self._wanted.setdefault(name, (size, []))[1].append(Place(memory, offset, gpu))

    def start(self, threads: int) -> None:
        """Begin to read what is wanted since the last time."""
        self.stop()
        threads = threads or default_threads(beside=False)
        gpus = sorted({gpu for _, gpu in self._pieces.values()})
        if not gpus:
            return
        self._contexts.use(gpus[0])
        if self._ring is None or self._ring.slots < threads:
            self._ring = Pinned(threads, self._chunk)
        ring = self._ring
        tasks = [((name, size, places), size * len(places)) for name, (size, places) in self._wanted.items()]
        self._wanted = {}
        self._crew = Crew(tasks, self._read, lambda n: Hand(self._contexts, ring.slot(n)), threads=threads)

    def poll(self) -> dict[str, Any]:
        """Say how far it is; waits a moment."""
        return poll(self._crew)

    def stop(self) -> None:
        """Stop reading."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def close(self) -> None:
        """Let go of all of it; memory lives on where somebody has a descriptor of it."""
        self.stop()
        for piece, _ in self._pieces.values():
            piece.close()
        if self._ring is not None:
            self._contexts.use(sorted({gpu for _, gpu in self._pieces.values()})[0])
            self._ring.close()
            self._ring = None
        self._pieces.clear()
        self._chunks.close()

    def _read(self, hand: Hand, task: tuple[str, int, list[Place]]) -> None:
        name, size, places = task
        try:
            fd = self._chunks.open(name)
        except OSError as error:
            raise Damaged(f"{chunk_path(name)} cannot be opened ({error.strerror})") from error
        view = hand.slot.view[:size]
        try:
            if os.fstat(fd).st_size != size:
                raise Damaged(f"{chunk_path(name)} has {os.fstat(fd).st_size} bytes instead of {size}")
            read_whole(fd, view, 0)
        except OSError as error:
            raise Damaged(f"{chunk_path(name)} cannot be read ({error.strerror})") from error
        finally:
            os.close(fd)
        if name_of(view) != name:
            raise Damaged(f"{chunk_path(name)} has another content than was written")
        hand.into(places, size)


class Damaged(Exception):
    """A chunk is not what its name says."""


class Differs(Exception):
    """What arrived is not what was sent."""


def read_whole(fd: int, view: memoryview, offset: int) -> None:
    """Fill a buffer from a file.

    Raises:
        OSError: it ends before.
    """
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if not got:
            raise OSError(0, "it is shorter than it was")
        done += got


def default_threads(*, beside: bool = True) -> int:
    """How many threads: half of the processors beside a job that runs, else all of them."""
    processors = len(os.sched_getaffinity(0))
    return max(2, min(MOST_THREADS, processors // 2 if beside else processors))


def poll(crew: Crew | None) -> dict[str, Any]:
    """What is said of a crew at work."""
    if crew is None:
        return {"running": False, "done": 0, "total": 0, "chunks": 0, "seconds": 0.0, "failed": None}
    over = crew.wait(POLL_SECONDS)
    failed: dict[str, Any] | None = None
    if over and crew.failed is not None:
        failed = {"text": str(crew.failed), "kind": type(crew.failed).__name__, "errno": 0, "result": ""}
        if isinstance(crew.failed, OSError):
            failed |= {"kind": "OSError", "errno": crew.failed.errno or 0, "text": crew.failed.strerror or "?"}
        if isinstance(crew.failed, LimosaError):
            failed["result"] = str(crew.failed.fields.get("result", ""))
    return {
        "running": not over,
        "done": crew.done,
        "total": crew.total,
        "chunks": crew.chunks,
        "seconds": crew.seconds,
        "failed": failed,
    }


# --- verbs ----------------------------------------------------------------------------------------------------


def save_open(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Begin to save: ``chunk``, ``key``; the descriptor of the folder."""
    session.drop(KEY)
    session.pieces[KEY] = [Save(session.contexts, fds[0], asked["chunk"], asked["key"] or None)]
    return {}


def save_take(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Have pieces that are on a GPU: ``pid``, ``ids``, ``sizes``, ``gpu``; their descriptors."""
    _save(session).take(asked["pid"], asked["ids"], asked["sizes"], asked["gpu"], fds)
    return {}


def save_aside(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Have pieces that are in host memory: ``pid``, ``places``, ``gpu``; descriptors that lead to it."""
    _save(session).aside(asked["pid"], asked["places"], asked["gpu"], fds)
    return {}


def save_drop(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Forget pieces: ``pid``, ``ids``."""
    _save(session).drop(asked["pid"], asked["ids"])
    return {}


def save_ready(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Have all in place for the pause: ``hold``."""
    _save(session).ready(asked["hold"])
    return {}


def save_differ(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Look what has changed."""
    return _save(session).differ()


def save_start(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Begin: ``what`` ("copy", "keep", "write"), ``rate``, ``nice``, ``threads`` (0: as many as fit)."""
    _save(session).start(asked["what"], asked["rate"], asked["nice"], asked["threads"])
    return {}


def save_names(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Tell names of chunks: ``parts``."""
    return {"names": _save(session).names(asked["parts"])}


def load_open(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Begin to load: ``chunk``; the descriptor of the folder."""
    session.drop(KEY)
    session.pieces[KEY] = [Load(session.contexts, fds[0], asked["chunk"])]
    return {}


def load_make(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Make memory and give descriptors of it away: ``pid``, ``ids``, ``sizes``, ``gpu``."""
    return {}, _load(session).make(asked["pid"], asked["ids"], asked["sizes"], asked["gpu"])


def load_take(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Have memory that a process has made: ``pid``, ``ids``, ``sizes``, ``gpu``; its descriptors."""
    _load(session).take(asked["pid"], asked["ids"], asked["sizes"], asked["gpu"], fds)
    return {}


def load_want(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Say what belongs where: ``parts`` of (pid, id, from which chunk on, names)."""
    for pid, id_, start, names in asked["parts"]:
        _load(session).want(pid, id_, start, names)
    return {}


def load_start(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Begin to read: ``threads`` (0: as many as fit)."""
    _load(session).start(asked["threads"])
    return {}


def staging_poll(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Tell how far it is."""
    return _any(session).poll()


def staging_stop(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Stop what was begun."""
    _any(session).stop()
    return {}


def staging_close(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Let go of all of it."""
    session.drop(KEY)
    return {}


def _any(session: Session) -> Save | Load:
    held: list[Any] = session.pieces.get(KEY, [])
    if not held:
        raise ValueError("nothing is being saved or loaded")
    found: Save | Load = held[0]
    return found


def _save(session: Session) -> Save:
    found = _any(session)
    if not isinstance(found, Save):
        raise ValueError("nothing is being saved")
    return found


def _load(session: Session) -> Load:
    found = _any(session)
    if not isinstance(found, Load):
        raise ValueError("nothing is being loaded")
    return found


VERBS = {
    "save-open": save_open,
    "save-take": save_take,
    "save-aside": save_aside,
    "save-drop": save_drop,
    "save-ready": save_ready,
    "save-differ": save_differ,
    "save-start": save_start,
    "save-names": save_names,
    "load-open": load_open,
    "load-make": load_make,
    "load-take": load_take,
    "load-want": load_want,
    "load-start": load_start,
    "staging-poll": staging_poll,
    "staging-stop": staging_stop,
    "staging-close": staging_close,
}

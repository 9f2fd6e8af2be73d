"""Threads that work through the chunks of device memory, each with pinned memory for one.

One copies from the GPU, hashes what has arrived and writes it, while others do the same with other chunks; on the way
back one reads, compares and copies.
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

from limosa.gpu.vmm import Contexts, Piece, call
from limosa.parking.mover_protocol import MOST_THREADS


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


class Ring:
    """Pinned memory for one chunk for each of several threads; each is pinned when it is first needed.

    512 MB at once took 0.15 s before the first chunk was copied (H200).
    """

    def __init__(self, chunk: int):
        self._chunk = chunk
        self._pinned: dict[int, Pinned] = {}

    def slot(self, n: int) -> Slot:
        """The n-th thread's; a context is current."""
        if n not in self._pinned:
            self._pinned[n] = Pinned(1, self._chunk)
        return self._pinned[n].slot(0)

    def close(self) -> None:
        """Unpin all."""
        for one in self._pinned.values():
            one.close()
        self._pinned.clear()


class Slot(NamedTuple):
    """Pinned memory for one chunk: where it is, and its bytes."""

    at: int
    view: memoryview


class Hand:
    """What one thread works with: pinned memory for a chunk, a stream on each GPU."""

    def __init__(self, contexts: Contexts, slot: Slot):
        self.slot = slot
        self._contexts = contexts
        self._streams: dict[str, Any] = {}

    def out(self, memory: Piece, offset: int, size: int, gpu: str, slot: Slot) -> None:
        """Copy a part of a piece to pinned memory."""
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
            others: list[threading.Thread] = []
            try:
                for n in range(1, count):
                    other = threading.Thread(target=self._one, args=(n,), name=f"staging-{n}")
                    other.start()
                    others.append(other)
                self._one(0)
            except BaseException as error:  # no more threads can be had: those that there are end first
                self._fail(error)
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


BESIDE, ENDING, ALL = 4, 2, 1
"""What part of the processors: beside a job that runs on; beside one that is to end; where none runs.

Half of 32 took 12 % of the steps of a job that waits for its processor and made 0.9 ms steps (two H200).
"""


def default_threads(part: int) -> int:
    """How many threads: such a part of the processors."""
    return max(2, min(MOST_THREADS, len(os.sched_getaffinity(0)) // part))

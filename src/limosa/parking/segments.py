"""The arena: host memory that takes device memory in, in segments, each a memfd of its own.

A suspended process has segments to itself (CRIU writes them to disk with it, and nobody else's bytes); those that
nobody uses are kept for the next. The vault makes them and says whose they are, the mover pins them. All segments of a
process but its last have ``LARGE`` bytes; sizes are powers of two, so that one fits where another was.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence

from limosa.ipc.sealed import SEALED, sealed_file, seals_of

LARGE, SMALL = 1 << 30, 32 << 20
NAME = "limosa-arena"
_AS_LARGE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


def sizes_for(bytes_: int) -> list[int]:
    """Return the sizes of the segments that so many bytes take.

    Example:
        >>> [size >> 20 for size in sizes_for(2500 << 20)]
        [1024, 1024, 512]
    """
    whole, rest = divmod(bytes_, LARGE)
    return [LARGE] * whole + ([max(SMALL, 1 << (rest - 1).bit_length())] if rest else [])


def room_for(bytes_: int) -> int:
    """Return how many bytes of arena so many bytes of device memory take."""
    return sum(sizes_for(bytes_))


def exactly(bytes_: int) -> list[int]:
    """Return the sizes of segments that are so many bytes together: to a multiple of ``SMALL``, rounded up.

    Example:
        >>> [size >> 20 for size in exactly(1500 << 20)]
        [1024, 256, 128, 64, 32]
    """
    whole, rest = divmod(-(-bytes_ // SMALL) * SMALL, LARGE)
    powers = (1 << bit for bit in range(LARGE.bit_length() - 2, SMALL.bit_length() - 2, -1))
    return [LARGE] * whole + [size for size in powers if rest & size]


def is_segment(fd: int) -> bool:
    """Return whether a descriptor is of a segment: it stays as large as it is; what says what is in them is sealed."""
    return seals_of(fd) & SEALED == _AS_LARGE


def fits(fd: int, bytes_: int) -> bool:
    """Return whether a descriptor is of a segment that is at least so large."""
    return is_segment(fd) and os.fstat(fd).st_size >= bytes_


class NoRoom(Exception):
    """The arena may not grow so far."""


class Pool:
    """The segments that nobody uses.

    Args:
        close: closes one that is not needed any more.

    Attributes:
        free: descriptors with their size and when they were last used.
        reserved: bytes that are to be there, free or not, until a moment (monotonic seconds).
    """

    def __init__(self, close: Callable[[int], None] = os.close) -> None:
        self._shut = close
        self.free: list[tuple[int, int, float]] = []
        self.reserved, self.until = 0, 0.0

    def bytes(self) -> int:
        """Return how many bytes nobody uses."""
        return sum(size for _, size, _ in self.free)

    def take(self, sizes: Sequence[int], used: int, cap: int) -> list[int]:
        """Return segments of sizes as :func:`sizes_for` gives them: free ones first, what is missing is made.

        With ``used`` bytes in use the arena may be no larger than the cap: free segments go where they are in the way.
        Raises NoRoom: it would become larger; nothing was taken.
        """
        if used + sum(sizes) > cap:
            raise NoRoom
        found: list[int] = []
        try:
            for size in sizes:
                # The smallest that does (all but the last must have their size), and of these the latest used.
                fit = [entry for entry in self.free if entry[1] >= size]
                if fit:
                    entry = min(fit, key=lambda e: (e[1], -e[2]))
                    self.free.remove(entry)
                    found.append(entry[0])
                else:
                    found.append(make(size))
            used += sum(os.fstat(fd).st_size for fd in found)
        except BaseException:
            self.give_back(found)
            raise
        while self.free and used + self.bytes() > cap:
            self._close(min(self.free, key=lambda e: e[2]))
        if self.reserved:  # it is to be so large, and what did not fit would come on top of that
            self.trim(used, 0.0)
        return found

    def lend(self, fds: Sequence[int]) -> None:
        """Have segments among those that may be taken next; :meth:`take_back` if they were not."""
        now = time.monotonic()
        self.free += [(fd, os.fstat(fd).st_size, now) for fd in fds]

    def take_back(self, fds: Sequence[int]) -> None:
        """Have them no more."""
        self.free = [entry for entry in self.free if entry[0] not in fds]

    def give_back(self, fds: Sequence[int]) -> None:
        """Take descriptors back: segments for the next, the rest is closed."""
        for fd in fds:
            if is_segment(fd):
                self.free.append((fd, os.fstat(fd).st_size, time.monotonic()))
            else:
                self._shut(fd)

    def reserve(self, bytes_: int, until: float, used: int, cap: int) -> None:
        """Have so many bytes there, used and free together, until a moment; 0: what is used alone.

        Raises NoRoom: the arena may not be so large.
        """
        if bytes_ > cap:
            raise NoRoom
        self.reserved, self.until = bytes_, until
        room = max(0, bytes_ - used)
        for entry in sorted(self.free, key=lambda e: -e[1]):
            if entry[1] <= room:
                room -= entry[1]
            else:
                self._close(entry)
        now = time.monotonic()
        for size in exactly(room):  # each counts as soon as it is there
            self.free.append((make(size), size, now))

    def trim(self, used: int, idle: float) -> None:
        """Let go of what has not been used for so many seconds and is not reserved."""
        now = time.monotonic()
        if now > self.until:
            self.reserved = 0
        for entry in sorted(self.free, key=lambda e: e[2]):
            if now - entry[2] >= idle and used + self.bytes() - entry[1] >= self.reserved:
                self._close(entry)

    def _close(self, entry: tuple[int, int, float]) -> None:
        self.free.remove(entry)
        self._shut(entry[0])


def make(size: int) -> int:
    """Return a new segment; no memory is taken before it is touched.

    Its size is sealed: whoever has mapped it does not die of somebody who cuts it off.
    """
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _AS_LARGE | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def layout_file(text: bytes) -> int:
    """Return a descriptor of a small file that cannot be changed any more."""
    return sealed_file(text, NAME)

"""Reading the small files of ``/proc`` without Python's file objects: a look at a job opens thousands of them.

Not all of them are small: with ``prctl(PR_SET_MM)`` anybody makes his command line and environment as large as he likes
at no cost, and 60,000 mappings have 200 MB of ``maps``. Each way to read one has a bound for what it keeps in memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from limosa.process.openat import closing

MOST = 64 << 20
"""Far more than the lists of mounts and descriptors of a large machine have."""
MOST_ENVIRONMENT = 6 << 20
"""What ``execve`` takes (the kernel's fs/exec.c): only who has changed it afterwards has more."""
MOST_COMMAND = 1 << 16
"""Of a command line, which is only shown."""


class TooLong(PermissionError):
    """A file of ``/proc`` is longer than it may be: it counts as one that may not be read."""


def slurp(path: str, size: int = 4096, most: int = MOST) -> bytes:
    """Return a file's whole content.

    Args:
        path: the file.
        size: bytes to read at a time; most files of ``/proc`` come in one piece.
        most: bytes that it may have.

    Raises:
        TooLong: it has more.
        OSError: it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, size)
        # A file of /proc gives less than was asked for when it ends, and also between two lines of a long one.
        if not data:
            return data
        parts, length = [data], len(data)
        while more := os.read(fd, size):
            length += len(more)
            if length > most:
                raise TooLong(errno.EFBIG, f"it has more than {most} bytes", path)
            parts.append(more)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(fd)


def head(path: str, most: int) -> bytes:
    """Return a file's first bytes, for what is only shown, or looked for at its beginning.

    Raises:
        OSError: it cannot be opened or read.
    """
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        data = b""
        while len(data) < most and (more := os.read(fd, most - len(data))):
            data += more
        return data


def pieces(path: str, size: int = 1 << 16) -> Iterator[bytes]:
    """Yield a long file in pieces of whole lines, so that it is never in memory as a whole.

    Raises:
        OSError: it cannot be opened or read.
    """
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        rest = b""
        while data := os.read(fd, size):
            whole, newline, rest = (rest + data).rpartition(b"\n")
            if newline:
                yield whole + newline
        if rest:
            yield rest


def lines(path: str, size: int = 1 << 16) -> Iterator[bytes]:
    """Yield a long file line by line. A name may have any line end in it but this one, which the kernel escapes.

    Raises:
        OSError: it cannot be opened or read.
    """
    for piece in pieces(path, size):
        yield from piece.removesuffix(b"\n").split(b"\n")

"""Reading the small files of ``/proc`` without Python's file objects: a look at a job opens thousands of them."""

from __future__ import annotations

import os


def slurp(path: str, size: int = 4096) -> bytes:
    """Return a file's whole content.

    Args:
        path: the file.
        size: bytes to read at a time; most files of ``/proc`` come in one piece.

    Raises:
        OSError: it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, size)
        # A file of /proc gives less than was asked for when it ends, and also between two lines of a long one.
        if not data:
            return data
        parts = [data]
        while more := os.read(fd, size):
            parts.append(more)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(fd)

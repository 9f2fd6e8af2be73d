"""Files in memory that nobody can change any more (memfd_create(2), F_ADD_SEALS in fcntl(2))."""

from __future__ import annotations

import fcntl
import os

SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
"""Nobody can change such a file any more."""


def sealed_file(text: bytes, name: str = "limosa") -> int:
    """Return a descriptor of a small file that cannot be changed any more; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(text)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALED | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seals_of(fd: int) -> int:
    """Return the seals of a file in memory; 0 for anything else."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def is_sealed(fd: int) -> bool:
    """Return whether a descriptor is of a file that nobody can change any more."""
    return seals_of(fd) & SEALED == SEALED

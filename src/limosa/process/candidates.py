"""The whole machine at a glance: which processes could hold CUDA state at all.

NVML does not list a suspended job, so ``limosa ps`` asks the driver about each process that has libcuda mapped.
"""

from __future__ import annotations

import os
import re

from limosa.process.slurp import head, pieces

_OWN_NAMES = (b"limosa-mover", b"limosa-vault", b"limosa-worker")
_OWN_COMMANDS = re.compile(rb"/limosa/boot\.py\0[^\0]*\0limosa\.(parking\.resident_main|gpu\.worker_main)\0")
"""Of one that has not taken its name yet."""
_MOST_NAME = 4096
MOST_OF_MAPS = 16 << 20
"""Bytes: 65,530 mappings, which is as many as a process may have, of files with names of an ordinary length."""


def is_own(pid: int) -> bool:
    """Return whether a process is Limosa's own (mover, vault, worker), whoever started it: it is nobody's job."""
    try:
        if head(f"/proc/{pid}/comm", _MOST_NAME).rstrip() in _OWN_NAMES:
            return True
        return _OWN_COMMANDS.search(head(f"/proc/{pid}/cmdline", _MOST_NAME)) is not None
    except OSError:
        return False


def _has_libcuda(pid: int) -> bool:
    """Whether it has, or its mappings are too many to be gone through: then the driver has to say."""
    read = 0
    for lines in pieces(f"/proc/{pid}/maps"):
        if b"/libcuda.so" in lines or (read := read + len(lines)) > MOST_OF_MAPS:
            return True
    return False


def may_use_cuda(pid: int) -> bool:
    """Return whether a process has libcuda mapped; True where it may not be looked at, False where it is gone."""
    try:
        return _has_libcuda(pid)
    except PermissionError:
        return True
    except OSError:
        return False


def may_be_seen(pid: int) -> bool:
    """Return whether a process's mappings may be read (another user's may not); True where it is gone."""
    try:
        os.close(os.open(f"/proc/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def candidates() -> list[int]:
    """Return the pids of all processes that have libcuda mapped, ascending.

    Processes whose mappings may not be read (other users', without root) are left out: the driver would not let
    their state be asked either.
    """
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if _has_libcuda(int(name)) and not is_own(int(name)):
                found.append(int(name))
        except OSError:
            continue
    return sorted(found)

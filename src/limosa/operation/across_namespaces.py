"""No two operations on a job from different pid namespaces: Limosa in a container, and Limosa on its host.

Claims are files, and a container's are its own: neither sees the other's. What both can open is the job's pid
namespace itself (``/proc/PID/ns/pid``), which is one file of the kernel's. Each takes a shared lock on a byte of it,
which says from how far above it looks at the namespace, and then asks whether anybody has another byte. Both may see
each other and give way. Those of one namespace share the byte: claims are between them.

The kernel lets nobody open that file who may not trace the process, so nobody holds up another user; and it takes the
lock away with whoever has it. It is asked for only where a job, or the caller, is in a pid namespace that is not the
machine's first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import struct
import threading
import time
from collections.abc import Iterable, Iterator

from limosa.errors import Busy
from limosa.process.identity import Identity
from limosa.process.namespaces import level_of, namespace_of

_FIRST = 0xEFFFFFFC  # the inode of the machine's first pid namespace (PROC_PID_INIT_INO)
_FLOCK = "hhqqi0q"  # struct flock
_PATIENCE = 1.0
_held: dict[str, list[int]] = {}
_changing = threading.Lock()


def hold(operation: str, processes: Iterable[Identity]) -> None:
    """Keep Limosa of other pid namespaces away from the namespaces that these processes are in.

    Args:
        operation: whose lock it is.
        processes: the processes that it works on.

    Raises:
        Busy: one of them works on a job there.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        taken, busy = _take(processes)
        if not busy:
            with _changing:
                _held.setdefault(operation, []).extend(taken)
            return
        for fd in taken:
            os.close(fd)
        if time.monotonic() > end:
            raise Busy(pid=busy, by="a limosa of another pid namespace (in the container, or outside of it)")
        time.sleep(random.uniform(0.01, 0.1))  # noqa: S311 - who goes first


def let_go(operation: str) -> None:
    """Let others work there again."""
    with _changing:
        fds = _held.pop(operation, [])
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def held(operation: str, processes: Iterable[Identity]) -> Iterator[None]:
    """As :func:`hold`, for a while."""
    hold(operation, processes)
    try:
        yield
    finally:
        let_go(operation)


def _take(processes: Iterable[Identity]) -> tuple[list[int], int]:
    """The locks of all namespaces; and a process in one where somebody else is at work, 0 where nobody is."""
    taken: list[int] = []
    seen: set[tuple[int, int] | None] = {None}
    first = namespace_of("self", "pid")
    if first is not None and first[1] == _FIRST:
        seen.add(first)
    for identity in processes:
        namespace = namespace_of(identity.pid, "pid")
        if namespace in seen:
            continue
        seen.add(namespace)
        level = level_of(identity.pid)
        try:
            fd = os.open(f"/proc/{identity.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # it has gone, or is not the caller's to work on
        taken.append(fd)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, level, 1))
        if _is_taken(fd, 0, level) or _is_taken(fd, level + 1, 0):
            return taken, identity.pid
    return taken, 0


def _is_taken(fd: int, begin: int, length: int) -> bool:
    """Whether another has one of these bytes; a length of 0 is all that follow."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, begin, length))
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def _lock(kind: int, begin: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, begin, length, 0)

"""A job's namespaces as the kernel tells them: which of ours it shares, and what its pids are called here.

A process in a container tells others by the pids of its own pid namespace. Here the same process has another pid
(``NSpid`` in ``/proc/PID/status``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import threading
from collections.abc import Callable, Collection

from limosa.process.openat import closing, last_error
from limosa.process.status import status_of

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
_NS_GET_PARENT = 0xB702  # ioctl_ns(2)
_MOST_LEVELS = 33  # pid_namespaces(7): 32 below the first
_libc = ctypes.CDLL(None, use_errno=True)


def namespace_of(pid: int | str, kind: str) -> tuple[int, int] | None:
    """Return what names one of a process's namespaces; None where it has gone or may not be asked.

    Args:
        pid: the process, or "self".
        kind: "pid", "net", "mnt", "user" …
    """
    try:
        found = os.stat(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_ours(pid: int, kind: str) -> bool:
    """Return whether a process is in the caller's namespace of that kind, also where that cannot be told."""
    return namespace_of(pid, kind) in (None, namespace_of("self", kind))


def is_first(pid: int) -> bool:
    """Return whether a process is the first one of a pid namespace that is not the caller's."""
    return not is_ours(pid, "pid") and _numbers(pid)[-1:] == [1]


def inside(pid: int) -> int:
    """Return what a process is called in its own pid namespace; 0 where it has gone."""
    return next(iter(_numbers(pid)[-1:]), 0)


def level_of(pid: int) -> int:
    """Return how many pid namespaces a process is in, of those that the caller sees: 1 for one of the caller's own."""
    return len(_numbers(pid))


def namespaces_above(pid: int, kind: str) -> list[tuple[int, int]]:
    """Return what names a namespace of a process and those above that, as far as the caller may see them.

    Args:
        pid: the process.
        kind: "pid" or "user".
    """
    found = []
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        for _ in range(_MOST_LEVELS):
            with closing(fd):
                info = os.fstat(fd)
                found.append((info.st_dev, info.st_ino))
                fd = fcntl.ioctl(fd, _NS_GET_PARENT)
        os.close(fd)
    return found


def enter(fd: int, kind: int) -> None:
    """Have the calling thread enter an open namespace (setns(2)).

    Raises:
        OSError: it may not.
    """
    if _libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)):
        raise last_error()


def in_a_thread(call: Callable[[], None]) -> None:
    """Make a call in a thread of its own: the kernel has namespaces, users and masks by thread.

    Raises:
        BaseException: what the call raised.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="limosa-apart")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


class Pids:
    """What the processes of a pid namespace are called here.

    Args:
        pid: a process in that namespace.
    """

    def __init__(self, pid: int):
        self._level = len(_numbers(pid))
        self._namespace = namespace_of(pid, "pid")

    def here(self, inner: int) -> int:
        """Return the pid that a process of the namespace has here; 0 where there is none of that number."""
        return self.all_here({inner}).get(inner, 0)

    def all_here(self, inner: Collection[int]) -> dict[int, int]:
        """Return which pids processes of the namespace have here, of those that there are.

        However many are asked for, all processes of the machine are looked at once: who asks may have been told them by
        a process of the namespace, and that may tell of as many as it likes.
        """
        found: dict[int, int] = {}
        for name in os.listdir("/proc") if inner else []:
            if not name.isdigit():
                continue
            numbers = _numbers(int(name))
            number = numbers[self._level - 1] if len(numbers) >= self._level > 0 else 0
            if number in inner and number not in found and self._is_in(int(name)):
                found[number] = int(name)
        return found

    def _is_in(self, pid: int) -> bool:
        """Whether a process is in the namespace, or in one that was made in it."""
        return self._namespace in namespaces_above(pid, "pid")


def _numbers(pid: int) -> list[int]:
    """A process's pids, ours first and its own last; nothing where it has gone."""
    try:
        return [int(word) for word in status_of(pid).get("NSpid", [])]
    except OSError:
        return []

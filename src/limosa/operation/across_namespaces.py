"""No two operations on a job from different pid namespaces: Limosa in a container, and Limosa on its host.

Claims are files, and a container's are its own: neither sees the other's. What both can open is the job's pid
namespace itself (``/proc/PID/ns/pid``), which is one file of the kernel's. Each takes a shared lock on a byte of it,
which says from how far above it looks at the namespace, and then asks whether anybody has another byte. Both may see
each other and give way. Those of one namespace share the byte: claims are between them. The kernel takes a lock away
with whoever has it. It is asked for only where a job, or the caller, is in a pid namespace that is not the machine's
first.

Everybody in that namespace can open the file, as his own, and take a lock on it, also who may not touch the job. The
kernel does not say who has a lock of this kind. Root in the first namespace sees every process, and finds out whether
one of those has it who may work on the job (:func:`_has_a_say`), for five seconds: a stranger's counts for nothing.
All others see too little for that, and give way to any lock: so a stranger in the container can keep off Limosa in
there, and that of other users than root outside. Where the job is the whole container nobody in there is a stranger: he
owns a part of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from limosa.errors import Busy
from limosa.process.identity import Identity
from limosa.process.namespaces import level_of, namespace_of, namespaces_above
from limosa.process.slurp import slurp
from limosa.process.status import effective_capabilities, uids_of

_FIRST = 0xEFFFFFFC  # the inode of the machine's first pid namespace (PROC_PID_INIT_INO)
_Namespace: TypeAlias = "tuple[int, int] | None"
_FLOCK = "hhqqi0q"  # struct flock
_PATIENCE = 1.0
_LOOKING = 5.0  # seconds; who else is at work waits ten for the lock of all claims
_CAP_SYS_PTRACE = 1 << 19
_MOST_FDS = 1 << 17
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
    inside: dict[_Namespace, list[Identity]] = {}
    for identity in processes:
        inside.setdefault(namespace_of(identity.pid, "pid"), []).append(identity)
    doubtful: list[tuple[int, int, list[Identity]]] = []
    for namespace, job in inside.items():
        if namespace in seen:
            continue
        identity = job[0]
        level = level_of(identity.pid)
        try:
            fd = os.open(f"/proc/{identity.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # it has gone, or is not the caller's to work on
        taken.append(fd)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, level, 1))
        if not _is_taken(fd, 0, level) and not _is_taken(fd, level + 1, 0):
            continue
        if os.geteuid() != 0 or first is None or first[1] != _FIRST:
            return taken, identity.pid
        doubtful.append((fd, level, job))
    # A job may have thousands of namespaces: the machine's processes are looked at once, when all locks are taken.
    others, end = _in_namespaces() if doubtful else {}, time.monotonic() + _LOOKING
    for fd, level, job in doubtful:
        if _is_believed(fd, level, job, others, end):
            return taken, job[0].pid
    return taken, 0


def _in_namespaces() -> dict[_Namespace, list[int]]:
    """The processes that are in other pid namespaces than ours, by these; None for those that cannot be asked."""
    found: dict[_Namespace, list[int]] = {}
    for name in os.listdir("/proc"):
        # A Limosa of another level sees the job, and is not in our namespace.
        if name.isdigit() and level_of(int(name)) > 1:
            found.setdefault(namespace_of(int(name), "pid"), []).append(int(name))
    return found


def _is_believed(
    fd: int, level: int, job: Iterable[Identity], others: Mapping[_Namespace, Sequence[int]], end: float
) -> bool:
    """Whether somebody who may work on a job has a lock of another level.

    Who cannot be looked at, or not until ``end`` (time.monotonic()), has one.
    """
    inode, users, above = os.fstat(fd).st_ino, {0}, set[_Namespace]()
    within: set[_Namespace] = set()
    for identity in job:
        within |= set(namespaces_above(identity.pid, "pid"))
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            users.add(uids_of(identity.pid)[1])
            above |= set(namespaces_above(identity.pid, "user"))
    within -= {namespace_of("self", "pid")}
    for pid in (pid for namespace in (None, *within) for pid in others.get(namespace, ())):
        if time.monotonic() > end:
            return True
        try:
            if _has_a_say(pid, users, above) and _has_lock(pid, inode, level):
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has gone, and its lock with it
        except OSError:
            return True
    return False


def _has_a_say(pid: int, users: Collection[int], above: Collection[_Namespace]) -> bool:
    """Whether a process may work on a job: it is root's or the job's user's, or may trace what is in a container.

    All its ids count: of a program that is set-uid, whoever has started it can have opened what it has open.

    Args:
        pid: the process.
        users: root, and whose the job's processes are.
        above: the user namespaces that those are in, and those above.
    """
    own = set(uids_of(pid))
    if own <= set(users):
        return True
    return len(own) == 1 and bool(effective_capabilities(pid) & _CAP_SYS_PTRACE) and namespace_of(pid, "user") in above


def _has_lock(pid: int, inode: int, level: int) -> bool:
    """Whether a process has a lock of another level on the namespace's file."""
    for number, fd in enumerate(os.listdir(f"/proc/{pid}/fd")):
        if number > _MOST_FDS:
            return True  # whoever has so many is the job's user, or root: it is theirs to say
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{fd}") != f"pid:[{inode}]":
                continue
            for line in slurp(f"/proc/{pid}/fdinfo/{fd}").split(b"\n"):
                # lock: 1: OFDLCK ADVISORY READ -1 00:04:4026532271 2 2
                words = line.split()
                if words[:1] == [b"lock:"] and words[-2:] != [b"%d" % level] * 2:
                    return True
    return False


def _is_taken(fd: int, begin: int, length: int) -> bool:
    """Whether another has one of these bytes; a length of 0 is all that follow."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, begin, length))
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def _lock(kind: int, begin: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, begin, length, 0)

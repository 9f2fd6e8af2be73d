"""A process's open descriptors: what each refers to, from ``/proc/PID/fd`` and ``/proc/PID/fdinfo``."""

from __future__ import annotations

import contextlib
import os
import stat as stat_bits
from collections.abc import Mapping
from typing import NamedTuple

from limosa.errors import LimosaError
from limosa.process.identity import read_stat
from limosa.process.observation import FdObservation
from limosa.process.slurp import slurp

_DELETED = " (deleted)"
_ANONYMOUS = {
    "eventfd": "eventfd",
    "eventpoll": "epoll",
    "io_uring": "io_uring",
    "inotify": "inotify",
    "fanotify": "fanotify",
    "signalfd": "signalfd",
    "timerfd": "timerfd",
    "pidfd": "pidfd",
}
_FILE_LIKE = ("file", "dir", "fifo", "device", "block", "path")
ANONYMOUS_SHARED = f"/dev/zero{_DELETED}"
"""What the kernel calls shared memory without a name, which is open where /proc/PID/map_files was opened."""
# Size that a POSIX message queue's inode always shows (FILENT_SIZE in the kernel's ipc/mqueue.c).
_MQUEUE_SIZE = 80


def _character_device(target: str, rdev: int) -> str:
    major, minor = os.major(rdev), os.minor(rdev)
    if 136 <= major <= 143 or (major, minor) == (5, 2):  # Unix98 pty slaves, /dev/ptmx
        return "pty"
    # 4: virtual consoles and ttyS; 5: /dev/tty and /dev/console (the kernel's admin-guide/devices.txt); others by name.
    if major in (4, 5) or target.startswith(("/dev/tty", "/dev/console", "/dev/hvc")):
        return "tty"
    return "device"


_TRIES = 3  # looks at a descriptor that changes all the time


def kind_of(target: str, info: os.stat_result | None) -> str:
    """Return the kind of a descriptor (see :class:`FdObservation`) from its link's text and stat."""
    if target.startswith("pipe:["):
        return "pipe"
    if target.startswith("anon_inode:"):
        return _ANONYMOUS.get(target[11:].strip("[]"), "anon")
    if target.startswith("pidfd:["):
        return "pidfd"
    if target.startswith("/memfd:"):
        return "memfd"
    if target.startswith("/secretmem"):
        return "secretmem"
    if info is None:
        return "anon"
    mode = info.st_mode
    if stat_bits.S_ISREG(mode):
        if target == ANONYMOUS_SHARED:
            return "memfd"
        # Files of nsfs are regular and called "net:[4026531840]".
        return "namespace" if not target.startswith("/") and ":[" in target else "file"
    if stat_bits.S_ISDIR(mode):
        return "dir"
    if stat_bits.S_ISFIFO(mode):
        return "fifo"
    if stat_bits.S_ISSOCK(mode):
        return "socket"
    if stat_bits.S_ISCHR(mode):
        return _character_device(target, info.st_rdev)
    return "block" if stat_bits.S_ISBLK(mode) else "anon"


def _fill_from_fdinfo(entry: FdObservation, folder: str) -> None:
    for line in slurp(f"{folder}/fdinfo/{entry.fd}").splitlines():
        key, _, value = line.partition(b":")
        if key == b"pos":
            entry.position = int(value)
        elif key == b"flags":
            entry.flags = int(value, 8)
        elif key == b"mnt_id":
            entry.mount_id = int(value)
        elif key == b"lock":
            entry.locks.append(" ".join(value.decode(errors="replace").split()))
        elif key == b"tty-index":
            entry.tty_index = int(value)
        elif key == b"Pid":
            entry.watched_pid = int(value)
        elif key not in (b"ino", b"size"):
            break  # what follows is long and not used (epoll's targets, io_uring's rings)


class Mount(NamedTuple):
    """A mount, as a process sees it: where it is, and which part of a procfs it shows (None: it is of another kind)."""

    point: str
    proc_root: str | None

    def inside(self, target: str) -> str:
        """The path in its procfs of a file that is called ``target``; "" where it is on another file system."""
        if self.proc_root is None:
            return ""
        below = target.removeprefix(self.point).lstrip("/")
        return f"{self.proc_root.strip('/')}/{below}".strip("/")


def read_mounts(folder: str) -> dict[int, Mount]:
    """Return the mounts that ``/proc/PID`` sees, by id (proc_pid_mountinfo(5))."""
    found = {}
    # Only what the kernel separates by: a user's mount may have any other line end or blank in its name.
    for line in slurp(f"{folder}/mountinfo").split(b"\n")[:-1]:
        fields = os.fsdecode(line).split(" ")
        procfs = fields[fields.index("-", 6) + 1] == "proc"
        found[int(fields[0])] = Mount(fields[4], fields[3] if procfs else None)
    return found


def read_descriptors(folder: str, mounts: Mapping[int, Mount]) -> list[FdObservation]:
    """Return all descriptors of a process, ascending.

    Args:
        folder: ``/proc/PID``.
        mounts: the mounts that it sees.

    Raises:
        PermissionError: it is somebody else's.
        FileNotFoundError, ProcessLookupError: it has gone.
    """
    found = []
    for name in sorted(os.listdir(f"{folder}/fd"), key=int):
        for _ in range(_TRIES):
            try:
                entry, target = _read_descriptor(folder, int(name), mounts)
                # A number may be closed and opened again between the looks: what was read is then of two things.
                if entry.kind == "socket" or os.readlink(f"{folder}/fd/{name}") == target:
                    found.append(entry)
                    break
            except (FileNotFoundError, ProcessLookupError):
                break  # closed since
        else:
            found.append(entry)  # renamed all the time, say: it is there
    return found


def _read_descriptor(folder: str, number: int, mounts: Mapping[int, Mount]) -> tuple[FdObservation, str]:
    """Return one descriptor, and its link's text as it was at first.

    Raises:
        FileNotFoundError, ProcessLookupError: it has been closed.
    """
    path = f"{folder}/fd/{number}"
    target = os.readlink(path)
    entry = FdObservation(fd=number, target=target)
    if target.startswith("socket:["):
        # All that matters of a socket is in the kernel's tables; jobs have hundreds of them.
        entry.kind, entry.inode = "socket", int(target[8:-1])
        return entry, target
    _fill_from_fdinfo(entry, folder)
    try:
        info: os.stat_result | None = os.stat(path)
    except OSError:
        info = None
    if target.endswith(_DELETED):
        entry.target, entry.deleted = target[: -len(_DELETED)], True
    entry.kind = kind_of(target, info)
    if info is not None:
        entry.inode, entry.links = info.st_ino, info.st_nlink
        entry.dev = f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}"
        if stat_bits.S_ISREG(info.st_mode) and entry.kind != "namespace":
            entry.size = info.st_size
        if stat_bits.S_ISCHR(info.st_mode) or stat_bits.S_ISBLK(info.st_mode):
            entry.device = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
    if entry.flags & os.O_PATH:
        entry.kind = "path"
    if entry.kind in _FILE_LIKE:
        entry.mounted = entry.mount_id in mounts
        if entry.mounted and (inside := mounts[entry.mount_id].inside(entry.target)):
            entry.in_proc, entry.watched_pid = inside, _told_of(inside)
        if entry.kind == "file" and not entry.mounted and entry.size == _MQUEUE_SIZE and target.count("/") == 1:
            entry.kind = "mqueue"
    return entry, target


def _told_of(inside: str) -> int:
    """The process, or thread, that a file of procfs tells of, while it lives; 0."""
    first = inside.partition("/")[0]
    with contextlib.suppress(LimosaError):
        if first.isascii() and first.isdigit() and len(first) < 8 and not read_stat(int(first)).ended:
            return int(first)
    return 0

"""Which other processes hold what the job holds: one pass over their descriptors, and mappings where needed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from limosa.errors import NoSuchProcess, PermissionDenied
from limosa.ipc.packet import inode_at
from limosa.process.identity import read_stat
from limosa.process.observation import Peer
from limosa.process.slurp import pieces
from limosa.process.status import uids_of
from limosa.process.tree import pids

# A semaphore that one has by a name that is gone others have by its own.
_SHARED_LINE = re.compile(
    rb"^\S+ (..)\S\S \S+ (\S+) (\d+) +(?:.*\(deleted\)|\[anon_shmem:.*|/dev/shm/.*)$", re.MULTILINE
)

# A look at a descriptor takes some microseconds, and anybody may have millions. So far are users looked at who have no
# part in the job: what is beyond counts as what may not be looked into.
MOST_DESCRIPTORS = 100_000
"""Of one user."""
MOST_OF_MAPS = 256 << 20
"""Bytes, of one user."""
SECONDS = 10.0
"""For all these users together: somebody may have many uids (``/etc/subuid``)."""


class _TooMuch(Exception):
    """A user has more than is looked at."""


class _Strangers:
    """How far users who have no part in the job are looked at."""

    def __init__(self) -> None:
        self._end = time.monotonic() + SECONDS
        self._left: dict[int, tuple[int, int]] = {}

    def take(self, uid: int, descriptors: int = 0, maps: int = 0) -> None:
        """Count what is looked at. Raises _TooMuch: it is not to be, and nothing of that user any more."""
        left = self._left.get(uid, (MOST_DESCRIPTORS, MOST_OF_MAPS))
        self._left[uid] = left = left[0] - descriptors, left[1] - maps
        if min(left) < 0 or time.monotonic() > self._end:
            raise _TooMuch


class Wanted(msgspec.Struct):
    """What to look for: link texts, pty numbers whose master is wanted, (device, inode) of nameless shared memory."""

    targets: set[str] = msgspec.field(default_factory=set)
    masters: set[int] = msgspec.field(default_factory=set)
    memory: set[tuple[int, int]] = msgspec.field(default_factory=set)

    @property
    def empty(self) -> bool:
        """Nothing to look for."""
        return not (self.targets or self.masters or self.memory)


class Found(msgspec.Struct):
    """The processes found, under the same keys.

    Attributes:
        hidden: processes whose descriptors could not be read, or were too many.
        crowded: of these, those that have too many.
        newborn: a process was left out because it joined the tree after that was read, or has ended meanwhile.
    """

    targets: dict[str, list[Peer]] = msgspec.field(default_factory=dict)
    masters: dict[int, list[Peer]] = msgspec.field(default_factory=dict)
    memory: dict[tuple[int, int], list[Peer]] = msgspec.field(default_factory=dict)
    hidden: int = 0
    crowded: int = 0
    newborn: bool = False


def _access(path: str) -> str:
    """Return how a descriptor is open, which the mode of its link under ``/proc/PID/fd`` shows (proc(5))."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    return ("r" if mode & 0o400 else "") + ("w" if mode & 0o200 else "")


def name_of(pid: int) -> str:
    """Return a process's name, "" where it has gone."""
    try:
        return read_stat(pid).name
    except (NoSuchProcess, PermissionDenied):
        return ""


def _tty_index(pid: int, fd: str) -> int:
    try:
        with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as file:
            for line in file:
                if line.startswith("tty-index:"):
                    return int(line.split(":")[1])
    except (OSError, ValueError):
        pass
    return -1


def _uids(pid: int) -> set[int]:
    """The users that a process is of. The folder's owner tells less: what may not be dumped is root's by that."""
    try:
        return set(uids_of(pid))
    except OSError:
        return set()


def _born_into(pid: int, inside: set[int]) -> bool:
    """Return whether a process descends from the tree (it was started after the tree was read), or has ended.

    What has ended holds nothing any more, and nobody can tell whose child it was: the kernel calls it 0's for a moment.
    """
    for _ in range(64):
        try:
            seen = read_stat(pid)
        except NoSuchProcess:
            return True
        except PermissionDenied:
            return False
        if seen.ended:
            return True
        pid = seen.ppid
        if pid in inside:
            return True
        if pid <= 1:
            break
    return False


class _Search:
    """One pass over the other processes."""

    def __init__(self, wanted: Wanted, inside: set[int]):
        self.wanted, self.inside, self.found = wanted, inside, Found()
        self.strangers = _Strangers()
        self.inodes = {b" %d " % inode for _, inode in wanted.memory}

    def everybody(self) -> None:
        """Look at all processes: first at those of root and of the job's users, which cannot be crowded out."""
        known = {0, os.getuid()}.union(*(_uids(pid) for pid in self.inside))
        strangers = []
        for pid in pids():
            if pid not in self.inside:
                strange = _uids(pid) - known
                if strange:
                    strangers.append((pid, min(strange)))
                else:
                    self.process(pid)
        self.strangers = _Strangers()
        for pid, uid in strangers:
            self.process(pid, uid)

    def process(self, pid: int, stranger: int = 0) -> None:
        """Look at one process's descriptors, and at its mappings where memory is looked for.

        ``stranger``: whose it is, where that user has no part in the job.
        """
        hits: list[tuple[dict[Any, list[Peer]], Any, Peer]] = []
        try:
            if stranger:
                self.strangers.take(stranger)
            hits += self._descriptors(pid, stranger)
            if self.wanted.memory:
                hits += self._mappings(pid, stranger)
        except PermissionError:
            self.found.hidden += 1
            return
        except _TooMuch:
            self.found.hidden += 1
            self.found.crowded += 1
            return
        except OSError:
            return
        if hits and _born_into(pid, self.inside):
            self.found.newborn = True
            return
        for where, key, peer in hits:
            where.setdefault(key, []).append(peer)

    def _descriptors(self, pid: int, stranger: int) -> Iterator[tuple[dict[Any, list[Peer]], Any, Peer]]:
        wanted, found = self.wanted, self.found
        folder = f"/proc/{pid}/fd"
        names = os.listdir(folder)
        if stranger:
            self.strangers.take(stranger, descriptors=len(names))
        for fd in names:
            path = f"{folder}/{fd}"
            try:
                target = os.readlink(path)
            except OSError:
                continue
            if target in wanted.targets:
                yield found.targets, target, Peer(pid=pid, name=name_of(pid), fd=int(fd), access=_access(path))
            elif wanted.masters and target.endswith("/ptmx"):
                index = _tty_index(pid, fd)
                if index in wanted.masters:
                    yield found.masters, index, Peer(pid=pid, name=name_of(pid), fd=int(fd), access="rw")
            elif wanted.memory and target.endswith(" (deleted)"):
                try:
                    key = inode_at(path)  # any user's file, perhaps on his own file system: it is not asked
                except OSError:
                    continue
                if key in wanted.memory:
                    yield found.memory, key, Peer(pid=pid, name=name_of(pid), fd=int(fd), access=_access(path))

    def _mappings(self, pid: int, stranger: int) -> Iterator[tuple[dict[Any, list[Peer]], Any, Peer]]:
        seen = set()
        with contextlib.suppress(OSError):
            for data in pieces(f"/proc/{pid}/maps"):
                if stranger:
                    self.strangers.take(stranger, maps=len(data))
                if not any(inode in data for inode in self.inodes):
                    continue  # quick: most processes have none of them
                for match in _SHARED_LINE.finditer(data):
                    major, _, minor = match[2].partition(b":")
                    key = (os.makedev(int(major, 16), int(minor, 16)), int(match[3]))
                    if key in self.wanted.memory and key not in seen:
                        seen.add(key)
                        access = "rw" if match[1] == b"rw" else "r"
                        yield self.found.memory, key, Peer(pid=pid, name=name_of(pid), access=access)


def look(wanted: Wanted, tree: Iterable[int]) -> Found:
    """Look through every process outside of a job's tree.

    Args:
        wanted: what to look for.
        tree: the job's pids, which are left out.

    Returns:
        What was found. Processes that cannot be read (other users', without root) are counted in ``hidden``, and so are
        those of users without a part in the job who have too much to be looked at.
    """
    search = _Search(wanted, set(tree))
    if not wanted.empty:
        search.everybody()
    return search.found

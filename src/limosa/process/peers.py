"""Which other processes hold what the job holds: one pass over their descriptors, and mappings where needed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from limosa.errors import NoSuchProcess, PermissionDenied
from limosa.ipc.packet import inode_at
from limosa.process.identity import read_stat
from limosa.process.observation import Peer
from limosa.process.slurp import pieces
from limosa.process.tree import pids

# A semaphore that one has by a name that is gone others have by its own.
_SHARED_LINE = re.compile(
    rb"^\S+ (..)\S\S \S+ (\S+) (\d+) +(?:.*\(deleted\)|\[anon_shmem:.*|/dev/shm/.*)$", re.MULTILINE
)


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
        hidden: processes whose descriptors could not be read.
        newborn: a process was left out because it joined the tree after that was read, or has ended meanwhile.
    """

    targets: dict[str, list[Peer]] = msgspec.field(default_factory=dict)
    masters: dict[int, list[Peer]] = msgspec.field(default_factory=dict)
    memory: dict[tuple[int, int], list[Peer]] = msgspec.field(default_factory=dict)
    hidden: int = 0
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
        self.inodes = {b" %d " % inode for _, inode in wanted.memory}

    def process(self, pid: int) -> None:
        """Look at one process's descriptors, and at its mappings where memory is looked for."""
        hits: list[tuple[dict[Any, list[Peer]], Any, Peer]] = []
        try:
            hits += self._descriptors(pid)
        except PermissionError:
            self.found.hidden += 1
            return
        except OSError:
            return
        if self.wanted.memory:
            hits += self._mappings(pid)
        if hits and _born_into(pid, self.inside):
            self.found.newborn = True
            return
        for where, key, peer in hits:
            where.setdefault(key, []).append(peer)

    def _descriptors(self, pid: int) -> Iterator[tuple[dict[Any, list[Peer]], Any, Peer]]:
        wanted, found = self.wanted, self.found
        folder = f"/proc/{pid}/fd"
        for fd in os.listdir(folder):
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

    def _mappings(self, pid: int) -> Iterator[tuple[dict[Any, list[Peer]], Any, Peer]]:
        seen = set()
        with contextlib.suppress(OSError):
            for data in pieces(f"/proc/{pid}/maps"):
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
        What was found. Processes that cannot be read (other users', without root) are counted in ``hidden``.
    """
    search = _Search(wanted, set(tree))
    if not wanted.empty:
        for pid in pids():
            if pid not in search.inside:
                search.process(pid)
    return search.found

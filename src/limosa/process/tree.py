"""The job tree: a process and all its descendants, read from ``/proc`` while they go on forking and ending.

The first process of a pid namespace (of a container) has all others of it, too: also those that were started from
outside (``podman exec``), whose parent is none of them. They end with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from limosa.errors import NoSuchProcess, PermissionDenied
from limosa.process.identity import Identity, Stat, read_stat
from limosa.process.namespaces import is_first, is_ours, namespace_of

_TRIES = 5
_KNOWN_SECONDS = 1.0
_kernels: dict[int, float] = {}
"""The kernel's own threads, and when each was seen."""


def pids() -> list[int]:
    """Return the pids of all processes, without those that were seen to be the kernel's own just now.

    Of these there are hundreds on a machine of many cores, and a look at a job goes through all processes six times. No
    pid of theirs is another's so soon.
    """
    now = time.monotonic()
    known = {pid for pid, seen in list(_kernels.items()) if now - seen < _KNOWN_SECONDS}
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in known]


def snapshot() -> dict[int, Stat]:
    """Return ``/proc/PID/stat`` of every process but the kernel's own that can be seen and has not ended, by pid."""
    found: dict[int, Stat] = {}
    now = time.monotonic()
    for pid in pids():
        try:
            stat = read_stat(pid)
        except (NoSuchProcess, PermissionDenied):
            continue  # ended while we looked, or hidden: either way not ours to move
        if stat.kernel:
            _kernels[pid] = now
        elif not stat.ended:
            found[stat.pid] = stat
    return found


def descendants(root: int, processes: Mapping[int, Stat]) -> list[int]:
    """Return ``root`` and all its descendants, each parent before its children.

    Args:
        root: a pid.
        processes: a snapshot.

    Returns:
        Pids; brothers and sisters in the order in which they were started.
    """
    children: dict[int, list[Stat]] = {}
    for stat in processes.values():
        children.setdefault(stat.ppid, []).append(stat)
    order, seen = [root], {root}
    for pid in order:  # grows while we go: breadth first
        for child in sorted(children.get(pid, []), key=lambda stat: (stat.start_time, stat.pid)):
            if child.pid not in seen:
                seen.add(child.pid)
                order.append(child.pid)
    return order


def job_tree(root: Identity) -> list[Identity]:
    """Return a process and all its descendants, root first, each parent before its children.

    One pass over ``/proc`` can miss a child that is born behind the reader's back, so passes are made until two agree
    (five at most: a tree that forks all the time has no right answer, and whoever acts on it looks again after
    locking). Zombies are not part of the answer.

    Args:
        root: the job's first process.

    Raises:
        NoSuchProcess, Zombie, PidReused: the root is not what it was.
    """
    last: list[Identity] = []
    for _ in range(_TRIES):
        root.check()
        processes = snapshot()
        if root.pid not in processes:
            continue  # it ended between the two looks: check() says so next
        now = [Identity(pid, processes[pid].start_time) for pid in _tree(root.pid, processes)]
        if now == last:
            return now
        last = now
    root.check()
    return last


def _tree(root: int, processes: Mapping[int, Stat]) -> list[int]:
    order = descendants(root, processes)
    if not is_first(root):
        return order
    namespace, seen = namespace_of(root, "pid"), set(order)
    strays = [pid for pid in processes if pid not in seen and namespace_of(pid, "pid") == namespace]
    for stray in sorted(strays, key=lambda pid: (processes[pid].start_time, pid)):
        if stray not in seen:
            order += (more := [pid for pid in descendants(stray, processes) if pid not in seen])
            seen.update(more)
    return order


def under_first(pids: Iterable[int], parents: Mapping[int, int]) -> dict[int, int]:
    """Return the first process of the pid namespace of each of these that is in another than we are.

    Args:
        pids: processes.
        parents: pid → parent's pid, of all.
    """
    firsts: dict[tuple[int, int] | None, int] = {None: 0}
    found = {}
    for pid in pids:
        if is_ours(pid, "pid"):
            continue
        namespace = namespace_of(pid, "pid")
        if namespace not in firsts:
            firsts[namespace] = next((p for p in parents if namespace_of(p, "pid") == namespace and is_first(p)), 0)
        if firsts[namespace]:
            found[pid] = firsts[namespace]
    return found


def group_by_topmost(
    pids: Iterable[int], run_roots: Iterable[int], parents: Mapping[int, int] | None = None
) -> dict[int, list[int]]:
    """Group processes into jobs: each under its topmost ancestor that is itself in one of the two sets.

    Args:
        pids: processes that hold CUDA state.
        run_roots: roots of jobs that ``limosa run`` started.
        parents: pid → parent's pid; read from ``/proc`` where None.

    Returns:
        Root pid → the ``pids`` in that job, ascending. Roots of ``run`` jobs without any of ``pids`` are left out.
    """
    wanted = set(pids)
    heads = wanted | set(run_roots)
    if parents is None:
        parents = {pid: stat.ppid for pid, stat in snapshot().items()}
    groups: dict[int, list[int]] = {}
    for pid in sorted(wanted):
        top, current, seen = pid, pid, set[int]()
        while current > 0 and current not in seen:
            seen.add(current)
            if current in heads:
                top = current
            current = parents.get(current, 0)
        groups.setdefault(top, []).append(pid)
    return dict(sorted(groups.items()))

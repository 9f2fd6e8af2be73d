"""Who has the other ranks of a job's communicators: processes on this machine that are no part of it.

They are asked only where ranks are missing. Whom the caller may not look at is not found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from functools import partial

from limosa.ipc.side_by_side import within
from limosa.operation.communicators.meeting import Id
from limosa.operation.jobs import holders
from limosa.parking.shim import Shim, under_shim
from limosa.process.candidates import candidates
from limosa.process.identity import Identity, ancestors
from limosa.process.tree import snapshot

SECONDS = 1.0
"""For all of them."""
_EACH = 0.3
_NAMED = 3
_ONE_RUN = "start all ranks by one limosa run on one machine, and they are one job: limosa run -- torchrun …"


def of(ids: Collection[Id], but: Collection[int]) -> dict[Id, list[int]]:
    """Return the processes that have ranks of these communicators, but for some; 64 at most are asked, side by side."""
    end = time.monotonic() + SECONDS
    others = []
    for pid in candidates():
        if time.monotonic() > end:
            break
        if pid not in but and pid != os.getpid() and under_shim(pid):
            others.append(pid)
    found: dict[Id, list[int]] = {}
    for pid, theirs in within(SECONDS, [partial(ids_of, pid) for pid in others]):
        for id_ in theirs & set(ids):
            found.setdefault(id_, []).append(pid)
    return found


def ids_of(pid: int) -> tuple[int, set[Id]]:
    """Return a process and its communicators. Raises what :class:`Shim` does."""
    with Shim.to_look(Identity.of(pid), _EACH, 0.0) as shim:
        return pid, {comm.id for comm in shim.comms()[1]}


def named(pids: Sequence[int]) -> str:
    """Some processes in words, with their jobs' names."""
    known = holders(pids[:_NAMED])
    told = [f"process {pid}" + (f" of the job {known[pid].name}" if known[pid].name else "") for pid in pids[:_NAMED]]
    more = len(pids) - len(told)
    return ", ".join(told) + (f" and {more} more" if more else "")


def way_out(pid: int, theirs: Sequence[int]) -> str:
    """What to do about a rank that has its peers in these processes (none: nobody knows where)."""
    if not theirs:
        more = "a job whose ranks are on several machines cannot be moved yet; if its ranks are just ending, let them"
        return f"{_ONE_RUN}; {more}"
    top = _common(pid, theirs)
    return f"name process {top}, from which all of them descend" if top else _ONE_RUN


def _common(pid: int, theirs: Sequence[int]) -> int:
    """The job that all are in, or else whom all descend from; 0 where that is a shell, or whatever all descend from."""
    known = holders([pid, *theirs])
    jobs = {one.job for one in known.values()}
    if len(jobs) == 1 and pid not in jobs:
        return jobs.pop()
    processes = snapshot()

    def line(one: int) -> list[int]:
        found: list[int] = []
        while one > 1 and one in processes and one not in found:
            found.append(one)
            one = processes[one].ppid
        return found

    of_theirs = [set(line(one)) for one in theirs]
    top = next((one for one in line(pid) if all(one in theirs for theirs in of_theirs)), 0)
    try:
        return 0 if not top or os.getsid(top) == top or top in {a.pid for a in ancestors()} else top
    except OSError:
        return 0

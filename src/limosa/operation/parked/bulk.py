"""What the shim does to make the driver's own part of a checkpoint shorter (facts measured: ``docs/caveats.md``).

The driver saves what the shim does not manage, and takes one large piece of host memory for it, which one thread clears
page by page. The shim has it ready before the pause, and releases what is not used when the gate opens, or when the
client that asked for it is gone. (The other thing that it does is ``gates.lower_stacks``.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping, Sequence
from functools import partial

from limosa.errors import LimosaError
from limosa.gpu import State
from limosa.operation.journal import Member
from limosa.operation.parked.calls import together
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, under_shim
from limosa.process.cgroups import memory_levels_of
from limosa.process.memory import host_memory

LEAST = 32 << 20
"""The driver's memory is not looked after where it is smaller than this."""
MOST_BESIDE = 1 << 30
"""What the driver may have to save beside what NVML counts, at most."""
KEPT_FREE = 1 << 30
"""Bytes of host memory that are left to everybody else."""


class Bulk:
    """Host memory that processes have ready for what the driver saves.

    Args:
        members: the processes.
        shims: connections that stay others'.
        whole: pids of those of them of which the driver saves all.
    """

    def __init__(self, members: Sequence[Member], shims: Mapping[int, Shim] | None = None, whole: Container[int] = ()):
        self._members, self._whole = members, whole
        self._shims = dict(shims or {})
        self._own: dict[int, Shim] = {}

    def prepare(self) -> None:
        """Have it made, while the jobs run; as much as there is room for, none where a shim does not answer."""
        wanted: dict[int, int] = {}
        shims = [(member, shim) for member in self._members if (shim := self._shim(member)) is not None]

        def one(member: Member, shim: Shim) -> None:
            with contextlib.suppress(LimosaError):
                goes = member.pid in self._shims and member.pid not in self._whole
                parked = shim.hello().bytes if goes else 0
                asked = min(shim.bulk(0), member.bytes + MOST_BESIDE)  # it may have been the application's
                wanted[member.pid] = max(asked, member.bytes - parked)

        together([partial(one, member, shim) for member, shim in shims])
        room, calls = _room(self._members), []
        for member, shim in shims:
            bytes_ = min(wanted.get(member.pid, 0), max(0, room))
            if bytes_ >= LEAST:
                calls.append(partial(_ask, shim, bytes_))
                room -= bytes_
        together(calls)

    @property
    def pids(self) -> set[int]:
        """Processes whose gate was open and stays so: only one client is served at a time, and that is us."""
        return set(self._own)

    @property
    def shims(self) -> dict[int, Shim]:
        """The connections, by pid."""
        return {**self._own, **self._shims}

    def let_go(self) -> None:
        """The driver has what it needs: what is left of it is let go of, and our own connections with it."""
        together([partial(_ask, shim, 0) for shim in (*self._shims.values(), *self._own.values())])
        for shim in self._own.values():
            shim.close()
        self._own.clear()
        self._shims.clear()

    def _shim(self, member: Member) -> Shim | None:
        if member.pid in self._shims:
            return self._shims[member.pid]
        if member.was != State.RUNNING or not under_shim(member.pid):
            return None
        with contextlib.suppress(LimosaError):
            shim = Shim(member.identity)
            if shim.hello().stand is Stand.OPEN:
                self._own[member.pid] = shim
                return shim
            shim.close()
        return None


def _ask(shim: Shim, bytes_: int) -> None:
    with contextlib.suppress(LimosaError):
        shim.bulk(bytes_)


def _room(members: Sequence[Member]) -> int:
    """Bytes that all of them together may take: of the machine, and of the fullest cgroup above any."""
    found = [host_memory()[1]]
    for member in members:
        with contextlib.suppress(OSError):
            found += [level.room or 0 for level in memory_levels_of(member.pid)]
    return min(found) - KEPT_FREE

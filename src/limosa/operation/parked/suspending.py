"""The parked part of one suspend: device memory into the arena, beside the driver's lock and checkpoint or alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import msgspec

from limosa import gpu as gpus
from limosa.errors import FailedUndone
from limosa.operation import counting
from limosa.operation.arena import arena_cap
from limosa.operation.journal import Member
from limosa.operation.parked import gates, shares
from limosa.operation.parked.aside import Copy, Layout, Placed, copy_all
from limosa.operation.parked.calls import each
from limosa.operation.parked.carrier import Beside
from limosa.operation.parked.holders import Held, aside_key, key_of, note_of
from limosa.operation.parked.pieces import copy_limit, export
from limosa.operation.parked.stranded import let_arena_go
from limosa.operation.work import Work
from limosa.parking.answers import Memory
from limosa.parking.protocol import Stand
from limosa.parking.segments import layout_file, sizes_for
from limosa.parking.shim import Shim
from limosa.terms import Release


class _Going:
    """One process on its way into host memory."""

    def __init__(self, member: Member, shim: Shim):
        self.member, self.shim = member, shim
        self.devices, self.saw = shim.devices(), shim.saw()
        self.mapped = False
        self.source: dict[int, int] = {}
        self.layout: list[Placed] = []
        self.segments: list[int] = []
        self.sizes: list[int] = []
        self.known: dict[int, Memory] = {}

    def pieces(self) -> list[Memory]:
        """What can be parked, in the order of the arena."""
        return sorted((m for m in self.shim.memories() if not m.shared), key=lambda m: (m.device, m.id))

    def close(self) -> None:
        for fd in (*self.source.values(), *self.segments):
            os.close(fd)
        self.source.clear()
        self.segments.clear()
        self.shim.close()


class Suspending(Beside[_Going]):
    """The parked part of one suspend: what arrives is in the arena."""

    def __init__(self, work: Work, members: Sequence[Member], shims: dict[int, Shim], release: Release = Release.ALL):
        super().__init__(work)
        self._alone = release == Release.MEMORY_ONLY
        self._parts = [_Going(m, shims[m.pid]) for m in members if m.pid in shims]

    def prepare(self) -> None:
        """Lets the arena's segments be pinned and everything be held by vault and mover; the jobs run on."""
        counted = gpus.inventory()
        for part in self._parts:
            pieces = part.pieces()
            self._ready(part, pieces)
            counting.note_beside(counted, part.member, part.devices, pieces)

    def _ready(self, part: _Going, pieces: Sequence[Memory], *, pin: bool = True) -> None:
        pid, owner, mover = part.member.pid, part.shim.owner, self._residents.mover(part.shim.owner)
        new, fds = export(part.shim, [m for m in pieces if m.id not in part.source])
        part.source.update(zip((m.id for m in new), fds, strict=True))
        pieces = [m for m in pieces if m.id in part.source]
        part.known = {m.id: m for m in pieces}
        self._bytes -= sum(p.bytes for p in part.layout)
        part.layout = []
        for m in pieces:
            before = part.layout[-1] if part.layout else Placed(0, 0, "", 0)
            part.layout.append(Placed(m.id, m.bytes, part.devices[m.device], before.offset + before.bytes))
        total = sum(p.bytes for p in part.layout)
        self._hold(part, pieces)
        for gpu in {p.gpu for p in part.layout}:
            mover.drop(f"{pid}/{gpu}")
            mine = [p for p in part.layout if p.gpu == gpu]
            mover.take(f"{pid}/{gpu}", [part.source[p.id] for p in mine], [p.bytes for p in mine], gpu)
        if part.sizes != sizes_for(total):
            mover.drop(f"{pid}/arena")
            for fd in part.segments:
                os.close(fd)
            part.segments = []
            part.segments = self._residents.segments(owner, aside_key(part.member), total, arena_cap())
            part.sizes = sizes_for(total)
        if part.layout:
            with self._work.spent("pin"):
                mover.hold(f"{pid}/arena", part.segments, total, part.layout[0].gpu, pin=pin)
        self._bytes += total

    def _hold(self, part: _Going, pieces: Sequence[Memory]) -> None:
        key, fds = key_of(self._work.id, part.member, "source"), [part.source[m.id] for m in pieces]
        self._residents.put(part.shim.owner, key, fds, note_of(pieces, part.devices))

    def hold(self) -> None:
        """Closes all gates at once, follows what was allocated or freed since, and takes the memory away."""
        for part in self._parts:  # vault and mover may have been killed since, and others be in their place
            wanted = {key_of(self._work.id, part.member, "source"): len(part.source)}
            if self._residents.missing(part.shim.owner, wanted):
                self._hold(part, [part.known[p.id] for p in part.layout])
        self._begin_to_park()
        with self._work.spent("gate"):
            gates.close([part.shim for part in self._parts], self._work)
        shares.refuse_outside(self.shims)
        for part in [] if self._alone else self._parts:
            gates.lower_stack(part.shim)
        for part in self._parts:
            now = part.pieces()
            if [m.id for m in now] != [p.id for p in part.layout]:
                for gone in set(part.source) - {m.id for m in now}:
                    os.close(part.source.pop(gone))
                self._ready(part, now, pin=False)  # the job stands still: what is new is copied more slowly
        with self._work.spent("unmap"):
            for part in self._parts:
                if part.shim.unmap() is not Stand.AWAY and part.source:
                    raise FailedUndone(f"process {part.member.pid} did not let go of its memory")

    def copy(self) -> None:
        """Copies in the background; the driver does its part meanwhile."""
        copies: dict[int, list[Copy]] = {}
        for part in self._parts:
            for gpu in sorted({p.gpu for p in part.layout}):
                first = next(p for p in part.layout if p.gpu == gpu)
                one = (f"{part.member.pid}/{gpu}", f"{part.member.pid}/arena", first.offset, gpu)
                copies.setdefault(part.shim.owner, []).append(one)
        limit = copy_limit(self.bytes)
        self._copying.start(lambda: copy_all(self._work, self._residents, "out", copies, limit))

    def arrive(self) -> None:
        """Has each arena held by the vault and by the job itself, and what it holds counted as the job's."""
        for part in self._parts:
            layout = layout_file(msgspec.json.encode(Layout(part.layout, part.saw, self._work.id)))
            try:
                held = [*part.segments, layout]
                self._residents.put(part.shim.owner, aside_key(part.member), held, mover=False)
                part.shim.keep(held)
            finally:
                os.close(layout)
            if self._alone:
                part.member.away, part.member.held = True, {}
            for placed in part.layout:
                part.member.held[placed.gpu] = part.member.held.get(placed.gpu, 0) + placed.bytes

    def back(self) -> None:
        """Gives every process its own memory back and opens its gate; the driver has brought it home before.

        Where the driver could not, for want of room, its memory goes into the arena and it stays suspended.
        """
        self._copying.settle()
        each([(part.member, partial(self._home, part)) for part in self._parts])
        self.release()

    def _home(self, part: _Going) -> None:
        if part.member.pid not in self._touched:  # it has heard of nothing yet
            if part.sizes:
                self._residents.drop(part.shim.owner, aside_key(part.member))
            return
        there = [p for p in part.layout if p.id in part.source]  # others it has freed since, before its gate was closed
        pieces = [Held(p.id, p.bytes, p.gpu) for p in there]
        if self._go_home(part, pieces, [part.source[p.id] for p in there]):
            let_arena_go(part.member, part.shim)

    def let_arenas_go(self) -> None:
        """Lets go of the segments that were to be filled: nothing is in them."""
        for part in self._parts:
            if part.sizes:
                self._residents.drop(part.shim.owner, aside_key(part.member))

    def release(self) -> None:
        """Lets go of the source's memory."""
        for part in self._parts:
            self._residents.drop(part.shim.owner, key_of(self._work.id, part.member, "source"))
            part.close()
        self._residents.close()

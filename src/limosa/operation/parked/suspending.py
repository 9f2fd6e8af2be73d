"""The parked part of one suspend: device memory into the arena, beside the driver's lock and checkpoint or alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from limosa import gpu as gpus
from limosa.ipc.packet import close_all
from limosa.operation import counting
from limosa.operation.arena import arena_cap
from limosa.operation.journal import Member
from limosa.operation.parked.aside import Copy, Layout, Placed, copy_all, laid_out
from limosa.operation.parked.carrier import Beside, Connected, Process
from limosa.operation.parked.holders import Held, aside_key
from limosa.operation.parked.pieces import export
from limosa.operation.parked.stranded import let_arena_go
from limosa.operation.work import Work
from limosa.parking.answers import Memory
from limosa.parking.segments import layout_file, sizes_for
from limosa.parking.shim import Shim
from limosa.terms import Release


class _Going(Process):
    """One process on its way into host memory, and what is to be where there."""

    def __init__(self, member: Member, shim: Shim):
        super().__init__(member, shim)
        self.devices, self.saw = shim.devices(), shim.saw()
        self.layout: list[Placed] = []
        self.sizes: list[int] = []

    def held(self, side: str) -> list[Held]:
        there = [p for p in self.layout if p.id in self.source]  # others it has freed since
        return [Held(p.id, p.bytes, p.gpu) for p in there]

    def pieces(self) -> list[Memory]:
        """What can be parked, in the order of the arena."""
        return sorted((m for m in self.shim.memories() if not m.shared), key=lambda m: (m.device, m.id))

    def copies(self) -> list[Copy]:
        """What is to be copied: key, arena, where in it, GPU."""
        first = {p.gpu: p.offset for p in reversed(self.layout)}
        return [(f"{self.member.pid}/{uuid}", f"{self.member.pid}/arena", first[uuid], uuid) for uuid in sorted(first)]


class Suspending(Beside[_Going]):
    """The parked part of one suspend: what arrives is in the arena."""

    def __init__(
        self,
        work: Work,
        parked: Sequence[Connected],
        others: Sequence[Connected] = (),
        release: Release = Release.ALL,
    ):
        super().__init__(work, others)
        self._alone = release == Release.MEMORY_ONLY
        self._parts = [_Going(member, shim) for member, shim in parked]

    def prepare(self) -> None:
        counted = gpus.inventory()
        for part in self._parts:
            pieces = part.pieces()
            self._ready(part, pieces)
            counting.note_beside(counted, part.member, part.devices, pieces)

    def _ready(self, part: _Going, pieces: Sequence[Memory], *, pin: bool = True) -> None:
        pid, owner, mover = part.member.pid, part.shim.owner, self._residents.mover(part.shim.owner)
        new, fds = export(part.shim, [m for m in pieces if m.id not in part.source])
        part.source.update(zip((m.id for m in new), fds, strict=True))
        self._bytes -= sum(p.bytes for p in part.layout)
        there = [Held(m.id, m.bytes, part.devices[m.device]) for m in pieces if m.id in part.source]
        part.layout, total = laid_out(there)
        self._hold(part)
        for gpu in {p.gpu for p in part.layout}:
            mover.drop(f"{pid}/{gpu}")
            mine = [p for p in part.layout if p.gpu == gpu]
            mover.take(f"{pid}/{gpu}", [part.source[p.id] for p in mine], [p.bytes for p in mine], gpu)
        if part.sizes != sizes_for(total):
            mover.drop(f"{pid}/arena")
            close_all(part.arena)
            part.arena.clear()
            part.arena = self._residents.segments(owner, aside_key(part.member), total, arena_cap())
            part.sizes = sizes_for(total)
        if part.layout:
            with self._work.spent("pin"):
                mover.hold(f"{pid}/arena", part.arena, total, part.layout[0].gpu, pin=pin)
        self._bytes += total

    def hold(self) -> None:
        self._hold_again()
        with self._work.spent("gate"):
            self._close_gates(self._parts, stacks=not self._alone)
        self._refuse_outside()
        for part in self._parts:
            now = part.pieces()
            if [m.id for m in now] != [p.id for p in part.layout]:
                for gone in set(part.source) - {m.id for m in now}:
                    os.close(part.source.pop(gone))
                self._ready(part, now, pin=False)  # the job stands still: what is new is copied more slowly
        with self._work.spent("unmap"):
            self._take_away(self._parts)

    def copy(self) -> None:
        copies = [(part.shim.owner, part.copies()) for part in self._parts if part.layout]
        self._copying.start(lambda: copy_all(self._work, self._residents, "out", copies, self.bytes))

    def arrive(self) -> None:
        """Has each arena held by the vault and by the job itself, and what it holds counted as the job's."""
        for part in self._parts:
            layout = layout_file(msgspec.json.encode(Layout(part.layout, part.saw, self._work.id)))
            try:
                held = [*part.arena, layout]
                self._residents.put(part.shim.owner, aside_key(part.member), held, mover=False)
                part.shim.keep(held)
            finally:
                os.close(layout)
            if self._alone:
                part.member.away, part.member.held = True, {}
            for placed in part.layout:
                part.member.held[placed.gpu] = part.member.held.get(placed.gpu, 0) + placed.bytes

    def _home(self, part: _Going) -> bool:
        if not part.touched:  # it has heard of nothing yet
            self._drop_arena(part)
            return True
        home = super()._home(part)
        if home:
            let_arena_go(part.member, part.shim)
        return home

    def let_arenas_go(self) -> None:
        """Lets go of the segments that were to be filled: nothing is in them."""
        for part in self._parts:
            self._drop_arena(part)

    def _drop_arena(self, part: _Going) -> None:
        if part.sizes:
            self._residents.drop(part.shim.owner, aside_key(part.member))

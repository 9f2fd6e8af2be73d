"""The parked part of one resume: device memory back from the arena, beside the driver's restore or alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from limosa.errors import FailedUndone, LimosaError
from limosa.operation.journal import Member, Noted, Phase, added_up
from limosa.operation.parked import shares
from limosa.operation.parked.aside import Copy, Placed, arena_of, copy_all, parts_of
from limosa.operation.parked.carrier import Beside, Process
from limosa.operation.parked.holders import Held, aside_key
from limosa.operation.parked.pieces import copy_limit
from limosa.operation.work import Work
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim


class _Coming(Process):
    """One process on its way back."""

    sides = ("target",)

    def __init__(self, member: Member, shim: Shim, arena: list[int]):
        super().__init__(member, shim, arena)
        self.segments, layout = parts_of(member, arena)
        self.layout, self.saw = layout.pieces, set(layout.saw)

    def held(self, side: str) -> list[Held]:
        return [Held(p.id, p.bytes, self.there(p)) for p in self.layout if p.id in self.target]

    def there(self, placed: Placed) -> str:
        """The GPU that a piece goes to."""
        now = self.member.moved.get(placed.gpu, placed.gpu)
        return self.member.map.get(now, now)

    def on(self, *, seen: bool) -> dict[str, list[Placed]]:
        """The pieces by the GPU that they go to: those that the process saw when it began, or the others.

        On one that it did not see it cannot import memory: it makes it itself, once the driver has brought it there.
        """
        found: dict[str, list[Placed]] = {}
        for placed in self.layout:
            if (self.there(placed) in self.saw) == seen:
                found.setdefault(self.there(placed), []).append(placed)
        return found

    def copies(self, *, seen: bool) -> list[Copy]:
        """What is to be copied to these: key, arena, where in it, GPU."""
        pid = self.member.pid
        return [(f"{pid}/{gpu}", f"{pid}/arena", mine[0].offset, gpu) for gpu, mine in self.on(seen=seen).items()]


class Resuming(Beside[_Coming]):
    """The parked part of one resume."""

    def __init__(self, work: Work, members: Sequence[Member], shims: dict[int, Shim]):
        super().__init__(work)
        mine = [(m, shims[m.pid]) for m in members if m.pid in shims]
        self._parts = [_Coming(m, shim, arena_of(self._residents, m, shim)) for m, shim in mine]
        self._bytes = sum(p.bytes for part in self._parts for p in part.layout)

    def prepare(self) -> None:
        for part in self._parts:
            pid, mover = part.member.pid, self._residents.mover(part.shim.owner)
            for gpu, mine in part.on(seen=True).items():
                made = mover.make(f"{pid}/{gpu}", [p.bytes for p in mine], gpu)
                part.target.update(zip((p.id for p in mine), made, strict=True))
                self._work.made = added_up([self._work.made, *({gpu: p.bytes} for p in mine)])
        self._work.has_taken(self._work.made)
        shares.join((part.shim, part.target) for part in self._parts)
        for part in self._parts:
            pid, mover = part.member.pid, self._residents.mover(part.shim.owner)
            mover.prepare(sorted(part.on(seen=False)))
            self._hold(part)
            if part.layout:
                total = sum(p.bytes for p in part.layout)
                mover.hold(f"{pid}/arena", part.segments, total, part.there(part.layout[0]), pin=False)

    def copy(self) -> None:
        copies = [(part.shim.owner, part.copies(seen=True)) for part in self._parts]
        self._copying.start(lambda: copy_all(self._work, self._residents, "in", copies, self.bytes))

    def arrive(self) -> None:
        """Maps the memory where it was; what the process must make itself is made and filled before."""
        for part in self._parts:
            self._work.note(Noted.MAP, Phase.BEGIN, part.member.pid)
            part.mapped = True
            part.shim.stack(0)
            stand = Stand.CLOSED if not part.layout else Stand.AWAY
            if part.target:
                stand = part.shim.map(list(part.target), list(part.target.values()))
            if part.on(seen=False):
                stand = self._made_by_itself(part)
            if stand is not Stand.CLOSED:
                raise FailedUndone(f"process {part.member.pid} could not be given its memory back")

    def _made_by_itself(self, part: _Coming) -> Stand:
        mover, pid = self._residents.mover(part.shim.owner), part.member.pid
        late = part.on(seen=False)
        ids = [p.id for mine in late.values() for p in mine]
        part.target.update(zip(ids, part.shim.make(ids), strict=True))
        self._hold(part)
        for gpu, mine in late.items():
            mover.take(f"{pid}/{gpu}", [part.target[p.id] for p in mine], [p.bytes for p in mine], gpu)
        with self._work.spent("copy-late"):
            mover.host("in", part.copies(seen=False), copy_limit(self.bytes))
        return part.shim.map(ids)

    def back(self) -> None:
        """What a resume leaves that was undone: the arenas, and nothing on the GPUs."""
        self._copying.settle()
        super().release()

    def release(self) -> None:
        for part in self._parts:
            again = False
            with contextlib.suppress(LimosaError):
                part.shim.keep()
                again = True
            self._residents.drop(part.shim.owner, aside_key(part.member), again=again)
        super().release()

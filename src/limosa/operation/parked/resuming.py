"""The parked part of one resume: device memory back from the arena, beside the driver's restore or alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial

from limosa.errors import FailedUndone, LimosaError
from limosa.operation.journal import Member, Noted, Phase, added_up
from limosa.operation.parked import ahead, shares
from limosa.operation.parked.aside import Copy, Placed, arena_of, copy_all, parts_of
from limosa.operation.parked.calls import together
from limosa.operation.parked.carrier import Beside, Connected, Process
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
        self.ahead: set[str] = set()  # GPUs where contents wait for it to make its memory

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

    def copies(self, gpus: Iterable[str], what: str = "") -> list[Copy]:
        """What is to be copied to the pieces that go to these GPUs: key, arena, where in it, GPU."""
        pid, mine = self.member.pid, {**self.on(seen=True), **self.on(seen=False)}
        return [(f"{pid}/{gpu}{what}", f"{pid}/arena", mine[gpu][0].offset, gpu) for gpu in gpus]


class Resuming(Beside[_Coming]):
    """The parked part of one resume."""

    def __init__(self, work: Work, parked: Sequence[Connected], others: Sequence[Connected] = ()):
        super().__init__(work, others)
        self._parts = [_Coming(m, shim, arena_of(self._residents, m, shim)) for m, shim in parked]
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
            self._come_ahead(part)
            self._hold(part)
            if part.layout:
                total = sum(p.bytes for p in part.layout)
                mover.hold(f"{pid}/arena", part.segments, total, part.there(part.layout[0]), pin=False)

    def _come_ahead(self, part: _Coming) -> None:
        """Makes memory for what it will have to make itself, on GPUs that have room for both."""
        mover, late = self._residents.mover(part.shim.owner), part.on(seen=False)
        sizes = {gpu: [p.bytes for p in mine] for gpu, mine in late.items()}
        part.ahead = ahead.rooms(
            self._work, sizes, lambda gpu: mover.make(f"{part.member.pid}/{gpu}/ahead", sizes[gpu], gpu)
        )

    def copy(self) -> None:
        copies = [
            (part.shim.owner, [*part.copies(part.on(seen=True)), *part.copies(part.ahead, "/ahead")])
            for part in self._parts
        ]
        self._copying.start(lambda: copy_all(self._work, self._residents, "in", copies, self.bytes))

    def arrive(self) -> None:
        """Maps the memory where it was; what the process must make itself is made and filled before."""
        for part in self._parts:
            self._work.note(Noted.MAP, Phase.BEGIN, part.member.pid)
            part.mapped = True
        stands: dict[int, Stand] = {}

        def one(part: _Coming) -> None:
            part.shim.stack(0)
            stand = Stand.AWAY if part.layout else Stand.CLOSED
            if part.target:
                stand = part.shim.map(list(part.target), list(part.target.values()))
            stands[part.member.pid] = stand

        together([partial(one, part) for part in self._parts])
        self._stacks_back()
        for part in self._parts:
            if part.on(seen=False):
                stands[part.member.pid] = self._made_by_itself(part)
            if stands[part.member.pid] is not Stand.CLOSED:
                raise FailedUndone(f"process {part.member.pid} could not be given its memory back")

    def _made_by_itself(self, part: _Coming) -> Stand:
        mover, pid = self._residents.mover(part.shim.owner), part.member.pid
        late = part.on(seen=False)
        for gpu, mine in late.items():
            ids = [p.id for p in mine]
            fds, _ = ahead.made(part.shim, ids, partial(self._give_up, part, gpu))
            part.target.update(zip(ids, fds, strict=True))
            mover.take(f"{pid}/{gpu}", fds, [p.bytes for p in mine], gpu)
        self._hold(part)
        with self._work.spent("copy-late"):
            there = [(f"{pid}/{gpu}/ahead", f"{pid}/{gpu}", gpu) for gpu in part.ahead]
            if there:
                mover.copy(there, copy_limit(self.bytes))
            if others := part.copies(late.keys() - part.ahead):
                mover.host("in", others, copy_limit(self.bytes))
        return part.shim.map([p.id for mine in late.values() for p in mine])

    def _give_up(self, part: _Coming, gpu: str) -> None:
        """Lets go of what came ahead to a GPU: the process needs the room."""
        part.ahead.discard(gpu)
        self._residents.mover(part.shim.owner).drop(f"{part.member.pid}/{gpu}/ahead")

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

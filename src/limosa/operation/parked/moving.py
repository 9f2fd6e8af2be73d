"""The parked part of one move: device memory is held aside and copied GPU to GPU.

Beside the driver's steps, which then have little to carry: the gates are closed, the memory unmapped, copied while the
driver checkpoints what is left, and mapped at the same addresses when the driver has restored that. The source's
memory is let go of last, when the job has been seen running. Until then its descriptors are held by the vault, by the
mover and here, so that any of the three may be killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from limosa.errors import CannotBeMoved, FailedUndone
from limosa.ipc.packet import close_all
from limosa.operation import counting
from limosa.operation.journal import Member, Noted, Phase
from limosa.operation.parked import ahead, shares
from limosa.operation.parked.calls import together
from limosa.operation.parked.carrier import Beside, Connected, Process
from limosa.operation.parked.holders import Held
from limosa.operation.parked.pieces import copy_limit, export
from limosa.operation.work import Work
from limosa.parking.answers import Memory
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim

_BLIND = "its processes share device memory, and one did not see the GPU that it is to go to when it began"


class _Part(Process):
    """One process, and what is known of each piece of its memory."""

    sides = ("source", "target")

    def __init__(self, member: Member, shim: Shim):
        super().__init__(member, shim)
        self.devices = shim.devices()
        self.known: dict[int, Memory] = {}
        self.later: list[_Later] = []
        self._sees: dict[str, bool] = {}

    def sees(self, gpu_: str) -> bool:
        """Whether it can import memory of that GPU: not where it did not see it when it began."""
        if gpu_ not in self._sees:
            self._sees[gpu_] = self.shim.sees(gpu_)
        return self._sees[gpu_]

    def held(self, side: str) -> list[Held]:
        known = [self.known[i] for i in sorted(getattr(self, side))]
        return [Held(m.id, m.bytes, self.devices[m.device]) for m in known]

    def pieces(self) -> list[Memory]:
        return [m for m in self.shim.memories() if not m.shared]

    def places(self, piece: Memory) -> tuple[str, str]:
        """The GPU that it is on, and the one that it goes to."""
        here = self.devices[piece.device]
        return here, self.member.map.get(here, here)

    def by_place(self, pieces: Sequence[Memory]) -> dict[tuple[str, str], list[Memory]]:
        """Pieces by the GPU that they are on and the one that they go to."""
        found: dict[tuple[str, str], list[Memory]] = {}
        for piece in pieces:
            found.setdefault(self.places(piece), []).append(piece)
        return found


class _Later(NamedTuple):
    """Pieces that their process makes itself when it is there; until then the mover keeps the room for them.

    ``ahead``: their contents are in that room by then.
    """

    key: str
    pieces: list[Memory]
    gpu: str
    ahead: bool


class Moving(Beside[_Part]):
    """The parked part of one move; ``parked``: members with connections, which :meth:`close` closes."""

    def __init__(self, work: Work, parked: Sequence[Connected], others: Sequence[Connected] = ()):
        super().__init__(work, others)
        self._parts = [_Part(member, shim) for member, shim in parked]
        self._n = 0
        self._copies: dict[int, list[tuple[str, str, str]]] = {}
        self._shared: dict[int, int] = {}  # memory that several processes have: a descriptor of what was made for it

    # -- before the pause ----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self._refuse_outside()
        for owner in {part.shim.owner for part in self._parts}:
            gpus = {b for part in self._parts if part.shim.owner == owner for b in part.member.map.values()}
            self._residents.mover(owner).prepare(sorted(gpus))
        counted = self._work.driver.inventory()
        for part in self._parts:
            self._add(part, part.pieces())
            self._hold(part)
            counting.note_beside(counted, part.member, part.devices, part.known.values())

    def _add(self, part: _Part, new: Sequence[Memory]) -> None:
        """Takes pieces in: exported, made on the other side."""
        new, fds = export(part.shim, new)
        if not new:
            return
        part.known.update({m.id: m for m in new})
        part.source.update(zip((m.id for m in new), fds, strict=True))
        for piece in new:
            if piece.share in self._shared:
                if not part.sees(part.places(piece)[1]):
                    raise CannotBeMoved(detail=_BLIND)
                part.target[piece.id] = os.dup(self._shared[piece.share])
        others = [m for m in new if m.id not in part.target]
        one = shares.one_each({m.id: m.share for m in others}, [m.id for m in others], set())
        for (here, there), pieces in part.by_place([m for m in others if m.id in one]).items():
            ids, sizes = [m.id for m in pieces], [m.bytes for m in pieces]
            if here == there:
                part.target.update({i: part.source[i] for i in ids})
                continue
            copies = self._copies.setdefault(part.shim.owner, [])
            mover, key = self._residents.mover(part.shim.owner), f"{part.member.pid}/{self._n}"
            self._n += 1
            mover.take(f"{key}/source", [part.source[i] for i in ids], sizes, there)
            self._bytes += sum(sizes)
            if not part.sees(there):
                if any(m.share for m in pieces):
                    raise CannotBeMoved(detail=_BLIND)
                close_all(mover.make(f"{key}/room", sizes, there))
                fits = bool(ahead.fits(self._work, {there: sum(sizes)}))
                if fits:
                    copies.append((f"{key}/source", f"{key}/room", there))
                part.later.append(_Later(key, pieces, there, fits))
                continue
            made = mover.make(f"{key}/target", sizes, there)
            part.target.update(zip(ids, made, strict=True))
            self._shared.update({m.share: os.dup(part.target[m.id]) for m in pieces if m.share})
            copies.append((f"{key}/source", f"{key}/target", there))
        for piece in others:
            if piece.id not in one:
                here, there = part.places(piece)
                part.target[piece.id] = part.source[piece.id] if here == there else os.dup(self._shared[piece.share])

    # -- the pause -----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        self._hold_again()
        with self._work.spent("gate"):
            self._close_gates(self._parts)
        self._refuse_outside()
        now_of = [(part, {m.id: m for m in part.pieces()}) for part in self._parts]
        for part, now in now_of:  # of all, before one of them is given what another shares since
            self._note_shares(part, now.values())
        for part, now in now_of:
            if set(now) == set(part.source):
                continue
            for gone in set(part.source) - set(now):
                close_all({part.source.pop(gone), part.target.pop(gone, -1)} - {-1})
            self._add(part, [m for i, m in sorted(now.items()) if i not in part.source])
            self._hold(part)
        self._take_away(self._parts)

    def _note_shares(self, part: _Part, pieces: Iterable[Memory]) -> None:
        """Has what is shared since it was made on the other side be the one for all that have it.

        Raises CannotBeMoved: its process makes it itself, and the others could not have that.
        """
        for piece in pieces:
            if not piece.share or piece.share in self._shared or piece.id not in part.source:
                continue
            if piece.id not in part.target:
                raise CannotBeMoved(detail=_BLIND)
            self._shared[piece.share] = os.dup(part.target[piece.id])

    def copy(self) -> None:
        def copy() -> None:
            with self._work.spent("copy"):
                self._copy(self._copies)

        self._copying.start(copy)

    def arrive(self) -> None:
        for part in self._parts:
            self._work.note(Noted.MAP, Phase.BEGIN, part.member.pid)
            part.mapped = True
        # Where a stack cannot be put back there is still a way back; else its gate would see to it.
        together([partial(part.shim.stack, 0) for part in self._parts])
        self._stacks_back()
        self._make_there()
        together([partial(self._give_back, part) for part in self._parts])

    @staticmethod
    def _give_back(part: _Part) -> None:
        stand = part.shim.hello().stand
        if part.target:
            stand = part.shim.map(list(part.target), list(part.target.values()))
        if ids := [m.id for later in part.later for m in later.pieces if m.id in part.source]:
            stand = part.shim.map(ids)
        if stand is not Stand.CLOSED:
            raise FailedUndone(f"process {part.member.pid} could not be given its memory back")

    def _make_there(self) -> None:
        """Has processes make what they cannot import, and fills that: with what came ahead, or from where it was."""
        copies: dict[int, list[tuple[str, str, str]]] = {}
        with self._work.spent("make"):
            for part in self._parts:
                for later in part.later:
                    copies.setdefault(part.shim.owner, []).append(self._made_by_itself(part, later))
            self._copy(copies)

    def _made_by_itself(self, part: _Part, later: _Later) -> tuple[str, str, str]:
        """Has it make these pieces; returns what is to be copied into them."""
        mover, gpu = self._residents.mover(part.shim.owner), later.gpu
        source, room, target = (f"{later.key}/{what}" for what in ("source", "room", "target"))
        pieces = [m for m in later.pieces if m.id in part.source]  # others it has freed since
        all_there = len(pieces) == len(later.pieces)
        ids, sizes = [m.id for m in pieces], [m.bytes for m in pieces]
        if later.ahead and all_there:
            fds, came = ahead.made(part.shim, ids, lambda: mover.drop(room))
        else:
            mover.drop(room)
            fds, came = part.shim.make(ids), False
        try:
            if not all_there:
                mover.drop(source)
                mover.take(source, [part.source[i] for i in ids], sizes, gpu)
            mover.take(target, fds, sizes, gpu)
        finally:
            close_all(fds)
        return room if came else source, target, gpu

    def _copy(self, copies: Mapping[int, Sequence[tuple[str, str, str]]]) -> None:
        limit, movers = copy_limit(self.bytes), self._residents.mover
        together([partial(movers(owner).copy, some, limit) for owner, some in copies.items()])

    def close(self) -> None:
        close_all(self._shared.values())
        self._shared.clear()
        super().close()

"""Where all ranks of a job can stop: the same point of every communicator's history, with nothing in flight.

Each process counts the calls that it has begun: collectives for each communicator, sends and receives for each ordered
pair of ranks. Calls that were not begun when the gates closed wait. What some rank has begun the others have to begin,
too: they are let go on to the largest count. Who waits meanwhile for something that another rank would do only after a
call that it may not begin is found by its standing still, and that call is let through as well. Why this comes to an
end is in ``native/shim/DESIGN.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from limosa.parking.answers import Comm, CommsLook, Counted, Want
from limosa.parking.protocol import Kind

PATIENCE = 0.03
"""Seconds without any progress after which calls that wait are let through; twice as long each time that it happens."""
LONGEST_PATIENCE = 0.5
ALONE = 0.5
"""Seconds without any progress after which a communicator that not all of its ranks have any more holds nobody up."""

MOST_NAMED = (1 << 16) - 1
"""A rank of a process that has several is named to its shim by 16 bits."""

Id = tuple[int, int]


class Said(msgspec.Struct, frozen=True):
    """What one process says of its communicators, all at one moment."""

    look: CommsLook
    comms: Sequence[Comm] = ()
    counted: Sequence[Counted] = ()
    wants: Sequence[Want] = ()


class What(NamedTuple):
    """What is counted alike in two or more ranks: collectives, or what goes from one rank to another."""

    id: Id
    source: int = -1  # -1: collectives
    target: int = -1


class Limit(NamedTuple):
    """Up to which count a process may go on."""

    id: Id
    kind: Kind
    rank: int  # which of its ranks; -1: all of them
    peer: int
    most: int


def counts(said: Said, of_several: Callable[[int, int], int] = min) -> dict[What, int]:
    """What a process has begun. Several ranks of one communicator in it: the one that is furthest behind, or ahead."""
    found: dict[What, int] = {}
    by_number = {comm.number: comm for comm in said.comms}
    own = {(comm.id, comm.rank): comm.number for comm in said.comms}
    told = {(one.number, one.peer) for one in said.counted}

    def add(what: What, count: int) -> None:
        found[what] = of_several(found.get(what, count), count)

    for comm in said.comms:
        add(What(comm.id), comm.collectives)
    for one in said.counted:
        of = by_number.get(one.number)
        if of is None or of.rank < 0 or one.peer >= of.ranks:
            continue
        there, back = What(of.id, of.rank, one.peer), What(of.id, one.peer, of.rank)
        add(there, one.sent)
        add(back, one.received if one.peer != of.rank else one.sent)
        if (of.id, one.peer) in own and (own[of.id, one.peer], of.rank) not in told:  # that one has begun nothing
            add(there, 0)
            add(back, 0)
    return found


def _who_wants(said: Said) -> Iterator[tuple[Want, int]]:
    """What threads of this process want, and the rank that wants it; -1 where there is none.

    Of several ranks an older shim does not say which. A process may say that it has thousands of them, and that each of
    thousands of threads waits: they are gone through once.
    """
    own = {(comm.id, comm.rank) for comm in said.comms}
    some = {comm.id: comm.rank for comm in said.comms}
    for want in said.wants:
        yield want, want.rank if (want.id, want.rank) in own else some.get(want.id, -1)


def whole(saids: Sequence[Said]) -> dict[Id, bool]:
    """Whether all ranks of a communicator are there, each once, for each that any process has."""
    ranks: dict[Id, list[int]] = {}
    sizes: dict[Id, int] = {}
    for said in saids:
        for comm in said.comms:
            ranks.setdefault(comm.id, []).append(comm.rank)
            sizes[comm.id] = max(sizes.get(comm.id, 0), comm.ranks)
    return {id_: len(found) >= sizes[id_] and _each_once(found, sizes[id_]) for id_, found in ranks.items()}


def _each_once(ranks: Sequence[int], n: int) -> bool:
    return sorted(rank for rank in ranks if rank >= 0) == list(range(n))


def at_one_point(saids: Sequence[Said]) -> bool:
    """Whether what one has begun the others have begun, too; of processes that do not go on."""
    point = Meeting(0.0)
    point.reach(saids)
    return not point.any_behind(saids)


class Meeting:
    """The way of some processes to the point where all of them stop."""

    def __init__(self, now: float):
        self.targets: dict[What, int] = {}
        self._told: list[dict[Limit, None]] = []
        self._seen: object = None
        self._since = self._quiet = now
        self._patience = PATIENCE

    def settled(self, saids: Sequence[Said], now: float) -> bool:
        """Whether all stand at the same point, with no call under way."""
        if any(said.look.inside or any(comm.joining for comm in said.comms) for said in saids):
            return False
        if self.any_behind(saids):
            return False
        return now - self._quiet > ALONE or all(whole(saids).values())

    def limits(self, saids: Sequence[Said], now: float) -> list[list[Limit]]:
        """For each process what it may go on to that it has not been told yet."""
        seen = [(said.look.inside, counts(said), counts(said, max)) for said in saids]
        if seen != self._seen:
            self._seen, self._since, self._quiet = seen, now, now
        self.reach(saids)
        if now - self._since > self._patience:
            self._since, self._patience = now, min(LONGEST_PATIENCE, 2 * self._patience)
            for what, count in self._wanted(saids):
                self._reach(what, count)
        self._told = self._told or [{} for _ in saids]
        return [list(self._new(said, told)) for said, told in zip(saids, self._told, strict=True)]

    def waits(self, saids: Sequence[Said]) -> Iterator[tuple[int, What, list[int]]]:
        """Who is behind, in what, and who has come there and waits: the numbers of the processes, for words."""
        have = [counts(said) for said in saids]
        for i, behind in enumerate(self._each_behind(saids)):
            for what in behind:
                yield i, what, [j for j, one in enumerate(have) if j != i and one.get(what, 0) >= self.targets[what]]

    def reach(self, saids: Sequence[Said]) -> None:
        """What anybody has begun all have to come to."""
        for said in saids:
            for what, count in counts(said, max).items():
                self._reach(what, count)

    def any_behind(self, saids: Sequence[Said]) -> bool:
        """Whether anybody has not come to all of that."""
        return any(True for _ in self._behind(saids))

    def _reach(self, what: What, count: int) -> None:
        if self.targets.get(what, 0) < count:
            self.targets[what] = count

    def _each_behind(self, saids: Sequence[Said]) -> Iterator[Iterator[What]]:
        has = whole(saids)
        for said in saids:
            yield self._behind_of(said, counts(said), {comm.id: comm.rank for comm in said.comms}, has)

    def _behind_of(
        self, said: Said, mine: Mapping[What, int], ranks: Mapping[Id, int], has: Mapping[Id, bool]
    ) -> Iterator[What]:
        own = {(comm.id, comm.rank) for comm in said.comms if comm.rank >= 0}
        for what, count in self.targets.items():
            if what.id not in ranks:
                if what.source < 0 and not has.get(what.id, True):
                    yield what  # it is yet to be made here, or not to be ended alone
                continue
            concerns = what.source < 0 or (what.id, what.source) in own or (what.id, what.target) in own
            if concerns and mine.get(what, 0) < count:
                yield what

    def _behind(self, saids: Sequence[Said]) -> Iterator[What]:
        has = whole(saids)
        for behind in self._each_behind(saids):
            yield from (what for what in behind if has.get(what.id, True))

    def _wanted(self, saids: Sequence[Said]) -> Iterator[tuple[What, int]]:
        """What those want who are behind; if none of them waits at a gate, what anybody wants.

        One that is behind and waits for a call of another communicator needs that first. One that waits for something
        else, a message by way of the host, waits for a rank that stands at its gate.
        """
        late = [said for said, behind in zip(saids, self._each_behind(saids), strict=True) if any(True for _ in behind)]
        some = [said for said in late if said.wants] or saids
        for said in some:
            for want, rank in _who_wants(said):
                if want.kind is not Kind.COLLECTIVE and rank < 0:
                    continue  # it is not made yet
                if want.kind is Kind.SEND:
                    yield What(want.id, rank, want.peer), want.wanted
                elif want.kind is Kind.RECEIVE:
                    yield What(want.id, want.peer, rank), want.wanted
                else:
                    yield What(want.id), want.wanted

    def _new(self, said: Said, told: dict[Limit, None]) -> Iterator[Limit]:
        own = {(comm.id, comm.rank) for comm in said.comms if comm.rank >= 0}
        ranks = Counter(id_ for id_, _ in own)

        def one(id_: Id, rank: int) -> int:  # older shims know no ranks
            return rank if ranks[id_] > 1 and rank < MOST_NAMED else -1

        for what, count in self.targets.items():
            new = []
            if what.source < 0:
                new.append(Limit(what.id, Kind.COLLECTIVE, -1, 0, count))
            if (what.id, what.source) in own:
                new.append(Limit(what.id, Kind.SEND, one(what.id, what.source), what.target, count))
            if (what.id, what.target) in own:
                new.append(Limit(what.id, Kind.RECEIVE, one(what.id, what.target), what.source, count))
            for limit in new:
                if limit not in told:
                    told[limit] = None
                    yield limit

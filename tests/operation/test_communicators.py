"""What processes say of their communicators is bounded, and is no word about another user's."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest

from limosa.errors import CannotBeMoved
from limosa.operation.communicators import closing
from limosa.operation.communicators.meeting import Said, whole
from limosa.operation.journal import Member
from limosa.operation.work import Clock
from limosa.parking.answers import Comm, CommsLook
from limosa.parking.protocol import CommGate
from limosa.process.identity import Identity


class Says:
    """A shim that says what it likes."""

    def __init__(self, identity: Identity, comms: list[Comm], owner: int = 0):
        self.identity, self.owner, self.until, self.asked = identity, owner, None, list[str]()
        self.said, self.changes = comms, itertools.repeat(1)
        self.gate = CommGate.OPEN

    def _look(self, what: list[Any]) -> tuple[CommsLook, list[Any]]:
        return CommsLook(self.gate, 0, next(self.changes)), what

    def comms(self) -> tuple[CommsLook, list[Comm]]:
        return self._look(self.said)

    def counted(self) -> tuple[CommsLook, list[Any]]:
        return self._look([])

    def wants(self) -> tuple[CommsLook, list[Any]]:
        return self._look([])

    def unique_ids(self, numbers: list[int]) -> list[bytes]:
        return [bytes([self.owner]) * 128 for _ in numbers]

    def join(self, ids: list[tuple[int, bytes]], seconds: float) -> None:
        self.asked.append(f"join {[id_[0] for _, id_ in ids]}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.asked.append(name)


def of(rank: int, ranks: int = 2, *, closed: bool = False) -> Comm:
    return Comm((7, 7), 1, 5, rank, ranks, 0, closed=closed)


def rank(says: Says, root: int = 1) -> closing.Rank:
    member = Member(identity=says.identity, root=root)
    return closing.Rank(member, says, own=False)  # type: ignore[arg-type]


@pytest.fixture
def me() -> Identity:
    return Identity.of(os.getpid())


def test_one_that_never_says_the_same_twice_is_not_asked_for_ever(me: Identity) -> None:
    says = Says(me, [of(0)])
    says.changes = itertools.count()
    begun = time.monotonic()
    with pytest.raises(CannotBeMoved, match="faster than it can be asked"):
        closing.meet([rank(says)], Clock("move", timeout=30))
    assert time.monotonic() - begun < 3


def test_a_rank_that_two_have_is_not_whole() -> None:
    look = CommsLook(CommGate.OPEN, 0, 1)
    assert whole([Said(look, [of(0)]), Said(look, [of(1)])]) == {(7, 7): True}
    assert whole([Said(look, [of(0)]), Said(look, [of(1)]), Said(look, [of(0)])]) == {(7, 7): False}
    assert whole([Said(look, [of(0)]), Said(look, [of(0)])]) == {(7, 7): False}


def test_who_says_that_he_is_rank_0_of_another_users_is_not_asked_for_its_id(
    me: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id names the address that the ranks connect to."""
    honest = [Says(me, [of(n, closed=True)], owner=11) for n in (0, 1)]
    thief = Says(me, [of(0, closed=True)], owner=12)
    ranks = [rank(says) for says in (*honest, thief)]
    monkeypatch.setattr(closing, "ranks_of", lambda *_: ranks)
    closing.back([])
    assert [[a for a in says.asked if a.startswith("join")] for says in (*honest, thief)] == [
        ["join [11]"],
        ["join [11]"],
        [],
    ]


def test_jobs_of_one_user_stop_apart(me: Identity) -> None:
    a, b = (rank(Says(me, [of(0)], owner=5), root) for root in (1, 2))
    assert closing.apart([a, b]) == [[a], [b]]


def test_all_that_a_process_is_asked_has_an_end(me: Identity) -> None:
    """However many packets it is asked in."""
    says, until = Says(me, [of(0)]), list[Any]()
    says.cut = lambda: until.append(says.until)  # type: ignore[attr-defined]
    closing.meet([rank(says)], Clock("move", timeout=30))
    assert 0 < until[0].left() <= closing.MEETING_SECONDS + 2
    assert says.until is None

"""What processes say of their communicators is bounded, and is no word about another user's."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support import quickest

from limosa.errors import CannotBeMoved, TimedOutUndone
from limosa.operation.communicators import closing
from limosa.operation.communicators.meeting import Limit, Meeting, Said, at_one_point, counts, whole
from limosa.operation.journal import Member, Noted, Phase
from limosa.operation.steps.communicators import JoinCommunicators
from limosa.operation.work import Clock
from limosa.parking.answers import Comm, CommsLook, Counted, Hello, Want
from limosa.parking.protocol import CommGate, Kind, Stand
from limosa.parking.shim import ShimError
from limosa.process.identity import Identity


class Says:
    """A shim that says what it likes."""

    def __init__(self, identity: Identity, comms: list[Comm], owner: int = 0):
        self.identity, self.owner, self.until, self.asked = identity, owner, None, list[str]()
        self.said, self.changes = comms, itertools.repeat(1)
        self.gate = CommGate.OPEN
        self.stands, self.pairs = Hello(Stand.OPEN, 0, 0), list[Counted]()

    def _look(self, what: list[Any]) -> tuple[CommsLook, list[Any]]:
        return CommsLook(self.gate, 0, next(self.changes)), what

    def comms(self) -> tuple[CommsLook, list[Comm]]:
        return self._look(self.said)

    def counted(self) -> tuple[CommsLook, list[Any]]:
        return self._look(self.pairs)

    def wants(self) -> tuple[CommsLook, list[Any]]:
        return self._look([])

    def hello(self) -> Hello:
        return self.stands

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
        closing.meet([rank(says)], Clock("move", timeout=250))
    assert time.monotonic() - begun < 60


def test_a_rank_that_two_have_is_not_whole() -> None:
    look = CommsLook(CommGate.OPEN, 0, 1)
    assert whole([Said(look, [of(0)]), Said(look, [of(1)])]) == {(7, 7): True}
    assert whole([Said(look, [of(0)]), Said(look, [of(1)]), Said(look, [of(0)])]) == {(7, 7): False}
    assert whole([Said(look, [of(0)]), Said(look, [of(0)])]) == {(7, 7): False}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Member]]]:
    """``job(says, …)``: members of one job, each a process, which say that; None says nothing. Of users 11, 11, 12 …"""
    sleepers: list[subprocess.Popen[bytes]] = []

    def make(*says: Says | None, owners: tuple[int, ...]) -> list[Member]:
        members, of_pid = [], {}
        for one, owner in zip(says, owners, strict=True):
            sleepers.append(subprocess.Popen(["sleep", "60"]))
            members.append(Member(identity=Identity.of(sleepers[-1].pid), root=1))
            of_pid[sleepers[-1].pid] = (one, owner)

        def rank_of(member: Member, _: object) -> closing.Rank:
            answers, owner = of_pid[member.pid]
            if answers is None:
                raise ShimError(pid=member.pid, what="comms", detail="timed out")
            answers.identity, answers.owner = member.identity, owner
            return closing.Rank(member, answers, own=False)  # type: ignore[arg-type]

        monkeypatch.setattr(closing, "_rank_of", rank_of)
        monkeypatch.setattr(closing, "under_shim", lambda _: True)
        monkeypatch.setattr(closing, "uids_of", lambda pid: (of_pid[pid][1],) * 4)
        return members

    yield make
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()


def joins(*says: Says) -> list[list[str]]:
    return [[a for a in one.asked if a.startswith("join")] for one in says]


def test_one_that_says_nothing_keeps_no_other_users_ranks(me: Identity, job: Callable[..., list[Member]]) -> None:
    honest = [Says(me, [of(n, closed=True)]) for n in (0, 1)]
    with pytest.raises(CannotBeMoved, match="does not answer"):
        closing.back(job(*honest, None, owners=(11, 11, 12)))
    assert joins(*honest) == [["join [11]"]] * 2
    assert "let" in honest[0].asked


def test_one_that_says_nothing_may_be_a_rank_of_its_own_users(me: Identity, job: Callable[..., list[Member]]) -> None:
    """They are not let go on without it: what is closed could not be made again afterwards."""
    others = [Says(me, [of(n, 3, closed=True)]) for n in (0, 1)]
    with pytest.raises(CannotBeMoved, match="does not answer"):
        closing.back(job(*others, None, owners=(11, 11, 11)))
    assert [says.asked for says in others] == [[], []]


def test_nothing_is_made_where_memory_may_be_away(me: Identity, job: Callable[..., list[Member]]) -> None:
    both = [Says(me, [of(n, closed=True)]) for n in (0, 1)]
    both[1].stands = Hello(Stand.AWAY, 0, 0)
    with pytest.raises(CannotBeMoved, match="at its gate"):
        closing.back(job(*both, owners=(11, 11)))
    assert [says.asked for says in both] == [[], []]


def test_what_is_compared_is_bounded(me: Identity) -> None:
    says = Says(me, [of(0, 1 << 20)])
    says.pairs = [Counted(1, 1, 1, peer) for peer in range(70_000)]
    begun = time.monotonic()
    with pytest.raises(CannotBeMoved, match="too much"):
        closing.meet([rank(says), rank(Says(me, [of(1)]))], Clock("move", timeout=250))
    assert time.monotonic() - begun < 60


def test_what_is_compared_is_bounded_also_once_they_are_at_rest(me: Identity) -> None:
    """Sixteen that said it only then took 40 seconds and 400 MB, 48 more than 1.3 GB."""
    says = [Says(me, [of(n, 1 << 20)]) for n in (0, 1)]
    says[0].pairs = [Counted(1, 1, 1, peer) for peer in range(70_000)]
    with pytest.raises(CannotBeMoved, match="too much"):
        closing.close([rank(one) for one in says], Clock("move", timeout=250))
    assert "shut" not in says[0].asked + says[1].asked


def test_thousands_that_wait_in_one_process_of_thousands_of_ranks_cost_little() -> None:
    """It held root's move for minutes: all ranks were gone through once for each that waits."""
    ranks, waiting = 4000, 30_000
    comms = [Comm((7, 7), i + 1, 0, i, ranks, 0) for i in range(ranks)]
    pairs = [Counted(i % ranks + 1, 0, 0, i // ranks) for i in range(waiting)]
    wants = [Want((7, 7), i + 1, Kind.SEND, i % ranks, 1) for i in range(waiting)]
    said = Said(CommsLook(CommGate.CUT, 1, 1), comms, pairs, wants)

    def meets() -> None:
        meeting = Meeting(0)
        for now in (0, 100):
            meeting.limits([said], now)

    assert quickest(meets, 10, 2) < 10


def test_thousands_that_are_half_made_again_cost_little(me: Identity, job: Callable[..., list[Member]]) -> None:
    """Twenty-four such processes held root's undo for minutes."""

    def half(n: int) -> Says:
        ids = [(n, i) for i in range(2048)]
        closed = [Comm(id_, 2 * i + 1, 0, 0, 2, 0, closed=True) for i, id_ in enumerate(ids)]
        return Says(me, closed + [Comm(id_, 2 * i + 2, 0, 1, 2, 0, again=True) for i, id_ in enumerate(ids)])

    says = [half(n) for n in range(8)]
    members = job(*says, owners=(11,) * len(says))

    assert quickest(lambda: closing.back(members), 10, 2) < 10
    assert all("let" in one.asked for one in says)


def test_who_waits_for_whom_is_told(me: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "MEETING_SECONDS", 0.1)
    ahead, behind = Says(me, [of(0)]), Says(me, [msgspec.structs.replace(of(1), collectives=4)])
    with pytest.raises(TimedOutUndone) as caught:
        closing.meet([rank(ahead), rank(behind)], Clock("move", timeout=250))
    collective = f"process {me.pid} has not come to a collective of the communicator of 2 ranks"
    assert caught.value.hint == f"{collective}, for which process {me.pid} waits"


def test_pairs_with_a_rank_that_there_is_not_are_none() -> None:
    look = CommsLook(CommGate.CUT, 0, 1)
    said = Said(look, [of(0)], [Counted(1, 3, 4, 1), Counted(1, 5, 6, 2)])
    assert sorted(counts(said).values()) == [3, 4, 5]  # of it the collectives are 5


def test_several_ranks_of_one_process_come_to_what_the_first_of_them_has_begun() -> None:
    """Each by a thread: one may be ahead of the other, and no other process ahead of that."""
    look = CommsLook(CommGate.CUT, 0, 1)

    def stand(*collectives: int, sent: int = 0, received: int = 0) -> list[Said]:
        comms = [Comm((7, 7), i + 1, n, i, 4, i) for i, n in enumerate(collectives)]
        pairs = [Counted(1, sent, 0, 1), *([Counted(2, 0, received, 0)] if received else [])]
        return [Said(look, comms[:2], pairs if sent else []), Said(look, comms[2:])]

    meeting = Meeting(0)
    first, second = meeting.limits(stand(3, 2, 2, 2), 0)
    assert first == second == [Limit((7, 7), Kind.COLLECTIVE, -1, 0, 3)]
    assert not meeting.settled(stand(3, 2, 3, 3), 0)
    assert not any(meeting.limits(stand(3, 3, 3, 3), 0))
    assert meeting.settled(stand(3, 3, 3, 3), 0)
    (first, second) = meeting.limits(stand(3, 3, 3, 3, sent=1), 0)
    assert sorted(first) == [Limit((7, 7), Kind.SEND, 0, 1, 1), Limit((7, 7), Kind.RECEIVE, 1, 0, 1)]
    assert second == []
    assert not meeting.settled(stand(3, 3, 3, 3, sent=1), 0)
    assert meeting.settled(stand(3, 3, 3, 3, sent=1, received=1), 0)
    assert at_one_point(stand(3, 3, 3, 3, sent=1, received=1))
    assert not at_one_point(stand(3, 3, 3, 3, sent=1))


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_one_that_wants_it_is_let_on_and_no_other(rank: int) -> None:
    """Rank 0 has sent to rank 2 twice, rank 1 never; one of them waits at the gate to do so for the third time."""
    look = CommsLook(CommGate.CUT, 0, 1)
    comms = [Comm((7, 7), i + 1, 0, i, 3, i) for i in range(3)]
    mine = Said(look, comms[:2], [Counted(1, 2, 0, 2)], [Want((7, 7), 3, Kind.SEND, 2, 1, rank)])
    meeting = Meeting(0)
    for now in (0.0, 100.0):
        limits = meeting.limits([mine, Said(look, comms[2:], [Counted(3, 0, 2, 0)])], now)
    assert [limit for limit in limits[0] if limit.most == 3] == [Limit((7, 7), Kind.SEND, rank, 2, 3)]
    assert [limit for limit in limits[1] if limit.most == 3] == [Limit((7, 7), Kind.RECEIVE, -1, rank, 3)]


def test_what_was_sent_behind_the_meetings_back_is_not_closed(me: Identity) -> None:
    """It lies in a buffer of NCCL's, which would go with the communicator."""
    sender, receiver = Says(me, [of(0)]), Says(me, [Comm((7, 7), 1, 5, 1, 2, 0)])
    sender.pairs, receiver.pairs = [Counted(1, 2, 0, 1)], [Counted(1, 0, 1, 0)]
    with pytest.raises(CannotBeMoved, match="more than it was let"):
        closing.close([rank(sender), rank(receiver)], Clock("move", timeout=250))
    assert "shut" not in sender.asked + receiver.asked


def test_who_says_that_he_is_rank_0_of_another_users_is_not_asked_for_its_id(
    me: Identity, job: Callable[..., list[Member]]
) -> None:
    """The id names the address that the ranks connect to."""
    honest = [Says(me, [of(n, closed=True)], owner=11) for n in (0, 1)]
    thief = Says(me, [of(0, closed=True)], owner=12)
    closing.back(job(*honest, thief, owners=(11, 11, 12)))
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
    closing.meet([rank(says)], Clock("move", timeout=250))
    assert 0 < until[0].left() <= closing.MEETING_SECONDS + 2
    assert says.until is None


def test_where_a_rank_does_not_answer_on_the_way_back_recover_goes_forward(
    me: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told so, and finds in the journal that it may: before, it took the job back."""

    def fails(*_: object) -> None:
        raise CannotBeMoved(detail="the shim does not answer")

    done: list[object] = []
    work = SimpleNamespace(try_note=lambda *noted: done.append(noted), only_forward=done.append)
    op: Any = SimpleNamespace(closed=True, ranks=[Member(identity=me)], shims={}, work=work)
    monkeypatch.setattr(closing, "back", fails)
    with pytest.raises(CannotBeMoved):
        JoinCommunicators().do(op)
    assert done[0] == (Noted.JOIN, Phase.BEGIN)
    assert "limosa recover" in str(done[1])

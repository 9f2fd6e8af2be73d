"""Has the processes of a job stop at the same point, close their communicators, and make them again."""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from limosa.errors import CannotBeMoved, LimosaError, TimedOutUndone
from limosa.ipc.packet import Deadline
from limosa.operation.communicators.meeting import Id, Meeting, Said, at_one_point, whole
from limosa.operation.journal import Member
from limosa.operation.parked.calls import together
from limosa.operation.work import Clock
from limosa.parking.protocol import CommGate, Stand
from limosa.parking.shim import Shim, under_shim
from limosa.process.identity import ending
from limosa.process.status import uids_of

MEETING_SECONDS = 10.0
"""How long the ranks may take to come to the same point."""
CLOSE_SECONDS = 30.0
JOIN_SECONDS = 60.0
WHOLE_SECONDS = 150.0
"""For all that is asked on the way back, whatever a process answers."""
MOST_COMPARED = 1 << 16
"""Communicators and pairs of ranks that talk directly, of all processes of a job."""
_LOOK_SECONDS = 0.0005
_STEADY_SECONDS = 1.0
_SPARE = 2.0
"""Seconds that what a process is told takes beside what it is to do."""
_T = TypeVar("_T")


class Rank:
    """A process that has communicators with others."""

    def __init__(self, member: Member, shim: Shim, *, own: bool):
        self.member, self.shim, self.own = member, shim, own
        self.said = Said(*shim.comms())


def said_by(shim: Shim) -> Said:
    """All that a process says, of one moment. Raises CannotBeMoved: it says something else each time."""
    end = time.monotonic() + _STEADY_SECONDS
    while time.monotonic() < end:
        look, comms = shim.comms()
        counted_at, counted = shim.counted()
        waits_at, wants = shim.wants()
        if look.changes == counted_at.changes == waits_at.changes:
            return Said(waits_at, comms, counted, wants)
    raise CannotBeMoved(detail=f"process {shim.identity.pid} calls NCCL faster than it can be asked")


def between(saids: Sequence[Said]) -> set[Id]:
    """The communicators that have ranks in more than one process: those that stand in the way."""
    here: dict[Id, int] = {}
    for said in saids:
        for id_ in {comm.id for comm in said.comms}:
            here[id_] = here.get(id_, 0) + 1
    found = set()
    for said in saids:
        own: dict[Id, int] = {}
        for comm in said.comms:
            own[comm.id] = own.get(comm.id, 0) + 1
        found |= {comm.id for comm in said.comms if comm.joining or own[comm.id] < comm.ranks or here[comm.id] > 1}
    return found


def within(saids: Sequence[Said]) -> bool:
    """Whether a process has several ranks of one communicator.

    Between their launches its gate would find a GPU that waits for the other one.
    """
    return any(len({comm.id for comm in said.comms}) < len(said.comms) for said in saids)


def ranks_of(members: Sequence[Member], connected: Mapping[int, Shim] = MappingProxyType({})) -> list[Rank]:
    """Connects to the processes that have communicators, but for those connected to; :func:`leave` closes connections.

    Raises CannotBeMoved: one runs under the shim and does not answer.
    """
    ranks, silent = _answering(members, connected)
    for error in silent.values():
        leave(ranks)
        raise error
    return ranks


def _answering(members: Sequence[Member], connected: Mapping[int, Shim]) -> tuple[list[Rank], dict[int, CannotBeMoved]]:
    """Those of them that answer, and of the others, by pid, what was wrong."""
    found: dict[int, Rank] = {}
    silent: dict[int, CannotBeMoved] = {}

    def one(member: Member) -> None:
        try:
            rank = _rank_of(member, connected.get(member.pid))
        except LimosaError as error:
            if not _looks_after_none(error) and member.identity.alive() and not ending(member.pid):
                silent[member.pid] = _no_answer(member.pid, error)
            return
        if rank.said.comms or rank.said.look.gate is not CommGate.OPEN:
            found[member.pid] = rank
        else:
            leave([rank])

    try:
        together([partial(one, member) for member in members if under_shim(member.pid)])
    except BaseException:
        leave(list(found.values()))
        raise
    return [found[member.pid] for member in members if member.pid in found], silent


def _no_answer(pid: int, error: LimosaError) -> CannotBeMoved:
    found = CannotBeMoved(detail=f"the shim of process {pid} does not answer ({error})")
    found.__cause__ = error
    return found


def apart(ranks: Sequence[Rank]) -> list[list[Rank]]:
    """Those of one job and one user: what one says is no word about another's. Each group stops and goes on alone."""
    groups: dict[tuple[int, int], list[Rank]] = {}
    for rank in ranks:
        groups.setdefault((rank.member.root, rank.shim.owner), []).append(rank)
    return list(groups.values())


@contextlib.contextmanager
def _in_all(ranks: Sequence[Rank], seconds: float) -> Iterator[None]:
    """All that these are asked takes no longer than that."""
    until = Deadline(seconds)
    for rank in ranks:
        rank.shim.until = until
    try:
        yield
    finally:
        for rank in ranks:
            rank.shim.until = None


def _looks_after_none(error: LimosaError) -> bool:
    """Whether that is the answer of a shim that does not look after communicators."""
    return error.fields.get("result") == -errno.ENOSYS


def _rank_of(member: Member, shim: Shim | None) -> Rank:
    """By the connection that there is; one that was closed meanwhile is none."""
    if shim is not None:
        try:
            return Rank(member, shim, own=False)
        except LimosaError as error:
            if _looks_after_none(error):
                raise
            shim.leave()  # it serves one at a time
    shim = Shim(member.identity)
    try:
        return Rank(member, shim, own=True)
    except BaseException:
        shim.close()
        raise


def leave(ranks: Sequence[Rank]) -> None:
    """Closes the connections that are ours."""
    for rank in ranks:
        if rank.own:
            rank.shim.close()


def _of_all(ranks: Sequence[Rank], what: Callable[[Rank], _T]) -> list[_T]:
    """Asks all at once. The first error is raised: the others may wait for that rank, and are not waited for."""
    found: dict[int, _T] = {}
    failed: list[LimosaError] = []

    def one(i: int) -> None:
        try:
            found[i] = what(ranks[i])
        except LimosaError as error:
            failed.append(error)
            for j, other in enumerate(ranks):
                if j != i and j not in found:
                    other.shim.interrupt()

    together([partial(one, i) for i in range(len(ranks))])
    if failed:
        for rank in ranks:
            rank.shim.leave()
        raise failed[0]
    return [found[i] for i in range(len(ranks))]


def _look(ranks: Sequence[Rank], clock: Clock, known: int = 0) -> list[Said]:
    """What all of them say now; ``known``: what there is to compare already. Raises CannotBeMoved: it is too much."""
    said = 0
    for rank in ranks:
        clock.check()
        rank.said = said_by(rank.shim)
        said += len(rank.said.comms) + len(rank.said.counted) + len(rank.said.wants)
        _refuse_too_many(ranks, said, known)  # before the next one says as much: all of it is in memory
    return [rank.said for rank in ranks]


def _refuse_too_many(ranks: Sequence[Rank], said: int, known: int) -> None:
    """What is compared grows with all that was ever said, and a process may say what it likes.

    Raises CannotBeMoved.
    """
    if max(said, known) > MOST_COMPARED or len(ranks) * max(said, known) > 64 * MOST_COMPARED:
        text = f"{len(ranks)} processes say too much of their communicators to be compared"
        raise CannotBeMoved(detail=f"{text} ({said} now, {known} in all)")


def meet(ranks: Sequence[Rank], clock: Clock) -> None:
    """Has all stop at the same point of every communicator's history.

    Raises TimedOutUndone: they did not come to one within the time; all go on. LimosaError: a process failed.
    """
    seconds = clock.at_most(MEETING_SECONDS)
    with _in_all(ranks, seconds + _SPARE):
        _meet(ranks, clock, seconds)


def _meet(ranks: Sequence[Rank], clock: Clock, seconds: float) -> None:
    began = time.monotonic()
    end = began + seconds
    _of_all(ranks, lambda rank: rank.shim.cut())
    meeting = Meeting(began)
    while True:
        clock.check()
        saids, now = _look(ranks, clock, len(meeting.targets)), time.monotonic()
        limits = meeting.limits(saids, now)
        for rank, some in zip(ranks, limits, strict=True):
            if some:
                rank.shim.limits(some)
        if not any(limits) and meeting.settled(saids, now):
            return
        if now > end:
            raise _no_meeting(ranks, meeting, saids, round(now - began, 1))
        time.sleep(_LOOK_SECONDS)


def _no_meeting(ranks: Sequence[Rank], meeting: Meeting, saids: Sequence[Said], seconds: float) -> LimosaError:
    told = []
    for i, what, ahead in itertools.islice(meeting.waits(saids), 4):
        kind = "a collective" if what.source < 0 else f"what goes from rank {what.source} to rank {what.target}"
        size = next((c.ranks for said in saids for c in said.comms if c.id == what.id), 0)
        text = f"process {ranks[i].member.pid} has not come to {kind} of the communicator of {size} ranks"
        if ahead:
            text += f", for which process {', '.join(str(ranks[j].member.pid) for j in ahead[:4])} waits"
        told.append(text)
    told += [f"process {rank.member.pid} is in a call of NCCL's" for rank in ranks if rank.said.look.inside]
    error = TimedOutUndone(what="bringing the ranks to the same point", seconds=seconds)
    error.hint = "; ".join(told) or "try again"
    return error


def close(ranks: Sequence[Rank], clock: Clock) -> None:
    """Closes what lies between processes, in all ranks at once. What lies within one stays as it is.

    The ranks stand at the same point. All work on all of their GPUs is done first: what one has sent may still be read
    from its memory by another.
    """
    with _in_all(ranks, 2 * clock.at_most(CLOSE_SECONDS) + _SPARE):
        _close(ranks, clock)


def _close(ranks: Sequence[Rank], clock: Clock) -> None:
    _of_all(ranks, lambda rank: rank.shim.rest(clock.at_most(CLOSE_SECONDS)))
    saids = _look(ranks, clock)
    if not at_one_point(saids):  # what was sent and is not received yet would be lost with its communicator
        raise CannotBeMoved(detail="a process with several ranks has sent or received more than it was let: try again")
    shared = between(saids)
    if not shared:
        return
    for rank in ranks:
        if any(comm.captured for comm in rank.said.comms if comm.id in shared):
            text = f"process {rank.member.pid} has put operations of NCCL into a CUDA graph just now"
            raise CannotBeMoved(detail=f"{text}: the graph holds the old connections")

    def one(rank: Rank) -> None:
        mine = sorted((comm for comm in rank.said.comms if comm.id in shared), key=lambda comm: (comm.id, comm.rank))
        rank.shim.shut([comm.number for comm in mine], clock.at_most(CLOSE_SECONDS))

    _of_all(ranks, one)
    for rank in ranks:
        imported = any(m.owner < 0 for m in rank.shim.memories())
        if imported or rank.shim.counts()["ipc"][0]:
            text = f"process {rank.member.pid} shares device memory with others, beside NCCL's"
            raise CannotBeMoved(detail=f"{text}: the driver could not restore it")


def join(ranks: Sequence[Rank]) -> None:
    """Makes again what was closed, and lets all go on. Where that fails it is tried once more, with the same ids.

    A communicator that has lost a rank meanwhile is not made again: its ranks are told so by the next call, as they
    would have been by NCCL. Raises LimosaError: it failed twice, and nobody has ended.
    """
    living, failed = _living(ranks), 0
    while True:
        try:
            _join_once(living)
            break
        except LimosaError:
            before, living = len(living), _living(living)
            failed += len(living) == before
            if failed > 1:
                raise
    try:
        _of_all(living, lambda rank: rank.shim.let())
    except LimosaError:
        if len(_living(living)) == len(living):
            raise
        let(_living(living))


def _living(ranks: Sequence[Rank]) -> list[Rank]:
    return [rank for rank in ranks if rank.member.identity.alive() and not ending(rank.member.pid)]


def _join_once(ranks: Sequence[Rank]) -> None:
    closed = _closed_everywhere(ranks)
    ids: dict[Id, bytes] = {}
    for rank in ranks:
        mine = {comm.id: comm.number for comm in rank.said.comms if comm.rank == 0 and comm.id in closed}
        if mine:
            ids |= dict(zip(mine, rank.shim.unique_ids(list(mine.values())), strict=True))

    def one(rank: Rank) -> None:
        mine = sorted((comm for comm in rank.said.comms if comm.id in ids), key=lambda comm: (comm.id, comm.rank))
        if mine:
            rank.shim.join([(comm.number, ids[comm.id]) for comm in mine], JOIN_SECONDS)

    _of_all(ranks, one)


def _closed_everywhere(ranks: Sequence[Rank]) -> set[Id]:
    """What is to be made again, and closed in all of its ranks: who has died in the middle has left some open.

    Those that were never closed are closed now. Where some were made again already, the others are about to be, or
    that has failed: whoever does not come to it in time has all of them closed once more.
    """
    closed = _whole_and_closed(ranks)
    made = {c.id: c.again for rank in ranks for c in rank.said.comms if c.id in closed and c.closed}

    def never_closed(rank: Rank) -> list[int]:
        return [c.number for c in rank.said.comms if c.id in closed and not c.closed and c.again == made[c.id]]

    _shut(ranks, never_closed)
    halves = {c.id for rank in ranks for c in rank.said.comms if c.id in closed and c.again != made[c.id]}
    if halves:
        late = [rank for rank in ranks if any(c.id in halves and c.closed for c in rank.said.comms)]
        _of_all(late, lambda rank: rank.shim.shut([], CLOSE_SECONDS))  # answered when what was asked before is done
        closed = _whole_and_closed(ranks)
        again = closed & halves
        _shut(ranks, lambda rank: [c.number for c in rank.said.comms if c.id in again and not c.closed])
    return closed


def _shut(ranks: Sequence[Rank], which: Callable[[Rank], Sequence[int]]) -> None:
    _of_all([rank for rank in ranks if which(rank)], lambda rank: rank.shim.shut(which(rank), CLOSE_SECONDS))


def _whole_and_closed(ranks: Sequence[Rank]) -> set[Id]:
    for rank in ranks:  # of nothing else is anything asked on the way back
        rank.said = Said(*rank.shim.comms())
    saids = [rank.said for rank in ranks]
    has = whole(saids)
    return {comm.id for said in saids for comm in said.comms if comm.closed and has[comm.id]}


def let(ranks: Sequence[Rank]) -> None:
    """Lets all go on where nothing was closed; one that has ended needs nothing."""
    for rank in ranks:
        with contextlib.suppress(LimosaError):
            rank.shim.let()


def back(
    members: Sequence[Member],
    connected: Mapping[int, Shim] = MappingProxyType({}),
    joins: Callable[[], object] = lambda: None,
) -> None:
    """Makes again whatever of these is closed, and lets them go on: the way back, and what ``recover`` does.

    ``joins`` is called before any is made. Raises LimosaError: one does not answer, or its gate is closed still. Those
    that it may have communicators with, of its job and its user, stay as they are; all others go on.
    """
    ranks, silent = _answering([m for m in members if m.identity.alive()], connected)
    try:
        silent |= _at_their_gates(ranks)
        theirs = {(member.root, user) for member in members if member.pid in silent for user in _users(member.pid)}
        groups = [group for group in apart(ranks) if (group[0].member.root, group[0].shim.owner) not in theirs]
        closed = [any(comm.closed for rank in group for comm in rank.said.comms) for group in groups]
        if any(closed):
            joins()
        together([partial(_back, group, was) for group, was in zip(groups, closed, strict=True)])
    finally:
        leave(ranks)
    for error in silent.values():
        raise error


def _at_their_gates(ranks: Sequence[Rank]) -> dict[int, CannotBeMoved]:
    """Those whose memory may be away, by pid: nothing of NCCL's is made there."""
    found: dict[int, CannotBeMoved] = {}

    def one(rank: Rank) -> None:
        pid = rank.member.pid
        try:
            if rank.shim.hello().stand is Stand.OPEN:
                return
            found[pid] = CannotBeMoved(detail=f"process {pid} stands at its gate: its communicators stay closed")
        except LimosaError as error:
            if rank.member.identity.alive() and not ending(pid):
                found[pid] = _no_answer(pid, error)

    together([partial(one, rank) for rank in ranks])
    return found


def _users(pid: int) -> set[int]:
    """Whose a process is; nobody's, where it has gone."""
    try:
        return set(uids_of(pid))
    except OSError:
        return set()


def _back(group: Sequence[Rank], closed: bool) -> None:
    with _in_all(group, WHOLE_SECONDS):
        if closed:
            join(group)
        else:
            let([rank for rank in group if rank.said.look.gate is not CommGate.OPEN])

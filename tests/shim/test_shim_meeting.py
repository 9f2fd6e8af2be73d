"""Ranks that compute together come to one point, wherever they are when they are stopped, and go on from there.

A model: threads are ranks, with the shim's own gate (``comms.c``, loaded once for each) and Limosa's own ``Meeting``.
What they run is drawn: communicators of some of the ranks, groups, sends and receives, waits for what was begun,
barriers by way of the host, a second thread with communicators of its own, ranks that are late. Communicators are made,
split and ended on the way: each of these waits for its peers inside the gate, as NCCL does.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from limosa.native.build import SHIM, compilers
from limosa.operation.communicators.meeting import Meeting, Said
from limosa.parking import answers
from limosa.parking.answers import CommsLook, Counted, Want
from limosa.parking.protocol import COMM, WANT, CommGate, Kind

RANKS = 4
LIMIT = 60.0
MOST = 80
"""Communicators of one rank."""
COMMS = ((0, 1, 2, 3), (0, 1), (2, 3), (1, 2, 3), (0, 3))
"""There from the beginning."""
INIT, SPLIT, END = -2, -3, -4
"""In the place of a source, where -1 is a collective."""

Call = tuple[int, int, int]
"""Communicator, source, target."""


class Event(NamedTuple):
    """What some ranks do: "call" (those together are a group), "wait" for all that was begun, "barrier", or "make"."""

    what: str
    calls: tuple[Call, ...] = ()
    ranks: tuple[int, ...] = ()
    thread: int = 0
    children: tuple[int, ...] = ()


class Program(NamedTuple):
    """Which ranks each communicator has, and what happens; each thread does what it has a part in, in this order."""

    members: tuple[tuple[int, ...], ...]
    threads: tuple[int, ...]  # whose each is
    events: tuple[Event, ...]


class Drawn:
    """A program that is being drawn."""

    def __init__(self, draw: st.DrawFn):
        self.draw = draw
        self.members: list[tuple[int, ...]] = list(COMMS)
        self.threads = [comm % 2 for comm in range(len(COMMS))]
        self.alive = [[comm for comm, of in enumerate(self.threads) if of == thread] for thread in (0, 1)]

    def event(self) -> Event:
        draw, thread = self.draw, self.draw(st.integers(0, 1))
        kinds = ("call",) * 4 + ("group", "wait", "barrier", "init", "split", "end")
        kind = draw(st.sampled_from(kinds))
        if kind == "barrier":
            return Event(kind, ranks=tuple(range(RANKS)), thread=thread)
        if kind == "wait":
            return Event(kind, ranks=tuple(draw(st.sets(st.integers(0, RANKS - 1), min_size=1))), thread=thread)
        if kind == "init" or not self.alive[thread]:
            ranks = tuple(sorted(draw(st.sets(st.integers(0, RANKS - 1), min_size=2))))
            return Event("make", ((self.new(thread, ranks), INIT, -1),), thread=thread)
        if kind in ("split", "end"):
            comm = draw(st.sampled_from(self.alive[thread]))
            if kind == "end":
                self.alive[thread].remove(comm)
                return Event("make", ((comm, END, -1),), thread=thread)
            colours = {rank: draw(st.booleans()) for rank in self.members[comm]}
            groups = [tuple(rank for rank in colours if colours[rank] is one) for one in (False, True)]
            children = tuple(self.new(thread, group) for group in groups if group)
            return Event("make", ((comm, SPLIT, -1),), thread=thread, children=children)
        return Event(
            "call",
            tuple(self.call(thread) for _ in range(draw(st.integers(2, 4)) if kind == "group" else 1)),
            thread=thread,
        )

    def new(self, thread: int, ranks: tuple[int, ...]) -> int:
        self.members.append(ranks)
        self.threads.append(thread)
        self.alive[thread].append(len(self.members) - 1)
        return len(self.members) - 1

    def call(self, thread: int) -> Call:
        comm = self.draw(st.sampled_from(self.alive[thread]))
        size = len(self.members[comm])
        if size < 2 or not self.draw(st.booleans()):
            return comm, -1, -1
        source = self.draw(st.integers(0, size - 1))
        return comm, source, (source + self.draw(st.integers(1, size - 1))) % size


@st.composite
def programs(draw: st.DrawFn) -> Program:
    drawn = Drawn(draw)
    events = tuple(drawn.event() for _ in range(draw(st.integers(4, 30))))
    return Program(tuple(drawn.members), tuple(drawn.threads), events)


class Model:
    """What ranks have begun, by what is counted; a call is done when all that take part have begun it."""

    def __init__(self, program: Program) -> None:
        self.members, self.threads = program.members, program.threads
        self.lock = threading.Condition()
        self.begun: dict[int, Counter[Call]] = {rank: Counter() for rank in range(RANKS)}
        self.barriers: Counter[int] = Counter()
        self.failed = False

    def done(self, rank: int, threads: Sequence[int] = (0, 1)) -> bool:
        """Whether all is over that these threads have begun (who waited for another one's could wait for ever)."""
        begun = self.begun[rank].items()
        return all(self.begun_by_all(what, n) for what, n in begun if self.threads[what[0]] in threads)

    def begun_by_all(self, what: Call, n: int = 1) -> bool:
        return all(self.begun[other][what] >= n for other in self.takes_part(what))

    def takes_part(self, what: Call) -> Sequence[int]:
        comm, source, target = what
        members = self.members[comm]
        return members if source < 0 else (members[source], members[target])

    def begins(self, rank: int, what: Sequence[Call]) -> None:
        with self.lock:
            for call in what:
                if rank in self.takes_part(call):
                    self.begun[rank][call] += 1
            self.lock.notify_all()

    def wait(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        with self.lock:
            while not true():
                if self.failed or (not self.lock.wait(0.05) and time.monotonic() > end):
                    self.failed = True
                    raise TimeoutError


class Rank:
    """One rank: its gate, and what its threads do."""

    def __init__(self, library: Path, number: int, model: Model, program: Program, late: tuple[float, float]):
        self.c = ctypes.CDLL(str(library))
        for new in (self.c.rank_comm, self.c.rank_begins, self.c.rank_splits):
            new.restype, new.argtypes = ctypes.c_void_p, [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
        self.c.rank_splits.argtypes = [ctypes.c_uint64]
        self.c.rank_made.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self.c.rank_ended.argtypes = [ctypes.c_void_p]
        self.c.rank_look.restype = ctypes.c_uint64
        self.c.rank_limit.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64]
        self.c.comms_in_child()  # as new
        self.number, self.model, (self.start, self.late) = number, model, late
        self.handles: dict[int, int] = {}
        for comm, members in enumerate(COMMS):
            if number in members:
                self.handles[comm] = self.c.rank_comm(comm + 1, len(members), members.index(number))
        scripts = [[e for e in program.events if e.thread == thread] for thread in (0, 1)]
        self.threads = [threading.Thread(target=self.run, args=(s, t), daemon=True) for t, s in enumerate(scripts)]

    def run(self, script: Sequence[Event], thread: int) -> None:
        barriers = 0
        time.sleep(self.start)
        try:
            for i, event in enumerate(script):
                time.sleep(self.late * ((i * 7 + self.number * 3) % 4))
                if event.what == "barrier":
                    barriers += 1
                    key = 1000 * thread + barriers
                    with self.model.lock:
                        self.model.barriers[key] += 1
                        self.model.lock.notify_all()
                    self.model.wait(lambda key=key: self.model.barriers[key] >= RANKS)
                elif event.what == "wait" and self.number in event.ranks:
                    self.model.wait(lambda: self.model.done(self.number, [thread]))
                elif event.what == "call":
                    self.call(event.calls)
                elif event.what == "make" and self.number in self.model.takes_part(event.calls[0]):
                    self.make(event.calls[0], event.children)
        except TimeoutError:
            pass

    def make(self, what: Call, children: Sequence[int]) -> None:
        """A communicator comes, is split, or ends: a call that is over when all ranks have come to it."""
        comm, kind, _ = what
        members = self.model.members
        if kind == INIT:
            self.handles[comm] = self.c.rank_begins(comm + 1, len(members[comm]), members[comm].index(self.number))
        self.enter([(comm, Kind.COLLECTIVE, -1)])
        self.model.begins(self.number, [what])
        made = [comm] if kind == INIT else [child for child in children if self.number in members[child]]
        if kind == END:
            self.c.rank_ended(self.handles[comm])
        elif kind == SPLIT:
            self.handles[made[0]] = self.c.rank_splits(made[0] + 1)
        self.model.wait(lambda: self.model.begun_by_all(what))
        for one in made:
            self.c.rank_made(self.handles[one], len(members[one]), members[one].index(self.number))
        self.c.comms_leave()

    def enter(self, calls: Sequence[tuple[int, Kind, int]]) -> None:
        n = len(calls)
        handles = (ctypes.c_void_p * n)(*(self.handles[comm] for comm, _, _ in calls))
        kinds, peers = (ctypes.c_int * n)(*(k for _, k, _ in calls)), (ctypes.c_int * n)(*(p for _, _, p in calls))
        self.c.rank_enter(handles, kinds, peers, ctypes.c_size_t(n))

    def call(self, calls: Sequence[Call]) -> None:
        members = self.model.members
        mine: list[tuple[int, Kind, int]] = []
        for comm, source, target in calls:
            if source < 0 and self.number in members[comm]:
                mine.append((comm, Kind.COLLECTIVE, -1))
            elif source >= 0 and self.number == members[comm][source]:
                mine.append((comm, Kind.SEND, target))
            elif source >= 0 and self.number == members[comm][target]:
                mine.append((comm, Kind.RECEIVE, source))
        if not mine:
            return
        self.enter(mine)
        self.model.begins(self.number, calls)
        self.c.comms_leave()

    def said(self) -> Said:
        told, pairs = ctypes.create_string_buffer(COMM.size * MOST), (ctypes.c_uint64 * (16 * MOST))()
        wants = ctypes.create_string_buffer(WANT.size * 64)
        n_comms, n_pairs, n_wants = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        of = ctypes.byref
        inside = self.c.rank_look(told, of(n_comms), pairs, of(n_pairs), wants, of(n_wants))
        comms = list(answers.comms(told.raw[: COMM.size * n_comms.value], n_comms.value))
        counted = [
            Counted(pairs[4 * i], pairs[4 * i + 2], pairs[4 * i + 3], pairs[4 * i + 1]) for i in range(n_pairs.value)
        ]
        found = [
            Want((a, b), wanted, Kind(kind), peer, thread)
            for a, b, wanted, kind, peer, thread, _ in WANT.iter_unpack(wants.raw[: n_wants.value * WANT.size])
        ]
        return Said(CommsLook(CommGate.CUT, inside, 0), comms, counted, found)


def stop(ranks: Sequence[Rank]) -> float:
    """Has them come to one point; returns how long it took."""
    began = time.monotonic()
    for rank in ranks:
        rank.c.comms_cut()
    meeting = Meeting(began)
    while True:
        saids, now = [rank.said() for rank in ranks], time.monotonic()
        limits = meeting.limits(saids, now)
        for rank, some in zip(ranks, limits, strict=True):
            for one in some:
                rank.c.rank_limit(one.id[0], one.kind, one.peer, one.most)
        if not any(limits) and meeting.settled(saids, now):
            return now - began
        assert now - began < LIMIT, meeting.waits(saids)
        time.sleep(0.0005)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("meeting")
    first = folder / "rank0.so"
    source = Path(__file__).with_name("meeting.c")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", "-pthread", f"-I{SHIM}"]
    subprocess.run([*compilers()[0], *flags, "-o", first, source], check=True, timeout=60)
    for rank in range(1, RANKS):
        shutil.copy(first, folder / f"rank{rank}.so")
    return [folder / f"rank{rank}.so" for rank in range(RANKS)]


@settings(
    phases=[Phase.generate], max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    program=programs(),
    when=st.lists(st.floats(0, 0.02), min_size=1, max_size=3),
    late=st.lists(
        st.tuples(st.sampled_from((0.0, 0.004, 0.015)), st.sampled_from((0.0, 0.0005, 0.003))),
        min_size=RANKS,
        max_size=RANKS,
    ),
)
def test_all_ranks_stop_at_one_point_and_go_on(
    libraries: list[Path], program: Program, when: list[float], late: list[tuple[float, float]]
) -> None:
    model = Model(program)
    ranks = [Rank(library, i, model, program, late[i]) for i, library in enumerate(libraries)]
    for thread in itertools.chain(*(rank.threads for rank in ranks)):
        thread.start()
    for pause in when:
        time.sleep(pause)
        stop(ranks)
        with model.lock:
            for rank in ranks:
                assert model.done(rank.number), f"rank {rank.number} has begun what others have not"
            before = {rank.number: Counter(model.begun[rank.number]) for rank in ranks}
        time.sleep(0.002)
        with model.lock:
            assert before == {rank.number: model.begun[rank.number] for rank in ranks}, "one has gone on"
        for rank in ranks:
            assert rank.c.comms_shut()
            rank.c.comms_open()
    for thread in itertools.chain(*(rank.threads for rank in ranks)):
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert not model.failed


def test_a_question_changes_nothing_and_is_waited_for_at_the_end_alone(libraries: list[Path], tmp_path: Path) -> None:
    """What is never counted and may wait for others (False: not captured) is inside, as every call."""
    c = ctypes.CDLL(str(shutil.copy(libraries[0], tmp_path / "own.so")))
    c.comms_changes.restype = ctypes.c_uint64
    c.comms_ask.restype = c.comms_shut.restype = c.comms_enter_uncounted.restype = ctypes.c_bool
    assert c.comms_ask()
    assert (c.comms_changes(), c.comms_inside()) == (0, 0)
    c.comms_cut()
    assert c.comms_enter_uncounted(False)
    assert c.comms_ask()
    assert not c.comms_shut()
    assert c.comms_ask()  # as long as somebody is inside others may come to what he waits for
    c.comms_leave()
    assert c.comms_inside() == 0
    assert not c.comms_shut()
    assert not c.comms_ask()
    assert not c.comms_enter_uncounted(False)
    for _ in range(3):
        assert not c.comms_shut()
        c.comms_asked()
    assert c.comms_shut()
    assert c.comms_changes() == 1  # the one that left
    c.comms_open()
    assert c.comms_ask()

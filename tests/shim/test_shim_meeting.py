"""Ranks that compute together come to one point, wherever they are when they are stopped, and go on from there.

A model: threads are ranks, with the shim's own gate (``comms.c``, loaded once for each) and Limosa's own ``Meeting``.
What they run is drawn: communicators of some of the ranks, groups, sends and receives, waits for what was begun,
barriers by way of the host, a second thread with communicators of its own, ranks that are late.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from limosa.native.build import SHIM, compilers
from limosa.operation.communicators.meeting import Meeting, Said
from limosa.parking.answers import Comm, CommsLook, Counted, Want
from limosa.parking.protocol import WANT, CommGate, Kind

RANKS = 4
LIMIT = 6.0
COMMS = ((0, 1, 2, 3), (0, 1), (2, 3), (1, 2, 3), (0, 3))


class Event(NamedTuple):
    """What some ranks do: ``calls`` as (communicator, source, target), source -1 for a collective."""

    what: str  # "call", "wait" (for all that was begun), "barrier"
    calls: tuple[tuple[int, int, int], ...] = ()
    ranks: tuple[int, ...] = ()
    thread: int = 0


def thread_of(comm: int) -> int:
    return comm % 2


@st.composite
def events(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(("call", "call", "call", "group", "wait", "barrier")))
    if kind in ("wait", "barrier"):
        ranks = (
            tuple(range(RANKS)) if kind == "barrier" else tuple(draw(st.sets(st.integers(0, RANKS - 1), min_size=1)))
        )
        return Event(kind, ranks=ranks, thread=draw(st.integers(0, 1)))
    thread = draw(st.integers(0, 1))
    calls = []
    for _ in range(draw(st.integers(2, 4)) if kind == "group" else 1):
        comm = draw(st.sampled_from([i for i in range(len(COMMS)) if thread_of(i) == thread]))
        size = len(COMMS[comm])
        source, target = -1, -1
        if draw(st.booleans()):
            source = draw(st.integers(0, size - 1))
            target = (source + draw(st.integers(1, size - 1))) % size
        calls.append((comm, source, target))
    return Event("call", tuple(calls), thread=thread)


class Model:
    """What ranks have begun, by what is counted; a call is done when all that take part have begun it."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.begun: dict[int, Counter[tuple[int, int, int]]] = {rank: Counter() for rank in range(RANKS)}
        self.barriers: Counter[int] = Counter()
        self.failed = False

    def done(self, rank: int) -> bool:
        return all(self.begun[other][what] >= n for what, n in self.begun[rank].items() for other in takes_part(what))

    def wait(self, true: object) -> None:
        end = time.monotonic() + LIMIT
        with self.lock:
            while not true():  # type: ignore[operator]
                if self.failed or (not self.lock.wait(0.05) and time.monotonic() > end):
                    self.failed = True
                    raise TimeoutError


def takes_part(what: tuple[int, int, int]) -> Sequence[int]:
    comm, source, target = what
    return COMMS[comm] if source < 0 else (COMMS[comm][source], COMMS[comm][target])


class Rank:
    """One rank: its gate, and what its threads do."""

    def __init__(self, library: Path, number: int, model: Model, program: Sequence[Event], late: float):
        self.c = ctypes.CDLL(str(library))
        self.c.rank_comm.restype = ctypes.c_void_p
        self.c.rank_comm.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
        self.c.rank_look.restype = ctypes.c_uint64
        self.c.rank_limit.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64]
        self.c.comms_in_child()  # as new
        self.number, self.model, self.late = number, model, late
        self.comms = {i: COMMS[i].index(number) for i in range(len(COMMS)) if number in COMMS[i]}
        self.handles = {i: self.c.rank_comm(i + 1, len(COMMS[i]), rank) for i, rank in self.comms.items()}
        scripts = [[e for e in program if e.thread == thread] for thread in (0, 1)]
        self.threads = [threading.Thread(target=self.run, args=(s, t), daemon=True) for t, s in enumerate(scripts)]

    def run(self, script: Sequence[Event], thread: int) -> None:
        barriers = 0
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
                    self.model.wait(lambda: self.model.done(self.number))
                elif event.what == "call":
                    self.call(event.calls)
        except TimeoutError:
            pass

    def call(self, calls: Sequence[tuple[int, int, int]]) -> None:
        mine: list[tuple[int, Kind, int]] = []
        for comm, source, target in calls:
            if source < 0 and self.number in COMMS[comm]:
                mine.append((comm, Kind.COLLECTIVE, -1))
            elif source >= 0 and self.number == COMMS[comm][source]:
                mine.append((comm, Kind.SEND, target))
            elif source >= 0 and self.number == COMMS[comm][target]:
                mine.append((comm, Kind.RECEIVE, source))
        if not mine:
            return
        n = len(mine)
        handles = (ctypes.c_void_p * n)(*(self.handles[comm] for comm, _, _ in mine))
        kinds, peers = (ctypes.c_int * n)(*(k for _, k, _ in mine)), (ctypes.c_int * n)(*(p for _, _, p in mine))
        self.c.rank_enter(handles, kinds, peers, ctypes.c_size_t(n))
        with self.model.lock:
            for call in calls:
                if self.number in takes_part(call):
                    self.model.begun[self.number][call] += 1
            self.model.lock.notify_all()
        self.c.comms_leave()

    def said(self) -> Said:
        collectives, pairs = (ctypes.c_uint64 * 16)(), (ctypes.c_uint64 * 1024)()
        wants = ctypes.create_string_buffer(WANT.size * 64)
        n_pairs, n_wants = ctypes.c_size_t(), ctypes.c_size_t()
        inside = self.c.rank_look(collectives, pairs, ctypes.byref(n_pairs), wants, ctypes.byref(n_wants))
        comms = [
            Comm((i + 1, 0), number + 1, collectives[number], rank, len(COMMS[i]), 0)
            for number, (i, rank) in enumerate(self.comms.items())
        ]
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
    program=st.lists(events(), min_size=4, max_size=30),
    when=st.lists(st.floats(0, 0.02), min_size=1, max_size=3),
    late=st.lists(st.sampled_from((0.0, 0.0005, 0.003)), min_size=RANKS, max_size=RANKS),
)
def test_all_ranks_stop_at_one_point_and_go_on(
    libraries: list[Path], program: list[Event], when: list[float], late: list[float]
) -> None:
    model = Model()
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

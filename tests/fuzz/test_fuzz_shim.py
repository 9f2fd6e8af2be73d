"""Whatever a process says to whoever asks its shim, a ``ShimError`` comes of it, or an answer that can be used."""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fuzz import frame
from fuzz.mutate import mutated
from limosa.parking import shim as shims
from limosa.parking.protocol import COUNTS, MAGIC, MESSAGE, MOST, PAIR, RECORD, VERSION, Role, Verb
from limosa.parking.shim import Shim, ShimError
from limosa.process.identity import Identity

ME = Identity.of(os.getpid())
MIB = 1 << 20
Packet = tuple[bytes, int]
"""What is sent, and how many descriptors with it."""


def kinds_of_descriptors() -> list[int]:
    read, write = os.pipe()
    return [
        *(os.memfd_create("memory"), os.open("/dev/null", os.O_RDWR), os.open("/tmp", os.O_RDONLY), read, write),
        os.open(__file__, os.O_RDONLY),
        socket.socket(socket.AF_UNIX).detach(),
    ]


@pytest.fixture
def foreign() -> Iterator[list[int]]:
    """Descriptors of all kinds; the first two may be of memory."""
    found = kinds_of_descriptors()
    yield found
    for fd in found:
        os.close(fd)


class Preloaded(Shim):
    """A shim's connection at whose other end all has been said before anything is asked."""

    def __init__(self, connection: socket.socket, limit: float):
        self.identity, self._number, self._lost, self._pids = ME, 0, False, None
        self._socket, self.owner, self.limit = connection, os.geteuid(), limit
        self._user, self._within, self._gpus_known, self._version = -1, None, 64, VERSION

    def _connect(self, patience: float) -> None:
        raise self._error("connect", "it listens no more")


def message(verb: int, number: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> bytes:
    return MESSAGE.pack(MAGIC, VERSION, verb, number, 0, a, b, c, d)


def in_packets(verb: Verb, parts: list[bytes], some: int) -> list[Packet]:
    """Records as the shim sends them."""
    groups = [parts[i : i + some] for i in range(0, len(parts), some)] or [[]]
    return [(message(verb, 1, len(parts), len(group)) + b"".join(group), 0) for group in groups]


def records(source: random.Random) -> list[Packet]:
    n = source.choice([0, 1, 3, MOST, MOST + 1, 500])
    each = [RECORD.pack(i + 1, source.choice([2, 64]) * MIB, i << 30, 0, i % 2, 8, 0, 0) for i in range(n)]
    return in_packets(Verb.LIST, each, MOST)


def names(source: random.Random) -> list[Packet]:
    roles = list(Role)
    each = [
        bytes([source.choice(roles), 3]) + f"cuFunction{i}".encode() + b"\0" for i in range(source.choice([1, 900]))
    ]
    return in_packets(Verb.CALLED, each, 700)


def pairs(source: random.Random) -> list[Packet]:
    return in_packets(Verb.SHARERS, [PAIR.pack(7, i + 1) for i in range(source.choice([0, 2, 450]))], MOST)


def descriptors(verb: Verb) -> Callable[[random.Random], list[Packet]]:
    return lambda _: [(message(verb, 1), MOST), (message(verb, 2), 50)]


def kept(source: random.Random) -> list[Packet]:
    n = source.choice([0, 1, 3, MOST, MOST + 7])
    return [(message(Verb.KEPT, i + 1, n), min(MOST, n - i * MOST)) for i in range(max(1, -(-n // MOST)))]


def plain(verb: Verb, **fields: int) -> Callable[[random.Random], list[Packet]]:
    return lambda _: [(message(verb, i + 1, **fields), 0) for i in range(2)]


def devices(_: random.Random) -> list[Packet]:
    return [(message(Verb.DEVICES, 1, 2, 1) + bytes(48), 0)]


def counts(_: random.Random) -> list[Packet]:
    return [(message(Verb.COUNTS, 1, 10) + COUNTS.pack(*range(COUNTS.size // 8)), 0)]


NUMBERS = [0, 1, 2, 3, 199, 600, 1 << 18, 1 << 31, 1 << 40, (1 << 64) - 1]
IDS = list(range(1, MOST + 51))
VERBS: dict[str, tuple[Callable[[random.Random], list[Packet]], Callable[[Shim], Any]]] = {
    "hello": (plain(Verb.HELLO, a=0, b=os.getpid(), c=2, d=4 * MIB), lambda shim: shim.hello()),
    "memories": (records, lambda shim: shim.memories()),
    "export": (descriptors(Verb.EXPORT), lambda shim: shim.export(IDS)),
    "make": (descriptors(Verb.MAKE), lambda shim: shim.make(IDS)),
    "close": (plain(Verb.CLOSE), lambda shim: shim.close_gate(0.001)),
    "open": (plain(Verb.OPEN), lambda shim: shim.open_gate()),
    "unmap": (plain(Verb.UNMAP, a=2), lambda shim: shim.unmap()),
    "map": (plain(Verb.MAP, a=1), lambda shim: shim.map(IDS, [0] * len(IDS))),
    "stack": (plain(Verb.STACK), lambda shim: shim.stack(16)),
    "bulk": (plain(Verb.BULK, c=64 * MIB), lambda shim: shim.bulk(MIB)),
    "keep": (plain(Verb.KEEP), lambda shim: shim.keep([0] * len(IDS))),
    "kept": (kept, lambda shim: shim.kept()),
    "devices": (devices, lambda shim: shim.devices()),
    "saw": (devices, lambda shim: shim.saw()),
    "counts": (counts, lambda shim: shim.counts()),
    "called": (names, lambda shim: shim.called()),
    "sharers": (pairs, lambda shim: shim.sharers()),
}
VERB_LIST = sorted(VERBS)


def spoilt(source: random.Random, packets: list[Packet]) -> list[Packet]:
    """An answer with something wrong with it, or said more than once, or not to its end."""
    made = list(packets)
    for _ in range(source.choice([0, 1, 1, 1, 2])):
        kind, at = source.randrange(6), source.randrange(len(made)) if made else 0
        if not made:
            break
        data, n = made[at]
        if kind == 0:
            made[at] = mutated(source, [one for one, _ in made], most=1 << 16), n
        elif kind == 1:
            made[at] = data, source.choice([0, 1, n + 1, max(0, n - 1), 250])
        elif kind == 2:
            made[at : at + 1] = [made[at]] * source.choice([0, 2, 50])
        elif kind == 3 and len(data) >= MESSAGE.size:
            fields = list(MESSAGE.unpack_from(data))
            field = source.randrange(4, 9) if source.random() < 0.7 else source.randrange(9)
            bits = (32, 16, 16, 32, 31, 64, 64, 64, 64)[field]
            fields[field] = source.choice([0, 1, 2, 3, 199, 600, 1 << 18, 1 << 31, 1 << 40, (1 << 64) - 1]) % (
                1 << bits
            )
            made[at] = MESSAGE.pack(*fields) + data[MESSAGE.size :], n
        elif kind == 4:
            made = made[:at]
        else:
            made[at] = data + source.randbytes(source.choice([1, 7, 4096])), n
    return made


def said_before(
    packets: list[Packet], source: random.Random, foreign: list[int]
) -> tuple[socket.socket, socket.socket]:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.setblocking(False)
    strange = source.random() < 0.1
    with contextlib.suppress(BlockingIOError):
        for data, n in packets:
            fds = array.array("i", [source.choice(foreign if strange else foreign[:2]) for _ in range(n)])
            other.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if n else [])
    return mine, other


def test_whatever_a_shim_says_is_an_answer_or_a_shim_error(
    fuzz: frame.Fuzz, foreign: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shims, "WORK_SECONDS", 0.002)
    answered: set[str] = set()
    for case in fuzz.cases(limit=2.0):
        name = case.random.choice(VERB_LIST)
        right, ask = VERBS[name]
        mine, other = said_before(spoilt(case.random, right(case.random)), case.random, foreign)
        if case.random.random() < 0.5:
            other.shutdown(socket.SHUT_WR)  # it leaves in the middle
        shim, found = Preloaded(mine, 0.002), None
        with case, contextlib.suppress(ShimError):
            found = ask(shim)
            answered.add(name)
        if name in ("export", "make", "kept"):
            for fd in found or []:
                os.close(fd)
        shim.close()
        other.close()
    assert answered == set(VERBS), "each of them was answered rightly now and then"


class Endless:
    """A process that says what is not wrong, one packet after the other, and never comes to an end."""

    def __init__(self, said: Callable[[int], tuple[bytes, list[int]]], pause: float):
        self.mine, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._said, self._pause, self._over = said, pause, threading.Event()
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def _talk(self) -> None:
        n = 0
        with contextlib.suppress(OSError):
            while not self._over.wait(self._pause):
                data, fds = self._said(n)
                socket.send_fds(self._other, [data], fds) if fds else self._other.send(data)
                n += 1

    def close(self) -> None:
        self._over.set()
        self._other.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._other.close()


def piece(n: int) -> bytes:
    return RECORD.pack(n + 1, 2 * MIB, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("pause", [0.0, 0.02])
@pytest.mark.parametrize("total", [1 << 17, 1 << 30])
def test_an_answer_without_an_end_is_given_up_on(nothing_left: None, pause: float, total: int) -> None:
    """A drip held ``ps`` for more than 25 seconds; a flood took 2.7 GB."""
    peer = Endless(lambda n: (message(Verb.LIST, 1, total, 1) + piece(n), []), pause)
    shim, begun = Preloaded(peer.mine, 0.5), time.monotonic()
    with pytest.raises(ShimError):
        shim.memories()
    assert time.monotonic() - begun < 20
    shim.close()
    peer.close()


def test_descriptors_that_nobody_asked_for_are_not_open_here(nothing_left: None, foreign: list[int]) -> None:
    """19,992 of them stayed open after one question."""
    peer = Endless(lambda n: (message(Verb.LIST, 1, 1 << 17, 1) + piece(n), [foreign[0]] * 200), 0.0)
    shim = Preloaded(peer.mine, 0.5)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ShimError):
        shim.memories()
    assert len(os.listdir("/proc/self/fd")) == before
    shim.close()
    peer.close()

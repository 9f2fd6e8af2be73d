"""Whatever is said between Limosa and a user's vault or mover, either way, is an answer or an error in words."""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest

from fuzz import frame
from fuzz.mutate import mutated, mutated_object
from limosa.errors import LimosaError
from limosa.ipc import messages as packets
from limosa.ipc.packet import Given
from limosa.ipc.sessions import serve
from limosa.parking import mover as movers
from limosa.parking import mover_main, resident, staging, vault_main
from limosa.parking.mover import Mover
from limosa.parking.mover_protocol import End
from limosa.parking.mover_session import Session, Shared
from limosa.parking.resident import Found, Greeting
from limosa.parking.segments import layout_file, make
from limosa.parking.vault import Vault
from limosa.parking.vault_protocol import Asked
from limosa.process.identity import Identity

ME = Identity.of(os.getpid())
KEY = f"move-1-a/source/{ME.to_str()}"
GPU = "GPU-00000000-0000-0000-0000-000000000000"
MIB = 1 << 20
Said = dict[str, Any]


@pytest.fixture
def foreign() -> Iterator[list[int]]:
    """Descriptors of all kinds; the first three may be of memory."""
    read, write = os.pipe()
    found = [make(64 * MIB), layout_file(b"text"), os.open("/dev/null", os.O_RDWR), read, write]
    found += [os.open("/tmp", os.O_RDONLY), socket.socket(socket.AF_UNIX).detach()]
    yield found
    for fd in found:
        os.close(fd)


PART = "a part of a message"
ARENA = {"used": 1, "free": 2, "reserved": 0, "seconds": 0.0, "by": {"aside/1@1": 1}, "inodes": [7, 8]}
# What is asked, what is answered rightly, with how many descriptors.
OF_A_VAULT: list[tuple[Callable[[Vault], Any], list[tuple[Said, int]]]] = [
    (lambda vault: vault.put(KEY, [0], b"note"), [({"n": 1}, 0)]),
    (lambda vault: vault.get(KEY), [({"note": b"note", "n": 3}, 3)]),
    (lambda vault: vault.get(KEY), [({"error": "nothing", "there": False}, 0)]),
    (lambda vault: vault.drop(KEY), [({"n": 1}, 0)]),
    (lambda vault: vault.segments("aside/1@1", 40 * MIB, 1 << 30), [({}, 1)]),
    (lambda vault: vault.segments("aside/1@1", 40 * MIB, 1 << 30), [({"error": "no room in the arena", "used": 5}, 0)]),
    (lambda vault: vault.reserve(MIB, 1.0, 1 << 30), [({}, 0), (ARENA, 2)]),
    (lambda vault: vault.arena(), [(ARENA, 0)]),
    (lambda vault: vault.held(), [({"keys": {KEY: 3}}, 0)]),
]
POLL = {"done": 1, "total": 2, "running": False, "chunks": 1, "seconds": 0.1, "failed": None}
FAILED = {**POLL, "failed": {"text": "no", "kind": "OSError", "errno": 28, "result": ""}}
OF_A_MOVER: list[tuple[Callable[[Mover], Any], list[tuple[Said, int]]]] = [
    (lambda mover: mover.prepare([GPU]), [({}, 0)]),
    (lambda mover: mover.take("a", [0], [MIB], GPU), [({}, 0)]),
    (lambda mover: mover.make("a", [MIB, MIB], GPU), [({}, 2)]),
    (lambda mover: mover.make("a", [MIB], GPU), [({"error": "x", "result": "CUDA_ERROR_OUT_OF_MEMORY"}, 0)]),
    (lambda mover: mover.copy([("a", "b", GPU)], 0.002), [({"bytes": 0, "seconds": 0.1}, 0)]),
    (lambda mover: mover.hold("a", [0], 0, GPU, pin=True), [({"seconds": 0.1}, 0)]),
    (lambda mover: mover.warm([0], 0, GPU, 1.0), [({"seconds": 0.1}, 0)]),
    (lambda mover: mover.pinned(), [({"bytes": 1}, 0)]),
    (lambda mover: mover.host("out", [("a", "b", 0, GPU)], 0.002), [({"bytes": 0}, 0)]),
    (lambda mover: mover.put(KEY, [0], b"note"), [({"n": 1}, 0)]),
    (lambda mover: mover.get(KEY), [({"there": True, "note": b"note", "n": 3}, 3)]),
    (lambda mover: mover.held(), [({"keys": {KEY: 3}}, 0)]),
    (lambda mover: mover.unput(KEY), [({"n": 3}, 0)]),
    (lambda mover: mover.drop("a"), [({}, 0)]),
    (lambda mover: mover.end(), [({}, 0)]),
    (lambda mover: staging.Saver(mover, 0, 4 * MIB, None).run("copy"), [({}, 0), ({}, 0), (POLL, 0)]),
    (
        lambda mover: staging.Saver(mover, 0, 4 * MIB, None).differ(),
        [({}, 0), ({"changed": 1, "bytes": 2, "seconds": 0.1}, 0)],
    ),
    (
        lambda mover: staging.Saver(mover, 0, 4 * MIB, None).names([(1, 2, 5 * MIB)]),
        [({}, 0), ({"names": bytes(64)}, 0)],
    ),
    (lambda mover: staging.Loader(mover, 0, 4 * MIB, "image").make(1, [1, 2], [MIB, MIB], GPU), [({}, 0), ({}, 2)]),
    (lambda mover: staging.Loader(mover, 0, 4 * MIB, "image").run(), [({}, 0), ({}, 0), (FAILED, 0)]),
]


def packed(source: random.Random, said: Any) -> bytes:
    with contextlib.suppress(Exception):  # what the format has no form for
        return msgspec.msgpack.encode(mutated_object(source, said))
    return msgspec.msgpack.encode(said)


def say(source: random.Random, to: socket.socket, said: Any, n: int, foreign: list[int]) -> None:
    """Sends a message, rightly or with something wrong with it."""
    kind = source.randrange(8)
    right = msgspec.msgpack.encode(said)
    data = right if kind < 2 else packed(source, said) if kind < 6 else mutated(source, [right], most=1 << 16)
    if source.random() < 0.15:
        n = source.choice([0, 1, 3, 200, 201, 250])
    some = foreign if source.random() < 0.05 else foreign[:3]
    fds = [source.choice(some) for _ in range(n)]
    parts: list[bytes] = []
    if source.random() < 0.1:
        size = source.choice([1, 7, max(1, len(data))])
        cut = [data[start : start + size] for start in range(0, len(data), size)]
        parts = [msgspec.msgpack.encode({"more": True, PART: part}) for part in cut[:-1]]
        data = msgspec.msgpack.encode({PART: cut[-1] if cut else b""} if source.random() < 0.9 else {})
    more = [msgspec.msgpack.encode({"more": source.choice([True, True, 7])})] * source.choice([1, 3])
    with contextlib.suppress(OSError):
        for before in more if source.random() < 0.1 else []:
            many = array.array("i", fds[: source.choice([0, 100])])
            to.sendmsg([before], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)] if many else [])
        for part in parts:
            to.sendmsg([part])
        to.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


def let_go(answer: Any) -> None:
    """Closes the descriptors that came with an answer, where some did."""
    found = answer[0] if isinstance(answer, tuple) else answer
    for fd in found if isinstance(found, list) and all(type(one) is int for one in found) else []:
        os.close(fd)


def found(connection: socket.socket) -> Found:
    return Found(connection, ME, Greeting(version=packets.VERSION))


@pytest.mark.parametrize("kind", ["vault", "mover"])
def test_whatever_a_resident_says_is_an_answer_or_an_error_in_words(
    fuzz: frame.Fuzz, foreign: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module in (movers, staging):
        monkeypatch.setattr(module, "CALL_SECONDS", 0.002)
    monkeypatch.setattr(movers, "replace", lambda *_: None)
    monkeypatch.setattr(resident, "ANSWER_SECONDS", 0.002)
    right = 0
    for case in fuzz.cases(limit=2.0, share=0.5):
        ask, answers = case.random.choice(OF_A_VAULT if kind == "vault" else OF_A_MOVER)
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        other.setblocking(False)
        for said, n in answers:
            say(case.random, other, said, n, foreign)
        with case, contextlib.suppress(LimosaError, KeyError, OSError if "Saver" in repr(ask) else LimosaError):
            one = Vault(limit=0.002, found=found(mine)) if kind == "vault" else Mover(found=found(mine))
            with contextlib.suppress(OSError) if kind == "mover" else contextlib.nullcontext():
                let_go(ask(one))
                right += 1
        mine.close()
        other.close()
    assert right > 10, "it was answered rightly now and then"


TO_A_VAULT: list[tuple[Said, int]] = [
    ({"verb": "put", "key": "other", "n": 2, "note": b"note"}, 2),
    ({"verb": "get", "key": KEY}, 0),
    ({"verb": "drop", "key": "other", "again": True}, 0),
    ({"verb": "keys"}, 0),
    ({"verb": "ping"}, 0),
    ({"verb": "segments", "key": "aside/1@1", "sizes": [32 * MIB], "cap": 1 << 30, "again": True}, 0),
    ({"verb": "reserve", "bytes": 64 * MIB, "seconds": 1.0, "cap": 1 << 30}, 0),
    ({"verb": "arena", "with_free": True}, 0),
]


def test_whatever_a_client_says_to_a_vault_it_goes_on(fuzz: frame.Fuzz, foreign: list[int]) -> None:
    """What it holds for others stays as it is: two pieces under a key, whatever else is asked for."""
    for case in fuzz.cases(limit=2.0, share=0.5):
        vault = vault_main.VaultServer()
        vault.put(KEY, b"note", [os.dup(foreign[0]), os.dup(foreign[1])])
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (mine, other):
            end.settimeout(0.05)
        said, n = case.random.choice(TO_A_VAULT)
        say(case.random, other, said, n, foreign)
        other.shutdown(socket.SHUT_WR)
        with case:
            serve(mine, vault_main.VaultSession(vault))
            assert KEY not in vault.held or len(vault.held[KEY].fds) == 2
            vault.look()
        for entry in vault.held.values():
            entry.close()
        for fd, _, _ in vault.pool.free:
            os.close(fd)
        other.close()


PIECES = {"pid": 1, "ids": [1, 2], "sizes": [MIB, MIB], "gpu": GPU}
TO_A_MOVER: list[tuple[Said, int]] = [
    ({"verb": "ping", "limit": 5.0}, 0),
    ({"verb": "put", "key": "other", "n": 2, "note": b"note"}, 2),
    ({"verb": "get", "key": KEY}, 0),
    ({"verb": "unput", "key": "other"}, 0),
    ({"verb": "keys"}, 0),
    ({"verb": "prepare", "gpus": [GPU]}, 0),
    ({"verb": "take", "key": "a", "sizes": [MIB], "gpu": GPU}, 1),
    ({"verb": "make", "key": "a", "sizes": [MIB], "gpu": GPU}, 0),
    ({"verb": "copy", "copies": [["a", "b", GPU]]}, 0),
    ({"verb": "drop", "key": "a"}, 0),
    ({"verb": "drop-all"}, 0),
    ({"verb": "hold", "key": "a", "bytes": MIB, "gpu": GPU, "pin": True}, 1),
    ({"verb": "warm", "gpu": GPU, "seconds": 1.0}, 1),
    ({"verb": "pinned"}, 0),
    ({"verb": "host", "way": "out", "copies": [["a", "b", 0, GPU]]}, 0),
    ({"verb": "staging-poll"}, 0),
    ({"verb": "staging-stop"}, 0),
    ({"verb": "staging-close"}, 0),
    ({"verb": "save-open", "chunk": 4 * MIB, "key": b""}, 1),
    ({"verb": "save-take", **PIECES}, 2),
    ({"verb": "save-aside", "pid": 1, "places": [[1, MIB, 0]], "gpu": GPU}, 1),
    ({"verb": "save-drop", "pid": 1, "ids": [1]}, 0),
    ({"verb": "save-ready", "hold": 0}, 0),
    ({"verb": "save-differ"}, 0),
    ({"verb": "save-start", "what": "write", "rate": 0.0, "nice": 0}, 0),
    ({"verb": "save-names", "parts": [[1, 1, 0, 1]]}, 0),
    ({"verb": "load-open", "chunk": 4 * MIB}, 1),
    ({"verb": "load-make", **PIECES}, 0),
    ({"verb": "load-take", **PIECES}, 2),
    ({"verb": "load-move", **PIECES}, 2),
    ({"verb": "load-drop", "pid": 1, "ids": [1]}, 0),
    ({"verb": "load-want", "parts": [[1, 1, 0, bytes(32)]]}, 0),
    ({"verb": "load-start"}, 0),
]


def test_whatever_a_client_says_to_a_mover_others_are_served(fuzz: frame.Fuzz, foreign: list[int]) -> None:
    """No driver is needed to understand what is asked; what it does with it the tests on software GPUs show."""
    verbs = {type_: verb for type_, verb in mover_main.all_verbs().items() if type_ is not End}
    assert {type_.__struct_config__.tag for type_ in verbs} == {said["verb"] for said, _ in TO_A_MOVER}
    shared = Shared()
    for case in fuzz.cases(limit=3.0, share=0.5):
        held = vault_main.Entry()
        held.fds = [os.dup(foreign[0])]
        shared.resident = {KEY: held}
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (mine, other):
            end.settimeout(0.05)
        for said, n in case.random.sample(TO_A_MOVER, 2):
            say(case.random, other, said, n, foreign)
        other.shutdown(socket.SHUT_WR)
        with case:
            session = Session(shared, verbs)
            serve(mine, session)
            assert not session.pieces
        for entry in shared.resident.values():
            entry.close()
        other.close()


def test_a_message_that_is_right_is_understood() -> None:
    """What the fuzzers spoil is what vault and mover really take."""
    verbs = {type_.__struct_config__.tag: type_ for type_ in mover_main.all_verbs()}
    for said, _ in TO_A_MOVER:
        packets.Message(msgspec.msgpack.encode(said), Given()).read_as(verbs[said["verb"]])
    assert {type_.__struct_config__.tag for type_ in get_args(Asked)} == {said["verb"] for said, _ in TO_A_VAULT}
    for said, _ in TO_A_VAULT:
        packets.Message(msgspec.msgpack.encode(said), Given()).read_as(Asked)

"""Whatever its user says to a shim, it goes on, and nothing of it stays open there."""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
from collections.abc import Iterator

import pytest
from fuzz import frame
from fuzz.mutate import mutated
from softgpu.far import Far

from limosa.parking.names import names_of
from limosa.parking.protocol import MAGIC, MESSAGE, VERSION, Verb
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture
def given() -> Iterator[list[int]]:
    found = [os.memfd_create("one"), os.open("/dev/null", os.O_RDWR), *os.pipe()]
    yield found
    for fd in found:
        os.close(fd)


@pytest.fixture(autouse=True, params=["", "ranks"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it leaves ranks alone, and answers nothing else than that there is no such thing."""
    if request.param:
        monkeypatch.setenv("LIMOSA_SHIM_WITHOUT", request.param)


def packet(source: random.Random) -> bytes:
    numbers = [0, 1, 2, 3, 199, 200, 4096, 1 << 31, 1 << 40, (1 << 64) - 1]
    fields = [source.choice(numbers) for _ in range(4)]
    verb = source.choice([verb for verb in Verb if verb is not Verb.BULK])  # as much memory as is asked for
    ids = bytes(8 * source.choice([0, 1, 3, 200, 201]))
    right = MESSAGE.pack(MAGIC, VERSION, verb, source.getrandbits(32), 0, *fields) + ids
    return right if source.random() < 0.6 else bytes(mutated(source, [right], most=4096))


def is_bulk(data: bytes) -> bool:
    return len(data) >= MESSAGE.size and MESSAGE.unpack_from(data)[2] == Verb.BULK


def test_whatever_is_said_to_a_shim_it_goes_on(job: Far, given: list[int]) -> None:
    identity = Identity.of(job.pid)
    job("open_here = lambda: len(os.listdir('/proc/self/fd'))")
    before = None
    for case in frame.Fuzz().cases(limit=20.0, share=0.25):
        source = case.random
        with case, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one, contextlib.suppress(OSError):
            one.settimeout(1)  # ranks may be waited for as long as the client stays
            one.connect(names_of(job.pid)[0].address)
            for _ in range(source.choice([1, 1, 3])):
                data = packet(source)
                if is_bulk(data):
                    continue
                fds = array.array("i", [source.choice(given) for _ in range(source.choice([0, 0, 1, 3, 200]))])
                one.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])
                if source.random() < 0.8:
                    one.recv(1 << 17)
        if case.number % 50 == 0:
            with case, Shim(identity) as shim:
                shim.keep()
                if shim.hello().stand.name == "CLOSED":
                    shim.open_gate()
            before = before or job("open_here()")
    with Shim(identity) as shim:
        shim.keep()
    assert job("open_here()") <= before + 1

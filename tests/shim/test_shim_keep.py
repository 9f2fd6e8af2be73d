"""What a process holds of its own suspended memory: all of it or nothing, and never let go of for a part."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest
from soft_node import Node
from softgpu.far import Far

from limosa.parking.protocol import MAGIC, MESSAGE, MOST, VERSION, Verb
from limosa.parking.shim import Shim, ShimError
from limosa.process.identity import Identity

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture
def new() -> Iterator[Callable[[int], list[int]]]:
    """Files in memory, as many as are asked for."""
    found: list[int] = []

    def make(n: int) -> list[int]:
        found.extend(some := [os.memfd_create(f"piece-{i}") for i in range(n)])
        return some

    yield make
    for fd in found:
        os.close(fd)


def kept(identity: Identity) -> list[int]:
    """The inodes of what it holds, in order."""
    with Shim(identity) as shim:
        fds = shim.kept()
    found = [os.fstat(fd).st_ino for fd in fds]
    for fd in fds:
        os.close(fd)
    return found


def inodes(fds: list[int]) -> list[int]:
    return [os.fstat(fd).st_ino for fd in fds]


def said(connection: socket.socket, number: int, a: int, b: int, fds: list[int]) -> int:
    """The result of one packet of KEEP."""
    packet = MESSAGE.pack(MAGIC, VERSION, Verb.KEEP, number, 0, a, b, 0, 0)
    socket.send_fds(connection, [packet], fds)
    return int(MESSAGE.unpack(connection.recv(1 << 16))[4])


def test_the_old_is_let_go_of_when_all_of_the_new_is_there(job: Far, new: Callable[[int], list[int]]) -> None:
    identity, old, more = Identity.of(job.pid), new(3), new(MOST + 50)
    with Shim(identity) as shim:
        shim.keep(old)
    for broken in (
        [(0, 3, more[:2])],  # fewer than it says
        [(0, 3, more[:4])],  # more
        [(0, MOST + 50, more[:MOST])],  # whoever says so leaves in the middle
        [(0, MOST + 50, more[:MOST]), (MOST, MOST + 50, more[MOST:-1])],
        [(0, MOST + 50, more[:MOST]), (MOST + 1, MOST + 50, more[MOST:])],
        [(0, MOST + 50, more[:MOST]), (MOST, MOST + 49, more[MOST:-1])],
        [(7, 9, more[:2])],
        [(0, 1 << 40, more[:MOST])],
    ):
        with Shim(identity) as shim:
            results = [said(shim._socket, n, *one) for n, one in enumerate(broken)]
        assert kept(identity) == inodes(old), (broken, results)
    with Shim(identity) as shim:
        shim.keep(more)
    assert kept(identity) == inodes(more)
    job("links = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]")
    assert job("sum('memfd:piece' in link for link in links)") == MOST + 50
    with Shim(identity) as shim:
        shim.keep()
    assert kept(identity) == []


def test_a_process_that_has_no_descriptors_left_keeps_what_it_has(
    node: Node, library: object, new: Callable[[int], list[int]]
) -> None:
    """As many may be open as it needs for one half of the new: it keeps all of the old."""
    job = Far(node, env={"LD_PRELOAD": str(library)})
    job("start()")
    identity, old, more = Identity.of(job.pid), new(20), new(100)
    with Shim(identity) as shim:
        shim.keep(old)
    job("import resource; most = len(os.listdir('/proc/self/fd')) + 40")
    job("resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))")
    with Shim(identity) as shim:
        with pytest.raises(ShimError, match="Too many open files"):
            shim.keep(more)
        assert shim.hello().n_memories == 0, "it goes on"
    assert kept(identity) == inodes(old)


TOO_FEW = """
import os, resource, sys
from limosa.parking.shim import Shim, ShimError
from limosa.process.identity import Identity

with Shim(Identity.of(int(sys.argv[1]))) as shim:
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + int(sys.argv[2]), 4096))
    try:
        print("kept", len(shim.kept()))
    except ShimError as error:
        print(error)
    print(len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.parametrize("room", [5, MOST + 10])
def test_too_few_descriptors_here_are_no_smaller_set(
    node: Node, job: Far, new: Callable[[int], list[int]], room: int
) -> None:
    """A part of it was taken for all there is, and given back as that: the rest was nobody's any more."""
    identity, old = Identity.of(job.pid), new(MOST + 20)
    with Shim(identity) as shim:
        shim.keep(old)
    said = node.python(TOO_FEW, str(job.pid), str(room)).stdout.splitlines()
    assert "Too many open files" in said[0]
    assert said[1] == "0", "nothing of it stays open"
    assert kept(identity) == inodes(old)

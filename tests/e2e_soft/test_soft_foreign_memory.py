"""A user gives root's mover something else than his job's memory when root writes the job to disk.

He can: the job is his process, and so are the vault and the mover that hold its memory for him.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from soft_command import start
from test_soft_owners import node, place, residents, users_job

from limosa.parking.segments import LARGE, SMALL, layout_file, make
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

__all__ = ["node", "place"]  # fixtures
pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
MIB = 1 << 20


def pipe() -> int:
    """Whose other end is held and never written to: whoever reads it waits."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, False)
    HELD.append(writing)
    return reading


HELD: list[int] = []


def named_pipe(place: Path) -> int:
    os.mkfifo(place / "fifo")
    return os.open(place / "fifo", os.O_RDWR)


def a_file(place: Path) -> int:
    path = place / "file"
    path.write_bytes(b"x")
    os.truncate(path, 64 * MIB)
    return os.open(path, os.O_RDWR)


def unsealed(size: int) -> int:
    fd = os.memfd_create("limosa-arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def opened(path: str) -> Callable[[Path], int]:
    return lambda _: os.open(path, os.O_RDWR if path.startswith("/dev") else os.O_RDONLY)


# In place of the segment, and in place of the file that says what is where in it.
SEGMENTS: dict[str, Callable[[Path], int]] = {
    "pipe": lambda _: pipe(),
    "named pipe": named_pipe,
    "socket": lambda _: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach(),
    "file": a_file,
    "folder": opened("/"),
    "device": opened("/dev/zero"),
    "cut off": lambda _: unsealed(0),
    "may be cut off": lambda _: unsealed(64 * MIB),
    "too small": lambda _: make(SMALL),
}
LAYOUTS: dict[str, Callable[[Path], int]] = {
    "pipe": lambda _: pipe(),
    "not JSON": lambda _: layout_file(b"{"),
    "may change": lambda _: unsealed(100),
    "behind the end": lambda _: layout_file(
        b'{"pieces":[{"id":1,"bytes":%d,"gpu":"GPU","offset":0}],"saw":[],"operation":""}' % (2 * LARGE)
    ),
    "too much": lambda _: layout_file(b" " * (33 << 20)),
}


@contextlib.contextmanager
def in_place_of(fds: list[int], at: int, made: int) -> Iterator[list[int]]:
    """The descriptors with another in one place."""
    try:
        yield [made if n == at else fd for n, fd in enumerate(fds)]
    finally:
        for fd in [made, *HELD]:
            os.close(fd)
        HELD.clear()


def lies(node: Any, job: Any, fds: list[int]) -> None:
    """The job holds these instead; the user has ended his vault and mover."""
    for pid in [pid for (_, uid), pid in residents(node).items() if uid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while any(uid for _, uid in residents(node)):
        time.sleep(0.01)
    with Shim(Identity.of(job.pid)) as shim:
        shim.keep(fds)


@pytest.mark.criu
def test_what_a_user_gives_in_place_of_memory_harms_nobody_else(node: Any, place: Path) -> None:
    job, own = users_job(node, place), start(node, "--mib", 24, "--gpu", 1)
    node.limosa("suspend", job.pid)
    with Shim(Identity.of(job.pid)) as shim:
        good = shim.kept()
    segment = max(range(len(good)), key=lambda n: os.fstat(good[n]).st_size)
    forms = [(segment, f"segment: {form}", made) for form, made in SEGMENTS.items()]
    forms += [(1 - segment, f"layout: {form}", made) for form, made in LAYOUTS.items()]
    assert len(good) == 2
    for number, (at, form, made) in enumerate(forms):
        with in_place_of(good, at, made(place)) as given:
            lies(node, job, given)
        # Root's mover is at work for another, too.
        image = place / f"own{number}"
        small = ["--chunk", "4MiB", "-R", "--rate", "20MiB"]
        beside = node.later("checkpoint", own.pid, "--output", image, *small) if number % 4 == 0 else None
        force = "--force=resource-limits"
        said = node.limosa(
            "checkpoint", "-o", "json", job.pid, "--output", place / "his", *small, force, limit=20, rc=None
        )
        assert 10 < said.rc < 40, (form, said)
        assert said.json["error"]["id"] != "criu-failed", (form, said)
        assert not (place / "his").exists(), form
        assert os.stat(f"/proc/{job.pid}").st_uid != 0
        if beside is not None:
            assert node.ends(beside, 60).rc == 0, form
            node.limosa("verify", image)
            assert ("limosa-mover", 0) in residents(node)
    own.goes_on(2)
    lies(node, job, good)  # the very bytes
    for fd in good:
        os.close(fd)
    node.limosa("resume", job.pid)
    for one in (job, own):
        one.goes_on(2)
        one.finish()

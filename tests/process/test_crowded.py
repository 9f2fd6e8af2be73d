"""A user with millions of descriptors or mappings does not keep root's look at another's job."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from limosa.errors import Reason
from limosa.process import candidates, peers
from limosa.process.hazards import checkpoint_hazards
from limosa.process.identity import Identity
from limosa.process.observation import JobObservation
from limosa.process.observe import observe

pytestmark = pytest.mark.root
ADA, EVE, CAROL = 61101, 61102, 61103  # nobody else has these: their processes are counted


@pytest.fixture
def holds() -> Iterator[Callable[..., int]]:
    """``holds(uid, fd, copies)``: a process of that user has a descriptor and so many copies of it."""
    started = []

    def go(uid: int, fd: int, copies: int, *, dumpable: bool = True) -> int:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                libc = ctypes.CDLL(None)
                libc.prctl(1, signal.SIGKILL, 0, 0, 0)
                libc.prctl(4, int(dumpable), 0, 0, 0)  # what is not to be dumped has a folder of root's in /proc
                for _ in range(copies):
                    os.dup(fd)
                os.write(writer, b"1")
                time.sleep(300)
            os._exit(1)
        started.append(child)
        os.close(writer)
        assert os.read(reader, 1) == b"1"
        os.close(reader)
        return child

    yield go
    for child in started:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    yield reader
    os.close(reader)
    os.close(writer)


def who(pid: int, fd: int) -> set[int]:
    seen = observe(Identity.of(pid))
    return {peer.pid for one in seen.processes[0].fds if one.fd == fd for peer in one.peers}


@pytest.mark.parametrize("dumpable", [True, False])
def test_beyond_a_users_share_nothing_is_looked_at(
    holds: Callable[..., int], pipe: int, monkeypatch: pytest.MonkeyPatch, dumpable: bool
) -> None:
    monkeypatch.setattr(peers, "MOST_DESCRIPTORS", 500)
    eves = [holds(EVE, pipe, 300, dumpable=dumpable) for _ in range(3)]
    job, adas, carols = holds(ADA, pipe, 0), holds(ADA, pipe, 600), holds(CAROL, pipe, 100)
    found = who(job, pipe)
    assert found == {eves[0], adas, carols, os.getpid()}  # adas is beyond no bound: she is the job's
    seen = observe(Identity.of(job))
    assert (seen.host.hidden_processes, seen.host.crowded_processes) == (2, 2)
    assert "too many descriptors" in hidden(seen).text
    monkeypatch.setattr(peers, "MOST_DESCRIPTORS", 5000)
    assert observe(Identity.of(job)).host.hidden_processes == 0


def hidden(seen: JobObservation) -> Reason:
    (reason,) = [r for r in checkpoint_hazards(seen) if r.id == "peers-hidden"]
    assert not reason.refuses
    return reason


def test_all_of_them_together_have_some_seconds(
    holds: Callable[..., int], pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SECONDS", -1.0)
    holds(EVE, pipe, 0)
    job, adas = holds(ADA, pipe, 0), holds(ADA, pipe, 0)
    assert who(job, pipe) == {adas, os.getpid()}


def test_mappings_are_counted_as_well(
    holds: Callable[..., int], pipe: int, monkeypatch: pytest.MonkeyPatch, job: Callable[..., Any]
) -> None:
    monkeypatch.setattr(peers, "MOST_OF_MAPS", 10)
    holds(EVE, pipe, 0)
    victim = job("m = mmap.mmap(-1, 4096)")
    assert observe(victim.identity).host.crowded_processes >= 1


def test_whoever_has_too_many_mappings_is_for_the_driver_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            assert process.pid not in candidates.candidates()
            monkeypatch.setattr(candidates, "MOST_OF_MAPS", 10)
            assert process.pid in candidates.candidates()
        finally:
            process.kill()

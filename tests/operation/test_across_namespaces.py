"""Locks of strangers on many pid namespaces: what they cost whoever works on a job."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from limosa.errors import Busy
from limosa.operation import across_namespaces
from limosa.process.identity import Identity

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
MANY = 12
READ_LOCK = struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)


@pytest.fixture
def apart() -> Iterator[list[Identity]]:
    """The first processes of namespaces, each of which somebody outside has a lock on, as its user may."""
    makers = [subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sleep", "60"]) for _ in range(MANY)]
    found, fds = [], []
    try:
        for maker in makers:
            children, end = Path(f"/proc/{maker.pid}/task/{maker.pid}/children"), time.monotonic() + 60
            while not (words := children.read_text().split()):
                assert time.monotonic() < end
                time.sleep(0.01)
            found.append(Identity.of(int(words[0])))
            fds.append(os.open(f"/proc/{words[0]}/ns/pid", os.O_RDONLY | os.O_CLOEXEC))
            fcntl.fcntl(fds[-1], fcntl.F_OFD_SETLK, READ_LOCK)
        yield found
    finally:
        for fd in fds:
            os.close(fd)
        for maker in makers:
            maker.kill()
            maker.wait()


def test_all_processes_are_looked_at_once(apart: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's job of 500 namespaces kept the lock of all claims, and so root's other operations, for 83 s."""
    asked: list[int] = []
    level_of = across_namespaces.level_of
    monkeypatch.setattr(across_namespaces, "level_of", lambda pid: asked.append(pid) or level_of(pid))
    with across_namespaces.held("this", apart):
        pass
    others = [pid for pid in asked if pid not in {one.pid for one in apart}]
    assert len(others) < 2 * len(set(others))


def test_who_could_not_be_looked_at_in_time_is_believed(apart: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across_namespaces, "_LOOKING", -1.0)
    with pytest.raises(Busy):
        across_namespaces.hold("this", apart[:1])

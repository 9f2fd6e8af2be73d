"""Who has locked a job's files, where anybody may have as many locks as he likes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.image import LockedFile
from limosa.operation import locks

MANY = """
import fcntl, os, time
for f in range(200):
    fd = os.open("/tmp", os.O_RDWR | os.O_TMPFILE, 0o600)
    for n in range(500):
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, 2 * n)
print("LOCKED", flush=True)
time.sleep(60)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """What a manifest says of a job's file, which another has locked."""
    path = tmp_path / "file"
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        modified = os.fstat(file.fileno()).st_mtime_ns
        had = LockedFile(pid=41, fd=3, path=str(path), locks=["FLOCK WRITE 0 EOF"], modified=modified)
        yield SimpleNamespace(locks=[had])


def test_they_are_looked_for_no_longer_than_a_moment(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 200,000 locks of a stranger's it took 14 s, and four times as long with twice as many."""
    assert [one.id for one in locks.in_the_way(job)] == ["file-locked"]
    stranger = subprocess.Popen([sys.executable, "-I", "-c", MANY], stdout=subprocess.PIPE, text=True)
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "LOCKED\n"
        monkeypatch.setattr(locks, "_LOOKING", 0.2)
        begun = time.process_time()
        assert all(one.id == "file-locked" for one in locks.in_the_way(job))
        assert time.process_time() - begun < 0.6
    finally:
        stranger.kill()
        stranger.wait()

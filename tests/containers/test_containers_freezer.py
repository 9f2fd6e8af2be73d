"""Who stands still in a way that CRIU could not bear is known before it begins."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from limosa.containers.freezer import cannot_be_traced
from limosa.process.identity import Identity

libc = ctypes.CDLL(None, use_errno=True)
pytestmark = pytest.mark.timeout(60)
WAITS = """
import os, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(flush=True)
os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_WRONLY, 0)])
"""
"""Its main thread waits in vfork(2) for a child that waits for a reader: no signal to stop reaches it."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    os.mkfifo(tmp_path / "fifo")
    words = [sys.executable, "-c", WAITS, str(tmp_path / "fifo")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def threads(pid: int) -> list[int]:
    return sorted(map(int, os.listdir(f"/proc/{pid}/task")))


def states(pid: int) -> list[str]:
    found = [Path(f"/proc/{pid}/task/{tid}/stat").read_text() for tid in threads(pid)]
    return [text.rpartition(")")[2].split()[0] for text in found]


def until(pid: int, wanted: list[str]) -> None:
    end = time.monotonic() + 50
    while states(pid) != wanted:
        assert time.monotonic() < end, states(pid)
        time.sleep(0.01)


def test_a_thread_that_is_stopped_is_seen_though_the_main_one_is_not(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "freezer.state").write_text("THAWED")  # version 1
    me = Identity.of(job.pid)
    until(job.pid, ["D", "S"])
    assert cannot_be_traced(str(tmp_path), [me]) == []
    libc.tgkill(job.pid, threads(job.pid)[1], signal.SIGSTOP)
    until(job.pid, ["D", "T"])
    assert cannot_be_traced(str(tmp_path), [me]) == [me]

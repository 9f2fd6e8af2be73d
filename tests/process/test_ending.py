"""A process that is on its way out is told from one that runs, one that is stopped and one that waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from softgpu.far import until

from limosa.process import identity, status
from limosa.process.identity import ending
from limosa.process.slurp import slurp


@pytest.fixture
def sleeper():
    """A process that waits, with a second thread."""
    program = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait(60)
    process.stdout.close()


def test_one_that_runs_is_not(sleeper: subprocess.Popen[bytes]) -> None:
    assert not ending(os.getpid())
    assert not ending(sleeper.pid)


def test_one_that_is_stopped_is_not(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: identity.read_stat(sleeper.pid).stopped)
    assert not ending(sleeper.pid)


def test_a_zombie_and_one_that_is_gone_are(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    until(lambda: identity.read_stat(sleeper.pid).ended)
    assert ending(sleeper.pid)
    sleeper.wait(60)
    assert ending(sleeper.pid)


def test_one_whose_main_thread_alone_has_ended_is_not() -> None:
    program = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            until(lambda: identity.read_stat(process.pid).state == "Z")
            assert not identity.read_stat(process.pid).ended
            assert not ending(process.pid)
        finally:
            process.kill()


@pytest.mark.parametrize("field", ["flags", "pending"])
def test_one_that_the_kernel_is_taking_apart_is(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """As it is while a driver lets go of a GPU: alive, and nothing of its program runs any more."""

    def seen(path: str) -> bytes:
        raw = slurp(path)
        if path.endswith("/stat") and field == "flags":
            head, _, rest = raw.rpartition(b")")
            words = rest.split()
            words[6] = str(int(words[6]) | 0x4).encode()
            return head + b") " + b" ".join(words)
        if path.endswith("/status") and field == "pending":
            return raw.replace(b"SigPnd:\t0000000000000000", b"SigPnd:\t0000000000000100")
        return raw

    monkeypatch.setattr(identity, "slurp", seen)
    monkeypatch.setattr(status, "slurp", seen)
    assert ending(sleeper.pid)

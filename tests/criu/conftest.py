"""Fixtures for tests of CRIU's room: a CRIU that works, and jobs that are ended for sure."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from limosa.errors import LimosaError
from limosa.process.criu import network, trial_victim
from limosa.process.criu.find import find
from limosa.process.criu.program import Criu

SPEAKER = str(Path(trial_victim.__file__))


@pytest.fixture(scope="session")
def criu() -> Criu:
    return find()


@pytest.fixture(autouse=True)
def adopt() -> Iterator[None]:
    """What is restored becomes our child, so that it can be reaped: zombies would keep pids.

    For these tests only: elsewhere a detached job is init's, which reaps it.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)
    yield
    libc.prctl(36, 0, 0, 0, 0)


class Job:
    """A process in a session of its own with folders for images and log."""

    def __init__(self, folder: Path, argv: list[str]):
        self.folder = folder
        self.beat = folder / "beat"
        self.fds: list[int] = []
        for name in ("images", "work"):
            (folder / name).mkdir(0o700)
        self.images, self.work = self.open("images"), self.open("work")
        with open(folder / "errors", "ab") as errors:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True, cwd=folder
            )
        self.pid = self.process.pid

    def open(self, name: str) -> int:
        self.fds.append(os.open(self.folder / name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return self.fds[-1]

    def beats(self) -> int:
        """The last round of the trial's victim."""
        with contextlib.suppress(FileNotFoundError, IndexError):
            return int(self.beat.read_text().split()[-1])
        return 0

    def goes_on(self, seconds: float = 60) -> bool:
        before, end = self.beats(), time.monotonic() + seconds
        while time.monotonic() < end:
            if self.beats() > before + 2:
                return True
            time.sleep(0.01)
        return False

    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def reap(self, seconds: float = 60) -> None:
        """Wait until all of the session is gone."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not self.session():
                return
            time.sleep(0.01)
        raise AssertionError(f"left: {self.session()}")

    def session(self) -> list[int]:
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[3]) == self.pid:
                    found.append(int(name))
        return found

    def end(self) -> None:
        for pid in self.session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGCONT)
        self.reap()
        self.process.returncode = self.process.returncode or 0
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a program that appends numbers to "beat" (the trial's victim where none is named) and wait for some."""
    jobs: list[Job] = []

    def start(program: str | None = None, *, wait: bool = True) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        argv = [sys.executable, "-I", SPEAKER, str(folder / "beat")]
        if program is not None:
            argv = [sys.executable, "-I", "-c", program, str(folder / "beat")]
        started = Job(folder, argv)
        jobs.append(started)
        if wait:
            assert started.goes_on(20), started.errors()
        return started

    yield start
    for each in jobs:
        each.end()


@pytest.fixture(autouse=True)
def no_tables_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove what tables a test has made, and no others."""
    if "criu" not in request.fixturenames:
        yield
        return
    criu = request.getfixturevalue("criu")
    before = network.tables(criu)
    yield
    for name in network.tables(criu):
        if name not in before:
            with contextlib.suppress(LimosaError):
                network.remove_table(criu, name)

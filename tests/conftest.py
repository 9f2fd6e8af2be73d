"""Fixtures that all tests share: ``start`` (real victims, ended for sure), ``limosa`` (the command line), ``runtime``.

Order: fast tests first, then those that need CRIU, slow ones last. Skips are counted and printed (``-ra``).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from shares import Shares
from support import VICTIMS, Reaper, Victim, end_marked, end_session, own_network
from surroundings import as_usual

as_usual()  # before anything is started, workers of xdist among it


def pytest_configure(config: pytest.Config) -> None:
    """Side by side (``-n 2``) each process gets a network of its own: nftables are one to a network namespace."""
    if share := os.environ.get("LIMOSA_SHARE"):
        config.pluginmanager.register(Shares(share))
    if "PYTEST_XDIST_WORKER" in os.environ and os.environ.get("LIMOSA_TEST_NETWORKS"):
        own_network()


_PR_SET_CHILD_SUBREAPER = 36
ON_NODES = {"campaign", "conformance", "containers", "e2e_soft", "softgpu"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast first, CRIU after, slow last; otherwise as collected. What runs on software GPUs is run by root."""
    for item in items:
        if item.path.parent.name in ON_NODES:
            item.add_marker("root")
    items.sort(key=lambda item: (bool(item.get_closest_marker("slow")), bool(item.get_closest_marker("criu"))))


@pytest.fixture(scope="session", autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    """Build what is in C where a test needs it and it is missing or older than its source."""
    if any(item.get_closest_marker("root") for item in request.session.items):
        from limosa.native import build
        from limosa_softgpu.build import build_softgpu

        for one in (build_softgpu, build.build_shim, build.build_sight, build.build_hash):
            assert one() is None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many tests were skipped, also where it is none: a skip that nobody sees is an answer that nobody has."""
    terminalreporter.write_line(f"skipped: {len(terminalreporter.stats.get('skipped', []))}")
    if share := os.environ.get("LIMOSA_SHARE"):
        terminalreporter.write_line(f"share {share} of the variants; make test-all runs all of them")


Start = Callable[..., Victim]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts victims: ``start("counter")``, ``start("train_numpy", 50, 0.01)``, ``start(["sleep", "60"], ready=None)``.

    Args of the function: a name in ``tests/victims`` (gets its folder as first argument) or an argument vector; more
    arguments; ``ready`` (text in its log to wait for, or None), ``limit`` (seconds to wait), ``folder``, ``env``,
    ``via`` (an argument vector to put before the program, as torchrun).
    """
    victims: list[Victim] = []

    def go(
        program: str | Sequence[str],
        *arguments: object,
        ready: str | None = "READY",
        limit: float = 120,
        folder: Path | None = None,
        env: dict[str, str] | None = None,
        via: Sequence[str] = (sys.executable,),
    ) -> Victim:
        place = folder or tmp_path / f"victim{len(victims)}"
        argv = [*via, str(VICTIMS / f"{program}.py"), str(place)] if isinstance(program, str) else list(program)
        victim = Victim([*argv, *map(str, arguments)], place, env)
        victims.append(victim)
        if ready:
            victim.wait_for(ready, limit)
        return victim

    try:
        yield go
    finally:
        for victim in victims:
            victim.kill()


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    """Reaps the jobs that it is told of at once.

    A job that a checkpoint ends stays a zombie until its parent reaps it, and a restore waits for that. The first
    parent is this process, later ones are whoever adopts the restored job: that is this process as well then, so that
    nothing depends on how quick the machine's init is.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    found = Reaper()
    try:
        yield found
    finally:
        found.close()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def torchrun() -> list[str]:
    """What to put before a program to run it as two ranks on this machine, with a port of its own."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


# --- the command line --------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a ``limosa`` command answered."""

    rc: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        return json.loads(self.stdout)


Limosa = Callable[..., Result]


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder for this test alone, instead of /run/limosa; its name also marks all that the test starts.

    What is still there afterwards is ended, whatever session or parent it has by then (torchrun gives each rank a
    session of its own, and they outlive an agent that was killed).
    """
    path = tmp_path_factory.mktemp("run") / "limosa"
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(path))
    ctrl_c = signal.getsignal(signal.SIGINT)
    yield path
    signal.signal(signal.SIGINT, ctrl_c)  # a command line that ran in this process ignores it once it is done
    end_marked(f"LIMOSA_RUNTIME_DIR={path}")


@pytest.fixture
def limosa(runtime: Path, tmp_path: Path) -> Iterator[Limosa]:
    """Runs the command line as a process: ``limosa("ps", "-o", "json")`` → rc, stdout, stderr, json.

    Args of the function: arguments; ``limit`` in seconds (a time-out is a failure), ``env``, ``cwd``, ``rc`` (what the
    exit code has to be), ``wait=False`` for the ``Popen`` itself (ended at the end of the test).
    """
    started: list[subprocess.Popen[str]] = []

    def go(
        *arguments: object,
        limit: float = 120,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        rc: int | None = None,
        wait: bool = True,
    ) -> Any:
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "limosa", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or tmp_path,
            env={**os.environ, "NO_COLOR": "1", **(env or {})},
        )
        started.append(process)
        if not wait:
            return process
        stdout, stderr = process.communicate(timeout=limit)
        result = Result(process.returncode, stdout, stderr, time.monotonic() - begin)
        if rc is not None:
            assert result.rc == rc, f"limosa {arguments} exited {result.rc}, not {rc}:\n{stdout}\n{stderr}"
        return result

    try:
        yield go
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for record in runtime.glob("**/jobs/*.json"):
            end_session(json.loads(record.read_bytes())["root"]["pid"])

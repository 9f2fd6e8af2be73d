"""Fixtures for whole jobs that are checkpointed, killed and restored: quick reaping, and operations that are disturbed.

``reaper`` (of all tests) reaps what they start.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import Reaper, Victim

HERE = Path(__file__).parent


@pytest.fixture
def start(start: Callable[..., Any], reaper: Reaper) -> Callable[..., Any]:
    """``start`` of all tests; its victims are reaped as soon as they end."""

    def go(*args: Any, **options: Any) -> Any:
        victim = start(*args, **options)
        reaper.watch(victim.pid)
        return victim

    return go


@pytest.fixture
def adopt(reaper: Reaper) -> Iterator[Callable[[int, Path], Victim]]:
    """``adopt(pid, folder)``: a victim that somebody else has started, as ``limosa run --detach`` does; ended too."""
    found: list[Victim] = []

    def go(pid: int, folder: Path) -> Victim:
        victim = object.__new__(Victim)
        victim.pid, victim.folder, victim.log, victim.argv = pid, folder, folder / "log", [f"process {pid}"]
        victim._process = subprocess.Popen(["true"])  # stands for the child that it is not
        victim._process.wait()
        reaper.watch(pid)
        found.append(victim)
        return victim

    try:
        yield go
    finally:
        for victim in found:
            victim.kill()


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of an echo server in this process."""
    server = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        try:
            while data := connection.recv(64):
                connection.sendall(data)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for connection in connections:
        connection.close()


# --- operations in a process that is disturbed -------------------------------------------------------------------


class Disturbed:
    """Runs operations in children of a warm process, each of which can be disturbed at a named point.

    See ``disturbed_program.py`` for what an order may say.
    """

    def __init__(self, runtime: Path):
        self.runtime = runtime
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "disturbed_program.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LIMOSA_RUNTIME_DIR": str(runtime)},
            text=True,
        )

    def __call__(self, verb: str, *args: Any, **order: Any) -> dict[str, Any]:
        """Runs one operation: {"rc", "id", "message", "image", "points", "run_ids", "result", "killed"}."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, "args": [str(a) for a in args], **order}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the program that runs the operations has died"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    # what must not be left -------------------------------------------------------------------------------------

    def helpers(self, but: int = 0) -> dict[int, str]:
        """Living processes that belong to operations in our runtime folder: workers, CRIU, recoverers.

        Whoever started them has ended or is our program, so they are its children or, as orphans, ours.
        """
        found = {}
        mark = f"LIMOSA_RUNTIME_DIR={self.runtime}".encode()
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == self._process.pid:
                continue
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) not in (os.getpid(), self._process.pid) or int(fields[3]) == but or fields[0] == b"Z":
                    continue
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(name)] = command[:150]
        return found

    def settle(self, victim: int, limit: float = 90) -> None:
        """Waits until nothing works on the job any more; fails where something stays."""
        end = time.monotonic() + limit
        seen = 0  # twice nobody: one who is just becoming another program shows no environment for a moment
        while seen < 2:
            left = self.helpers(but=victim)
            seen = 0 if left else seen + 1
            assert time.monotonic() < end, f"still there: {left}"
            time.sleep(0.01)

    def litter(self) -> list[str]:
        """Journals and claims that are there."""
        found = [p for kind in ("journals", "claims") for p in self.runtime.glob(f"**/{kind}/*")]
        return [str(p.relative_to(self.runtime)) for p in found]


@pytest.fixture
def disturbed(runtime: Path, reaper: Reaper) -> Iterator[Disturbed]:
    """Operations that can be disturbed; see :class:`Disturbed`."""
    found = Disturbed(runtime)
    try:
        yield found
    finally:
        found.close()

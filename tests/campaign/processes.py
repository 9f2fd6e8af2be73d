"""The room's ends of its processes: nurseries, and what a command line of ``limosa`` has answered."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from support import pids, stat_of

REAL = os.environ.get("LIMOSA_CAMPAIGN") == "real"
"""Whether the victims run on this machine's GPUs."""
TESTS = Path(__file__).parents[1]


def python_path() -> str:
    """Where a room's processes find the tests, Limosa, and what else this process was told to look for."""
    return os.pathsep.join(filter(None, (str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH"))))


class Found(NamedTuple):
    """How a command line ended."""

    argv: list[str]
    rc: int
    answer: dict[str, Any]
    said: list[dict[str, Any]]
    seconds: float
    stderr: str

    @property
    def error(self) -> dict[str, Any]:
        """Its error, if any."""
        return self.answer.get("error") or {}

    @property
    def at(self) -> list[str]:
        """Where it was disturbed."""
        return [one["at"] for one in self.said if "at" in one]

    def short(self) -> str:
        """In a line."""
        text = self.error.get("message", "") if isinstance(self.error, dict) else self.error
        return f"{' '.join(self.argv[:1])} → {self.rc} {text}"[:400]


class Nursery:
    """The room's end of a nursery."""

    def __init__(self, kind: str, env: dict[str, str]):
        command = [sys.executable, "-m", "campaign.nursery", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._buffer = b""
        assert self.read(30).get("ready")

    def send(self, order: dict[str, Any]) -> None:
        """Gives an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def read(self, limit: float) -> dict[str, Any]:
        """The next line, {} where none comes in time."""
        assert self.process.stdout is not None
        fd, end = self.process.stdout.fileno(), time.monotonic() + limit
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return {}
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise RuntimeError("a nursery has died")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, order: dict[str, Any], key: str, limit: float = 20) -> dict[str, Any]:
        """Gives an order and waits for its answer."""
        self.send(order)
        found = self.read(limit)
        assert key in found, found
        return found


def send_signal(pid: int, number: int) -> None:
    """As ``os.kill``; nobody there is fine."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def where_stuck(pid: int) -> list[str]:
    """What a process that does not end, and all that it has started, wait for."""
    found = []
    doomed = {pid}
    for one in pids():
        stat = stat_of(one)
        if stat is not None and (one in doomed or stat[0] in doomed):
            doomed.add(one)
            with contextlib.suppress(OSError):
                where = Path(f"/proc/{one}/wchan").read_text()
                words = Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ")[-60:].decode(errors="replace")
                call = Path(f"/proc/{one}/syscall").read_text().split()[0]
                found.append(f"{one} (of {stat[0]}, {stat[2]}) in {where}, call {call}: {words}")
    return found

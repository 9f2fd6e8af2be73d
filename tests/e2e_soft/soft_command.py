"""What tests of the parked way share: jobs under the shim, who holds their memory, commands held in a driver call."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from limosa.parking import LIBRARY
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

UNDER = {"LD_PRELOAD": str(LIBRARY)}


def start(node: Any, *arguments: object, **env: str) -> Any:
    """A job under the shim."""
    return node.job(*arguments, env={**UNDER, **env})


def pieces(job: Any) -> list[Any]:
    """What the shim looks after in a job."""
    with Shim(Identity.of(job.pid)) as shim:
        return shim.memories()


def used(node: Any) -> list[int]:
    """Bytes in use on each GPU, as ``limosa gpus`` shows them."""
    return [gpu["memory_used"] for gpu in node.limosa("gpus", "-o", "json").json["gpus"]]


def named(node: Any, name: str) -> list[int]:
    """The processes of a node with that name: "limosa-vault", "limosa-mover"."""
    found = []
    for pid in node.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
    return found


def kill(node: Any, name: str, number: int = signal.SIGKILL) -> None:
    """Ends those."""
    for pid in named(node, name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def waits_for(node: Any, true: Callable[[], bool], limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, node.log()
        time.sleep(0.01)


class Held:
    """A command that is held in one of its driver calls until it is let go."""

    def __init__(self, node: Any, function: str, *command: object):
        self.node = node
        self.rule = node.switches.add(f"function={function} hang")
        self.process = node.later(*command)
        waits_for(node, lambda: node.switches.count(self.rule) > 0 or self.process.poll() is not None)
        assert self.process.poll() is None, node.ends(self.process)

    def interrupt(self) -> None:
        """Ctrl-C; returns once it has been heard."""
        self.process.send_signal(signal.SIGINT)
        waits_for(self.node, lambda: "cannot be broken off" in self.node.heard(self.process))

    def let_go(self) -> Any:
        self.node.switches.remove(self.rule)
        return self.process


def importer_of(job: Any) -> int:
    """The child that has opened the job's memory, once it has."""
    noted = job.folder / "pid-importer"
    job.until(lambda: noted.exists() and noted.read_text() != "", what="an importer")
    return int(noted.read_text())


def child_of(job: Any) -> int:
    """The job's child."""
    return int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())


def name_of(pid: int) -> str:
    """What a process is called, or "" where there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""

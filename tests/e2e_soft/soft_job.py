"""A job of these tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from soft_node import Node
from support import Victim
from warm import Forked, Warm

JOB = Path(__file__).with_name("job.py")


class Job(Victim):
    """A job in a node, in a session of its own, with its output in a file: started as ``limosa run`` would."""

    def __init__(self, node: Node, folder: Path, argv: list[str], env: dict[str, str] | None = None):
        self.argv, self.folder, self.log = argv, folder, folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": folder, "start_new_session": True}
            self._process = node.popen(argv, env=env, **options)
        self.pid = self._process.pid

    @classmethod
    def forked(cls, node: Node, folder: Path, arguments: list[str], env: dict[str, str] | None = None) -> Job:
        """``job.py`` in a folder, forked from a warm process: no start of Python, and no loading of the bindings."""
        job = cls.__new__(cls)
        words = [str(folder), *arguments]
        job.argv, job.folder, job.log = [str(JOB), *words], folder, folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        whole = node.environment(env)
        with open(job.log, "ab") as log:
            warm = Warm.of(whole, str(JOB))
            options: dict[str, Any] = {"node": node.pid, "stdout": log.fileno(), "stderr": log.fileno()}
            job.pid, ended = warm.start(words, env=whole, cwd=folder, **options)
        job._process = Forked(job.argv, job.pid, ended, None)  # type: ignore[assignment]
        node.add(job._process)
        return job

    def until_gone(self, limit: float = 60) -> None:
        """Waits until nothing has its pid any more."""
        end = time.monotonic() + limit
        while Path(f"/proc/{self.pid}").exists():
            assert time.monotonic() < end, f"process {self.pid} is still there"
            time.sleep(0.01)

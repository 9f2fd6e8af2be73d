"""A job of these tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from soft_node import Node
from support import Victim

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

    def until_gone(self, limit: float = 10) -> None:
        """Waits until nothing has its pid any more."""
        end = time.monotonic() + limit
        while Path(f"/proc/{self.pid}").exists():
            assert time.monotonic() < end, f"process {self.pid} is still there"
            time.sleep(0.01)

"""Where the processes of this suite run: on a node of two software GPUs, or on the machine as it is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

REAL = os.environ.get("LIMOSA_CONFORMANCE") == "real"
SOURCE = str(Path(__file__).parents[2] / "src")


class Node:
    """The machine's own GPUs: nothing is put before a command, nothing set.

    Attributes:
        prefix: what to put before a command.
        env: variables that it needs.
    """

    def __init__(self) -> None:
        self.prefix: list[str] = []
        self.env: dict[str, str | None] = {}

    def close(self) -> None:
        """Nothing to do."""


class SoftNode(Node):
    """A node of two software GPUs; it lives as long as this object is open."""

    def __init__(self, gpus: int = 2, memory: str = "8GiB", flags: tuple[str, ...] = ()) -> None:
        super().__init__()
        holder = "import os, sys; print(os.getpid(), os.environ['LD_LIBRARY_PATH'], flush=True); sys.stdin.read()"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "limosa", "softgpu", "--gpus", str(gpus), "--memory", memory, *flags),
                *("--", sys.executable, "-c", holder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE},
        )
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        assert len(words) == 2, "no software node: `limosa softgpu` has said why"
        self.pid = int(words[0])
        self.prefix = ["nsenter", "-t", words[0], "-m", "--"]
        self.env = {"LD_LIBRARY_PATH": words[1]}

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

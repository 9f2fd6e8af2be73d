"""Jobs in namespaces of their own, seen from outside by the pids of the machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soft_job import JOB, Job
from soft_node import let_all_reach
from support import VICTIMS, open_the_way_to

from limosa.process.namespaces import is_ours

IN_NAMESPACES = VICTIMS / "in_namespaces.py"


def inside_of(pid: int, kinds: Sequence[str] = ("pid", "mnt"), limit: float = 60) -> int:
    """The child of a process that has namespaces of these kinds of its own, once it has."""
    end = time.monotonic() + limit
    while True:
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            if not any(is_ours(child, kind) for kind in kinds):
                return child
        assert time.monotonic() < end, f"process {pid} has made no namespace"
        time.sleep(0.01)


def open_folder(node: Any) -> Path:
    """A new folder for a job of anybody's; runtime folder, Python and this are within everybody's reach."""
    if not node.n_jobs:
        let_all_reach(node, Path(sys.base_prefix))
    folder = node.place / f"job{node.n_jobs}"
    node.n_jobs += 1
    folder.mkdir()
    folder.chmod(0o777)
    open_the_way_to(folder, Path(os.environ["LIMOSA_RUNTIME_DIR"]))
    return folder


def start(node: Any, *arguments: object, user: int = 0, env: dict[str, str] | None = None) -> Job:
    """``job.py`` in namespaces of its own, as uid 0 of a user namespace where ``user`` is given; it computes."""
    folder = open_folder(node)
    ways = ["--user", str(user)] if user else []
    variables = [f"{name}={value}" for name, value in (env or {}).items()]
    inside = ["env", *variables, sys.executable, str(JOB), str(folder), *map(str, arguments)]
    job = Job(node, folder, [sys.executable, str(IN_NAMESPACES), *ways, "--", *inside])
    job.pid = inside_of(job.pid)
    job.wait_for("READY")
    job.goes_on(2)
    return job

"""``job``: starts small Python programs that do one odd thing each, and ends them for sure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from limosa.process.identity import Identity
from limosa.process.tree import job_tree

PRELUDE = """
import ctypes, fcntl, mmap, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
folder = sys.argv[1]
def ready():
    open(os.path.join(folder, "ready"), "w").close()
    while True:
        time.sleep(60)
"""


class Job:
    """A program under test; ``pid`` is that of its interpreter, also behind a prefix such as unshare."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path):
        self.process, self.folder, self.pid = process, folder, process.pid

    @property
    def identity(self) -> Identity:
        return Identity.of(self.pid)

    def wait_ready(self, limit: float = 90) -> None:
        end = time.monotonic() + limit
        while not (self.folder / "ready").exists():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end, "not ready"
            time.sleep(0.005)


def end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``job(code, prefix=[…], session=True, inner=False, **popen)`` starts ``code`` after PRELUDE, then waits for it.

    ``inner``: the interpreter is the child of the process that was started (unshare --fork).
    """
    started: list[Job] = []

    def go(
        code: str,
        prefix: tuple[str, ...] = (),
        session: bool = True,
        inner: bool = False,
        wait: bool = True,
        **popen: Any,
    ) -> Job:
        folder = tmp_path / f"job{len(started)}"
        folder.mkdir()
        script = folder / "program.py"
        script.write_text(f"{PRELUDE}\n{code}\nready()\n")
        with open(folder / "log", "ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(
                [*prefix, sys.executable, str(script), str(folder)], start_new_session=session, **{**streams, **popen}
            )
        result = Job(process, folder)
        started.append(result)
        if wait:
            result.wait_ready()
        if inner:
            result.pid = job_tree(Identity.of(process.pid))[-1].pid
        return result

    try:
        yield go
    finally:
        for one in started:
            with contextlib.suppress(Exception):
                end([identity.pid for identity in job_tree(Identity.of(one.process.pid))])
            end([one.pid] if one.process.poll() is None else [])
            one.process.kill()
            one.process.wait(60)

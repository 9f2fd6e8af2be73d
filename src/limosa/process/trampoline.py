"""Runs between ``limosa run`` and the job, in the job's process: makes it clean, then becomes it (exec).

A program of its own, started with ``python -I -S`` by its path, because forking a threaded Python process and going on
in Python there is not safe. It is told what to do by JSON on descriptor 3, and in which folder by descriptor 5. It
answers with JSON lines on descriptor 4: ``{"pid": …, "start_time": …}``, ``{"no_new_privs": true}``, ``{"failed": step,
"errno": …, "text": …}``, and ``{"exec": true}`` as its last word; the end of the stream after that means that exec has
succeeded (the descriptor is close-on-exec).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

SPEC_FD, ANSWER_FD, FOLDER_FD = 3, 4, 5


def _say(**message: Any) -> None:
    os.write(ANSWER_FD, json.dumps(message).encode() + b"\n")


def _start_time() -> int:
    """Field 22 of /proc/self/stat, counted from behind the name; exec does not change it."""
    return int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])


def _close_on_exec() -> None:
    """Nothing but the standard streams goes on to the job, whatever we were started with."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.set_inheritable(fd, False)


def _reset_signals(ignored: list[int]) -> None:
    for number in signal.valid_signals() - set(ignored):
        with contextlib.suppress(OSError, ValueError):  # KILL, STOP, and the two that libc keeps
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _beside(name: str) -> Any:
    """A module beside this file, which imports nothing of Limosa either."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _deny_io_uring() -> None:
    if _beside("seccomp").deny_io_uring():
        _say(no_new_privs=True)


def main() -> None:
    """Does what descriptor 3 says; never returns."""
    step = "start"
    try:
        with open(SPEC_FD, "rb") as file:
            spec = json.load(file)
        if spec["detach"] and os.fork():
            os._exit(0)  # the job's parent is init (or the nearest subreaper) from here on
        os.setsid()
        _say(pid=os.getpid(), start_time=_start_time())
        _close_on_exec()
        step = "chdir"
        os.fchdir(FOLDER_FD)
        step = "seccomp"
        if spec["seccomp"]:
            _deny_io_uring()
        _reset_signals(spec["ignored"])
        step = "exec"
        _say(exec=True)
        os.execvpe(spec["command"][0], spec["command"], spec["env"])  # noqa: S606 - no shell is the point
    except BaseException as e:
        number = e.errno if isinstance(e, OSError) else None
        _say(failed=step, errno=number, text=str(e))
        os._exit(125)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()

"""What vault and mover have in common on their own side: how they come up, and as whom."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
from collections.abc import Sequence

from limosa.rights import become

_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_M_ARENA_MAX = -8  # malloc.h
TELLS = "LIMOSA_RESIDENT_TELLS"
"""The variable that names the descriptor by which one that comes up says that it listens."""


def main(argv: list[str]) -> int:
    """Become a vault or mover that is nobody's child: whoever calls Limosa may be a job itself.

    Takes "vault" or "mover" and the user it is for; returns the exit code, as soon as it listens.
    """
    kind, *arguments = argv
    came_up, tells = os.pipe()
    child = os.fork()
    if child:
        os.close(tells)
        return 0 if os.read(came_up, 1) else min(255, abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os.close(came_up)
    os.environ[TELLS] = str(tells)
    os._exit(importlib.import_module(f"limosa.parking.{kind}_main").main(arguments))


def begin(name: str, uid: int, ignored: Sequence[signal.Signals] = ()) -> None:
    """Take a name, which ``ps`` shows, as many descriptors as may be, and the rights of the user it is for.

    Import what is needed before: what root runs need not be readable for him. Signals that a terminal sends are
    ignored, and these. Raises OSError: it may not be that user.
    """
    for number in (*_IGNORED, *ignored):
        signal.signal(number, signal.SIG_IGN)
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)
    _one_heap()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if uid == os.geteuid():
        return
    become(uid)


def _one_heap() -> None:
    """Have all threads take memory from one heap: each further one is 64 MiB of address space that stays taken."""
    with contextlib.suppress(AttributeError):  # a C library that has no such thing
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def listens() -> None:
    """Say that it has come up: whoever has started it need not wait any longer."""
    fd = os.environ.pop(TELLS, "")
    if fd.isdigit():
        with contextlib.suppress(OSError):
            os.write(int(fd), b"1")
            os.close(int(fd))

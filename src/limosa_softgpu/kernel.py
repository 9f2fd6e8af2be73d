"""System calls that Python has no function for, or only from 3.12 on."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_NOSUID = 2
MS_NOEXEC = 8

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem), what)


def unshare(flags: int) -> None:
    """``unshare(2)``.

    Raises:
        OSError: it may not be done.
    """
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    """``setns(2)``.

    Raises:
        OSError: it may not be done.
    """
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """``mount(2)``.

    Raises:
        OSError: it may not be done.
    """
    _check(
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        ),
        target,
    )

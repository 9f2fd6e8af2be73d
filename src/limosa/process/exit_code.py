"""The exit code of a process that is not our child, as far as the kernel tells it.

Linux 6.15 and newer tell it to everybody who had a pidfd open when the process was reaped (``PIDFD_GET_INFO`` of
``linux/pidfd.h``). Older ones tell only its parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading

from limosa.process.identity import Identity

_SIZE = 64  # PIDFD_INFO_SIZE_VER0
_GET_INFO = 3 << 30 | _SIZE << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)
_EXIT = 1 << 3  # PIDFD_INFO_EXIT
_EXIT_CODE = 60  # its offset, in bytes
_MOST_KEPT = 64  # descriptors of a program that starts many jobs
_kept: dict[Identity, int] = {}
_lock = threading.Lock()


def keep(identity: Identity) -> None:
    """Keeps a pidfd of a process that this one has started: it may have ended before anybody waits for it.

    Of the newest only. Call it when the process is known to be there, or may have ended just now.
    """
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(identity.pid)
        with _lock:
            _kept[identity] = fd
            if len(_kept) > _MOST_KEPT:
                os.close(_kept.pop(next(iter(_kept))))


def code_kept(identity: Identity) -> int | None:
    """The exit code of a process that has ended, whose pidfd was kept; None where none was, or nobody can know."""
    with _lock:
        fd = os.dup(_kept[identity]) if identity in _kept else -1
    if fd < 0:
        return None
    try:
        return exit_code(fd)
    finally:
        os.close(fd)


def exit_code(pidfd: int, timeout: float = 5.0) -> int | None:
    """Returns how a process ended, once its parent has reaped it.

    Args:
        pidfd: opened while it was there.
        timeout: seconds to wait for that.

    Returns:
        Its exit code, or 128 + the signal that ended it; None where nobody can know.
    """
    poller = select.poll()
    poller.register(pidfd, 0)  # POLLHUP comes with the reaping, POLLIN with the end
    poller.poll(max(0, int(timeout * 1000)))
    info = bytearray(struct.pack("Q", _EXIT).ljust(_SIZE, b"\0"))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # an older kernel, or not reaped yet
        return None
    (mask,) = struct.unpack_from("Q", info)
    if not mask & _EXIT:
        return None
    (status,) = struct.unpack_from("i", info, _EXIT_CODE)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code

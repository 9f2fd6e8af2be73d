"""The exit code of a process that is not our child, as far as the kernel tells it.

Linux 6.15 and newer tell it to everybody who had a pidfd open when the process was reaped (``PIDFD_GET_INFO`` of
``linux/pidfd.h``). Older ones tell only its parent.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct

_SIZE = 64  # PIDFD_INFO_SIZE_VER0
_GET_INFO = 3 << 30 | _SIZE << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)
_EXIT = 1 << 3  # PIDFD_INFO_EXIT
_EXIT_CODE = 60  # its offset, in bytes


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

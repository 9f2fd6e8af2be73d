"""Opening one name in an open folder that somebody else may write to: no link, no mount, no pipe holds us up.

Example: root reads ``claims`` in a user's folder. The user may exchange it for a link to a folder of root's, a pipe, or
a file system of his own that never answers (FUSE). ``open_in`` follows no link and crosses no mount (openat2(2)), and
does not wait (``O_NONBLOCK``: for a pipe's writer, for a lease). What was opened is looked at by the descriptor, never
again by its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator

_SYS_OPENAT2, _SYS_PIDFD_GETFD = 437, 438  # the same on every architecture
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS = 0x01, 0x02, 0x04
_ALWAYS = os.O_NOFOLLOW | os.O_CLOEXEC
_UNLESS_PATH = os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY

_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in(folder: int, name: str, flags: int, mode: int = 0) -> int:
    """Open a name in an open folder.

    Args:
        folder: the folder's descriptor.
        name: one name, no path.
        flags: as of open(2); that no link is followed and nothing is waited for goes without saying.
        mode: of a file that is made.

    Raises:
        OSError: it is not there, is a link, is on another file system, or may not be opened.
    """
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
    flags |= _ALWAYS | (0 if flags & os.O_PATH else _UNLESS_PATH)
    how = _How(flags, mode, _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS)
    arguments = (ctypes.c_int(folder), ctypes.c_char_p(os.fsencode(name)), ctypes.byref(how))
    fd = int(_libc.syscall(ctypes.c_long(_SYS_OPENAT2), *arguments, ctypes.c_size_t(ctypes.sizeof(how))))
    if fd >= 0:
        return fd
    number = ctypes.get_errno()
    if number == errno.ENOSYS:  # before Linux 5.6, and in containers that do not know the call
        return os.open(name, flags, mode, dir_fd=folder)
    raise OSError(number, os.strerror(number), name)


def taken_from(pidfd: int, number: int) -> int:
    """A descriptor of one's own of what another process has open now (pidfd_getfd(2), Linux 5.6).

    Raises:
        OSError: it has no such descriptor, or that is not permitted (ptrace).
    """
    fd = int(
        _libc.syscall(ctypes.c_long(_SYS_PIDFD_GETFD), ctypes.c_int(pidfd), ctypes.c_int(number), ctypes.c_uint(0))
    )
    if fd < 0:
        raise last_error()
    return fd


def last_error() -> OSError:
    """What went wrong in the last call by ctypes, as an error to raise."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def open_folder_in(folder: int, name: str, uid: int) -> int:
    """Open a folder in an open folder; it must belong to that user and be written by nobody else.

    Raises:
        OSError: it is not there, or is something else.
    """
    fd = open_in(folder, name, _FOLDER)
    if only_by(os.fstat(fd), uid):
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, f"not a folder that only uid {uid} can write to", name)


_NOTHING = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.EACCES, errno.EPERM)
)


def nothing_there(error: OSError, trusted: bool) -> bool:
    """Whether what could not be opened is not there, or is something that does not count.

    Otherwise nobody knows: this process can open no file more, or the disk fails.

    Args:
        error: why it was not opened.
        trusted: whether only root and the caller can have caused it. Another user's file system may return any error,
            so his errors do not count, unless we really can open nothing.
    """
    return error.errno in _NOTHING or not (trusted or _can_open_nothing())


def _can_open_nothing() -> bool:
    try:
        os.close(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError:
        return True
    return False


def only_by(found: os.stat_result, uid: int) -> bool:
    """Whether it is a folder of that user, and nobody else may write to it."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Closes a descriptor in the end."""
    try:
        yield fd
    finally:
        os.close(fd)

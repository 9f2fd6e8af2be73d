"""Opening a job's log to read it. A record or an image names the log, and its user may have made the name up.

Example: a user's record says that his job's log is ``/root/.ssh/id_ed25519``, or a pipe. ``limosa logs`` by root shows
neither: root opens only a regular file of the job's user, or one that the job has as its output. It is checked
before it is opened (``O_PATH``), so that no pipe holds us up and no device notices, and never again by its name.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress

from limosa.ipc import packet
from limosa.process.belief import owners_of
from limosa.process.launch import log_folder
from limosa.process.openat import closing, taken_from
from limosa.start import served_by, server_of

_LOOK = os.O_PATH | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_said(path: str, pid: int) -> int:
    """Open a log of which somebody says that it is this process's.

    Raises:
        OSError: it cannot be opened, is no regular file, or is not for root to show.
    """
    if "\0" in path:
        raise OSError("no file is called that")
    if os.geteuid() == 0 and owners_of(pid) == {0}:
        return open_own(path)  # root's word, where nobody but root may have changed what is there
    with closing(os.open(path, _LOOK)) as fd:
        # He may never let go whoever closes it, nor whoever asks: that only where the list of mounts does not know it.
        if os.geteuid() == 0 and (served_by().get(packet.device(fd), 0) or server_of(fd)) != 0:
            raise PermissionError("it is on a file system that a user serves (FUSE)")
        found = os.fstat(fd)
        if os.geteuid() == 0 and not _is_its_users(found, pid) and not _is_its_output(found, pid):
            raise PermissionError(f"it is not a file of the user of process {pid}")
        return _opened(fd)


def open_own(path: str) -> int:
    """Open the log of a job of one's own; root follows no link of another user's.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    if os.geteuid() != 0:
        with closing(os.open(path, _LOOK)) as fd:
            return _opened(fd)
    with (
        log_folder(path) as folder,
        closing(os.open(os.path.basename(path), _LOOK | os.O_NOFOLLOW, dir_fd=folder)) as fd,
    ):
        if os.fstat(fd).st_nlink > 1:
            raise PermissionError("it has another name, which may be of a file of root's")
        return _opened(fd)


def _opened(fd: int) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError("it is not a regular file")
    return os.open(f"/proc/self/fd/{fd}", _READ)


def _is_its_users(found: os.stat_result, pid: int) -> bool:
    with suppress(OSError):
        return owners_of(pid) == {found.st_uid}
    return False


def _is_its_output(found: os.stat_result, pid: int) -> bool:
    """Whether the process may write to it, as it was given to it: root's log of a job that has become a user's.

    False where it cannot be known: nobody may take a descriptor of that process's (a container, ``ptrace_scope`` 3).
    """
    file = (found.st_dev, found.st_ino)
    with suppress(OSError), closing(os.pidfd_open(pid)) as process:
        uid = max(owners_of(pid))
        return any(_writes(process, pid, number, file, uid) for number in (1, 2))
    return False


def _writes(process: int, pid: int, number: int, file: tuple[int, int], uid: int) -> bool:
    """Whether that descriptor of the process is of that file, and open to write.

    The process may put another in its place at any moment, so both are asked of one that is ours. It is only taken
    where it seems to be right: closing one that is on a file system of the user's own (FUSE) may take for ever.
    """
    with suppress(OSError):
        with closing(os.open(f"/proc/{pid}/fd/{number}", _LOOK)) as seen:
            if packet.inode(seen) != file:
                return False
        fd = taken_from(process, number)
        try:
            mode = fcntl.fcntl(fd, fcntl.F_GETFL)
            return packet.inode(fd) == file and mode & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR) and not mode & os.O_PATH
        finally:
            packet.let_go(fd, uid)
    return False

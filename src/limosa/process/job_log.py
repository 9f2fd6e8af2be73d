"""Opening a job's log to read it: where it is is the word of a record or an image, which its user may have made up.

Example: a user's record says that his job's log is ``/root/.ssh/id_ed25519``, or a pipe. ``limosa logs`` by root shows
neither: what root opens is a regular file of the job's user, or one that the job has as its output. It is looked at
before it is opened (``O_PATH``), so that no pipe holds us up and no device notices, and never again by its name.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

from limosa.process.belief import owners_of
from limosa.process.launch import log_folder
from limosa.process.openat import closing
from limosa.process.slurp import slurp

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
    """Whether the process may write to it, as it was given to it: root's log of a job that has become a user's."""
    for number in (1, 2):
        with suppress(OSError):
            there = os.stat(f"/proc/{pid}/fd/{number}")
            flags = re.search(rb"^flags:\t([0-7]+)$", slurp(f"/proc/{pid}/fdinfo/{number}"), re.MULTILINE)
            mode = int(flags[1], 8) if flags else os.O_PATH
            writes = mode & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR) and not mode & os.O_PATH
            if writes and (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino):
                return True
    return False

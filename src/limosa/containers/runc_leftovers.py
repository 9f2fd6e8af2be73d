"""What a runc that was killed leaves where it notes its containers.

While it restores one it has the container's root file system mounted there, at ``criu-root``. ``runc delete --force``
removes what it finds in that folder, also through that mount: runc 1.1.5 was seen to empty a bundle's root file system
so. Therefore the mount goes first, and a folder that no state is in is taken away here, name by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re

from limosa.containers.runtime import NAME
from limosa.containers.state import open_folder, states
from limosa.errors import FailedUndone
from limosa.process.identity import Identity
from limosa.process.openat import closing, last_error, open_in

_ROOT = "criu-root"
_NOTES = ("state.json", "status")  # runc's, crun's
_OTHER = re.compile(r"exec\.fifo|state-.*")  # what runc makes there besides
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_libc = ctypes.CDLL(None, use_errno=True)


def begun(folder: str, name: str) -> bool:
    """Return whether a folder of notes has one of that name, and no state is in it.

    Args:
        folder: an absolute path, of a runtime.
        name: of a container.
    """
    if NAME.fullmatch(name):
        with contextlib.suppress(OSError), closing(open_folder(folder)) as above, closing(_opened(above, name)) as fd:
            return not any(note in os.listdir(fd) for note in _NOTES)
    return False


def unmount_root(folder: str, name: str) -> None:
    """Unmount what is left mounted in that folder of a container; there may be none.

    Raises:
        FailedUndone: it stays mounted, and nothing may be removed there.
    """
    try:
        with closing(open_folder(folder)) as above, closing(_opened(above, name)) as fd:
            _unmount(fd)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _failed(folder, name, error) from error


def take_away(folder: str, name: str, *, ended: Identity | None = None) -> None:
    """Remove such a folder, if it is there: it would keep the name taken.

    Args:
        folder: an absolute path, of a runtime.
        name: of a container.
        ended: the first process of a container of which nothing lives: also where the state in it is of that one.

    Raises:
        FailedUndone: it stays.
    """
    if not begun(folder, name) and (ended is None or not _is_of(folder, name, ended)):
        return
    try:
        with closing(open_folder(folder)) as above:
            with closing(_opened(above, name)) as fd:
                _unmount(fd)
                for one in os.listdir(fd):
                    if _OTHER.fullmatch(one) or (ended is not None and one in _NOTES):
                        os.unlink(one, dir_fd=fd)
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(_ROOT, dir_fd=fd)
            os.rmdir(name, dir_fd=above)
    except FileNotFoundError:
        return  # somebody else has removed it
    except OSError as error:
        raise _failed(folder, name, error) from error


def _is_of(folder: str, name: str, init: Identity) -> bool:
    """Whether what is noted there is a container's that had this first process."""
    noted = next((s for s in states([folder]) if (s.folder, s.id) == (folder, name)), None)
    return noted is not None and (noted.pid, noted.start_time) == (init.pid, init.start_time)


def _opened(above: int, name: str) -> int:
    return open_in(above, name, os.O_RDONLY | os.O_DIRECTORY)


def _unmount(fd: int) -> None:
    path = ctypes.c_char_p(f"/proc/self/fd/{fd}/{_ROOT}".encode())
    while not _libc.umount2(path, _MNT_DETACH | _UMOUNT_NOFOLLOW):
        pass
    error = last_error()
    if error.errno not in (errno.EINVAL, errno.ENOENT):  # nothing is mounted there
        raise error
    with contextlib.suppress(FileNotFoundError):  # or what is may not be unmounted: then it is another file system
        os.close(open_in(fd, _ROOT, os.O_PATH | os.O_DIRECTORY))


def _failed(folder: str, name: str, error: OSError) -> FailedUndone:
    return FailedUndone(what="runc delete", detail=f"{folder}/{name}: {error.strerror}")

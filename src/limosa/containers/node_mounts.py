"""The machine's own device nodes, bound into the /dev of a container that has a user namespace.

A node that is made on a file system of a user namespace cannot be opened. Rootless podman binds the machine's nodes in,
and so is it done here: the node's mount is taken where Limosa is (open_tree(2)), and put into the container's mount
namespace by a thread that enters that one and lives for nothing else. No path is looked up in the container but one
name in its open /dev, without following a link, and no program is run there. What it is put onto is an empty file of
the container's root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable

from limosa.process.identity import Identity
from limosa.process.namespaces import CLONE_NEWNS, enter, in_a_thread
from limosa.process.openat import closing, last_error

_SYS_OPEN_TREE, _SYS_MOVE_MOUNT = 428, 429  # of all machines
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW = -100, 0x100
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_FROM_FD, _TO_FD = 0x04, 0x40  # MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_CLONE_FS = 0x200
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


def taken(path: str, device: int) -> int:
    """Return a descriptor of a mount of a device node, which is nowhere yet.

    Args:
        path: the machine's node.
        device: its ``st_rdev``.

    Raises:
        OSError: it cannot be taken (Linux before 5.2), or is another.
    """
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_SYMLINK_NOFOLLOW
    arguments = (ctypes.c_int(_AT_FDCWD), ctypes.c_char_p(os.fsencode(path)), ctypes.c_uint(flags))
    fd = int(_libc.syscall(ctypes.c_long(_SYS_OPEN_TREE), *arguments))
    if fd < 0:
        raise last_error()
    found = os.fstat(fd)
    if not stat.S_ISCHR(found.st_mode) or found.st_rdev != device:
        os.close(fd)
        raise OSError(errno.ENODEV, f"{path} is another device")
    return fd


def bind(identity: Identity, dev: int, name: str, device: int) -> None:
    """Bind a node of the machine into a container's /dev.

    Args:
        identity: a process of the container.
        dev: its open /dev.
        name: of the node, there and here.
        device: its ``st_rdev``.

    Raises:
        OSError: it cannot be done, or the container has something in its place that cannot be removed.
        LimosaError: the process has gone.
    """
    root = os.fstat(dev)

    def put() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dev)
        with closing(_made_as(root.st_uid, root.st_gid, dev, name)) as place:
            arguments = (ctypes.c_int(tree), b"", ctypes.c_int(place), b"", ctypes.c_uint(_FROM_FD | _TO_FD))
            if _libc.syscall(ctypes.c_long(_SYS_MOVE_MOUNT), *arguments):
                raise last_error()

    with closing(taken(f"/dev/{name}", device)) as tree:
        _there(identity, put)


def unbind(identity: Identity, dev: int, name: str, device: int) -> None:
    """Take a node that is bound there away again; the file below it stays.

    Raises:
        OSError: it cannot be done.
        LimosaError: the process has gone.
    """

    def drop() -> None:
        os.fchdir(dev)
        with closing(os.open(name, _LOOK, dir_fd=dev)) as fd:
            if os.fstat(fd).st_rdev != device:
                raise OSError(errno.EBUSY, f"something else is at /dev/{name} of its container")
        if _libc.umount2(ctypes.c_char_p(os.fsencode(name)), _MNT_DETACH | _UMOUNT_NOFOLLOW):
            error = last_error()
            if error.errno != errno.EINVAL:  # it is none that is bound
                raise error

    _there(identity, drop)


def _there(identity: Identity, call: Callable[[], None]) -> None:
    """Make a call in a process's mount namespace."""
    with closing(os.open(f"/proc/{identity.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) as namespace:
        identity.check()

        def run() -> None:
            if _libc.unshare(_CLONE_FS):  # who shares its root and its folder with other threads may not enter
                raise last_error()
            enter(namespace, CLONE_NEWNS)
            call()

        in_a_thread(run)


def _made_as(uid: int, gid: int, folder: int, name: str) -> int:
    """Make an empty file as a user of the namespace: nobody else can be an owner there."""
    mine = os.geteuid(), os.getegid()
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    try:
        os.close(
            os.open(name, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        )
        return os.open(name, _LOOK, dir_fd=folder)
    finally:
        _libc.setfsuid(mine[0])
        _libc.setfsgid(mine[1])

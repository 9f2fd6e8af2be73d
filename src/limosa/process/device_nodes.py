"""Which GPUs' device nodes a job sees: in a mount namespace of its own /dev/null lies over the others.

Made by ``limosa run --gpus`` as root (:func:`hide`, called by the trampoline, which loads this file by its path: only
the standard library here), and changed while the job is checkpointed (:func:`show`), which drivers allow: a restore
looks anew at what the process can open.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from collections.abc import Callable, Iterable

_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_NULL = "/dev/null"


def node(minor: int) -> str:
    """The name of a GPU's device node."""
    return f"/dev/nvidia{minor}"


def hide(minors: Iterable[int]) -> None:
    """Give this process (with one thread) a mount namespace of its own, without these GPUs.

    Raises:
        OSError: it may not.
    """
    _call("unshare", _CLONE_NEWNS)
    # What is mounted outside later shows inside, and nothing of ours outside.
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None)
    _set((), minors)


def may_hide() -> bool:
    """Whether this process is permitted to."""
    return _try(lambda: _call("unshare", _CLONE_NEWNS))


def show(pid: int, visible: Iterable[int], others: Iterable[int]) -> None:
    """Change which GPUs a process, and all that share its mount namespace, can see.

    Args:
        pid: the process.
        visible: minor numbers of those that it is to see.
        others: of those that it is not to see, where they are not among these.

    Raises:
        OSError: it may not, or the process has ended.
    """
    wanted = set(visible)
    hidden = set(others) - wanted
    _inside(pid, lambda: _set(sorted(wanted), sorted(hidden)))


def _set(visible: Iterable[int], hidden: Iterable[int]) -> None:
    for minor in visible:
        while _is_covered(node(minor)):
            _call("umount2", node(minor).encode(), _MNT_DETACH | _UMOUNT_NOFOLLOW)
    for minor in hidden:
        if os.path.lexists(node(minor)) and not _is_covered(node(minor)):
            _cover(node(minor))


def _is_covered(path: str) -> bool:
    info = os.stat(path, follow_symlinks=False)
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == os.stat(_NULL).st_rdev


def _cover(path: str) -> None:
    if not stat.S_ISCHR(os.stat(path, follow_symlinks=False).st_mode):
        raise OSError(19, "no device node", path)
    _call("mount", _NULL.encode(), path.encode(), None, ctypes.c_ulong(_MS_BIND), None)


def _inside(pid: int, call: Callable[[], None]) -> None:
    """Make a call in the mount namespace of a process, in a thread of its own: that of the others stays what it is."""
    fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def enter() -> None:
        _call("unshare", _CLONE_FS)  # a thread that shares its folder with others may not
        _call("setns", fd, _CLONE_NEWNS)
        call()

    try:
        _in_a_thread(enter)
    finally:
        os.close(fd)


def _try(call: Callable[[], None]) -> bool:
    try:
        _in_a_thread(call)
    except OSError:
        return False
    return True


def _in_a_thread(call: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="limosa-nodes")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")

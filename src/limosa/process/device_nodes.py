"""Which GPUs a job sees: ``limosa run --gpus`` preloads a library that opens the device nodes of these alone.

Which they are is in a small file in the runtime folder of whoever started the job, named by a variable of the job's.
The library (``native/sight``) reads it whenever a node is opened. A driver looks anew at what a process can open when
it restores it, so a job whose file is changed while it is checkpointed (:func:`show`) can go to a GPU that it did not
see.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from limosa.process.runtime import own_folder, read_owned, write_atomic

LIBRARY = Path(__file__).resolve().parents[1] / "native" / "sight" / "liblimosa_sight.so"
_SEES = "LIMOSA_SEES"
_KIND = "sees"
_SETGROUPS = {"x86_64": 116}.get(os.uname().machine, 159)  # of the newer machines, arm64 among them


def preload(env: Mapping[str, str], minors: Iterable[int]) -> tuple[dict[str, str], str]:
    """Return an environment in which programs see these GPUs only, and the file that says so.

    Args:
        env: what it is made of.
        minors: minor numbers of the nodes of these GPUs.

    Raises:
        PermissionDenied: the runtime folder is somebody else's.
        OSError: the file cannot be written.
    """
    path = own_folder(_KIND) / secrets.token_hex(8)
    write_atomic(path, _text(minors))
    others = [part for part in env.get("LD_PRELOAD", "").replace(":", " ").split() if part != str(LIBRARY)]
    return {**env, _SEES: str(path), "LD_PRELOAD": ":".join([*others, str(LIBRARY)])}, str(path)


def owner(path: str) -> int | None:
    """Return the user in whose runtime folder it is (``…/UID/sees/NAME``); None where it is nowhere of that kind."""
    parts = Path(path).parts
    if not path.startswith("/") or len(parts) < 4 or parts[-2] != _KIND or ".." in parts:
        return None
    return int(parts[-3]) if parts[-3].isascii() and parts[-3].isdigit() else None


def seen(path: str) -> set[int] | None:
    """Return the minor numbers in such a file; None where it is gone, and all are seen."""
    uid = owner(path)
    text = None if uid is None else read_owned(Path(path), uid)
    if text is None:
        return None
    return {int(word) for word in text.split(b",") if word.isdigit() and len(word) < 6}


def show(path: str, minors: Iterable[int]) -> bool:
    """Change what the job of that file sees; its folder is made anew where it is missing, after a restart.

    Written with the rights of the user whose folder it is in: a path comes from records and images of users.

    Returns:
        Whether it sees these alone. Where the file cannot be written it is removed, and all GPUs are seen: that is no
        reason to leave a job where it is.

    Raises:
        OSError: the caller may not do that.
    """
    wanted, uid = set(minors), owner(path)
    if uid is None:
        raise OSError(errno.EINVAL, "not in a user's runtime folder", path)
    if seen(path) == wanted:
        return True
    written = []

    def write() -> None:
        try:
            Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_atomic(Path(path), _text(wanted))
            written.append(path)
        except OSError:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)

    if uid == os.geteuid():
        write()
    else:
        _as(uid, write)
    return bool(written)


def forget(path: str) -> None:
    """Remove such a file, when its job has ended."""
    if owner(path) == os.geteuid():
        with contextlib.suppress(OSError):
            os.unlink(path)


def _text(minors: Iterable[int]) -> bytes:
    return ",".join(str(minor) for minor in sorted(set(minors))).encode()


def _as(uid: int, call: Callable[[], None]) -> None:
    """Make a call with a user's rights to files (setfsuid(2)), in a thread of its own: the kernel has them by thread.

    Raises:
        OSError: what the call raised, or the rights may not be taken.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            try:
                gid = pwd.getpwuid(uid).pw_gid
            except KeyError:
                gid = uid
            if libc.syscall(_SETGROUPS, 0, None):  # the C library's would take them from all threads
                raise OSError(ctypes.get_errno(), "setgroups")
            libc.setfsgid(gid)
            libc.setfsuid(uid)
            if libc.setfsgid(gid) != gid or libc.setfsuid(uid) != uid:  # they answer what was before
                raise PermissionError(errno.EPERM, f"this is not for uid {os.geteuid()} to change")
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="limosa-sees")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]

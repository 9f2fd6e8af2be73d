"""Which GPUs a job sees: ``limosa run --gpus`` preloads a library that opens the device nodes of these alone.

A small file in the folder of the user who started the job (``places``) lists them; a variable of the job names it. The
library (``native/sight``) reads it whenever a node is opened. At a restore the driver checks anew what a process can
open. So a job whose file is changed while it is checkpointed (:func:`show`) can go to a GPU that it did not see.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from limosa.process import belief, places
from limosa.process.namespaces import in_a_thread
from limosa.process.openat import closing, open_folder_in, open_in
from limosa.process.runtime import write_atomic

LIBRARY = Path(__file__).resolve().parents[1] / "native" / "sight" / "liblimosa_sight.so"
_SEES = "LIMOSA_SEES"
_KIND = "sees"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
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
    path = places.own_folder(_KIND) / secrets.token_hex(8)
    write_atomic(path, _text(minors))
    others = [part for part in env.get("LD_PRELOAD", "").replace(":", " ").split() if part != str(LIBRARY)]
    return {**env, _SEES: str(path), "LD_PRELOAD": ":".join([*others, str(LIBRARY)])}, str(path)


def owner(path: str) -> int | None:
    """Return the user in whose folder it is; None where it is nowhere of that kind, as of an older Limosa."""
    folder, name = os.path.split(path)
    place, kind = os.path.split(folder)
    if kind != _KIND or not _NAME.fullmatch(name):
        return None
    if place == str(places.roots_place()):
        return 0
    users, own = os.path.split(place)
    uid = places.owner_of(own)
    return uid if users == str(places.users_place()) and uid > 0 else None


def known(path: str) -> str:
    """Return the path of such a file, "" for one elsewhere: an older Limosa's, of which nobody believes anything."""
    return path if path and owner(path) is not None else ""


def seen(path: str) -> set[int] | None:
    """Return the minor numbers in such a file; None where it is gone, and all are seen."""
    uid = owner(path)
    for note in belief.read_called(_KIND, os.path.basename(path)):
        if note.owner == uid:
            return {int(word) for word in note.data.split(b",") if word.isdigit() and len(word) < 6}
    return None


def show(path: str, minors: Iterable[int]) -> bool:
    """Change what the job of that file sees; its folder is made anew where it is missing, after a restart.

    Written with the rights of the user whose folder it is in, and by descriptor: a path comes from records and images
    of users.

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
        with contextlib.suppress(OSError), _folder(path, uid) as folder:
            try:
                _write(folder, os.path.basename(path), _text(wanted))
                written.append(path)
            except OSError:
                os.unlink(os.path.basename(path), dir_fd=folder)

    if uid == os.geteuid():
        write()
    else:
        _as(uid, write)
    return bool(written)


def write_as(uid: int, folder: int, name: str, minors: Iterable[int]) -> None:
    """Write such a file into an open folder, with a user's rights.

    Raises:
        OSError: he, or the caller, may not do that.
    """

    def write() -> None:
        _write(folder, name, _text(minors))

    if uid == os.geteuid():
        write()
    else:
        _as(uid, write)


@contextlib.contextmanager
def _folder(path: str, uid: int) -> Iterator[int]:
    """Open the folder of such a file, made where it is missing."""
    *_, place, kind, _ = path.split("/")
    above = os.path.dirname(os.path.dirname(os.path.dirname(path)))
    with (
        closing(os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as users,
        closing(_open_or_make(users, place, uid)) as own,
        closing(_open_or_make(own, kind, uid)) as folder,
    ):
        yield folder


def _open_or_make(folder: int, name: str, uid: int) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
        with closing(open_folder_in(folder, name, uid)) as made:
            os.fchmod(made, 0o755)  # past the umask
    return open_folder_in(folder, name, uid)


def _write(folder: int, name: str, data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it could not be written.
    """
    part = f".{name}.{secrets.token_hex(4)}"
    try:
        with closing(open_in(folder, part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)) as fd:
            os.fchmod(fd, 0o644)
            os.write(fd, data)
            os.fsync(fd)
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


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

    def with_his_rights() -> None:
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

    in_a_thread(with_his_rights)

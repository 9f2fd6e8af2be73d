"""The runtime folder: where what this machine remembers about jobs is kept, and who may write what there.

``/run/limosa`` is made by root (mode 1777, like ``/tmp``) and holds one folder a user, named by the uid (0755, files
0644: everyone may read). Whoever acts on a job writes into *his own* folder, so root suspending a user's job writes
into ``0/``. Readers look into all folders and believe a record only where the folder's owner may speak for the
process: it is his process, or he is root. A record of a process that has ended, or of another boot, is stale.

Where ``/run/limosa`` cannot be made: ``$XDG_RUNTIME_DIR/limosa``, then ``/tmp/limosa-<uid>`` (0700), with a warning,
because other users (and root, unless he looks there) do not see what happens there. ``LIMOSA_RUNTIME_DIR`` names
another folder instead (its only use is tests and machines whose ``/run`` cannot be had).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from limosa.errors import FailedUndone, NoRoomOnHost, PermissionDenied, Reason

T = TypeVar("T")
SHARED = Path("/run/limosa")
_LIMIT = 4 << 20  # bytes; no record is near that, and a hostile one must not fill our memory


class RuntimeDir(msgspec.Struct, frozen=True):
    """The runtime folder in use.

    Attributes:
        path: the folder that holds one folder a user.
        own: the caller's folder in it (exists, owned by the caller's effective uid, written by nobody else).
        warnings: why it is not ``/run/limosa``, if so.
    """

    path: Path
    own: Path
    warnings: tuple[Reason, ...] = ()


def _owned_folder(path: Path, uid: int, mode: int) -> Path:
    """Makes ``path`` where it is missing and makes sure that it is a folder of ``uid`` that nobody else can write."""
    try:
        os.mkdir(path, mode)
        os.chmod(path, mode)  # past the umask; the folder is new and ours
    except FileExistsError:
        pass
    except OSError as error:
        text = f"{path}, where Limosa notes what it is doing, cannot be made: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomOnHost(detail=text) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionDenied(detail=text) from error
        raise FailedUndone(text) from error
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o022:
        raise PermissionDenied(
            detail=f"{path} is not a folder that only uid {uid} can write to",
            hint=f"look at {path}; root may remove it",
        )
    return path


def _shared_folder(path: Path) -> bool:
    """Makes the folder that all users share where that is possible; False where it is not there and not safe."""
    root = os.geteuid() == 0
    with contextlib.suppress(OSError):
        os.mkdir(path, 0o755)
        if root:
            os.chmod(path, 0o1777)
    try:
        found = os.lstat(path)
    except OSError:
        return False
    sticky = bool(found.st_mode & stat.S_ISVTX)
    writable_by_others = bool(found.st_mode & 0o022)
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid in (0, os.geteuid())
        and (sticky or not writable_by_others)
        and os.access(path, os.W_OK | os.X_OK)
    )


def runtime_dir() -> RuntimeDir:
    """Finds the runtime folder, and makes it and the caller's folder in it where they are missing.

    Raises:
        PermissionDenied: somebody else owns what should be the caller's folder.
    """
    uid = os.geteuid()
    setting = os.environ.get("LIMOSA_RUNTIME_DIR")
    if setting:
        chosen = Path(setting)
        if not _shared_folder(chosen):
            raise PermissionDenied(detail=f"LIMOSA_RUNTIME_DIR={setting} cannot be made or is not safe to use")
        return RuntimeDir(chosen, _owned_folder(chosen / str(uid), uid, 0o755))
    if _shared_folder(SHARED):
        return RuntimeDir(SHARED, _owned_folder(SHARED / str(uid), uid, 0o755))
    path = _fallbacks(uid)[0]
    _owned_folder(path, uid, 0o700)
    text = f"{SHARED} cannot be made by uid {uid}: keeping records in {path}, where other users do not see them"
    reason = Reason(id="runtime-dir", text=text, hint=f"as root, once: limosa doctor --fix (makes {SHARED})")
    return RuntimeDir(path, _owned_folder(path / str(uid), uid, 0o755), (reason,))


def _fallbacks(uid: int) -> list[Path]:
    """Where a user without ``/run/limosa`` keeps records, best first."""
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path(xdg) / "limosa"] if xdg and os.path.isdir(xdg) and os.stat(xdg).st_uid == uid else []
    return [*places, Path(f"/tmp/limosa-{uid}")]  # noqa: S108 - ownership is checked, the name is meant to be found again


def own_folder(kind: str) -> Path:
    """The caller's folder for one kind of thing (``jobs``, ``suspended``, ``journal`` …), made where missing (0755)."""
    return _owned_folder(runtime_dir().own / kind, os.geteuid(), 0o755)


def folders(kind: str) -> list[tuple[int, Path]]:
    """Every user's folder for one kind of thing that is safe to read: ``(owner's uid, folder)``, the caller's first.

    A folder counts only if it and the one above it belong to the uid that it is named after (or to root) and can be
    written by nobody else.
    """
    uid = os.geteuid()
    setting = os.environ.get("LIMOSA_RUNTIME_DIR")
    roots = [Path(setting)] if setting else [SHARED, *_fallbacks(uid)]
    if uid == 0 and not setting:
        roots += [p / "limosa" for p in entries(Path("/run/user"))]
        roots += [p for p in entries(Path("/tmp")) if p.name.startswith("limosa-")]  # noqa: S108
    found: dict[Path, int] = {}
    for root in roots:
        for user in entries(root):
            if user.name.isascii() and user.name.isdigit():
                owner, folder = int(user.name), user / kind
                if _only_by(user, owner) and _only_by(folder, owner):
                    found[folder] = owner
    return sorted(((owner, path) for path, owner in found.items()), key=lambda f: (f[0] != uid, f[0]))


def entries(path: Path) -> list[Path]:
    """What is in a folder, sorted; nothing where it cannot be read."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _only_by(path: Path, uid: int) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Writes a file so that a reader, and a crash, sees all of it or nothing: temporary file, fsync, rename, fsync.

    The temporary file is locked as long as its writer lives; what a dead one left, ``remove_half_written`` finds.

    Raises:
        OSError: no room, no permission.
    """
    unless_taken(path, lambda: _write_once(path, data, mode))


def unless_taken(path: Path, write: Callable[[], T]) -> T:
    """Writes; once more where the temporary file was taken for a dead writer's before its writer had locked it."""
    try:
        return write()
    except FileNotFoundError:
        if not path.parent.exists():
            raise
        return write()


def _write_once(path: Path, data: bytes, mode: int) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    new = not path.exists()
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
            os.rename(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    try:
        sync_folder(path.parent)
    except BaseException:
        if new:  # whoever is told that it failed does not come back for it: a claim would keep its job busy
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise


def sync_folder(path: Path) -> None:
    """Puts the names in a folder on disk.

    Raises:
        OSError: it could not be done.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_or_empty(path: Path) -> None:
    """Removes a file; one that cannot be removed is emptied, so that it says nothing any more."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def remove_emptied(folder: Path, pattern: str) -> None:
    """Removes the files of that pattern that could only be emptied when they should have been removed."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_size == 0:
                os.unlink(path)


def remove_half_written() -> None:
    """Removes the temporary files of writers of the caller's that were killed in the middle: nobody has them locked."""
    own = runtime_dir().own
    for path in [*own.glob("*/.*"), *own.glob("*/*.new")]:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.lstat(path)):  # not renamed, and made anew, meanwhile
                    os.unlink(path)
            finally:
                os.close(fd)


def read_owned(path: Path, uid: int) -> bytes | None:
    """The bytes of a regular file that belongs to ``uid``, or None: gone, a link, a pipe, too large, not his."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid or found.st_size > _LIMIT:
            return None
        return file.read(_LIMIT)


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Holds an exclusive lock among the caller's own Limosa processes (``flock`` on a file in his folder)."""
    fd = os.open(runtime_dir().own / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

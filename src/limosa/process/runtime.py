"""Writing the caller's own files in the runtime folder: whole or not at all, and removed for sure.

``places`` says where they are; ``belief`` reads what others wrote there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from limosa.errors import Busy
from limosa.process.places import own_place

T = TypeVar("T")
LOCK_WAIT = 10.0
"""Seconds; whoever holds a lock needs milliseconds."""


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
    with contextlib.suppress(OSError):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if os.lstat(path).st_size == 0:
                    os.unlink(path)


def remove_half_written() -> None:
    """Removes the temporary files of writers of the caller's that were killed in the middle: nobody has them locked."""
    own = own_place()
    for path in [*own.glob("*/.*"), *own.glob("*/*.new")]:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.lstat(path)):  # not renamed, and made anew, meanwhile
                    os.unlink(path)
            finally:
                os.close(fd)


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Holds an exclusive lock among the caller's own Limosa processes (``flock`` on a file in his folder, 0600).

    Raises:
        Busy: somebody has held it for ten seconds (he is stopped, say).
    """
    path = own_place() / f"{name}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(f"{path} has been held by another process for {LOCK_WAIT:g} s", pid=0) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)

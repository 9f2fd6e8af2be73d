"""Switching CDI on in the configuration of a runtime that has it off because nobody has said anything about it.

What its owner has said stays: a switch that is off, a file that is no plain JSON, one of containerd's that is there
(1.7 lets a file that it includes replace a whole section, and a default configuration that was written down has the
switch off). A file that somebody else makes or changes meanwhile is left alone. The runtime is not started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from limosa.cdi.runtimes import MOST_BYTES, Runtime, looked_at
from limosa.process.runtime import sync_folder
from limosa.start import trusted

_CONTAINERD = b"""\
# Written by limosa doctor --fix: all else is as without this file.
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
"""


class _There(NamedTuple):
    """A file as it was read."""

    data: bytes
    info: os.stat_result


def switch_on(one: Runtime) -> bool:
    """Switch it on where nothing is said of it; return whether that was done.

    Args:
        one: a runtime, as :func:`limosa.cdi.runtimes.runtimes` has found it.

    Raises:
        OSError: it cannot be written, or was changed meanwhile; all is as it was.
    """
    path = one.unsaid
    if path is None or not trusted(path):
        return False
    before = _there(path)
    if one.name == "containerd":
        data = _CONTAINERD if before is None else None
    else:
        data = _with_feature(b"{}" if before is None else before.data)
    if data is None:
        return False
    if before is not None:
        _replace(path, data, before)
        return True
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o755)
    made = _make(path, data)
    now = looked_at(one.name)
    if now is not None and now.unsaid is None and now.problem != one.problem:
        return True
    if (there := _there(path)) is not None and _same(there.info, made):  # it does not heed it
        path.unlink()
        sync_folder(path.parent)
    return False


def _there(path: Path) -> _There | None:
    """What is in a file; None where there is none.

    Raises:
        OSError: it cannot be read, is no file of one name, or is too large.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise OSError(f"{path} is no file of one name")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(f"{path} is too large")
    return _There(data, info)


def _with_feature(before: bytes) -> bytes | None:
    """Docker's configuration with CDI on, and all else as it was; None where that cannot be done for sure."""
    try:
        told = json.loads(before.decode() or "{}", object_pairs_hook=_once)
        if told.setdefault("features", {}).setdefault("cdi", True) is not True:
            return None
        return (json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (ValueError, AttributeError, RecursionError):
        return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name that is there twice")
    return dict(pairs)


def _make(path: Path, data: bytes) -> os.stat_result:
    """Write a file that is not there; FileExistsError: it is by now."""
    with _Part(path, data) as part:
        os.link(part.path, path)
        return part.info()


def _replace(path: Path, data: bytes, before: _There) -> None:
    """Write a file anew, with the mode, the owner and the labels that it has; OSError: it was changed meanwhile."""
    with _Part(path, data) as part:
        os.fchown(part.fd, before.info.st_uid, before.info.st_gid)
        os.fchmod(part.fd, stat.S_IMODE(before.info.st_mode))
        for name in os.listxattr(path, follow_symlinks=False):
            os.setxattr(part.fd, name, os.getxattr(path, name, follow_symlinks=False))
        if not _same(os.lstat(path), before.info):
            raise OSError(f"{path} was changed meanwhile")
        os.rename(part.path, path)


class _Part:
    """The new text beside a file, on disk; gone at the end, but for what was made of it. Then the folder is on disk."""

    def __init__(self, path: Path, data: bytes):
        self._folder = path.parent
        self.fd, self.path = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            os.fchmod(self.fd, 0o644)
            with open(self.fd, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(self.fd)
        except BaseException:
            self.__exit__()
            raise

    def info(self) -> os.stat_result:
        return os.fstat(self.fd)

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        sync_folder(self._folder)


def _same(now: os.stat_result, then: os.stat_result) -> bool:
    """Whether it is the same file, and nobody has written to it."""
    return (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns) == (
        then.st_dev,
        then.st_ino,
        then.st_size,
        then.st_mtime_ns,
    )

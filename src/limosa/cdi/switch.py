"""Switching CDI on in the configuration of a runtime that has it off because nobody has said anything about it.

What its owner has said stays: a switch that is off, a file that is no plain JSON, one of containerd's that is there
(1.7 lets a file that it includes replace a whole section, and a default configuration that was written down has the
switch off). The runtime is not started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from limosa.cdi.runtimes import Runtime, looked_at
from limosa.start import trusted

_CONTAINERD = """\
# Written by limosa doctor --fix: all else is as without this file.
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
"""


def switch_on(one: Runtime) -> bool:
    """Switch it on where nothing is said of it; return whether that was done.

    Args:
        one: a runtime, as :func:`limosa.cdi.runtimes.runtimes` has found it.

    Raises:
        OSError: it cannot be written; all is as it was.
    """
    path = one.unsaid
    if path is None or not trusted(path):
        return False
    before = _plain(path)
    whole = _CONTAINERD if before is None else None
    data = whole if one.name == "containerd" else _with_feature(before)
    if data is None:
        return False
    path.parent.mkdir(mode=0o755, exist_ok=True)
    _write(path, data.encode(errors="surrogateescape"))
    now = looked_at(one.name)
    if before is None and (now is None or now.unsaid is not None or now.problem == one.problem):
        path.unlink()  # it does not heed it
        return False
    return True


def _plain(path: Path) -> str | None:
    """What is in a file; None where there is none.

    Raises:
        OSError: it cannot be read, or is no file of one name.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, encoding="utf-8", errors="surrogateescape") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise OSError(f"{path} is no file of one name")
        return file.read()


def _with_feature(before: str | None) -> str | None:
    """Docker's configuration with CDI on, and all else as it was; None where that cannot be done for sure."""
    try:
        told = json.loads(before or "{}", object_pairs_hook=_once)
        said = told.setdefault("features", {}).setdefault("cdi", True)
        return json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n" if said is True else None
    except (ValueError, AttributeError):
        return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name that is there twice")
    return dict(pairs)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, with the mode, the owner and the labels that it had."""
    fd, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o644)
            with contextlib.suppress(FileNotFoundError):
                info = os.lstat(path)
                os.fchown(fd, info.st_uid, info.st_gid)
                os.fchmod(fd, stat.S_IMODE(info.st_mode))
                for name in os.listxattr(path, follow_symlinks=False):
                    os.setxattr(fd, name, os.getxattr(path, name, follow_symlinks=False))
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(part, path)
    except BaseException:
        os.unlink(part)
        raise

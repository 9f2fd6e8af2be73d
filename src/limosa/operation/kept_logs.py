"""CRIU's logs of failed dumps: the undo removes their folder, but the logs are kept for the user."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from limosa.process.places import own_folder

_KEPT = 20  # logs; a verbose one has a few MiB, and /run is memory


def keep_log(folder_fd: int, name: str, operation_id: str) -> Path:
    """Copies a log out of a folder into the caller's ``logs`` under an operation's id; keeps the newest twenty.

    Returns where it is kept; where it could not be copied, where it was.
    """
    folder = own_folder("logs")
    target = folder / f"{operation_id}.log"
    try:
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        with open(source, "rb") as log, open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            shutil.copyfileobj(log, out, 1 << 20)
    except OSError:
        return Path(os.readlink(f"/proc/self/fd/{folder_fd}")) / name
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for old in logs[:-_KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return target

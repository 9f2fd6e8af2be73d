"""Control groups: the files to write a pid into, so that a restored job gets into the group that was asked for."""

from __future__ import annotations

import os
from pathlib import Path

from limosa.errors import PermissionDenied, UsageError

ROOT = Path("/sys/fs/cgroup")


def entry_files(group: str | None) -> list[str]:
    """Return the ``cgroup.procs`` files of a control group: one with the unified hierarchy, one a controller without.

    Args:
        group: "/sys/fs/cgroup/…", or the path as ``/proc/PID/cgroup`` shows it; None for the caller's (no files).

    Raises:
        UsageError: there is no such group.
        PermissionDenied: it may not be entered.
    """
    if group is None:
        return []
    text = os.path.normpath(group)
    relative = text[len(str(ROOT)) :] if text == str(ROOT) or text.startswith(f"{ROOT}/") else text
    unified = (ROOT / "cgroup.controllers").exists()
    if unified:
        folders = [ROOT / relative.lstrip("/")]
    elif relative != text:
        folders = [Path(text)]  # it names one controller's folder
    else:
        folders = [path / relative.lstrip("/") for path in sorted(ROOT.iterdir()) if not path.is_symlink()]
    files = [str(path / "cgroup.procs") for path in folders if (path / "cgroup.procs").exists()]
    if not files:
        raise UsageError(detail=f"there is no control group {group}")
    for file in files:
        if not os.access(file, os.W_OK):
            raise PermissionDenied(detail=f"the control group {group} may not be entered ({file} is not writable)")
    return files

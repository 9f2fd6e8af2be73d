"""Holding all processes of a container still by its cgroup, as ``podman pause`` does, and letting them go on.

Frozen, a job does not change while its image is hashed and committed, and no image says that it was frozen.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from limosa.containers.find import Container, own_lines
from limosa.errors import FailedUndone, LimosaError
from limosa.process.cgroups import cgroup_folders
from limosa.process.identity import Identity, read_stat
from limosa.process.openat import closing
from limosa.process.slurp import slurp

_SECONDS = 30.0
_TICK = 0.002


def freezer_of(init: Identity, container: Container) -> str:
    """Return the folder of the cgroup by which a container is frozen, "" where there is none of its own.

    Args:
        init: its first process.
        container: it.
    """
    try:
        text, mounts = os.fsdecode(slurp(f"/proc/{init.pid}/cgroup")), os.fsdecode(slurp("/proc/self/mountinfo"))
        init.check()
    except (OSError, LimosaError):
        return ""
    if not container.cgroup:
        return ""
    found: dict[str, str] = {}
    for version, folder, mount_point in cgroup_folders(own_lines(text, container.cgroup), mounts, "freezer"):
        if folder != mount_point:
            found.setdefault(version, folder)
    # Where v1 has the freezer, the cgroup of v2 may be one for all.
    return found.get("v1") or found.get("v2") or ""


def freeze(folder: str) -> None:
    """Hold a cgroup's processes still.

    Raises:
        FailedUndone: they do not stand still after half a minute; they were let go on.
        OSError: it cannot be done.
    """
    v1 = os.path.exists(f"{folder}/freezer.state")
    end = time.monotonic() + _SECONDS
    _write(folder, frozen=True)
    while not is_frozen(folder):
        if time.monotonic() > end:
            thaw(folder)
            raise FailedUndone(what="freezing the container", detail=f"{folder} is not frozen after {_SECONDS:.0f} s")
        time.sleep(_TICK)
        if v1:  # it freezes those that were forked meanwhile when it is asked again
            _write(folder, frozen=True)


def cannot_be_traced(folder: str, processes: Iterable[Identity]) -> list[Identity]:
    """Return those of a cgroup's processes for which CRIU would wait for ever, once they are frozen.

    Who attaches to a stopped process waits until it has noticed. Frozen by version 1 it does not notice, and CRIU hangs
    in the kernel (measured, Linux 6.18); version 2 leaves it where it is.

    Args:
        folder: the cgroup.
        processes: whom to look at, frozen or not yet.
    """
    if not os.path.exists(f"{folder}/freezer.state"):
        return []
    return [identity for identity in processes if _is_stopped(identity.pid)]


def _is_stopped(pid: int) -> bool:
    """Whether a thread of a process is stopped, also where it is frozen, which hides that from its state."""
    with contextlib.suppress(OSError):
        return any(_is_stopped_thread(int(tid)) for tid in os.listdir(f"/proc/{pid}/task"))
    return False


def _is_stopped_thread(tid: int) -> bool:
    with contextlib.suppress(LimosaError, OSError):
        return read_stat(tid).stopped or slurp(f"/proc/{tid}/wchan").strip() == b"do_signal_stop"
    return False


def thaw(folder: str) -> None:
    """Let a cgroup's processes go on; one that is gone has none.

    Raises:
        OSError: it cannot be done.
    """
    try:
        _write(folder, frozen=False)
    except FileNotFoundError:
        pass


def pause(folder: str, asked: Callable[[], bool]) -> None:
    """Hold a container still again whose runtime was told to pause it while it was held here: nobody else does.

    Args:
        folder: its cgroup, whose processes go on.
        asked: whether its runtime says that it is paused.

    Raises:
        OSError: it cannot be done.
    """
    if asked():
        _write(folder, frozen=True)
        if not asked():  # it was told to let it go on in between
            thaw(folder)


def is_frozen(folder: str) -> bool:
    """Return whether all of a cgroup's processes stand still.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return slurp(f"{folder}/freezer.state").strip() == b"FROZEN"
    except FileNotFoundError:
        return b"frozen 1" in slurp(f"{folder}/cgroup.events")


def _write(folder: str, *, frozen: bool) -> None:
    try:
        path, word = f"{folder}/freezer.state", b"FROZEN" if frozen else b"THAWED"
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        path, word = f"{folder}/cgroup.freeze", b"1" if frozen else b"0"
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    with closing(fd):
        os.write(fd, word)

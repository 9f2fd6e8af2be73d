"""How much memory the cgroups above a process still allow: cgroup v2, v1, and both side by side.

A suspended job's device memory sits in its own anonymous memory, which its memory cgroup counts. Every level above
may have a limit, so all are looked at as far as Limosa's own view of /sys/fs/cgroup shows them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache

from limosa.process.observation import CgroupObservation
from limosa.process.slurp import slurp

# v1 writes "no limit" as the largest page-aligned 63-bit number; nothing real comes near half of that.
_NO_LIMIT = 1 << 62
_CRIUS = "/.criu.cgyard."
"""Where a CRIU that restores has the hierarchies for itself; they are gone in a moment."""


@lru_cache(maxsize=1)
def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """Return where a controller ("memory", "freezer", "devices"; "v2") is mounted: → (root in the hierarchy, there)."""
    found: dict[str, tuple[str, str]] = {}
    for root, mount_point, kind, options in _seen(mountinfo):
        if kind == "cgroup2":
            found.setdefault("v2", (root, mount_point))
        elif kind == "cgroup":
            for controller in {"memory", "freezer", "devices"} & set(options.split(",")):
                found.setdefault(controller, (root, mount_point))
    return found


def _seen(mountinfo: str) -> list[tuple[str, str, str, str]]:
    """The hierarchies that are mounted, to stay, and that no other mount covers: root, mount point, kind, options."""
    mounts: dict[str, tuple[str, str]] = {}
    found: list[tuple[str, str, str, str, str]] = []
    # Only what the kernel separates by: a user's mount, or cgroup, may have any other line end or blank in its name.
    for line in mountinfo.split("\n"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5:
            continue
        mounts[fields[0]] = (fields[1], fields[4])
        if kind[0] in ("cgroup", "cgroup2") and _CRIUS not in fields[4]:
            found.append((fields[0], fields[3], fields[4], kind[0], kind[-1]))
    return [one[1:] for one in found if not any(_covers(other, one[0], mounts) for other in mounts)]


def _covers(other: str, number: str, mounts: dict[str, tuple[str, str]]) -> bool:
    """Whether who walks to where a mount is comes into another one instead.

    Numbers say nothing of what came later, since the kernel gives them anew. What is mounted on one folder twice has
    the first as its parent; of two with the same parent a walk meets the one that is nearer to the parent's root.

    Args:
        other: a mount's number.
        number: the mount that it may cover.
        mounts: number → (its parent's number, mount point).
    """
    parent, at = mounts[other]
    if not _is_below(mounts[number][1], at):
        return False
    way, above = "", number
    while above in mounts and above != way:
        if other == above:
            return False  # it carries that
        if parent == above:
            return not way or len(at) <= len(mounts[way][1])
        way, above = above, mounts[above][0]
    return False  # below something that covers, or is covered itself


def _is_below(path: str, at: str) -> bool:
    return path == at or path.startswith(f"{at}/")


def cgroup_mounts(mountinfo: str | None = None) -> list[tuple[str, str]]:
    """Return where all hierarchies are mounted, the longest names first: (root in the hierarchy, mount point)."""
    if mountinfo is None:
        mountinfo = os.fsdecode(slurp("/proc/self/mountinfo"))
    found = [(root, mount_point) for root, mount_point, _, _ in _seen(mountinfo)]
    return sorted(found, key=lambda one: -len(one[1]))


def _number(path: str) -> int | None:
    try:
        text = slurp(path).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(path: str, key: str) -> int:
    try:
        for line in slurp(path).splitlines():
            if line.startswith(key.encode() + b" "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def _level(folder: str, version: str) -> CgroupObservation | None:
    """Return one level if it has a limit."""
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version == "v2"
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    limit = _number(f"{folder}/{names[0]}")
    used = _number(f"{folder}/{names[1]}")
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    # Page cache that nobody used lately is dropped before the limit bites.
    used = max(0, used - _inactive_file(f"{folder}/memory.stat", names[2]))
    return CgroupObservation(path=folder, limit_bytes=limit, used_bytes=used)


def cgroup_folders(cgroup_file: str, mountinfo: str, controller: str) -> Iterator[tuple[str, str, str]]:
    """Yield ("v1" or "v2", folder, mount point) of the cgroups that a controller could act through on a process."""
    mounts = _mounts(mountinfo)
    for line in cgroup_file.split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = "v2" if number == "0" and not controllers else "v1"
        key = "v2" if version == "v2" else controller
        if (version == "v1" and controller not in controllers.split(",")) or key not in mounts:
            continue
        root, mount_point = mounts[key]
        if path.startswith("/.."):
            continue  # outside of Limosa's own cgroup namespace: cannot be seen
        # Without a cgroup namespace the path is the host's, while a container's mount shows only its own part.
        if root != "/" and (path == root or path.startswith(root + "/")):
            path = path[len(root) :] or "/"
        yield version, os.path.join(mount_point, path.lstrip("/")).rstrip("/"), mount_point


def frozen_by(cgroup_file: str, mountinfo: str) -> str:
    """Return the folder of the frozen cgroup that a process is in, or "" (freezer v1; ``cgroup.events`` of v2)."""
    for version, folder, _ in cgroup_folders(cgroup_file, mountinfo, "freezer"):
        try:
            if version == "v2":
                frozen = b"frozen 1" in slurp(f"{folder}/cgroup.events")
            else:
                frozen = slurp(f"{folder}/freezer.state").strip() in (b"FROZEN", b"FREEZING")
        except OSError:
            continue
        if frozen:
            return folder
    return ""


def memory_levels_of(pid: int) -> list[CgroupObservation]:
    """Return the memory cgroups with a limit above a process; their names may be of any bytes.

    Raises:
        OSError: it is gone, or may not be looked at.
    """
    return memory_levels(os.fsdecode(slurp(f"/proc/{pid}/cgroup")))


def memory_levels(cgroup_file: str, mountinfo: str | None = None) -> list[CgroupObservation]:
    """Return every memory cgroup with a limit above a process, the innermost first.

    Args:
        cgroup_file: the text of ``/proc/PID/cgroup`` (cgroups(7)).
        mountinfo: the text of ``/proc/self/mountinfo``; read where None.

    Returns:
        Levels with a limit; empty where there is none or the memory controller cannot be seen from here.
    """
    if mountinfo is None:
        mountinfo = os.fsdecode(slurp("/proc/self/mountinfo"))
    levels: list[CgroupObservation] = []
    for version, innermost, mount_point in cgroup_folders(cgroup_file, mountinfo, "memory"):
        folder = innermost
        while True:
            level = _level(folder, version)
            if level is not None:
                levels.append(level)
            if folder == mount_point:
                break
            folder = os.path.dirname(folder)
    return levels


def tightest(levels: list[CgroupObservation]) -> CgroupObservation:
    """Return the level with the least room, or one without a limit where the list is empty."""
    return min(levels, key=lambda level: level.room or 0, default=CgroupObservation())

"""Whether host memory has room for a job's device memory, and making it grow where machines allow that.

While a job is suspended its device memory sits in its own anonymous host memory: its memory cgroups must have room
for it, and so must the machine.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping

import msgspec

from limosa.errors import Reason
from limosa.process.cgroups import memory_levels
from limosa.process.observation import CgroupObservation, JobObservation

_GIB, _MIB = 1 << 30, 1 << 20
_CHUNK = 256 << 20
_PATIENCE = 3  # chunks without growth before giving up: growth comes in steps, not byte by byte


def host_memory() -> tuple[int, int]:
    """Return (MemTotal, MemAvailable) of ``/proc/meminfo`` in bytes."""
    values = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            key, _, rest = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                values[key] = int(rest.split()[0]) * 1024
    return values["MemTotal"], values["MemAvailable"]


def _own_room() -> int:
    """Return how many bytes Limosa's own memory cgroups still allow it."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            levels = memory_levels(file.read())
    except OSError:
        levels = []
    return min((level.room or 0 for level in levels), default=1 << 62)


def _touch(size: int) -> Callable[[], None]:
    """Map and populate fresh memory; the function returned gives it back."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)

    def free() -> None:
        area.madvise(mmap.MADV_DONTNEED)
        area.close()

    return free


def grow_host_memory(
    needed: int,
    *,
    read: Callable[[], tuple[int, int]] = host_memory,
    touch: Callable[[int], Callable[[], None]] = _touch,
    own_room: Callable[[], int] = _own_room,
    pause: float = 0.05,
    limit: float = 60.0,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Return how many bytes the host has available, after trying to make it ``needed``.

    Some virtual machines back memory only when it is first used: MemTotal starts small and grows. So where
    MemAvailable is short, fresh memory is touched in chunks that are kept until the end, and all is freed and looked at
    again. It stops as soon as there would be enough, when three chunks in a row made nothing grow, and long before the
    machine (or Limosa's own cgroup) runs short: a tenth of MemTotal, and at least half a GiB, always stay available.

    Args:
        needed: bytes.
        read: returns (MemTotal, MemAvailable).
        touch: maps and populates that many bytes, returns what frees them.
        own_room: bytes that Limosa's own memory cgroup allows.
        pause: seconds to give the machine for growing after each chunk.
        limit: seconds after which no more chunks are touched.
        stop: asked before each chunk whether to touch no more (cancelled, out of time).

    Returns:
        MemAvailable, bytes, with everything touched given back.
    """
    total, available = read()
    if available >= needed:
        return available
    held: list[Callable[[], None]] = []
    idle, begin, best = 0, time.monotonic(), available
    try:
        while idle < _PATIENCE and time.monotonic() - begin < limit and not stop():
            reserve = max(total // 10, _GIB // 2)
            if available - _CHUNK < reserve or own_room() < 2 * _CHUNK:
                break
            held.append(touch(_CHUNK))
            time.sleep(pause)
            now_total, available = read()
            # What would be there if all that is held were given back: only growth can raise it.
            potential = available + len(held) * _CHUNK
            idle = 0 if now_total > total or potential > best + _CHUNK // 4 else idle + 1
            total, best = now_total, max(best, potential)
            if best >= needed:
                break
    except (OSError, MemoryError):
        pass  # no more to be had
    finally:
        for free in held:
            free()
    return read()[1]


class _Level(msgspec.Struct):
    observation: CgroupObservation
    needed: int = 0
    pids: list[int] = msgspec.field(default_factory=list)


def gib(size: int) -> str:
    """Bytes in words, as refusals have them."""
    return f"{size / _GIB:.2f} GiB" if round(size / _MIB) >= 1024 else f"{size / _MIB:.0f} MiB"


def two(there: int, needed: int) -> tuple[str, str]:
    """Return what there is and what is needed in words that differ: "2,047 MiB" and "2,048 MiB"."""
    if gib(there) != gib(needed) and abs(needed - there) >= _GIB // 10:
        return gib(there), gib(needed)
    return f"{there // _MIB:,} MiB", f"{-(-needed // _MIB):,} MiB"


def memory_hazards(
    obs: JobObservation,
    needed: int | Mapping[int, int],
    *,
    probe: bool = False,
    grow: Callable[[int], int] = grow_host_memory,
) -> list[Reason]:
    """Return what stands against taking a job's device memory into host memory.

    Args:
        obs: the job.
        needed: bytes by pid, or altogether (then counted against the root's cgroups).
        probe: where the machine is short, touch and free memory and look again; without it the function is pure.
        grow: what ``probe`` calls.

    Returns:
        ``cgroup`` for the memory cgroup that is fullest, ``host-memory`` for the machine; both 15 and forceable.
    """
    share = dict(needed) if isinstance(needed, Mapping) else {obs.root: needed}
    total = sum(share.values())
    if total <= 0:
        return []
    found: list[Reason] = []
    levels: dict[str, _Level] = {}
    for process in obs.processes:
        if share.get(process.pid, 0) > 0:
            for seen in process.cgroup_levels or [process.cgroup]:
                if seen.limit_bytes is not None:
                    level = levels.setdefault(seen.path, _Level(seen))
                    level.needed += share[process.pid]
                    level.pids.append(process.pid)
    short = [level for level in levels.values() if level.needed > (level.observation.room or 0)]
    if short:
        worst = max(short, key=lambda level: level.needed - (level.observation.room or 0))
        room, limit = worst.observation.room or 0, worst.observation.limit_bytes or 0
        left, wanted = two(room, worst.needed)
        found.append(
            Reason(
                id="cgroup",
                text=f"the memory cgroup {worst.observation.path} has {left} left of {gib(limit)}, and the "
                f"job's device memory needs {wanted}: the kernel would kill it halfway",
                exit_code=15,
                hint="raise the cgroup's memory limit",
                pid=worst.pids[0],
                forceable=True,
            )
        )
    available = obs.host.mem_available
    # A limit below what the machine has is the one that counts, and touching memory would show nothing new.
    if available < total and probe and not short:
        available = grow(total)
    if available < total:
        left, wanted = two(available, total)
        found.append(
            Reason(
                id="host-memory",
                text=f"the machine has {left} of host memory available, and the job's device memory needs {wanted}",
                exit_code=15,
                hint="end something that uses host memory, or suspend fewer jobs at a time",
                pid=obs.root,
                forceable=True,
            )
        )
    return found

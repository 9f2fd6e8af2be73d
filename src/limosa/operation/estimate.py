"""What an operation will cost, by the rates measured on two H200 (docs/caveats.md has the table and the date)."""

from __future__ import annotations

from collections.abc import Sequence

from limosa.operation.journal import Member
from limosa.operation.results import Estimate, OtherWay

CHECKPOINT_FIXED, CHECKPOINT_RATE = 0.45, 2.4e9
"""Seconds of tearing a context down; bytes a second out, one thread of the driver (cold 1.7, warm 2.7 GB/s)."""
RESTORE_FIXED, RESTORE_RATE = 0.30, 6.8e9
COPY_RATE = 350e9
"""Bytes a second from GPU to GPU, beside the driver's checkpoint (prototype, two H200)."""
ARENA_RATE, GATE_FIXED = 50e9, 0.01
"""Between a GPU and pinned host memory (the bus gives 55e9); closing and opening the gates, unmapping and mapping."""
CONTEXT = 0.55e9
"""Bytes that NVML counts for a context beside the application's memory; their time is in the fixed costs."""
LOCK_FIXED = 0.005
DUMP_FIXED, DUMP_RATE = 0.15, 2.0e9
"""CRIU: starting and freezing; bytes of host memory a second into a file system that keeps up."""
CRIU_RESTORE_FIXED, CRIU_RESTORE_RATE = 0.2, 1.7e9
HASH_RATE = 2.5e9
CHUNKS_OUT_RATE = 5e9
"""Bytes a second of device memory that are hashed twice and written into the page cache while the job runs."""
CHUNKS_IN_RATE = 10e9
"""Bytes a second of chunks that are read, hashed and copied to a GPU side by side, from the page cache."""


PARKED = ("move", "suspend", "resume", "checkpoint")
"""What is done beside the driver for processes under the library of ``limosa run``."""


def checkpoint_seconds(members: Sequence[Member]) -> float:
    """The driver's checkpoint of all members at once: the largest decides."""
    todo = [m for m in members if m.was != "checkpointed"]
    return max((CHECKPOINT_FIXED + _beside_context(m) / CHECKPOINT_RATE for m in todo), default=0.0)


def restore_seconds(members: Sequence[Member]) -> float:
    """The driver's restore of all members at once."""
    return max((RESTORE_FIXED + _beside_context(m) / RESTORE_RATE for m in members), default=0.0)


def _beside_context(member: Member) -> float:
    return sum(max(0.0, size - CONTEXT) for size in member.held.values())


def device_bytes(members: Sequence[Member]) -> int:
    """Bytes of device memory the members hold together."""
    return sum(m.bytes for m in members)


def other_way(
    operation: str,
    members: Sequence[Member],
    host_bytes: int = 0,
    leave_running: bool = False,
    parked: int = 0,
    *,
    rate: float | None = None,
) -> OtherWay | None:
    """What the way that is not taken would cost; None where there is but one (memory alone is parked).

    Args:
        operation: the verb.
        members: the processes with CUDA state.
        host_bytes: as for :func:`of`.
        leave_running: likewise.
        parked: bytes that are not left to the driver; 0: the driver carries everything.
        rate: as for :func:`of`.
    """
    if not members or any(m.away for m in members):
        return None
    if parked:
        cost = of(operation, members, host_bytes, leave_running)
        return OtherWay(way="driver", pause_seconds=cost.pause_seconds, seconds=cost.seconds)
    could = int(sum(map(_beside_context, members)))
    cost = of(operation, members, host_bytes, leave_running, could, rate=rate)
    return OtherWay(way="parked", pause_seconds=cost.pause_seconds, seconds=cost.seconds)


def by_the_driver(operation: str, members: Sequence[Member], parked: int) -> str:
    """What it costs that the driver carries what could be parked, for a sentence."""
    slow, fast = of(operation, members), of(operation, members, parked=parked)
    return f"about {slow.seconds:.1f} s instead of {fast.seconds:.1f} s"


def of(
    operation: str,
    members: Sequence[Member],
    host_bytes: int = 0,
    leave_running: bool = False,
    parked: int = 0,
    *,
    release: str = "all",
    rate: float | None = None,
) -> Estimate:
    """The estimate for a verb.

    Args:
        operation: "move", "suspend", "resume", "checkpoint" or "restore".
        members: the processes with CUDA state.
        host_bytes: memory of all processes that an image takes, device memory excluded.
        leave_running: a checkpoint's option.
        parked: bytes that are not left to the driver, or that an image holds as chunks.
        release: what a suspend gives back.
        rate: bytes a second at most for what a checkpoint copies while the job runs.
    """
    size = device_bytes(members)
    out, back = checkpoint_seconds(members), restore_seconds(members)
    dump = DUMP_FIXED + (host_bytes + size) / DUMP_RATE
    hashing = (host_bytes + size) / HASH_RATE
    if operation in ("move", "suspend", "resume") and parked:
        copy = parked / (COPY_RATE if operation == "move" else ARENA_RATE)
        out = max(CHECKPOINT_FIXED, out - parked / CHECKPOINT_RATE, copy)
        back = max(RESTORE_FIXED, back - parked / RESTORE_RATE, copy if operation == "resume" else 0.0)
    if operation == "move":
        return Estimate(pause_seconds=LOCK_FIXED + out + back, seconds=LOCK_FIXED + out + back, bytes=size)
    away = [m for m in members if m.away]
    if (operation == "suspend" and release != "all") or (operation == "resume" and away):
        seconds = GATE_FIXED + max(parked, device_bytes(away)) / ARENA_RATE
        return Estimate(pause_seconds=seconds, seconds=seconds, bytes=max(parked, device_bytes(away)))
    if operation == "suspend":
        return Estimate(pause_seconds=LOCK_FIXED + out, seconds=LOCK_FIXED + out, bytes=size)
    if operation == "resume":
        return Estimate(pause_seconds=back, seconds=back, bytes=size)
    if operation == "checkpoint" and parked:  # copied before the pause, but for what changes until then
        rest = max(0, size - parked)
        out, back = (
            max(CHECKPOINT_FIXED, out - parked / CHECKPOINT_RATE),
            max(RESTORE_FIXED, back - parked / RESTORE_RATE),
        )
        dump = DUMP_FIXED + (host_bytes + rest) / DUMP_RATE
        pause, hashing = LOCK_FIXED + out + dump + back, (host_bytes + rest) / HASH_RATE
        before = parked / min(CHUNKS_OUT_RATE, rate or CHUNKS_OUT_RATE)
        return Estimate(
            pause_seconds=pause if leave_running else None,
            seconds=before + (pause if leave_running else out + dump) + hashing,
            bytes=size + host_bytes,
        )
    if operation == "checkpoint":
        pause = LOCK_FIXED * bool(members) + out + dump + back
        return Estimate(
            pause_seconds=pause if leave_running else None,
            seconds=(pause if leave_running else out + dump) + hashing,
            bytes=size + host_bytes,
        )
    if parked:  # an image: what is in chunks is read and hashed while CRIU works
        rest = max(0, size - parked)
        back = max(RESTORE_FIXED, back - parked / RESTORE_RATE)
        host = (host_bytes + rest) / HASH_RATE + CRIU_RESTORE_FIXED + (host_bytes + rest) / CRIU_RESTORE_RATE
        return Estimate(pause_seconds=None, seconds=max(host, parked / CHUNKS_IN_RATE) + back, bytes=size + host_bytes)
    seconds = hashing + CRIU_RESTORE_FIXED + (host_bytes + size) / CRIU_RESTORE_RATE + back
    return Estimate(pause_seconds=None, seconds=seconds, bytes=size + host_bytes)

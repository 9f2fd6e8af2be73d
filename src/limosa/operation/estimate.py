"""The rates by which an operation's cost is estimated, measured on two H200 (docs/caveats.md: table and date).

Each step computes its own cost from them (``steps/``); the cost of a verb is the sum (``step.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from limosa.gpu import State
from limosa.operation.journal import Member

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


def checkpoint_seconds(members: Sequence[Member]) -> float:
    """The driver's checkpoint of all members at once: the largest decides."""
    todo = [m for m in members if m.was != State.CHECKPOINTED]
    return max((CHECKPOINT_FIXED + beside_context(m) / CHECKPOINT_RATE for m in todo), default=0.0)


def restore_seconds(members: Sequence[Member]) -> float:
    """The driver's restore of all members at once."""
    return max((RESTORE_FIXED + beside_context(m) / RESTORE_RATE for m in members), default=0.0)


def dump_seconds(host_bytes: int) -> float:
    """CRIU's dump of so many bytes of host memory."""
    return DUMP_FIXED + host_bytes / DUMP_RATE


def beside_context(member: Member) -> float:
    """Bytes of a process's device memory without its contexts."""
    return sum(max(0.0, size - CONTEXT) for size in member.held.values())


def device_bytes(members: Sequence[Member]) -> int:
    """Bytes of device memory the members hold together."""
    return sum(m.bytes for m in members)

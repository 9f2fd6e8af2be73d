"""What a process has of what can leak, and how much more it has after many turns of the same thing."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

MIB = 1 << 20
GROWTH = {"gpu": 4 * MIB, "RssAnon": 16 * MIB, "VmSize": 32 * MIB, "fds": 0, "maps": 4, "threads": 0}
"""What there may be more of at the end; a leak of 2 MiB, or of a descriptor, a turn is far over it."""


def seen(pid: int) -> dict[str, int]:
    """Memory, address space, descriptors, mappings and threads of a process."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    if "RssAnon" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    with open(f"/proc/{pid}/maps") as file:
        maps = sum(1 for _ in file)
    return {
        "RssAnon": int(fields["RssAnon"].split()[0]) * 1024,
        "VmSize": int(fields["VmSize"].split()[0]) * 1024,
        "threads": int(fields["Threads"]),
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "maps": maps,
    }


def grown(samples: Sequence[dict[str, dict[str, int]]]) -> dict[str, int]:
    """How much more of everything there is at the end than after the first tenth: medians of a tenth each.

    Args:
        samples: for each turn who → what → how much.
    """
    found = {}
    tenth = max(1, len(samples) // 10)
    for who, last in samples[-1].items():
        values = [sample[who] for sample in samples if who in sample]
        for what in last:
            begin = statistics.median(value[what] for value in values[tenth : 2 * tenth])
            found[f"{who}: {what}"] = int(statistics.median(value[what] for value in values[-tenth:]) - begin)
    return found


def too_much(found: dict[str, int], limits: dict[str, int] | None = None) -> dict[str, int]:
    """What has grown by more than it may."""
    limits = limits or GROWTH
    return {name: more for name, more in found.items() if more > limits[name.split(": ")[1].split(" ")[0]]}


def note_of(samples: Sequence[Any]) -> list[Any]:
    """The first, every tenth and the last sample, for a file."""
    return [s for i, s in enumerate(samples) if i % 10 == 0 or i == len(samples) - 1]

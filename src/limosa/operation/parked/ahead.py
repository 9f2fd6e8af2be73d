"""Contents that are on the GPU before the process that is to have them can make memory there.

A process that did not see a GPU when it initialised the driver makes its memory there itself, when the driver has
brought it back. What belongs into it comes *ahead*: into memory of the mover's, beside the driver's steps, and from
there at the speed of the GPU's own memory. For that moment the GPU has it twice; where there is no room for that,
contents come afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from limosa.errors import NoRoomOnGpu
from limosa.ipc.packet import close_all
from limosa.operation import claims
from limosa.operation.journal import added_up
from limosa.operation.work import Work
from limosa.parking.shim import Shim, ShimError

SPARE = 32
"""A GPU's part of so many stays free: for the job's contexts, which the driver brings back, and for others who grow."""


def fits(work: Work, wanted: Mapping[str, int]) -> set[str]:
    """The GPUs (UUIDs) that have so many bytes free besides all that is made there already."""
    by_uuid = work.driver.inventory().by_uuid() if wanted else {}
    found = set()
    for uuid, size in wanted.items():
        there = by_uuid.get(uuid)
        if there is None:
            continue
        spoken_for = claims.reserved(uuid, but=work.id, most=there.memory_total)
        if there.memory_free - spoken_for - there.memory_total // SPARE >= size:
            found.add(uuid)
    return found


def rooms(work: Work, sizes: Mapping[str, Sequence[int]], make: Callable[[str], list[int]]) -> set[str]:
    """Make memory for what comes ahead, on GPUs that have room for both.

    Args:
        work: the operation, whose own room on GPUs this is.
        sizes: of the pieces that are wanted, by GPU UUID.
        make: makes them on a GPU; returns descriptors, which are closed: the mover has the memory.

    Returns:
        The GPUs on which there is some.
    """
    found = set()
    for gpu in fits(work, {gpu: 2 * sum(of) for gpu, of in sizes.items()}):
        with contextlib.suppress(NoRoomOnGpu):  # somebody was quicker
            close_all(make(gpu))
            found.add(gpu)
            work.made = added_up([work.made, {gpu: sum(sizes[gpu])}])  # it can be given up
    return found


def made(shim: Shim, ids: Sequence[int], let_go: Callable[[], None]) -> tuple[list[int], bool]:
    """Have a process make pieces beside what came ahead; ``let_go`` gives that up.

    Returns:
        Descriptors, which are the caller's to close; and whether what came ahead is still there: where there is no room
        for both, it is not.
    """
    try:
        return shim.make(ids), True
    except ShimError:
        let_go()
    return shim.make(ids), False

"""What a process holds where NVML does not count what it has imported."""

from __future__ import annotations

import pytest

from limosa.operation import counting
from limosa.parking.answers import Memory

MIB = 1 << 20
CONTEXT = 500 * MIB
A, B = "GPU-a", "GPU-b"


@pytest.mark.parametrize(
    ("counted", "own", "imported", "held", "beside"),
    [
        # What was imported comes on top of what NVML says, whatever else the driver carries.
        (CONTEXT + 4000 * MIB, 4000 * MIB, 0, CONTEXT + 4000 * MIB, CONTEXT),
        (CONTEXT, 0, 4000 * MIB, CONTEXT + 4000 * MIB, CONTEXT),
        (CONTEXT + 5000 * MIB, 0, 4000 * MIB, CONTEXT + 9000 * MIB, CONTEXT + 5000 * MIB),
        (CONTEXT + 64 * MIB, 64 * MIB, 4000 * MIB, CONTEXT + 4064 * MIB, CONTEXT),
        # NVML tells no figure, or not yet: what the shim says is there all the same.
        (1, 96 * MIB, 0, 96 * MIB, 0),
        # A context larger than what was imported is no sign that NVML counts that.
        (CONTEXT, 0, 400 * MIB, CONTEXT + 400 * MIB, CONTEXT),
    ],
)
def test_what_is_held_and_what_the_driver_carries(
    counted: int, own: int, imported: int, held: int, beside: int
) -> None:
    assert counting.held(counted, own, imported) == held
    assert counting.beside(counted, own, imported) == beside


def test_by_gpu() -> None:
    pieces = [
        Memory(1, 2 * MIB, 0),
        Memory(2, 4 * MIB, 0, imported=True),
        Memory(3, 8 * MIB, 1, imported=True),
        Memory(4, 16 * MIB, 0),
    ]
    assert counting.by_gpu([A, B], pieces) == {A: (18 * MIB, 4 * MIB), B: (0, 8 * MIB)}

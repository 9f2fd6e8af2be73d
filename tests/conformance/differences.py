"""Where the software GPU is allowed to answer differently, and why. Anything else that differs is its bug."""

from __future__ import annotations

from typing import Any, NamedTuple

from conformance.node import REAL


class Difference(NamedTuple):
    """The two answers."""

    real: Any
    software: Any
    why: str


# What a software GPU has instead of hardware behind the device files: not looked at where device files are.
HARDWARE = "/dev/nvidia-soft/"

DIFFERENCES: dict[str, Difference] = {
    "a question about work while checkpointed": Difference(
        "DIED -11",
        "BLOCKED",
        "the driver looks at device memory that is not there and the job ends by SIGSEGV; no test of anything else "
        "could be believed if the software GPU did so (the hazard synchronise-while-checkpointed-segfaults does it)",
    ),
    "descriptor of exported memory": Difference(
        "/dev/nvidiactl",
        HARDWARE + "memory/",
        "the descriptor is the memory itself, which lives as long as somebody holds it",
    ),
}


def expected(name: str) -> Any:
    """The answer of the driver that the tests run on."""
    both = DIFFERENCES[name]
    return both.real if REAL else both.software

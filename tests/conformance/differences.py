"""Where the software GPU is allowed to answer differently, and why. Anything else that differs is its bug."""

from __future__ import annotations

from typing import Any, NamedTuple

from conformance.node import REAL


class Difference(NamedTuple):
    """The two answers."""

    real: Any
    software: Any
    why: str


OWN, NEW = "its own", "of the GPU it is on"
DIFFERENCES: dict[str, Difference] = {
    "uuid after a move": Difference(NEW, NEW, "not seen yet"),
    "bus id after a move": Difference(NEW, NEW, "not seen yet"),
}


def expected(name: str) -> Any:
    """The answer of the driver that the tests run on."""
    both = DIFFERENCES[name]
    return both.real if REAL else both.software

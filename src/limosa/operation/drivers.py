"""The driver's worker for one command: the caller's that waits, where there is one, else a new one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from limosa import gpu
from limosa.errors import InvalidArgument, LimosaError
from limosa.gpu.worker_idle import end_all, start_in
from limosa.process.places import own_folder

KIND = "driver"
"""The folder in which workers wait, in the caller's runtime folder."""


def driver() -> gpu.Driver:
    """Return a client of the driver's worker, which is found or started at the first call.

    Close it: the worker waits for the next command then (:mod:`limosa.gpu.worker_idle`).
    """
    return gpu.Driver(start=start_in(_folder))


def check(given: gpu.Driver | None) -> None:
    """Refuse what a caller passes as ``driver=`` and is none (another that takes the same calls will do).

    Raises:
        InvalidArgument: it makes no calls of a driver's.
    """
    if given is not None and not callable(getattr(given, "states", None)):
        raise InvalidArgument(detail=f"driver={given!r}: give an open limosa.gpu.Driver, or leave driver= out")


@contextlib.contextmanager
def using(given: gpu.Driver | None) -> Iterator[gpu.Driver]:
    """Give the caller's client, or one for as long as this block runs."""
    check(given)
    if given is not None:
        yield given
        return
    with driver() as own:
        yield own


def end_waiting() -> list[int]:
    """Have the caller's waiting workers end, rather than after their minutes; returns their pids."""
    return end_all(own_folder(KIND))


def _folder() -> Path | None:
    try:
        return own_folder(KIND)
    except LimosaError:
        return None  # one that ends with its command does as well

"""Rooms outlive a test, and end with the last one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from campaign.twice import KEPT


@pytest.fixture(scope="session", autouse=True)
def rooms() -> Iterator[None]:
    """Ends the rooms that were kept."""
    yield
    until = time.monotonic() + 30
    for room in KEPT:
        room.let_end()
    for room in KEPT:
        room.end(until)
    KEPT.clear()

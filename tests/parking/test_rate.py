"""The limit on bytes a second."""

from __future__ import annotations

import time

import pytest
from support import quickest

from limosa.parking.rate import Rate


@pytest.mark.parametrize("part", [1 << 16, 1 << 20])
def test_no_more_than_so_many_bytes_a_second(part: int) -> None:

    def spend() -> None:
        rate, total, begun = Rate(32 << 20), 0, time.monotonic()
        while total < 8 << 20:
            rate.spend(part)
            total += part
        assert time.monotonic() - begun > 0.15, "a quarter of a second's worth, less what may go at once"

    assert quickest(spend, 2) < 2


def test_what_was_not_used_is_not_saved_up() -> None:
    rate = Rate(32 << 20, burst=0.01)
    time.sleep(0.3)
    begun = time.monotonic()
    for _ in range(8):
        rate.spend(1 << 20)
    assert time.monotonic() - begun > 0.15


def test_the_first_part_is_not_free() -> None:
    """One chunk for each thread of each round went at once: 20 MB/s were 27 to 42."""
    begun = time.monotonic()
    Rate(32 << 20).spend(8 << 20)
    assert time.monotonic() - begun >= 0.25


def test_none_is_no_limit() -> None:
    rate = Rate()
    assert quickest(lambda: [rate.spend(1 << 40) for _ in range(1000)], 1) < 1

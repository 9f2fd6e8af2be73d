"""Turns of several jobs: who has which, how long one that stands still waits, and that none is kept."""

from __future__ import annotations

import threading
import time

import pytest

from limosa.operation.turns import COME, GO, Turns


def nothing() -> None:
    """Nobody has cancelled."""


def test_one_goes_and_one_comes_at_a_time() -> None:
    shared = Turns()
    one, two, three = shared.of_one(), shared.of_one(), shared.of_one()
    one.take(GO, nothing)
    one.take(GO, nothing)  # two steps of one turn
    one.take(COME, nothing)
    two.take(GO, nothing)  # the first has let go of it
    had = threading.Event()
    waits = threading.Thread(target=lambda: (three.take(GO, nothing), had.set()))
    waits.start()
    assert not had.wait(0.1)
    one.end()
    two.take(COME, nothing)
    assert had.wait(5)
    waits.join()
    for turn in (one, two, three):
        turn.end()
        turn.end()
    one.take(GO, nothing)
    one.take(COME, nothing)


def test_one_that_stands_still_does_not_wait_for_ever() -> None:
    shared = Turns()
    hangs, other = shared.of_one(), shared.of_one()
    hangs.take(COME, nothing)
    other.take(GO, nothing)
    begun = time.monotonic()
    other.take(COME, nothing, still=0.2)
    assert 0.15 < time.monotonic() - begun < 2
    shared.of_one().take(GO, nothing)  # it has let go of that


def test_nobody_waits_twice_for_one_that_hangs() -> None:
    shared = Turns()
    hangs, other, third = shared.of_one(), shared.of_one(), shared.of_one()
    hangs.take(COME, nothing)
    other.take(COME, nothing, still=0.1)
    begun = time.monotonic()
    third.take(COME, nothing, still=5)
    assert time.monotonic() - begun < 1
    hangs.end()
    third.take(COME, nothing)
    assert not shared.hangs


def test_who_waits_can_be_cancelled() -> None:
    shared = Turns()
    shared.of_one().take(GO, nothing)

    def cancelled() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared.of_one().take(GO, cancelled)

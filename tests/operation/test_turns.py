"""Turns of several jobs: who has which, how long one that stands still waits, and that none is kept."""

from __future__ import annotations

import threading
import time

import pytest

from limosa.operation.turns import COME, GO, Turn, Turns


def nothing() -> None:
    """Nobody has cancelled."""


def test_one_goes_and_one_comes_at_a_time() -> None:
    shared = Turns()
    one, two, three = Turn(shared), Turn(shared), Turn(shared)
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
    assert had.wait(60)
    waits.join()
    for turn in (one, two, three):
        turn.end()
        turn.end()
    one.take(GO, nothing)
    one.take(COME, nothing)


def test_one_that_stands_still_does_not_wait_for_ever() -> None:
    shared = Turns()
    hangs, other = Turn(shared), Turn(shared)
    hangs.take(COME, nothing)
    other.take(GO, nothing)
    begun = time.monotonic()
    other.take(COME, nothing, still=0.2)
    assert time.monotonic() - begun > 0.15
    Turn(shared).take(GO, nothing)  # it has let go of that


def test_nobody_waits_twice_for_one_that_hangs() -> None:
    shared = Turns()
    hangs, other, third = Turn(shared), Turn(shared), Turn(shared)
    hangs.take(COME, nothing)
    other.take(COME, nothing, still=0.1)
    begun = time.monotonic()
    third.take(COME, nothing, still=60)
    assert time.monotonic() - begun < 30
    hangs.end()
    third.take(COME, nothing)
    assert not shared.hangs


def test_who_waits_can_be_cancelled() -> None:
    shared = Turns()
    Turn(shared).take(GO, nothing)

    def cancelled() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Turn(shared).take(GO, cancelled)

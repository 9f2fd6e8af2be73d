"""Turns of several jobs that are worked on side by side: one goes off its GPU while another comes onto its own.

The driver does what it does for one process after another, whoever asks: jobs that are held still together stand still
for each other. With turns each stands still for not much longer than alone, and the driver is never without work; no
other order was quicker by much (measured: ``docs/results/side-by-side-2026-11-26.md``). A job goes from when it is
looked at until it comes; it comes while the driver restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

GO, COME = "go", "come"
STILL_SECONDS = 1.0
"""How long a job that stands still waits for its turn to come: past that it comes all the same."""
_LOOK_SECONDS = 0.05


class Turns:
    """What several operations share."""

    def __init__(self) -> None:
        self.locks = {GO: threading.Lock(), COME: threading.Lock()}  # who has a turn has its lock
        self.hangs = False  # whether somebody has waited in vain for whoever comes now: nobody else is to


class Turn:
    """One operation's turns; it has one at a time."""

    def __init__(self, shared: Turns):
        self._shared = shared
        self._has = ""

    def take(self, name: str, check: Callable[[], None], still: float = STILL_SECONDS) -> None:
        """Waits for a turn (``GO`` or ``COME``), then lets go of the one before; ``check`` raises what ends the wait.

        One that waits to come stands still: after ``still`` seconds it comes all the same.
        """
        if name == self._has:
            return
        waited, lock = 0.0, self._shared.locks[name]
        while not lock.acquire(timeout=_LOOK_SECONDS):
            check()
            waited += _LOOK_SECONDS
            if name == COME and (self._shared.hangs or waited >= still):
                self._shared.hangs = True
                self.end()
                return
        self.end()
        self._has = name

    def end(self) -> None:
        """Let go of the turn, if there is one: the next job has it."""
        had, self._has = self._has, ""
        if had == COME:
            self._shared.hangs = False
        if had:
            self._shared.locks[had].release()

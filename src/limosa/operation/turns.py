"""Turns of several jobs that are worked on side by side: one goes off its GPU while another comes onto its own.

The driver does what it does for one process after another, whoever asks: jobs that are held still together stand still
for each other. With turns each stands still for not much longer than alone, and the driver is never without work
(measured: docs/results). A job goes from when it is held still until it comes; it comes while the driver restores it.
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
        self._locks = {GO: threading.Lock(), COME: threading.Lock()}

    def of_one(self) -> Turn:
        """Return what one operation has of it."""
        return Turn(self._locks)


class Turn:
    """One operation's turns; it has one at a time."""

    def __init__(self, locks: dict[str, threading.Lock]):
        self._locks = locks
        self._has = ""

    def take(self, name: str, check: Callable[[], None], still: float = STILL_SECONDS) -> None:
        """Wait for a turn, then let go of the one before.

        Args:
            name: ``GO`` or ``COME``.
            check: called now and then; raises what ends the wait.
            still: seconds that a job waits which has gone already, and stands still.
        """
        if name == self._has:
            return
        waited = 0.0
        while not self._locks[name].acquire(timeout=_LOOK_SECONDS):
            check()
            waited += _LOOK_SECONDS
            if self._has and waited >= still:
                self.end()
                return
        self.end()
        self._has = name

    def end(self) -> None:
        """Let go of the turn, if there is one: the next job has it."""
        had, self._has = self._has, ""
        if had:
            self._locks[had].release()

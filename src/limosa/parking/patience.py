"""How long a mere look at users' processes waits for them: a user can keep others waiting, but not for ever."""

from __future__ import annotations

import threading
import time

LEAST_SECONDS = 0.25
"""What a process is always waited for; a shim answers within some milliseconds."""
FORGOTTEN_AFTER = 60.0


class Patience:
    """What each user's processes have had this program wait lately, of the seconds that all of them together may."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._waited: dict[int, tuple[float, float]] = {}

    def left(self, uid: int, wanted: float) -> float:
        """Return for how long the next one of a user's processes is waited for: no longer than wanted."""
        return min(wanted, max(LEAST_SECONDS, self._seconds - self._of(uid)[0]))

    def waited(self, uid: int, seconds: float) -> None:
        """Note how long an answer took; what every process may take is not counted."""
        if seconds > LEAST_SECONDS:
            with self._lock:
                before, _ = self._of(uid)
                self._waited[uid] = before + seconds, time.monotonic()

    def _of(self, uid: int) -> tuple[float, float]:
        found = self._waited.get(uid, (0.0, 0.0))
        return found if time.monotonic() - found[1] < FORGOTTEN_AFTER else (0.0, 0.0)

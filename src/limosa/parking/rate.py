"""A limit on bytes a second, for copies that are made while jobs run."""

from __future__ import annotations

import time


class Rate:
    """Lets so many bytes go in a second, on average; 0: as fast as it goes.

    Args:
        bytes_per_second: the limit.
        burst: seconds' worth that may go at once.

    Example:
        >>> rate = Rate(0)
        >>> rate.spend(1 << 40)
    """

    def __init__(self, bytes_per_second: float = 0.0, burst: float = 0.05):
        self.bytes_per_second, self._burst = bytes_per_second, burst
        self._free_at = time.monotonic()

    def spend(self, n: int) -> None:
        """Wait until so many bytes may go."""
        if not self.bytes_per_second:
            return
        now = time.monotonic()
        # Paid before it goes: else one part for each thread and round would be free.
        self._free_at = max(self._free_at, now - self._burst) + n / self.bytes_per_second
        if self._free_at > now:
            time.sleep(self._free_at - now)

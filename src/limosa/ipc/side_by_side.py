"""Asks several others at once, for a limited time: one that does not answer in time delays nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

SECONDS = 2.0
"""For other users' vaults and movers, all together. What root asks of them is theirs to lose."""
_MOST = 64  # at once
T = TypeVar("T")


def within(seconds: float, calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make calls side by side; return what those returned that were done in time, in the order of the calls.

    What raised, and what comes too late, is dropped; nothing waits for it, not even the end of this process.
    """
    done: dict[int, T] = {}

    def run(number: int, call: Callable[[], T]) -> None:
        try:
            done[number] = call()
        except Exception:
            pass

    end = time.monotonic() + seconds
    threads = [
        threading.Thread(target=run, args=item, name="limosa-asks", daemon=True)
        for item in enumerate(list(calls)[:_MOST])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [done[number] for number in sorted(done.copy())]

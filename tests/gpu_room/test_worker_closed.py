"""What a controller has of its worker is gone when it has let it go, not a moment later."""

from __future__ import annotations

import contextlib
import os
import threading

from limosa.errors import LimosaError
from limosa.gpu import Driver


def test_nothing_of_a_worker_is_open_here_once_it_was_let_go() -> None:
    """Its thread closed the socket when it came to it: on a busy machine after the next operation had begun."""
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        with Driver() as driver, contextlib.suppress(LimosaError):  # there need not be a GPU
            driver.available()
        assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before

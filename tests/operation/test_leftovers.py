"""What CRIU brings back as it found it: a process that was stopped when it was frozen."""

from __future__ import annotations

import os
import signal

from support import stat_of

from limosa.operation.leftovers import let_go_on
from limosa.process.identity import Identity


def test_what_is_stopped_goes_on_and_is_named(start) -> None:
    """The driver does not answer about a stopped process: restoring such a job ended with 40."""
    running, stopped = start("counter"), start("counter")
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.until(lambda: stat_of(stopped.pid)[2] == "T", 10, "to be stopped")
    tree = [Identity.of(running.pid), Identity.of(stopped.pid)]
    assert let_go_on(tree) == [stopped.pid]
    stopped.goes_on(2)
    assert let_go_on(tree) == []

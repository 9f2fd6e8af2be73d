"""Commands that are held in the middle of a driver call."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any


def waits_for(node: Any, true: Callable[[], bool], limit: float = 15) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, node.log()
        time.sleep(0.01)


class Held:
    """A command that is held in one of its driver calls until it is let go."""

    def __init__(self, node: Any, function: str, *command: object):
        self.node = node
        self.rule = node.switches.add(f"function={function} hang")
        self.process = node.later(*command)
        waits_for(node, lambda: node.switches.count(self.rule) > 0 or self.process.poll() is not None)
        assert self.process.poll() is None, node.ends(self.process)

    def interrupt(self) -> None:
        """Ctrl-C; returns once it has been heard."""
        self.process.send_signal(signal.SIGINT)
        waits_for(self.node, lambda: "cannot be broken off" in self.node.heard(self.process))

    def let_go(self) -> Any:
        self.node.switches.remove(self.rule)
        return self.process

"""Something that is done beside the driver's steps: a copy, reading an image."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """One piece of work in a thread of its own; what it raises is raised where it is waited for."""

    def __init__(self, name: str):
        self._name = name
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begins."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failed = error

        thread = threading.Thread(target=run, name=self._name)
        thread.start()  # one that cannot start is not waited for
        self._thread = thread

    def settle(self) -> None:
        """Waits until it is over, whatever came of it: nothing is read or written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raises what it has raised so far."""
        if self._failed is not None:
            raise self._failed

    def wait(self) -> None:
        """Waits until it is over; raises what it raised."""
        self.settle()
        self.check()

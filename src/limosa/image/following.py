"""Hashing CRIU's pages of memory while CRIU writes them: most of an image, and so most of what a commit would wait for.

CRIU writes ``pages-N.img`` from its beginning to its end and never goes back in it (``page-xfer.c``: splice(2) to where
the file ends), so what is there of it stays. Its other files are small, and some of them it writes twice.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import Any, NamedTuple

import blake3

from limosa.image.files import open_file
from limosa.image.hashing import threads_here
from limosa.image.manifest import is_pages

_PART = 8 << 20
_LOOK_SECONDS = 0.02


class Begun(NamedTuple):
    """A file of which a part is hashed: a descriptor of it, how many bytes, and by whom.

    As long as it is open no other file gets its number.
    """

    fd: int
    done: int
    hasher: Any

    def part_of(self, fd: int) -> bool:
        """Whether that is the same file, and not shorter than what was hashed."""
        there = os.fstat(fd)
        return os.path.samestat(there, os.fstat(self.fd)) and self.done <= there.st_size


class Following:
    """Follows CRIU in ``criu/`` in a thread of its own; the descriptor stays the caller's."""

    def __init__(self, criu_fd: int):
        self._criu_fd = criu_fd
        self._begun: dict[str, Begun] = {}
        self._stop = threading.Event()
        self._buffer = memoryview(mmap.mmap(-1, _PART))
        self._thread = threading.Thread(target=self._run, name="limosa-follow")
        self._thread.start()

    def stop(self) -> dict[str, Begun]:
        """End it; returns how far it is, by name, until it is closed."""
        self._stop.set()
        self._thread.join()
        return self._begun

    def close(self) -> None:
        """End it, and forget all."""
        for begun in self.stop().values():
            os.close(begun.fd)
        self._begun = {}

    def _run(self) -> None:
        pause = _LOOK_SECONDS
        try:
            while not self._stop.wait(pause):
                begin = time.monotonic()
                names = os.listdir(self._criu_fd)
                pause = max(_LOOK_SECONDS, 20 * (time.monotonic() - begin))  # there may be tens of thousands
                for name in filter(is_pages, names):
                    self._follow(name)
        except OSError:  # the folder is being emptied; whoever commits hashes what is left
            pass

    def _follow(self, name: str) -> None:
        begun = self._begun.get(name)
        if begun is None:
            fd = open_file(name, self._criu_fd)
            begun = self._begun[name] = Begun(fd, 0, blake3.blake3(max_threads=threads_here()))
        while os.fstat(begun.fd).st_size - begun.done >= _PART and not self._stop.is_set():
            got = os.preadv(begun.fd, [self._buffer], begun.done)
            begun.hasher.update(self._buffer[:got])
            begun = self._begun[name] = begun._replace(done=begun.done + got)

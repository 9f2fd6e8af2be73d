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
from limosa.image.manifest import is_pages

MOST_FILES = 8
"""Followed at a time, each with a descriptor: a tree has one for each process. The others are hashed in the end."""
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
    """Follows CRIU in ``criu/`` in a thread of its own; the descriptor stays the caller's.

    What goes wrong is no error: it is hashed in the end.
    """

    def __init__(self, criu_fd: int):
        self._criu_fd = criu_fd
        self._begun: dict[str, Begun] = {}
        self._left: set[str] = set()  # what has become shorter, or could not be read
        self._stop = threading.Event()
        self._buffer = memoryview(mmap.mmap(-1, _PART))
        # A daemon: an operation that cannot be undone ends all the same.
        self._thread = threading.Thread(target=self._run, name="limosa-follow", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Begun]:
        """End it; returns how far it is, by name, until it is closed."""
        self._stop.set()
        self._thread.join()
        return self._begun

    def close(self) -> None:
        """End it, and forget all."""
        for name in list(self.stop()):
            self._leave(name)

    def _run(self) -> None:
        pause = _LOOK_SECONDS
        while not self._stop.wait(pause):
            begin = time.monotonic()
            try:
                names = os.listdir(self._criu_fd)
            except OSError:
                return
            pause = max(_LOOK_SECONDS, 20 * (time.monotonic() - begin))  # there may be tens of thousands
            for name in filter(is_pages, names):
                if name in self._begun or (name not in self._left and len(self._begun) < MOST_FILES):
                    self._follow(name)

    def _follow(self, name: str) -> None:
        try:
            if name not in self._begun:
                if os.stat(name, dir_fd=self._criu_fd, follow_symlinks=False).st_size < _PART:
                    return
                # By one thread, which is faster than CRIU: with more, each would have its own for as long as it lives.
                hasher = blake3.blake3(max_threads=1)
                self._begun[name] = Begun(open_file(name, self._criu_fd), 0, hasher)
            while not self._stop.is_set() and self._next_part(name):
                pass
        except Exception:
            self._leave(name)

    def _next_part(self, name: str) -> bool:
        """Hash the next part of it, where all of that is there."""
        begun = self._begun[name]
        there = os.fstat(begun.fd).st_size - begun.done
        if there < 0:
            raise ValueError("it has become shorter")
        if there < _PART or not (got := os.preadv(begun.fd, [self._buffer], begun.done)):
            return False
        begun.hasher.update(self._buffer[:got])
        self._begun[name] = begun._replace(done=begun.done + got)
        return True

    def _leave(self, name: str) -> None:
        self._left.add(name)
        if name in self._begun:
            os.close(self._begun.pop(name).fd)

"""Device memory in an image: a folder of chunks, each named by the BLAKE3 of its bytes.

``chunks/ab/ab…`` is the file of the chunk whose hash begins with ``ab``; its name says what must be in it, so equal
chunks (zero pages, replicas) are stored once, and another image could share them. The manifest says which chunk belongs
where. A name is used only when it has the form of a hash, relative to the open folder and never through a
symlink.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterator

import blake3

from limosa.image.files import Files, open_file, open_folder

CHUNKS_NAME = "chunks"
LEAST_CHUNK, MOST_CHUNK = 4 << 20, 64 << 20
"""Bytes of a chunk; the last one of a piece of memory may be shorter."""
USUAL_CHUNK = 16 << 20

_NAME = re.compile(r"[0-9a-f]{64}\Z")
_PREFIX = re.compile(r"[0-9a-f]{2}\Z")


def is_chunk_name(name: str) -> bool:
    """Whether ``name`` has the form of a chunk's."""
    return _NAME.match(name) is not None


def is_chunk_folder(name: str) -> bool:
    """Whether ``name`` has the form of a folder's in ``chunks/``."""
    return _PREFIX.match(name) is not None


def chunk_path(name: str) -> str:
    """Where a chunk lies in an image, for people to read."""
    return f"{CHUNKS_NAME}/{name[:2]}/{name}"


def name_of(data: bytes | memoryview) -> str:
    """The name of a chunk with this content."""
    return blake3.blake3(data).hexdigest()


class Chunks:
    """An open ``chunks/``; a context manager that closes it. May be used by several threads.

    Args:
        fd: of the folder; a copy of it is kept.
        files: how the disk is changed; for tests.
    """

    def __init__(self, fd: int, files: Files | None = None):
        self._fd = os.dup(fd)
        self._files = files or Files()
        self._folders: dict[str, int] = {}
        self._there: set[str] = set()
        self._lock = threading.Lock()

    def open(self, name: str) -> int:
        """Open a chunk for reading; the caller closes it.

        Raises:
            ValueError: this is no chunk's name.
            OSError: it is not there, or no regular file.
        """
        return open_file(name, self._folder(name))

    def add(self, data: bytes | memoryview, name: str = "") -> tuple[str, bool]:
        """Write a chunk, unless one of the same content was written before; not yet put on disk.

        Args:
            data: its content.
            name: its name, where that is known already.

        Returns:
            Its name, and whether it was written now.

        Raises:
            OSError: the disk said no: this draft is to be given up.
        """
        name = name or name_of(data)
        with self._lock:
            if name in self._there:
                return name, False
            self._there.add(name)
        self._files.put(name, data, self._folder(name, make=True))
        return name, True

    def keep(self, names: Collection[str]) -> int:
        """Remove all chunks but these; returns how many there were to remove."""
        gone = [name for name in self.names() if name not in names]
        for name in gone:
            self._files.unlink(name, self._folder(name))
            self._there.discard(name)
        return len(gone)

    def names(self) -> list[str]:
        """The names of all chunks that are there, in their order; nothing else is looked at."""
        found = []
        for prefix in sorted(filter(is_chunk_folder, os.listdir(self._fd))):
            found += sorted(filter(is_chunk_name, os.listdir(self._folder(prefix))))
        return found

    def folders(self) -> Iterator[int]:
        """Descriptors of the folders that hold chunks, then of ``chunks/`` itself; they stay ours."""
        for prefix in sorted(filter(is_chunk_folder, os.listdir(self._fd))):
            yield self._folder(prefix)
        yield self._fd

    def strangers(self, known: Collection[str]) -> list[str]:
        """What is there and is none of the chunks ``known``: paths in the image."""
        found = []
        for prefix in sorted(os.listdir(self._fd)):
            try:
                inner = os.listdir(self._folder(prefix)) if is_chunk_folder(prefix) else None
            except OSError:
                inner = None
            if inner is None:
                found.append(f"{CHUNKS_NAME}/{prefix}")
                continue
            found += [
                f"{CHUNKS_NAME}/{prefix}/{name}" for name in sorted(inner) if name not in known or name[:2] != prefix
            ]
        return found

    def close(self) -> None:
        """Close the descriptors; a second time does nothing."""
        with self._lock:
            for fd in self._folders.values():
                os.close(fd)
            self._folders.clear()
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Chunks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _folder(self, name: str, *, make: bool = False) -> int:
        """The open folder of a chunk (or of the two digits that its name begins with)."""
        if not is_chunk_name(name) and not is_chunk_folder(name):
            raise ValueError(f"{name!r} is no chunk's name")
        prefix = name[:2]
        with self._lock:
            if prefix not in self._folders:
                try:
                    self._folders[prefix] = open_folder(prefix, self._fd)
                except FileNotFoundError:
                    if not make:
                        raise
                    self._folders[prefix] = self._files.mkdir(prefix, self._fd)
            return self._folders[prefix]

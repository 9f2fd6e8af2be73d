"""What the mover does for a restore: the chunks of an image into device memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from limosa.gpu.vmm import Contexts, Piece
from limosa.image.chunks import chunk_path, name_of
from limosa.parking.crew import Crew, Hand, Place, default_threads
from limosa.parking.mover_chunks import (
    Staging,
    begin,
    held,
    only,
    read_whole,
)
from limosa.parking.mover_protocol import LoadMake, LoadOpen, LoadStart, LoadTake, LoadWant, Request
from limosa.parking.mover_session import Reply, Session, Verb


class Damaged(Exception):
    """A chunk is not what its name says."""


class Load(Staging):
    """The chunks of an image on their way into device memory: what is not what its name says does not get there.

    Args:
        contexts: the process's.
        folder: descriptor of the folder of chunks; stays the caller's.
        chunk: bytes of a chunk.
    """

    def __init__(self, contexts: Contexts, folder: int, chunk: int):
        super().__init__(contexts, folder, chunk)
        self._pieces: dict[tuple[int, int], tuple[Piece, str]] = {}
        self._wanted: dict[str, tuple[int, list[Place]]] = {}

    def make(self, pid: int, ids: Sequence[int], sizes: Sequence[int], gpu: str) -> list[int]:
        """Make memory on a GPU for pieces of a process; returns descriptors.

        Raises:
            DriverError: CUDA_ERROR_OUT_OF_MEMORY above all.
        """
        self._contexts.use(gpu)
        ordinal = self._contexts.ordinal(gpu)
        given: list[int] = []
        try:
            for id_, size in zip(ids, sizes, strict=True):
                piece = Piece.make(size, ordinal, [ordinal])
                self._pieces[pid, id_] = piece, gpu
                given.append(piece.export())
        except BaseException:
            for fd in given:
                os.close(fd)
            raise
        return given

    def take(self, pid: int, ids: Sequence[int], sizes: Sequence[int], gpu: str, fds: Sequence[int]) -> None:
        """Have memory that a process has made itself."""
        self._contexts.use(gpu)
        user = [self._contexts.ordinal(gpu)]
        for id_, size, fd in zip(ids, sizes, fds, strict=True):
            self._pieces[pid, id_] = Piece.take(fd, size, user), gpu

    def want(self, pid: int, id_: int, start: int, names: bytes) -> None:
        """Say what belongs into a piece, from a chunk on: 32 bytes of a name each."""
        memory, gpu = self._pieces[pid, id_]
        for n in range(len(names) // 32):
            offset = (start + n) * self._chunk
            name = names[32 * n : 32 * n + 32].hex()
            size = min(self._chunk, memory.bytes - offset)
            self._wanted.setdefault(name, (size, []))[1].append(Place(memory, offset, gpu))

    def start(self, threads: int) -> None:
        """Begin to read what is wanted since the last time."""
        self.stop()
        threads = threads or default_threads(beside=False)
        if not self._pieces:
            return
        tasks = [((name, size, places), size * len(places)) for name, (size, places) in self._wanted.items()]
        self._wanted = {}
        self._crew = Crew(tasks, self._read, self._hands(threads), threads=threads)

    def _gpus(self) -> set[str]:
        return {gpu for _, gpu in self._pieces.values()}

    def _close_pieces(self) -> None:
        for piece, _ in self._pieces.values():
            piece.close()
        self._pieces.clear()

    def _read(self, hand: Hand, task: tuple[str, int, list[Place]]) -> None:
        name, size, places = task
        try:
            fd = self._chunks.open(name)
        except OSError as error:
            raise Damaged(f"{chunk_path(name)} cannot be opened ({error.strerror})") from error
        view = hand.slot.view[:size]
        try:
            if os.fstat(fd).st_size != size:
                raise Damaged(f"{chunk_path(name)} has {os.fstat(fd).st_size} bytes instead of {size}")
            read_whole(fd, view, 0)
        except OSError as error:
            raise Damaged(f"{chunk_path(name)} cannot be read ({error.strerror})") from error
        finally:
            os.close(fd)
        if name_of(view) != name:
            raise Damaged(f"{chunk_path(name)} has another content than was written")
        hand.into(places, size)


def load_open(session: Session, asked: LoadOpen, fds: Sequence[int]) -> Reply:
    """Begin to load; the descriptor is of the folder."""
    begin(session, Load(session.contexts, only(fds), asked.chunk))
    return {}


def load_make(session: Session, asked: LoadMake, fds: Sequence[int]) -> Reply:
    """Make memory and give descriptors of it away."""
    return {}, held(session, Load).make(asked.pid, asked.ids, asked.sizes, asked.gpu)


def load_take(session: Session, asked: LoadTake, fds: Sequence[int]) -> Reply:
    """Have memory that a process has made, by its descriptors."""
    held(session, Load).take(asked.pid, asked.ids, asked.sizes, asked.gpu, fds)
    return {}


def load_want(session: Session, asked: LoadWant, fds: Sequence[int]) -> Reply:
    """Say what belongs where."""
    for pid, id_, start, names in asked.parts:
        held(session, Load).want(pid, id_, start, names)
    return {}


def load_start(session: Session, asked: LoadStart, fds: Sequence[int]) -> Reply:
    """Begin to read."""
    held(session, Load).start(asked.threads)
    return {}


VERBS: dict[type[Request], Verb] = {
    LoadOpen: load_open,
    LoadMake: load_make,
    LoadTake: load_take,
    LoadWant: load_want,
    LoadStart: load_start,
}

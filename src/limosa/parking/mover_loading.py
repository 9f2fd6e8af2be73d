"""What the mover does for a restore: the chunks of an image into device memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from limosa.gpu.vmm import Contexts, Piece, call
from limosa.image.chunks import chunk_path, name_of
from limosa.parking.crew import ALL, Crew, Hand, Place, default_threads
from limosa.parking.mover_chunks import Staging, begin, of, only, read_whole
from limosa.parking.mover_memory import made
from limosa.parking.mover_protocol import LoadDrop, LoadMake, LoadMove, LoadOpen, LoadStart, LoadTake, LoadWant
from limosa.parking.mover_session import Reply, Session, Verb
from limosa.parking.vault_protocol import Request


class Damaged(Exception):
    """A chunk is not what its name says."""


class Load(Staging):
    """The chunks of an image on their way into device memory: what is not what its name says does not get there."""

    def __init__(self, contexts: Contexts, folder: int, chunk: int):
        super().__init__(contexts, folder, chunk)
        self._pieces: dict[tuple[int, int], tuple[Piece, str]] = {}
        self._wanted: dict[str, tuple[int, list[Place]]] = {}

    def make(self, asked: LoadMake, fds: Sequence[int]) -> Reply:
        """Make memory on a GPU for pieces of a process, and give descriptors of it away.

        Raises DriverError: CUDA_ERROR_OUT_OF_MEMORY above all.
        """
        wanted = dict(zip(asked.ids, asked.sizes, strict=True))
        pieces, given = made(self._contexts, asked.gpu, wanted.values())
        self._pieces.update({(asked.pid, id_): (piece, asked.gpu) for id_, piece in zip(wanted, pieces, strict=True)})
        return {}, given

    def take(self, asked: LoadTake, fds: Sequence[int]) -> None:
        """Have memory that a process has made itself, by its descriptors."""
        self._contexts.use(asked.gpu)
        user = [self._contexts.ordinal(asked.gpu)]
        for id_, size, fd in zip(asked.ids, asked.sizes, fds, strict=True):
            self._pieces[asked.pid, id_] = Piece.take(fd, size, user), asked.gpu

    def move_on(self, asked: LoadMove, fds: Sequence[int]) -> None:
        """Copy what was read for pieces into memory that their process has made itself, and have that instead."""
        self._contexts.use(asked.gpu)
        user = [self._contexts.ordinal(asked.gpu)]
        keys = [(asked.pid, id_) for id_ in asked.ids]
        came = [self._pieces[key][0] for key in keys]
        if any(piece.bytes != size for piece, size in zip(came, asked.sizes, strict=True)):
            raise ValueError("pieces of other sizes than what was read for them")
        stream = call("cuStreamCreate", 1)
        try:
            for key, piece, fd in zip(keys, came, fds, strict=True):
                there = Piece.take(fd, piece.bytes, user)
                self._pieces[key] = there, asked.gpu
                call("cuMemcpyDtoDAsync", there.at, piece.at, piece.bytes, stream)
            call("cuStreamSynchronize", stream)
        finally:
            call("cuStreamDestroy", stream)
            for piece in came:
                piece.close()

    def drop(self, asked: LoadDrop, fds: Sequence[int]) -> None:
        """Let go of pieces, and of what was read for them."""
        for id_ in asked.ids:
            if (key := (asked.pid, id_)) in self._pieces:
                self._pieces.pop(key)[0].close()

    def want(self, asked: LoadWant, fds: Sequence[int]) -> None:
        """Note what belongs where."""
        for pid, id_, start, names in asked.parts:
            memory, gpu = self._pieces[pid, id_]
            for n in range(len(names) // 32):
                offset = (start + n) * self._chunk
                name = names[32 * n : 32 * n + 32].hex()
                size = min(self._chunk, memory.bytes - offset)
                self._wanted.setdefault(name, (size, []))[1].append(Place(memory, offset, gpu))

    def start(self, asked: LoadStart, fds: Sequence[int]) -> None:
        """Begin to read what is wanted since the last time."""
        self.stop()
        threads = default_threads(ALL)
        if not self._pieces:
            return
        tasks = [((name, size, places), size * len(places)) for name, (size, places) in self._wanted.items()]
        self._wanted = {}
        self._crew = Crew(tasks, self._read, self._hand, threads=threads)

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


VERBS: dict[type[Request], Verb] = {
    LoadOpen: load_open,
    LoadMake: of(Load, Load.make),
    LoadTake: of(Load, Load.take),
    LoadMove: of(Load, Load.move_on),
    LoadDrop: of(Load, Load.drop),
    LoadWant: of(Load, Load.want),
    LoadStart: of(Load, Load.start),
}

"""Chunks between device memory and an image, from Limosa's side: the mover is told to, and asked how far it is."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from limosa.errors import DamagedImage, FailedUndone, NoRoomOnGpu
from limosa.ipc.messages import Count, Seconds
from limosa.ipc.packet import Given
from limosa.parking import mover_protocol as protocol
from limosa.parking.mover import SLOWEST_PIN, WHO, Mover
from limosa.parking.mover_protocol import Changed, Failed, LoadTake, Progress, SaveTake
from limosa.parking.resident import understood
from limosa.parking.vault_protocol import CALL_SECONDS

STALL_SECONDS = 300.0
"""After so long in which not one more chunk was read or written a driver call hangs; a slow disk gets on."""
NICE = 10
"""What the threads that work beside a running job give way by."""
_MOST_NAMES = 2000  # 64 KB of a packet
_MOST_IDS = 4000


class Done(msgspec.Struct, frozen=True):
    """What was done: chunks, their bytes, how long it took."""

    chunks: Count = 0
    bytes: Count = 0
    seconds: Seconds = 0.0


class _Names(msgspec.Struct, frozen=True):
    names: Annotated[bytes, msgspec.Meta(max_length=32 * _MOST_NAMES)]


Told = Callable[[int, int], None]
"""Called with the bytes that are done, and all bytes."""


class _Staging:
    """One side's chunks: what is said about them to the mover, which stays the caller's."""

    _taking: type[SaveTake | LoadTake]

    def __init__(self, mover: Mover, chunk: int):
        self._mover, self.chunk = mover, chunk

    def close(self) -> None:
        """Have it let go of everything; files stay, and memory that somebody has a descriptor of."""
        self._mover.ask(protocol.Close())

    def take(self, pid: int, ids: Sequence[int], sizes: Sequence[int], gpu: str, fds: Sequence[int]) -> None:
        """Have it map pieces of a process's memory on a GPU; the descriptors stay ours."""
        for start in range(0, len(ids), _MOST_IDS):
            some = slice(start, start + _MOST_IDS)
            message = self._taking(pid=pid, ids=list(ids[some]), sizes=list(sizes[some]), gpu=gpu)
            self._mover.ask(message, fds=fds[some])


class Saver(_Staging):
    """Writes device memory into an image's folder of chunks; the mover and the folder's descriptor stay the caller's.

    The key (32 bytes) is for the hashes that find changes; None where everything is copied once.
    """

    _taking = SaveTake

    def __init__(self, mover: Mover, folder: int, chunk: int, key: bytes | None):
        super().__init__(mover, chunk)
        self._mover.ask(protocol.SaveOpen(chunk=chunk, key=key or b""), fds=[folder])

    def aside(self, pid: int, places: Sequence[tuple[int, int, int]], gpu: str, fds: Sequence[int]) -> None:
        """Have it read pieces from host memory: each is (id, bytes, where in the segments of an arena)."""
        for start in range(0, len(places), _MOST_NAMES):
            self._mover.ask(
                protocol.SaveAside(pid=pid, places=list(places[start : start + _MOST_NAMES]), gpu=gpu), fds=fds
            )

    def drop(self, pid: int, ids: Sequence[int]) -> None:
        """Have it let go of pieces that were freed."""
        if ids:
            self._mover.ask(protocol.SaveDrop(pid=pid, ids=list(ids)))

    def ready(self, hold: int) -> None:
        """Have all in place for the pause, and so much memory for what has changed by then."""
        self._mover.ask(protocol.SaveReady(hold=hold), CALL_SECONDS + hold / SLOWEST_PIN)

    def differ(self) -> Changed:
        """Hash all of it where it is; what is not what was copied is copied by the next :meth:`run`."""
        return understood(self._mover.ask(protocol.SaveDiffer()), Changed, WHO)

    def run(
        self,
        what: Literal["copy", "keep", "write"],
        *,
        told: Told = lambda *_: None,
        stop: Callable[[], bool] = lambda: False,
        rate: float = 0.0,
        nice: int = 0,
        ends: bool = False,
    ) -> Done:
        """Copy what is marked into files ("copy"), what has changed into memory ("keep"), or that into files ("write").

        ``stop`` is asked from time to time: then what was begun is left. ``rate`` is in bytes a second, 0: as fast as
        it goes. ``ends``: the job does, so that more of the processors may be taken from it. Raises OSError: the disk
        said no; FailedUndone: something else did.
        """
        self._mover.ask(protocol.SaveStart(what=what, rate=rate, nice=nice, ends=ends))
        limit = STALL_SECONDS + (protocol.MOST_THREADS * self.chunk / rate if rate else 0.0)
        return _wait(self._mover, told, stop, limit)

    def names(self, pieces: Sequence[tuple[int, int, int]]) -> list[list[str]]:
        """The names of all chunks of these pieces: (pid, id, bytes)."""
        found: list[list[str]] = [[] for _ in pieces]
        for parts in _parts(pieces, self.chunk):
            wanted = [(*pieces[n][:2], start, count) for n, start, count in parts]
            raw = understood(self._mover.ask(protocol.SaveNames(parts=wanted)), _Names, WHO).names
            if len(raw) != 32 * sum(count for _, _, count in parts):
                raise FailedUndone(f"{WHO} told {len(raw)} bytes of names of chunks")
            at = 0
            for n, _, count in parts:
                found[n] += [raw[i : i + 32].hex() for i in range(at, at + 32 * count, 32)]
                at += 32 * count
        return found


class Loader(_Staging):
    """Reads the chunks of an image, whose path errors name, into device memory; mover and folder stay the caller's."""

    _taking = LoadTake

    def __init__(self, mover: Mover, folder: int, chunk: int, image: str):
        super().__init__(mover, chunk)
        self._image = image
        self._mover.ask(protocol.LoadOpen(chunk=chunk), fds=[folder])

    def make(self, pid: int, ids: Sequence[int], sizes: Sequence[int], gpu: str) -> list[int]:
        """Have it make memory on a GPU; returns descriptors, which are ours to close.

        Raises NoRoomOnGpu: there is none.
        """
        with Given() as found:
            for start in range(0, len(ids), _MOST_IDS):
                some = slice(start, start + _MOST_IDS)
                message = protocol.LoadMake(pid=pid, ids=list(ids[some]), sizes=list(sizes[some]), gpu=gpu)
                found.add(self._mover.ask(message, wanted=len(ids[some])).given)
            if len(found) != len(ids):
                raise FailedUndone(f"the mover made {len(found)} of {len(ids)} pieces of memory")
            return found.take()

    def move_on(self, pid: int, ids: Sequence[int], sizes: Sequence[int], gpu: str, fds: Sequence[int]) -> None:
        """Have what was read for pieces copied into memory that their process has made itself, on the same GPU.

        The descriptors of that stay ours; it takes the place of what was read into.
        """
        for start in range(0, len(ids), _MOST_IDS):
            some = slice(start, start + _MOST_IDS)
            message = protocol.LoadMove(pid=pid, ids=list(ids[some]), sizes=list(sizes[some]), gpu=gpu)
            self._mover.ask(message, fds=fds[some])

    def drop(self, pid: int, ids: Sequence[int]) -> None:
        """Have it let go of pieces, and of what was read for them."""
        for start in range(0, len(ids), _MOST_IDS):
            self._mover.ask(protocol.LoadDrop(pid=pid, ids=list(ids[start : start + _MOST_IDS])))

    def want(self, pieces: Sequence[tuple[int, int, int]], names: Sequence[Sequence[str]]) -> None:
        """Say which chunks belong into pieces (pid, id, bytes)."""
        for parts in _parts(pieces, self.chunk):
            told = []
            for n, start, count in parts:
                raw = b"".join(bytes.fromhex(name) for name in names[n][start : start + count])
                told.append((*pieces[n][:2], start, raw))
            self._mover.ask(protocol.LoadWant(parts=told))

    def run(self, *, told: Told = lambda *_: None, stop: Callable[[], bool] = lambda: False) -> Done:
        """Read all that is wanted since the last time.

        Raises DamagedImage: a chunk is missing, or not what its name says; FailedUndone: something else went wrong.
        """
        self._mover.ask(protocol.LoadStart())
        return _wait(self._mover, told, stop, STALL_SECONDS, self._image)


def _wait(mover: Mover, told: Told, stop: Callable[[], bool], limit: float, image: str = "") -> Done:
    done, since = -1, time.monotonic()
    while True:
        said = understood(mover.ask(protocol.Poll()), Progress, WHO)
        told(said.done, said.total)
        if said.failed is not None:
            _raise(said.failed, image)
        if not said.running:
            return Done(said.chunks, said.done, said.seconds)
        if said.done != done:
            done, since = said.done, time.monotonic()
        elif time.monotonic() - since > limit:
            raise mover.hung(f"has copied nothing for {limit:g} s")
        if stop():
            mover.ask(protocol.Stop())
            return Done(said.chunks, said.done, said.seconds)


def _raise(failed: Failed, image: str) -> None:
    if failed.kind == "OSError" and failed.errno:
        raise OSError(failed.errno, failed.text)
    if failed.kind == "Damaged":
        hint = f"limosa verify {shlex.quote(image)} names all that is damaged; restore another image"
        raise DamagedImage(path=image, detail=failed.text, hint=hint)
    if failed.result == "CUDA_ERROR_OUT_OF_MEMORY":
        raise NoRoomOnGpu(detail="the GPU filled up in the middle")
    raise FailedUndone(f"the mover: {failed.text}")


def _parts(pieces: Sequence[tuple[int, int, int]], chunk: int) -> Iterator[list[tuple[int, int, int]]]:
    """Which chunks of which pieces fit into one packet: (number of the piece, from which chunk on, how many)."""
    part: list[tuple[int, int, int]] = []
    room = _MOST_NAMES
    for n, (_, _, size) in enumerate(pieces):
        total, start = -(-size // chunk), 0
        while start < total:
            count = min(room, total - start)
            part.append((n, start, count))
            start += count
            room -= count
            if not room:
                yield part
                part, room = [], _MOST_NAMES
    if part:
        yield part

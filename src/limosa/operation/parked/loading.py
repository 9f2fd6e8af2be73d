"""The parked way of a restore: device memory comes from an image's chunks while CRIU brings the host side back.

Memory is made on the GPUs of the map before CRIU is started; the chunks are read, compared with their names and copied
there beside it. A chunk that does not match its name does not get there, and the gate opens only when all are there.
Until then the image is the copy.

On a GPU that a process did not see when it initialised the driver it can import nothing: there it makes the memory
itself, once the driver has brought it back; the contents wait there (``ahead.py``), or are read then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial

from limosa.errors import CannotBeMoved, FailedUndone
from limosa.image import Image
from limosa.image.manifest import DeviceMemory, DevicePiece
from limosa.ipc.packet import close_all
from limosa.operation.background import Background
from limosa.operation.journal import Member, Noted, Phase
from limosa.operation.parked import ahead
from limosa.operation.parked.calls import together
from limosa.operation.parked.carrier import Carrier
from limosa.operation.parked.gates import Gates
from limosa.operation.parked.shares import one_each
from limosa.operation.work import Work
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.shim import Shim
from limosa.parking.staging import Done, Loader
from limosa.progress import Progress


class _Part:
    """One process: what it had, and the descriptors of what was made for it."""

    def __init__(self, member: Member, memory: DeviceMemory):
        self.member, self.saw = member, set(memory.saw)
        self.number = member.pid  # what the mover knows it by: in a container it comes back with another pid
        self.pieces = [piece for piece in memory.pieces if self._imports(piece)]
        self.late = [piece for piece in memory.pieces if not self._imports(piece)]
        self.ahead: set[str] = set()  # GPUs where what is late waits for the process to make its memory
        self.target: dict[int, int] = {}
        self.shim: Shim | None = None

    def connected(self) -> Shim:
        """Its shim, once CRIU has brought it back."""
        if self.shim is None:
            self.shim = Shim(self.member.identity)
        return self.shim

    def late_on(self) -> dict[str, list[DevicePiece]]:
        """What it makes itself, by the GPU that it goes to."""
        found: dict[str, list[DevicePiece]] = {}
        for piece in self.late:
            found.setdefault(self.there(piece), []).append(piece)
        return found

    def there(self, piece: DevicePiece) -> str:
        return self.member.map.get(piece.gpu, piece.gpu)

    def _imports(self, piece: DevicePiece) -> bool:
        return not self.saw or self.there(piece) in self.saw

    def close(self) -> None:
        close_all(self.target.values())
        self.target.clear()
        if self.shim is not None:
            self.shim.close()
            self.shim = None


class Loading(Carrier):
    """The parked part of one restore of an image, which stays open; takes what is made off what members hold.

    ``gates``: the restore's own, which may open others.
    """

    def __init__(self, work: Work, image: Image, members: Sequence[Member], gates: Gates):
        self._work, self._image = work, image
        of_pid = {process.pid: process for process in image.manifest.device}
        self._parts = [_Part(m, of_pid[m.pid]) for m in members if m.pid in of_pid]
        self._residents = Residents()
        self._loader: Loader | None = None
        self._reading = Background("limosa-chunks")
        self._leave = threading.Event()
        self._gates = gates
        self.done = Done()

    @property
    def shims(self) -> dict[int, Shim]:
        return {}  # none is taken away from: memory comes

    @property
    def pids(self) -> set[int]:
        """Those whose memory comes."""
        return {part.member.pid for part in self._parts}

    @property
    def connections(self) -> dict[int, Shim]:
        """The connections to processes that CRIU has brought back, by pid."""
        return {part.member.pid: part.shim for part in self._parts if part.shim is not None}

    @property
    def bytes(self) -> int:
        return self._image.manifest.device_bytes

    def prepare(self) -> None:
        image = self._image
        loader = self._loader = Loader(
            self._residents.mover(os.geteuid()), image.chunks_fd, image.manifest.chunk_bytes, str(image.path)
        )
        if any(piece.share for part in self._parts for piece in part.late):
            text = "processes that share device memory cannot go to a GPU that one of them did not see when it began"
            raise CannotBeMoved(detail=text)
        shared: dict[int, int] = {}  # what several processes have, or one has twice, is made once
        for part in self._parts:
            first = one_each({p.id: p.share for p in part.pieces}, [p.id for p in part.pieces], set(shared))
            own = [piece for piece in part.pieces if piece.id in first]
            for gpu in sorted({part.there(piece) for piece in own}):
                mine = [piece for piece in own if part.there(piece) == gpu]
                ids, sizes = [piece.id for piece in mine], [piece.bytes for piece in mine]
                part.target.update(zip(ids, loader.make(part.number, ids, sizes, gpu), strict=True))
            shared.update({piece.share: part.target[piece.id] for piece in own if piece.share})
            part.target.update({p.id: os.dup(shared[p.share]) for p in part.pieces if p.id not in part.target})
            loader.want([(part.number, p.id, p.bytes) for p in own], [p.chunks for p in own])
            for piece in own:
                part.member.held[piece.gpu] = max(0, part.member.held.get(piece.gpu, 0) - piece.bytes)
        for part in self._parts:
            self._come_ahead(loader, part)

    def _come_ahead(self, loader: Loader, part: _Part) -> None:
        """Has what it will make itself read into memory of the mover's, on GPUs that have room for both."""
        late = part.late_on()
        sizes = {gpu: [piece.bytes for piece in mine] for gpu, mine in late.items()}

        def make(gpu: str) -> list[int]:
            return loader.make(part.number, [piece.id for piece in late[gpu]], sizes[gpu], gpu)

        part.ahead = ahead.rooms(self._work, sizes, make)
        for gpu in part.ahead:
            loader.want([(part.number, p.id, p.bytes) for p in late[gpu]], [p.chunks for p in late[gpu]])

    def copy(self) -> None:
        self._reading.start(self._read)

    def _read(self) -> None:
        work = self._work

        def told(done: int, total: int) -> None:
            work.progress(Progress("chunks", done=done, total=total))

        assert self._loader is not None
        done = self._loader.run(told=told, stop=lambda: self._leave.is_set() or work.stop_asked())
        self.done = Done(self.done.chunks + done.chunks, self.done.bytes + done.bytes, done.seconds)
        work.timings["chunks"] = work.timings.get("chunks", 0.0) + done.seconds

    def check(self) -> None:
        """Stop here where it has failed already: raises what :meth:`wait` does."""
        self._reading.check()

    def wait(self) -> None:
        """Wait until every byte is there, and was compared.

        Raises DamagedImage: a chunk is not what its name says; FailedUndone: something else went wrong.
        """
        self._reading.wait()
        self._work.check()
        if any(part.late for part in self._parts):
            self._make_late()
            self._read()
            self._work.check()
        if self.done.bytes != self.bytes:
            raise FailedUndone(f"{self.done.bytes} of {self.bytes} bytes of device memory were read")

    def _make_late(self) -> None:
        """Have the processes make memory themselves, where they can import none, and fill it with what came ahead.

        What did not is wanted from the image.
        """
        assert self._loader is not None
        for part in self._parts:
            pid, loader = part.number, self._loader
            for gpu, mine in part.late_on().items():
                ids, sizes = [piece.id for piece in mine], [piece.bytes for piece in mine]
                fds, _ = ahead.made(part.connected(), ids, partial(self._give_up, part, gpu))
                try:
                    if gpu in part.ahead:
                        loader.move_on(pid, ids, sizes, gpu, fds)
                        continue
                    loader.take(pid, ids, sizes, gpu, fds)
                finally:
                    close_all(fds)
                loader.want([(pid, p.id, p.bytes) for p in mine], [p.chunks for p in mine])

    def _give_up(self, part: _Part, gpu: str) -> None:
        """Lets go of what came ahead to a GPU: the process needs the room. It is read once more."""
        if gpu not in part.ahead:
            return
        assert self._loader is not None
        part.ahead.discard(gpu)
        mine = part.late_on()[gpu]
        self._loader.drop(part.number, [piece.id for piece in mine])
        again = sum(piece.bytes for piece in mine)
        self.done = Done(self.done.chunks, self.done.bytes - again, self.done.seconds)

    def arrive(self) -> None:
        for part in self._parts:
            if part.connected().hello().stand is not Stand.AWAY:
                raise FailedUndone(f"process {part.member.pid} does not wait for its device memory")
            self._work.note(Noted.MAP, Phase.BEGIN, part.member.pid)
        together([partial(_map, part, part.connected()) for part in self._parts])

    def open(self) -> None:
        self._gates.open([(part.member, part.connected()) for part in self._parts])

    def back(self) -> None:
        """Let go of it: the tree is ended, the image is the copy."""
        self.release()

    def release(self) -> None:
        self._leave.set()
        self._reading.settle()
        for part in self._parts:
            part.close()
        self._residents.close()


def _map(part: _Part, shim: Shim) -> None:
    """Gives a process its device memory."""
    ids = sorted(part.target)
    stand = shim.map(ids, [part.target[i] for i in ids])
    if part.late:
        stand = shim.map([piece.id for piece in part.late])
    if stand is not Stand.CLOSED:
        raise FailedUndone(f"process {part.member.pid} could not be given its device memory back")

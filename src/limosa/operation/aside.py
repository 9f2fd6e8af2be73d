"""Suspended by the parked way: device memory in host memory that the job itself and the vault hold.

The memory of each process goes into one memfd, the *arena*: its pieces in the order of the process's GPUs and of their
ids, behind them a page that says which is where. It is pinned before the pause and filled at the speed of the bus while
the driver checkpoints what is left; a resume reads it back, on any GPU of that chip.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from limosa.errors import CannotBeMoved, LimosaError
from limosa.operation.journal import Member
from limosa.operation.parked import GATE_SECONDS, copy_limit, key_of, lower_stack, together
from limosa.operation.work import Work
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.shim import Memory, Shim, under_shim

PAGE = 1 << 16
ARENA = "limosa-arena"


class Placed(msgspec.Struct, frozen=True):
    """Where a piece of memory is in an arena, and on which GPU it was."""

    id: int
    bytes: int
    gpu: str
    offset: int


def write_layout(fd: int, layout: Sequence[Placed]) -> int:
    """Make an arena as large as what goes into it and note what is where; returns its size."""
    total = sum(p.bytes for p in layout)
    text = msgspec.json.encode(list(layout))
    room = -(-(len(text) + 8) // PAGE) * PAGE
    os.ftruncate(fd, total + room)
    os.pwrite(fd, text, total)
    os.pwrite(fd, len(text).to_bytes(8, "little"), total + room - 8)
    return total


def read_layout(fd: int) -> list[Placed]:
    """What is where in an arena.

    Raises:
        CannotBeMoved: it says nothing that can be read.
    """
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, size - 8), "little")
    room = -(-(length + 8) // PAGE) * PAGE
    try:
        return msgspec.json.decode(os.pread(fd, length, size - room), type=list[Placed])
    except msgspec.MsgspecError as error:
        raise CannotBeMoved(detail=f"the arena of the suspended job cannot be read ({error})") from error


def aside_key(member: Member) -> str:
    """What the vault calls a process's arena."""
    return f"aside/{member.identity.to_str()}"


def aside_shims(members: Sequence[Member]) -> dict[int, Shim]:
    """Connects to the suspended members whose memory is in an arena; the caller closes them."""
    found: dict[int, Shim] = {}
    for member in members:
        try:
            shim = Shim(member.identity)
        except LimosaError as error:
            if under_shim(member.pid):  # resumed by the driver alone it would stand at its gate for ever
                raise CannotBeMoved(detail=f"the shim of process {member.pid} does not answer ({error})") from error
            continue
        if shim.hello().stand is Stand.AWAY:
            found[member.pid] = shim
        else:
            shim.close()
    return found


def copy_all(
    residents: Residents, way: str, copies: Mapping[int, Sequence[tuple[str, str, int, str]]], limit: float
) -> float:
    """Has all of it copied at once, each owner's by his mover; returns seconds."""
    begun = time.monotonic()
    together([partial(residents.mover(owner).host, way, some, limit) for owner, some in copies.items()])
    return time.monotonic() - begun


class _Going:
    """One process on its way into host memory."""

    def __init__(self, member: Member, shim: Shim, residents: Residents):
        self.member, self.shim = member, shim
        self.vault, self.mover = residents.vault(shim.owner), residents.mover(shim.owner)
        self.devices = shim.devices()
        self.source: dict[int, int] = {}
        self.layout: list[Placed] = []
        self.arena = -1

    def pieces(self) -> list[Memory]:
        """What can be parked, in the order of the arena."""
        return sorted((m for m in self.shim.memories() if not m.shared), key=lambda m: (m.device, m.id))

    def close(self) -> None:
        for fd in self.source.values():
            os.close(fd)
        self.source.clear()
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1
        self.shim.close()


class Suspending:
    """The parked part of one suspend; used like :class:`limosa.operation.parked.Parked`."""

    def __init__(self, work: Work, members: Sequence[Member], shims: dict[int, Shim]):
        self._work = work
        self._residents = Residents()
        self._parts = [_Going(m, shims[m.pid], self._residents) for m in members if m.pid in shims]
        self._copying: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.bytes = 0

    @property
    def shims(self) -> dict[int, Shim]:
        """The connections, by pid."""
        return {part.member.pid: part.shim for part in self._parts}

    def prepare(self) -> None:
        """Has the arenas made and pinned, and everything held by vault and mover; the jobs run on meanwhile."""
        for part in self._parts:
            self._ready(part, part.pieces())

    def _ready(self, part: _Going, pieces: Sequence[Memory]) -> None:
        pid = part.member.pid
        new = [m for m in pieces if m.id not in part.source]
        part.source.update(zip((m.id for m in new), part.shim.export([m.id for m in new]), strict=True))
        part.layout = []
        for m in pieces:
            before = part.layout[-1] if part.layout else Placed(0, 0, "", 0)
            part.layout.append(Placed(m.id, m.bytes, part.devices[m.device], before.offset + before.bytes))
        part.vault.put(
            key_of(self._work.id, part.member, "source"),
            [part.source[m.id] for m in pieces],
            msgspec.json.encode([m.id for m in pieces]),
        )
        if part.arena >= 0:
            os.close(part.arena)
        part.arena = os.memfd_create(ARENA, os.MFD_CLOEXEC)
        total = write_layout(part.arena, part.layout)
        for gpu in {p.gpu for p in part.layout}:
            part.mover.drop(f"{pid}/{gpu}")
            mine = [p for p in part.layout if p.gpu == gpu]
            part.mover.take(f"{pid}/{gpu}", [part.source[p.id] for p in mine], [p.bytes for p in mine], gpu)
        part.mover.drop(f"{pid}/arena")
        if part.layout:
            part.mover.arena(f"{pid}/arena", part.arena, total, part.layout[0].gpu)
        self.bytes += total

    def hold_still(self) -> None:
        """Closes all gates at once, follows what was allocated or freed since, and takes the memory away."""
        with self._work.spent("gate"):
            together([partial(part.shim.close_gate, GATE_SECONDS) for part in self._parts])
        for part in self._parts:
            lower_stack(part.shim)
        for part in self._parts:
            now = part.pieces()
            if [m.id for m in now] != [p.id for p in part.layout]:
                for gone in set(part.source) - {m.id for m in now}:
                    os.close(part.source.pop(gone))
                self._ready(part, now)
        for part in self._parts:
            self._work.note("park", "begin", part.member.pid)
            part.shim.unmap()

    def start_copy(self) -> None:
        """Copies in the background; the driver's checkpoint runs meanwhile."""
        self._copying = threading.Thread(target=self._copy, name="limosa-copy")
        self._copying.start()

    def _copy(self) -> None:
        copies: dict[int, list[tuple[str, str, int, str]]] = {}
        for part in self._parts:
            for gpu in sorted({p.gpu for p in part.layout}):
                first = next(p for p in part.layout if p.gpu == gpu)
                one = (f"{part.member.pid}/{gpu}", f"{part.member.pid}/arena", first.offset, gpu)
                copies.setdefault(part.shim.owner, []).append(one)
        try:
            self._work.timings["copy"] = copy_all(self._residents, "out", copies, copy_limit(self.bytes))
        except BaseException as error:
            self._failed = error

    def wait_for_copy(self) -> None:
        """Waits until all is copied.

        Raises:
            FailedUndone: it was not.
        """
        self._settle()
        if self._failed is not None:
            raise self._failed

    def keep(self) -> None:
        """Has each arena held by the vault and by the job itself, and what it holds counted as the job's."""
        for part in self._parts:
            part.vault.put(aside_key(part.member), [part.arena])
            part.shim.keep(part.arena)
            for placed in part.layout:
                part.member.held[placed.gpu] = part.member.held.get(placed.gpu, 0) + placed.bytes

    def home(self) -> None:
        """Gives every process its own memory back and opens its gate; the driver has brought it home before."""
        self._settle()
        for part in self._parts:
            try:
                stand = part.shim.hello().stand
                if stand is Stand.AWAY:
                    stand = part.shim.map(list(part.source), list(part.source.values()))
                if stand is Stand.CLOSED:
                    part.shim.open_gate()
                part.shim.keep()
                part.vault.drop(aside_key(part.member))
            except LimosaError:
                if part.member.identity.alive():
                    raise
        self.let_go()

    def let_go(self) -> None:
        """Lets go of the source's memory."""
        for part in self._parts:
            part.vault.drop(key_of(self._work.id, part.member, "source"))
            part.close()
        self._residents.close()

    def _settle(self) -> None:
        if self._copying is not None:
            self._copying.join()
            self._copying = None


class _Coming:
    """One process on its way back."""

    def __init__(self, member: Member, shim: Shim, residents: Residents, arena: int):
        self.member, self.shim, self.arena = member, shim, arena
        self.vault, self.mover = residents.vault(shim.owner), residents.mover(shim.owner)
        self.layout = read_layout(arena)
        self.target: dict[int, int] = {}
        self.mapped = False

    def there(self, placed: Placed) -> str:
        """The GPU that a piece goes to."""
        return self.member.map.get(placed.gpu, placed.gpu)

    def close(self) -> None:
        for fd in self.target.values():
            os.close(fd)
        self.target.clear()
        os.close(self.arena)
        self.shim.close()


class Resuming:
    """The parked part of one resume."""

    def __init__(self, work: Work, members: Sequence[Member], shims: dict[int, Shim]):
        self._work = work
        self._residents = Residents()
        mine = [(m, shims[m.pid]) for m in members if m.pid in shims]
        self._parts = [_Coming(m, shim, self._residents, self._arena(m, shim)) for m, shim in mine]
        self._copying: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.bytes = sum(p.bytes for part in self._parts for p in part.layout)

    def _arena(self, member: Member, shim: Shim) -> int:
        vault = self._residents.vault(shim.owner)
        with contextlib.suppress(KeyError):
            return vault.get(aside_key(member))[0][0]
        fd = shim.kept()  # the vault was killed meanwhile
        if fd < 0:
            raise CannotBeMoved(detail=f"nobody has the device memory of the suspended process {member.pid} any more")
        vault.put(aside_key(member), [fd])
        return fd

    def prepare(self) -> None:
        """Makes memory on the GPUs and has the arenas pinned."""
        for part in self._parts:
            pid = part.member.pid
            for gpu in sorted({part.there(p) for p in part.layout}):
                mine = [p for p in part.layout if part.there(p) == gpu]
                made = part.mover.make(f"{pid}/{gpu}", [p.bytes for p in mine], gpu)
                part.target.update(zip((p.id for p in mine), made, strict=True))
            ids = sorted(part.target)
            note = msgspec.json.encode(ids)
            part.vault.put(key_of(self._work.id, part.member, "target"), [part.target[i] for i in ids], note)
            if part.layout:
                total = sum(p.bytes for p in part.layout)
                part.mover.arena(f"{pid}/arena", part.arena, total, part.there(part.layout[0]))

    def start_copy(self) -> None:
        """Copies in the background; the driver's restore runs meanwhile."""
        self._copying = threading.Thread(target=self._copy, name="limosa-copy")
        self._copying.start()

    def _copy(self) -> None:
        copies: dict[int, list[tuple[str, str, int, str]]] = {}
        for part in self._parts:
            for gpu in sorted({part.there(p) for p in part.layout}):
                first = next(p for p in part.layout if part.there(p) == gpu)
                one = (f"{part.member.pid}/{gpu}", f"{part.member.pid}/arena", first.offset, gpu)
                copies.setdefault(part.shim.owner, []).append(one)
        try:
            self._work.timings["copy"] = copy_all(self._residents, "in", copies, copy_limit(self.bytes))
        except BaseException as error:
            self._failed = error

    def wait_for_copy(self) -> None:
        """Waits until all is copied.

        Raises:
            FailedUndone: it was not.
        """
        self._settle()
        if self._failed is not None:
            raise self._failed

    def arrive(self) -> None:
        """Maps the memory where it was."""
        for part in self._parts:
            self._work.note("map", "begin", part.member.pid)
            part.mapped = True
            part.shim.stack(0)
            part.shim.map(list(part.target), list(part.target.values()))

    def open(self) -> None:
        """Opens the gates; from the first one on there is no way back."""
        for part in self._parts:
            self._work.try_note("open", "begin", part.member.pid)
            part.shim.open_gate()

    def leave_target(self) -> None:
        """Undoes :meth:`arrive`, before the driver puts the process aside again."""
        self._settle()
        for part in self._parts:
            if part.mapped and part.member.identity.alive():
                part.shim.unmap()
                part.mapped = False

    def stay(self) -> None:
        """What a resume leaves that was undone: the arenas, and nothing on the GPUs."""
        self._settle()
        self._close()

    def let_go(self) -> None:
        """The jobs run: nobody needs the arenas any more."""
        for part in self._parts:
            with contextlib.suppress(LimosaError):
                part.shim.keep()
            part.vault.drop(aside_key(part.member))
        self._close()

    def _close(self) -> None:
        for part in self._parts:
            part.vault.drop(key_of(self._work.id, part.member, "target"))
            part.close()
        self._residents.close()

    def _settle(self) -> None:
        if self._copying is not None:
            self._copying.join()
            self._copying = None

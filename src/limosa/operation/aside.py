"""Suspended by the parked way: device memory in host memory that the job itself and the vault hold.

The memory of each process goes into segments of the *arena* (``parking/segments.py``) that are its own meanwhile: its
pieces in the order of the process's GPUs and of their ids; a small sealed file says which is where. They are pinned
before the pause, or have been before, and filled at the speed of the bus while the driver checkpoints what is left; a
resume reads them back, on any GPU of that chip.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from limosa import gpu as gpus
from limosa.errors import CannotBeMoved, FailedUndone, LimosaError, Reason
from limosa.operation import driver_steps, room
from limosa.operation.arena import arena_cap, refusals
from limosa.operation.holders import Held, key_of, note_of
from limosa.operation.journal import Member, added_up
from limosa.operation.parked import (
    GATE_SECONDS,
    copy_limit,
    each,
    export,
    gate_was_opened,
    leave,
    lower_stack,
    open_gates,
    together,
)
from limosa.operation.work import Work
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.segments import is_segment, layout_file, room_for, sizes_for
from limosa.parking.shim import Memory, Shim, under_shim

MEMORY_ONLY = "memory-only"
"""What ``suspend`` gives back where the context is to stay: the gate stays closed, and a resume takes milliseconds."""


class Placed(msgspec.Struct, frozen=True):
    """Where a piece of memory is in an arena, and on which GPU it was."""

    id: int
    bytes: int
    gpu: str
    offset: int


class Layout(msgspec.Struct, frozen=True):
    """What is where in an arena.

    Attributes:
        pieces: in their order.
        saw: the GPUs that the process saw when it initialised the driver: of others it cannot import memory. Where that
            is not known there is none: it makes its memory itself then, which always works.
    """

    pieces: list[Placed]
    saw: list[str] = []


def read_layout(fd: int) -> Layout:
    """What is where in an arena.

    Raises:
        CannotBeMoved: it says nothing that can be read.
    """
    try:
        return msgspec.json.decode(os.pread(fd, os.fstat(fd).st_size, 0), type=Layout)
    except msgspec.MsgspecError as error:
        raise CannotBeMoved(detail=f"the arena of the suspended job cannot be read ({error})") from error


def aside_key(member: Member) -> str:
    """What the vault calls a process's arena."""
    return f"aside/{member.identity.to_str()}"


def look(operation: str, members: Sequence[Member], release: str) -> tuple[dict[int, int], list[Reason]]:
    """What stands against an operation where memory goes into the arena, or is there; says who is ``away``.

    Args:
        operation: the verb.
        members: the job's; of those whose memory alone is suspended ``away`` and ``held`` are filled in.
        release: what a suspend is to give back.

    Returns:
        Bytes that go into the arena, by pid, and the reasons.
    """
    going: dict[int, int] = {}
    wanted: dict[int, int] = {}
    found: list[Reason] = []
    for member in members:
        if member.was != "running":
            continue
        try:
            with Shim(member.identity) as shim:
                stand, devices, pieces = shim.hello().stand, shim.devices(), shim.memories()
        except LimosaError:
            continue
        pieces = [m for m in pieces if not m.shared]
        if stand is Stand.AWAY:
            member.away = True
            member.held = added_up({devices[m.device]: m.bytes} for m in pieces)
        elif operation == "suspend" and pieces:
            going[member.pid] = sum(m.bytes for m in pieces)
            wanted[shim.owner] = wanted.get(shim.owner, 0) + room_for(going[member.pid])
    away = [m for m in members if m.away]
    if away and (operation not in ("suspend", "resume") or (operation == "suspend" and release == "all")):
        text = f"the memory of process {away[0].pid} is suspended, its context is not"
        hint = f"first: limosa resume {away[0].root or away[0].pid}"
        found.append(Reason(id="suspended-memory", text=text, exit_code=13, hint=hint, pid=away[0].pid))
    if operation == "resume" and any(m.changes_gpu for m in away):
        text = f"only the memory of process {away[0].pid} is suspended: its context is where it was"
        hint = f"limosa resume {away[0].root or away[0].pid}, then limosa move"
        found.append(Reason(id="context-stays", text=text, exit_code=13, hint=hint, pid=away[0].pid))
    awake = any(m.was == "running" and not m.away for m in members)
    if operation == "suspend" and release == MEMORY_ONLY and awake and not going and not away:
        text = "it has no memory that could be given back alone: that needs a job started by limosa run"
        found.append(Reason(id="no-shim", text=text, exit_code=13, hint="limosa suspend, without --release"))
    if operation == "suspend":
        found += refusals(wanted)
    return going, found


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


def arena_of(residents: Residents, member: Member, shim: Shim) -> list[int]:
    """What is held of a suspended process, by the vault or by itself; descriptors, which are the caller's to close.

    Raises:
        CannotBeMoved: nobody holds anything.
    """
    with contextlib.suppress(KeyError):
        return residents.get(shim.owner, aside_key(member))[0]
    fds = shim.kept()  # the vault was killed meanwhile
    if not fds:
        raise CannotBeMoved(detail=f"nobody has the device memory of the suspended process {member.pid} any more")
    residents.put(shim.owner, aside_key(member), fds, mover=False)
    return fds


def parts_of(member: Member, arena: Sequence[int]) -> tuple[list[int], Layout]:
    """The segments among what is held of a suspended process, and what is where in them.

    Raises:
        CannotBeMoved: it is no arena.
    """
    layouts = [fd for fd in arena if not is_segment(fd)]
    if len(layouts) != 1:
        raise CannotBeMoved(detail=f"what is held of the suspended process {member.pid} is no arena")
    return [fd for fd in arena if is_segment(fd)], read_layout(layouts[0])


class _Going:
    """One process on its way into host memory."""

    def __init__(self, member: Member, shim: Shim):
        self.member, self.shim = member, shim
        self.devices, self.saw = shim.devices(), shim.saw()
        self.source: dict[int, int] = {}
        self.layout: list[Placed] = []
        self.segments: list[int] = []
        self.sizes: list[int] = []
        self.known: dict[int, Memory] = {}

    def pieces(self) -> list[Memory]:
        """What can be parked, in the order of the arena."""
        return sorted((m for m in self.shim.memories() if not m.shared), key=lambda m: (m.device, m.id))

    def close(self) -> None:
        for fd in (*self.source.values(), *self.segments):
            os.close(fd)
        self.source.clear()
        self.segments.clear()
        self.shim.close()


class Suspending:
    """The parked part of one suspend; used like :class:`limosa.operation.parked.Parked`."""

    def __init__(self, work: Work, members: Sequence[Member], shims: dict[int, Shim], release: str = "all"):
        self._work, self.release = work, release
        self._residents = Residents()
        self._parts = [_Going(m, shims[m.pid]) for m in members if m.pid in shims]
        self._copying: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.bytes = 0

    @property
    def shims(self) -> dict[int, Shim]:
        """The connections, by pid."""
        return {part.member.pid: part.shim for part in self._parts}

    def prepare(self) -> None:
        """Has segments of the arena pinned, and everything held by vault and mover; the jobs run on meanwhile."""
        counted = gpus.inventory()
        for part in self._parts:
            pieces = part.pieces()
            self._ready(part, pieces)
            own = added_up({part.devices[m.device]: m.bytes} for m in pieces if not m.imported)
            room.note_beside(counted, part.member, own)

    def _ready(self, part: _Going, pieces: Sequence[Memory]) -> None:
        pid, owner, mover = part.member.pid, part.shim.owner, self._residents.mover(part.shim.owner)
        new, fds = export(part.shim, [m for m in pieces if m.id not in part.source])
        part.source.update(zip((m.id for m in new), fds, strict=True))
        pieces = [m for m in pieces if m.id in part.source]
        part.known = {m.id: m for m in pieces}
        self.bytes -= sum(p.bytes for p in part.layout)
        part.layout = []
        for m in pieces:
            before = part.layout[-1] if part.layout else Placed(0, 0, "", 0)
            part.layout.append(Placed(m.id, m.bytes, part.devices[m.device], before.offset + before.bytes))
        total = sum(p.bytes for p in part.layout)
        self._hold(part, pieces)
        for gpu in {p.gpu for p in part.layout}:
            mover.drop(f"{pid}/{gpu}")
            mine = [p for p in part.layout if p.gpu == gpu]
            mover.take(f"{pid}/{gpu}", [part.source[p.id] for p in mine], [p.bytes for p in mine], gpu)
        if part.sizes != sizes_for(total):
            mover.drop(f"{pid}/arena")
            for fd in part.segments:
                os.close(fd)
            part.segments = []
            part.segments = self._residents.vault(owner).segments(aside_key(part.member), total, arena_cap())
            part.sizes = sizes_for(total)
        if part.layout:
            with self._work.spent("pin"):
                mover.hold(f"{pid}/arena", part.segments, total, part.layout[0].gpu, pin=True)
        self.bytes += total

    def _hold(self, part: _Going, pieces: Sequence[Memory]) -> None:
        key, fds = key_of(self._work.id, part.member, "source"), [part.source[m.id] for m in pieces]
        self._residents.put(part.shim.owner, key, fds, note_of(pieces, part.devices))

    def hold_still(self) -> None:
        """Closes all gates at once, follows what was allocated or freed since, and takes the memory away."""
        for part in self._parts:  # vault and mover may have been killed since, and others be in their place
            wanted = {key_of(self._work.id, part.member, "source"): len(part.source)}
            if self._residents.missing(part.shim.owner, wanted):
                self._hold(part, [part.known[p.id] for p in part.layout])
        for part in self._parts:
            self._work.note("park", "begin", part.member.pid)
        with self._work.spent("gate"):
            together([partial(part.shim.close_gate, GATE_SECONDS) for part in self._parts])
        for part in self._parts if self.release == "all" else []:
            lower_stack(part.shim)
        for part in self._parts:
            now = part.pieces()
            if [m.id for m in now] != [p.id for p in part.layout]:
                for gone in set(part.source) - {m.id for m in now}:
                    os.close(part.source.pop(gone))
                self._ready(part, now)
        with self._work.spent("unmap"):
            for part in self._parts:
                if part.shim.unmap() is not Stand.AWAY and part.source:
                    raise FailedUndone(f"process {part.member.pid} did not let go of its memory")

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
            layout = layout_file(msgspec.json.encode(Layout(part.layout, part.saw)))
            try:
                held = [*part.segments, layout]
                self._residents.put(part.shim.owner, aside_key(part.member), held, mover=False)
                part.shim.keep(held)
            finally:
                os.close(layout)
            if self.release == MEMORY_ONLY:
                part.member.away, part.member.held = True, {}
            for placed in part.layout:
                part.member.held[placed.gpu] = part.member.held.get(placed.gpu, 0) + placed.bytes

    def home(self) -> None:
        """Gives every process its own memory back and opens its gate; the driver has brought it home before.

        Where the driver could not, for want of room, its memory goes into the arena and it stays suspended.
        """
        self._settle()
        each([(part.member, partial(self._home, part)) for part in self._parts])
        self.let_go()

    def _home(self, part: _Going) -> None:
        from limosa.operation.stranded import let_arena_go, strand

        stand = part.shim.hello().stand
        if stand is Stand.AWAY and driver_steps.settled_state(self._work.driver, part.member.pid) == "checkpointed":
            pieces = [Held(p.id, p.bytes, p.gpu) for p in part.layout]
            strand(part.member, part.shim, pieces, [part.source[p.id] for p in part.layout], away=False)
            return
        if stand is Stand.AWAY:
            stand = part.shim.map(list(part.source), list(part.source.values()))
        if stand is Stand.CLOSED:
            part.shim.open_gate()
        let_arena_go(part.member, part.shim)

    def let_go(self) -> None:
        """Lets go of the source's memory."""
        for part in self._parts:
            self._residents.drop(part.shim.owner, key_of(self._work.id, part.member, "source"))
            part.close()
        self._residents.close()

    def _settle(self) -> None:
        if self._copying is not None:
            self._copying.join()
            self._copying = None


class _Coming:
    """One process on its way back."""

    def __init__(self, member: Member, shim: Shim, arena: list[int]):
        self.member, self.shim, self.arena = member, shim, arena
        self.segments, layout = parts_of(member, arena)
        self.layout, self.saw = layout.pieces, set(layout.saw)
        self.target: dict[int, int] = {}
        self.mapped = False

    def there(self, placed: Placed) -> str:
        """The GPU that a piece goes to."""
        now = self.member.moved.get(placed.gpu, placed.gpu)
        return self.member.map.get(now, now)

    def on(self, *, seen: bool) -> dict[str, list[Placed]]:
        """The pieces by the GPU that they go to: those that the process saw when it began, or the others.

        On one that it did not see it cannot import memory: it makes it itself, once the driver has brought it there.
        """
        found: dict[str, list[Placed]] = {}
        for placed in self.layout:
            if (self.there(placed) in self.saw) == seen:
                found.setdefault(self.there(placed), []).append(placed)
        return found

    def copies(self, *, seen: bool) -> list[tuple[str, str, int, str]]:
        """What is to be copied to these: key, arena, where in it, GPU."""
        pid = self.member.pid
        return [(f"{pid}/{gpu}", f"{pid}/arena", mine[0].offset, gpu) for gpu, mine in self.on(seen=seen).items()]

    def close(self) -> None:
        for fd in (*self.target.values(), *self.arena):
            os.close(fd)
        self.target.clear()
        self.arena.clear()
        self.shim.close()


class Resuming:
    """The parked part of one resume."""

    def __init__(self, work: Work, members: Sequence[Member], shims: dict[int, Shim]):
        self._work = work
        self._residents = Residents()
        mine = [(m, shims[m.pid]) for m in members if m.pid in shims]
        self._parts = [_Coming(m, shim, arena_of(self._residents, m, shim)) for m, shim in mine]
        self._opened = False
        self._copying: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.bytes = sum(p.bytes for part in self._parts for p in part.layout)

    def prepare(self) -> None:
        """Makes memory on the GPUs and has the arenas mapped: pinned where they have been so far."""
        for part in self._parts:
            pid, mover = part.member.pid, self._residents.mover(part.shim.owner)
            for gpu, mine in part.on(seen=True).items():
                made = mover.make(f"{pid}/{gpu}", [p.bytes for p in mine], gpu)
                part.target.update(zip((p.id for p in mine), made, strict=True))
                self._work.made = added_up([self._work.made, *({gpu: p.bytes} for p in mine)])
            mover.prepare(sorted(part.on(seen=False)))
            self._hold(part)
            if part.layout:
                total = sum(p.bytes for p in part.layout)
                mover.hold(f"{pid}/arena", part.segments, total, part.there(part.layout[0]), pin=False)

    def _hold(self, part: _Coming) -> None:
        there = [p for p in part.layout if p.id in part.target]
        note = msgspec.json.encode([Held(p.id, p.bytes, part.there(p)) for p in there])
        key, fds = key_of(self._work.id, part.member, "target"), [part.target[p.id] for p in there]
        self._residents.put(part.shim.owner, key, fds, note)

    def start_copy(self) -> None:
        """Copies in the background; the driver's restore runs meanwhile."""
        self._copying = threading.Thread(target=self._copy, name="limosa-copy")
        self._copying.start()

    def _copy(self) -> None:
        copies: dict[int, list[tuple[str, str, int, str]]] = {}
        for part in self._parts:
            copies.setdefault(part.shim.owner, []).extend(part.copies(seen=True))
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
        """Maps the memory where it was; what the process must make itself is made and filled before."""
        for part in self._parts:
            self._work.note("map", "begin", part.member.pid)
            part.mapped = True
            part.shim.stack(0)
            stand = Stand.CLOSED if not part.layout else Stand.AWAY
            if part.target:
                stand = part.shim.map(list(part.target), list(part.target.values()))
            if part.on(seen=False):
                stand = self._made_by_itself(part)
            if stand is not Stand.CLOSED:
                raise FailedUndone(f"process {part.member.pid} could not be given its memory back")

    def _made_by_itself(self, part: _Coming) -> Stand:
        mover, pid = self._residents.mover(part.shim.owner), part.member.pid
        late = part.on(seen=False)
        ids = [p.id for mine in late.values() for p in mine]
        part.target.update(zip(ids, part.shim.make(ids), strict=True))
        self._hold(part)
        for gpu, mine in late.items():
            mover.take(f"{pid}/{gpu}", [part.target[p.id] for p in mine], [p.bytes for p in mine], gpu)
        with self._work.spent("copy-late"):
            mover.host("in", part.copies(seen=False), copy_limit(self.bytes))
        return part.shim.map(ids)

    def open(self) -> None:
        """Opens the gates; from the first one on there is no way back.

        Raises:
            UndoFailed: one could not be opened: ``recover`` opens it.
        """
        self._opened = True
        for part in self._parts:
            self._work.try_note("open", "begin", part.member.pid)
        open_gates([(part.member, part.shim) for part in self._parts], self._work.operation)

    def leave_target(self) -> None:
        """Undoes :meth:`arrive`, before the driver puts the process aside again.

        Raises:
            UndoFailed: a gate was opened: the job may run, and ``recover`` opens the others.
        """
        self._settle()
        if self._opened:
            raise gate_was_opened(self._work.operation)
        leave([(part.member, part.shim) for part in self._parts if part.mapped])

    def stay(self) -> None:
        """What a resume leaves that was undone: the arenas, and nothing on the GPUs."""
        self._settle()
        self._close()

    def let_go(self) -> None:
        """The jobs run: nobody needs what is in the arenas any more."""
        for part in self._parts:
            again = False
            with contextlib.suppress(LimosaError):
                part.shim.keep()
                again = True
            with contextlib.suppress(LimosaError, OSError, EOFError):  # the job runs, whoever was killed
                self._residents.drop(part.shim.owner, aside_key(part.member), again=again)
        self._close()

    def _close(self) -> None:
        for part in self._parts:
            with contextlib.suppress(LimosaError, OSError, EOFError):
                self._residents.drop(part.shim.owner, key_of(self._work.id, part.member, "target"))
            part.close()
        self._residents.close()

    def _settle(self) -> None:
        if self._copying is not None:
            self._copying.join()
            self._copying = None

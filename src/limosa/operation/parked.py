"""The parked way of a move: the device memory that the shim looks after is held aside and copied GPU to GPU.

Beside the driver's steps, which then have little to carry: the gates are closed, the memory unmapped, copied while the
driver checkpoints what is left, and mapped at the same addresses when the driver has restored that. The source's
memory is let go of last, when the job has been seen running. Until then its descriptors are held by the vault, by the
mover and here, so that any of the three may be killed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from limosa import gpu
from limosa.errors import (
    CannotBeMoved,
    FailedUndone,
    LeftSuspended,
    LimosaError,
    NoSuchProcess,
    Reason,
    UndoFailed,
)
from limosa.operation import claims, driver_steps, estimate, holders, idle, room, shares
from limosa.operation.background import Background
from limosa.operation.holders import key_of, note_of
from limosa.operation.journal import Journal, Member, added_up
from limosa.operation.work import Work
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.shim import Memory, Shim, ShimError, under_shim

STACK_BYTES = 16
"""What a context's stack limit is lowered to while it is saved; the driver rounds it up to the least it knows."""
GATE_SECONDS = 5.0
"""How long a process may take to come out of the driver and finish its work on the GPU."""
SLOWEST_COPY = 1e9  # bytes a second
COPY_SECONDS = float(os.environ.get("LIMOSA_COPY_SECONDS", "60"))
"""What a copy may take beside that before it counts as hung."""
LARGE = 512 << 20
"""Bytes of an allocation that the driver was seen not to restore where GPUs have peer access (``refusals``)."""
TRIES = 5
"""How often pieces are asked for that the job frees meanwhile."""
_BLIND = "its processes share device memory, and one did not see the GPU that it is to go to when it began"
_FREED = 400  # CUDA_ERROR_INVALID_HANDLE


def copy_limit(bytes_: int) -> float:
    """Seconds after which a copy counts as hung."""
    return COPY_SECONDS + bytes_ / SLOWEST_COPY


def lower_stack(shim: Shim) -> None:
    """Lower the stack limits of a process whose gate is closed, where nobody has set them: less for the driver to save.

    They are put back by :meth:`Shim.stack`, or by the gate when it opens. That it cannot be done costs time, no more.
    """
    with contextlib.suppress(LimosaError):
        shim.stack(STACK_BYTES)


def shims_of(members: Sequence[Member]) -> dict[int, Shim]:
    """Connects to the members that run under the shim and have memory that can be parked.

    Returns:
        Connections by pid; the caller closes them.
    """
    found: dict[int, Shim] = {}
    for member in members:
        try:
            shim = Shim(member.identity)
        except LimosaError:
            continue
        hello = shim.hello()
        if hello.bytes and hello.stand is Stand.OPEN:
            found[member.pid] = shim
        else:
            shim.close()
    return found


def look(
    operation: str, members: Sequence[Member], *, software: bool
) -> tuple[dict[int, int], list[Reason], set[int], set[int]]:
    """What stands against an operation on processes under the shim; fills in what NVML does not count as theirs.

    Memory that came by the parked way was made by somebody else: NVML does not know it as the process's, and the driver
    would save it and could not bring it back (a handle that was imported: NOT_SUPPORTED, measured).

    Args:
        operation: the verb.
        members: its processes.
        software: whether the GPUs are software GPUs.

    Returns:
        By pid the bytes that can be parked; the reasons; the processes whose shim has told all that they share, and
        those of them that have left the driver no large allocation.
    """
    found: list[Reason] = []
    total: dict[int, int] = {}
    seen: set[int] = set()
    small: set[int] = set()
    with contextlib.ExitStack() as stack:
        shims: dict[int, Shim] = {}
        all_of: dict[int, list[Memory]] = {}
        for member in members:
            if member.was != "running":
                continue
            with contextlib.suppress(LimosaError):
                shim = stack.enter_context(Shim(member.identity))
                devices, all_of[member.pid] = shim.devices(), shim.memories()
                shims[member.pid] = shim
                counts = shim.counts()
                found += _left_to_others(member, counts, all_of[member.pid])
                if sum(counts[kind][1] for kind in ("pool", "managed", "failed", "foreign", "array")) < LARGE:
                    small.add(member.pid)
                # What several processes have is there once.
                pieces = [m for m in all_of[member.pid] if not m.shared and not (m.share and m.share in seen)]
                seen |= {m.share for m in pieces}
                total[member.pid] = sum(m.bytes for m in pieces)
                for uuid in {devices[m.device] for m in pieces}:
                    here = [m for m in pieces if devices[m.device] == uuid]
                    counted, parked = member.held.get(uuid, 0), sum(m.bytes for m in here)
                    member.beside[uuid] = left_beside(counted, parked, software=software)
                    member.held[uuid] = max(counted, parked)
        for pid, text in shares.outside(shims, all_of):
            hint = "name the process that all of them descend from"
            found.append(Reason(id="shared-memory", text=text, exit_code=13, hint=hint, pid=pid))
        aside = _aside(members)
        total |= {pid: sum(m.bytes for m in own if not m.shared) for pid, own in aside.items()}
        if operation == "checkpoint" and shares.several({**all_of, **aside}):
            text = "processes of the job share device memory by legacy IPC handles: it can be moved and suspended only"
            found.append(Reason(id="shared-memory", text=text, exit_code=13, pid=members[0].pid))
    return total, found, {*shims, *aside}, small


def too_full(inventory: gpu.Inventory, members: Sequence[Member]) -> tuple[str, bool]:
    """Whether a move has no room for both copies at once: the parked way lets go of the source last.

    Jobs that change places may be moved by the driver all the same, which puts all of it into host memory first.

    Returns:
        What is short, in a sentence, or ""; and whether the driver could not carry it (it came by the parked way).
    """
    wanted: dict[str, int] = {}
    seen: set[int] = set()
    imported = False
    for member in members:
        if member.was != "running" or not member.changes_gpu:
            continue
        with contextlib.suppress(LimosaError), Shim(member.identity) as shim:
            devices = shim.devices()
            for m in shim.memories():
                here = devices[m.device]
                there = member.map.get(here, here)
                if not m.shared and there != here and not (m.share and m.share in seen):
                    seen |= {m.share} if m.share else set()
                    wanted[there] = wanted.get(there, 0) + m.bytes
                    imported |= m.imported
    told = []
    spare = idle.spare(inventory, members)
    for one in inventory.gpus:
        free = one.memory_free + spare.get(one.uuid, 0) - claims.reserved(one.uuid)
        if wanted.get(one.uuid, 0) > free:
            size = room.gib(wanted[one.uuid])
            told.append(f"GPU {one.index} has {room.gib(max(0, free))} free, and {size} come before anything leaves")
    return "; ".join(told), imported


def _aside(members: Sequence[Member]) -> dict[int, list[Memory]]:
    """The memory of those that are suspended, by pid, where it is aside: their shims tell it without the driver."""
    found = {}
    for member in members:
        if member.was != "running":
            with contextlib.suppress(LimosaError), Shim(member.identity) as shim:
                if shim.hello().stand is Stand.AWAY:
                    found[member.pid] = shim.memories()
    return found


def left_beside(counted: int, parked: int, *, software: bool) -> int:
    """Bytes of a process on a GPU that the driver carries, of what NVML counts; not less than its context.

    Memory that was imported NVML may count as its maker's, or as the process's where it was that itself once.
    """
    return max(counted - parked, 0 if software else min(counted, int(estimate.CONTEXT)))


def _left_to_others(member: Member, counts: Mapping[str, tuple[int, int]], pieces: Sequence[Memory]) -> list[Reason]:
    """What the shim knows of memory of others, or for others, that the driver could not bring back."""
    found = []
    if counts["ipc"][0]:
        text = f"process {member.pid} shares small allocations, or pools, by CUDA IPC: the driver could not restore it"
        found.append(Reason(id="cuda-ipc", text=text, exit_code=13, pid=member.pid))
    if any(m.owner < 0 for m in pieces):
        text = f"process {member.pid} has imported memory by a descriptor: the driver could not restore it"
        hint = "let it unmap and release that first"
        found.append(Reason(id="imported-memory", text=text, exit_code=13, hint=hint, pid=member.pid, forceable=True))
    return found


class _Part:
    """One process: its shim, and each piece of its memory with the descriptors that lead to it."""

    def __init__(self, member: Member, shim: Shim):
        self.member, self.shim = member, shim
        self.source: dict[int, int] = {}
        self.target: dict[int, int] = {}
        self.devices = shim.devices()
        self.known: dict[int, Memory] = {}
        self.later: list[_Later] = []
        self.mapped_target = False
        self._sees: dict[str, bool] = {}

    def sees(self, gpu_: str) -> bool:
        """Whether it can import memory of that GPU: not where it did not see it when it began."""
        if gpu_ not in self._sees:
            self._sees[gpu_] = self.shim.sees(gpu_)
        return self._sees[gpu_]

    def keys(self, operation: str) -> dict[str, int]:
        """What is held for it, and how many descriptors that is."""
        sides = (("source", self.source), ("target", self.target))
        return {key_of(operation, self.member, side): len(fds) for side, fds in sides}

    def pieces(self) -> list[Memory]:
        return [m for m in self.shim.memories() if not m.shared]

    def places(self, piece: Memory) -> tuple[str, str]:
        """The GPU that it is on, and the one that it goes to."""
        here = self.devices[piece.device]
        return here, self.member.map.get(here, here)

    def close(self) -> None:
        for fd in {*self.source.values(), *self.target.values()}:
            os.close(fd)
        self.source.clear()
        self.target.clear()
        self.shim.close()


class _Later(NamedTuple):
    """Pieces that their process makes itself when it is there; until then the mover keeps the room for them."""

    key: str
    pieces: list[Memory]
    gpu: str


class Parked:
    """The parked part of one move.

    Args:
        work: the operation.
        members: its processes.
        shims: connections to those that are parked; closed by :meth:`close`.
    """

    def __init__(self, work: Work, members: Sequence[Member], shims: dict[int, Shim]):
        self._work = work
        self._parts = [_Part(m, shims[m.pid]) for m in members if m.pid in shims]
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._residents = Residents()
        self._gates = Gates(work)
        self._n = 0
        self._copies: dict[int, list[tuple[str, str, str]]] = {}
        self._copying = Background("limosa-copy")
        self._shared: dict[int, int] = {}  # memory that several processes have: a descriptor of what was made for it
        self.bytes = 0

    @property
    def shims(self) -> dict[int, Shim]:
        """The connections, by pid."""
        return {part.member.pid: part.shim for part in self._parts}

    # -- before the pause ----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the destination's memory and has everything held by vault and mover; the jobs run on meanwhile."""
        self._refuse_outside()
        for owner in {part.shim.owner for part in self._parts}:
            gpus = {b for part in self._parts if part.shim.owner == owner for b in part.member.map.values()}
            self._residents.mover(owner).prepare(sorted(gpus))
        counted = gpu.inventory()
        for part in self._parts:
            self._add(part, part.pieces())
            self._hold(part)
            own = added_up({part.devices[m.device]: m.bytes} for m in part.known.values() if not m.imported)
            room.note_beside(counted, part.member, own)

    def _refuse_outside(self) -> None:
        shims = {part.member.pid: part.shim for part in self._parts}
        found = shares.outside(shims, {pid: shim.memories() for pid, shim in shims.items()})
        if found:
            raise CannotBeMoved(detail=found[0][1])

    def _add(self, part: _Part, new: Sequence[Memory]) -> None:
        """Takes pieces in: exported, made on the other side."""
        new, fds = export(part.shim, new)
        if not new:
            return
        part.known.update({m.id: m for m in new})
        part.source.update(zip((m.id for m in new), fds, strict=True))
        for piece in new:
            if piece.share in self._shared:
                if not part.sees(part.places(piece)[1]):
                    raise CannotBeMoved(detail=_BLIND)
                part.target[piece.id] = os.dup(self._shared[piece.share])
        for (here, there), pieces in _by_place(part, [m for m in new if m.id not in part.target]).items():
            ids, sizes = [m.id for m in pieces], [m.bytes for m in pieces]
            if here == there:
                part.target.update({i: part.source[i] for i in ids})
                continue
            copies = self._copies.setdefault(part.shim.owner, [])
            mover, key = self._residents.mover(part.shim.owner), f"{part.member.pid}/{self._n}"
            self._n += 1
            mover.take(f"{key}/source", [part.source[i] for i in ids], sizes, there)
            self.bytes += sum(sizes)
            if not part.sees(there):
                if any(m.share for m in pieces):
                    raise CannotBeMoved(detail=_BLIND)
                holders.close_all(mover.make(f"{key}/room", sizes, there))
                part.later.append(_Later(key, pieces, there))
                continue
            made = mover.make(f"{key}/target", sizes, there)
            part.target.update(zip(ids, made, strict=True))
            self._shared.update({m.share: os.dup(part.target[m.id]) for m in pieces if m.share})
            copies.append((f"{key}/source", f"{key}/target", there))

    def _hold(self, part: _Part) -> None:
        for side, fds in (("source", part.source), ("target", part.target)):
            ids = sorted(fds)
            note = note_of([part.known[i] for i in ids], part.devices)
            key = key_of(self._work.id, part.member, side)
            self._residents.put(part.shim.owner, key, [fds[i] for i in ids], note)

    def _hold_again(self) -> None:
        """Vault and mover may have been killed since, and others be in their place."""
        for part in self._parts:
            if self._residents.missing(part.shim.owner, part.keys(self._work.id)):
                self._hold(part)

    # -- the pause -----------------------------------------------------------------------------------------------

    def hold_still(self) -> None:
        """Closes all gates at once, follows what was allocated or freed since, and takes the memory away.

        Raises:
            GateStaysOpen: one could not be closed in time; :meth:`home` opens the others.
        """
        self._hold_again()
        for part in self._parts:  # before the gate: whoever finds this journal looks where it stands
            self._work.note("park", "begin", part.member.pid)
        with self._work.spent("gate"):
            together([partial(part.shim.close_gate, GATE_SECONDS) for part in self._parts])
            for part in self._parts:
                lower_stack(part.shim)
        self._refuse_outside()
        for part in self._parts:
            now = {m.id: m for m in part.pieces()}
            if set(now) == set(part.source):
                continue
            for gone in set(part.source) - set(now):
                holders.close_all({part.source.pop(gone), part.target.pop(gone, -1)} - {-1})
            self._add(part, [m for i, m in sorted(now.items()) if i not in part.source])
            self._hold(part)
        for part in self._parts:
            if part.shim.unmap() is not Stand.AWAY and part.source:
                raise FailedUndone(f"process {part.member.pid} did not let go of its memory")

    def start_copy(self) -> None:
        """Copies in the background; the driver's checkpoint runs meanwhile."""

        def copy() -> None:
            with self._work.spent("copy"):
                self._copy(self._copies)

        self._copying.start(copy)

    def wait_for_copy(self) -> None:
        """Waits until all is copied.

        Raises:
            FailedUndone: it was not.
        """
        self._copying.wait()

    def arrive(self) -> None:
        """Maps the destination's memory where the source's was."""
        for part in self._parts:
            self._work.note("map", "begin", part.member.pid)
            part.mapped_target = True
            part.shim.stack(0)  # where it cannot be put back there is still a way back; else its gate would see to it
        self._make_there()
        for part in self._parts:
            stand = part.shim.hello().stand
            if part.target:
                stand = part.shim.map(list(part.target), list(part.target.values()))
            if ids := [m.id for later in part.later for m in later.pieces if m.id in part.source]:
                stand = part.shim.map(ids)
            if stand is not Stand.CLOSED:
                raise FailedUndone(f"process {part.member.pid} could not be given its memory back")

    def _make_there(self) -> None:
        """Has processes make what they cannot import, in the room that was kept for it, and fills that."""
        copies: dict[int, list[tuple[str, str, str]]] = {}
        with self._work.spent("make"):
            for part in self._parts:
                mover = self._residents.mover(part.shim.owner)
                for later in part.later:
                    pieces = [m for m in later.pieces if m.id in part.source]  # others it has freed since
                    mover.drop(f"{later.key}/room")
                    fds = part.shim.make([m.id for m in pieces])
                    try:
                        sizes = [m.bytes for m in pieces]
                        if len(pieces) < len(later.pieces):
                            mover.drop(f"{later.key}/source")
                            mover.take(f"{later.key}/source", [part.source[m.id] for m in pieces], sizes, later.gpu)
                        mover.take(f"{later.key}/target", fds, sizes, later.gpu)
                    finally:
                        holders.close_all(fds)
                    copies.setdefault(part.shim.owner, []).append(
                        (f"{later.key}/source", f"{later.key}/target", later.gpu)
                    )
            self._copy(copies)

    def _copy(self, copies: Mapping[int, Sequence[tuple[str, str, str]]]) -> None:
        limit, movers = copy_limit(self.bytes), self._residents.mover
        together([partial(movers(owner).copy, some, limit) for owner, some in copies.items()])

    def open(self) -> None:
        """Opens the gates; from the first one on there is no way back.

        Raises:
            UndoFailed: one could not be opened: ``recover`` opens it.
        """
        self._gates.open([(part.member, part.shim) for part in self._parts])

    def let_go(self) -> None:
        """Lets go of everything: the job runs, so nobody needs the source any more."""
        for part in self._parts:
            for key in part.keys(self._work.id):
                self._residents.drop(part.shim.owner, key)
        self.close()

    # -- the way back --------------------------------------------------------------------------------------------

    def leave_target(self) -> None:
        """Undoes :meth:`arrive`, before the driver takes the process home.

        Raises:
            UndoFailed: a gate was opened: the job may run there, and ``recover`` opens the others.
        """
        self._copying.settle()  # it reads what is about to be given back
        self._gates.leave([(part.member, part.shim) for part in self._parts if part.mapped_target])

    def home(self) -> None:
        """Gives every process its own memory back and opens its gate; the driver has brought it home before.

        Where the driver could not, for want of room, its memory goes into an arena and it stays suspended.
        """
        self._copying.settle()  # it reads what is about to be given back
        each([(part.member, partial(self._home, part)) for part in self._parts])
        self.let_go()

    def _home(self, part: _Part) -> None:
        stand = part.shim.hello().stand
        if stand is Stand.AWAY and driver_steps.settled_state(self._work.driver, part.member.pid) == "checkpointed":
            ids = sorted(part.source)
            pieces = [holders.Held(i, part.known[i].bytes, part.devices[part.known[i].device]) for i in ids]
            put_aside(part.member, part.shim, pieces, [part.source[i] for i in ids], self._work.journal)
            return
        if stand is Stand.AWAY:
            pieces = [holders.Held(i, part.known[i].bytes, part.devices[part.known[i].device]) for i in part.source]
            stand = put_back(part.shim, pieces, list(part.source.values()))
        if stand is Stand.CLOSED:
            part.shim.open_gate()

    def close(self) -> None:
        """Ends the connections."""
        for part in self._parts:
            part.close()
        for fd in self._shared.values():
            os.close(fd)
        self._shared.clear()
        self._residents.close()


def together(calls: Sequence[Callable[[], object]]) -> None:
    """Makes calls at once; every one is waited for, then the first error is raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def each(calls: Sequence[tuple[Member, Callable[[], object]]]) -> None:
    """Does something for each process, whatever comes of the others; one that has ended needs nothing.

    Raises:
        LimosaError: the first that failed.
    """
    failed: list[BaseException] = []
    for member, call in calls:
        try:
            call()
        except NoSuchProcess:
            continue
        except BaseException as error:
            if member.identity.alive():
                failed.append(error)
    if failed:
        raise failed[0]


class Gates:
    """The gates of one operation: from the first one that is to open there is no way back."""

    def __init__(self, work: Work):
        self._work, self._opened = work, False

    def open(self, parts: Sequence[tuple[Member, Shim]]) -> None:
        """Notes it and opens them.

        Raises:
            UndoFailed: one does not open.
        """
        self._opened = True
        for member, _ in parts:
            self._work.try_note("open", "begin", member.pid)

        def one(shim: Shim) -> None:
            if shim.hello().stand is not Stand.OPEN:
                shim.open_gate()

        try:
            each([(member, partial(one, shim)) for member, shim in parts])
        except LimosaError as error:
            raise gate_was_opened(self._work.operation, str(error)) from error

    def leave(self, parts: Sequence[tuple[Member, Shim]]) -> None:
        """Takes what was mapped out again.

        Raises:
            UndoFailed: one was opened, and the job may run.
        """
        if self._opened:
            raise gate_was_opened(self._work.operation)
        leave(parts)


def gate_was_opened(what: str, detail: str = "a gate does not open") -> UndoFailed:
    """What is said where there is no way back any more, and forward does not go on."""
    return UndoFailed(
        what=what, detail=detail, undo_detail="the job is where it was to go: limosa recover opens it",
        job_state="unknown",
    )  # fmt: skip


def leave(parts: Sequence[tuple[Member, Shim]]) -> None:
    """Takes what was mapped out again, of those whose gate is still closed."""

    def one(shim: Shim) -> None:
        if shim.hello().stand is not Stand.OPEN:
            shim.unmap()

    each([(member, partial(one, shim)) for member, shim in parts])


def export(shim: Shim, pieces: Sequence[Memory]) -> tuple[list[Memory], list[int]]:
    """Returns descriptors of these pieces, without those that the job has freed meanwhile."""
    for _ in range(TRIES):
        try:
            return list(pieces), shim.export([m.id for m in pieces])
        except ShimError as error:
            if error.fields.get("result") != _FREED:
                raise
        there = {m.id for m in shim.memories()}
        pieces = [m for m in pieces if m.id in there]
    # It frees all the time: what is there in one moment is asked for one by one.
    found = []
    for piece in pieces:
        try:
            found.append((piece, shim.export([piece.id])[0]))
        except ShimError as error:
            if error.fields.get("result") != _FREED:
                holders.close_all([fd for _, fd in found])
                raise
    return [piece for piece, _ in found], [fd for _, fd in found]


def put_back(shim: Shim, pieces: Sequence[holders.Held], fds: Sequence[int]) -> Stand:
    """Gives a process back what was taken from it; it is at home again, and its gate is closed.

    On a GPU that it did not see when it began it cannot import even that: it makes memory anew, which is filled.
    """
    stand, blind = shim.hello().stand, {gpu_ for gpu_ in {piece.gpu for piece in pieces} if not shim.sees(gpu_)}
    seen = [i for i, piece in enumerate(pieces) if piece.gpu not in blind]
    if seen:
        stand = shim.map([pieces[i].id for i in seen], [fds[i] for i in seen])
    there = {m.id for m in shim.memories() if not m.away} if blind else set()
    for gpu_ in sorted(blind):
        mine = [i for i, piece in enumerate(pieces) if piece.gpu == gpu_]
        gone = [i for i in mine if pieces[i].id not in there]  # an unmap that has failed in the middle leaves some
        sizes, made = [pieces[i].bytes for i in gone], shim.make([pieces[i].id for i in gone])
        residents = Residents()  # the mover that has served so far may be why there is a way back
        try:
            mover = residents.mover(shim.owner)
            for side, some in (("source", [fds[i] for i in gone]), ("made", made)):
                mover.take(side, some, sizes, gpu_)
            mover.copy([("source", "made", gpu_)], copy_limit(sum(sizes)))
        finally:
            holders.close_all(made)
            residents.close()
        stand = shim.map([pieces[i].id for i in mine])
    return stand


def put_aside(
    member: Member, shim: Shim, pieces: Sequence[holders.Held], fds: Sequence[int], journal: Journal | None
) -> None:
    """What is away and cannot go home goes into host memory: the process stays suspended."""
    from limosa.operation.stranded import strand

    strand(member, shim, pieces, fds, away=driver_steps.is_away(member, "checkpointed", journal))


# -- recover ------------------------------------------------------------------------------------------------------


def bring_home(dead: Journal, driver_home: Callable[[], None]) -> bool:
    """What ``recover`` does for parked jobs: finishes what had begun to go on, else undoes it.

    Args:
        dead: the journal of the operation.
        driver_home: brings the driver's half back to where it was.

    Returns:
        Whether it was finished.

    Raises:
        LeftSuspended: there is no room for it at home any more; it stays suspended.
    """
    members = [m for m in dead.header.members if m.identity.alive() and under_shim(m.pid)]
    stands = {m.pid: _stand(m) for m in members}
    # One that runs with what was mapped there would be lost by the driver on the way back.
    ran = any(stands[m.pid] is Stand.OPEN and dead.began("map", m.pid) for m in members)
    if dead.began("open") or ran:
        each([(m, partial(_go_on, dead, m)) for m in members])
        holders.forget(dead.header.id)
        return True
    each([(m, partial(_leave, m)) for m in members if dead.began("map", m.pid)])
    left: LeftSuspended | None = None
    try:
        driver_home()
    except LeftSuspended as error:
        left = error
    # What was suspended before lies in its arena, and stays there.
    mine = [m for m in members if m.was == "running" and not m.away]
    each([(m, partial(_give_back, dead, m, stays=left is not None)) for m in mine])
    holders.forget(dead.header.id)
    if left is not None:
        raise left
    return False


def aside(members: Sequence[Member]) -> bool:
    """Whether the memory of any of these is away, or its gate closed: then a restore alone does not make them run."""
    return any(under_shim(m.pid) and _stand(m) is not Stand.OPEN for m in members if m.identity.alive())


def all_in_arenas(members: Sequence[Member]) -> bool:
    """Whether what is away of each of these lies in an arena: then nobody needs what an operation held of it."""
    from limosa.operation.stranded import has_arena

    for member in members:
        if under_shim(member.pid):
            with Shim(member.identity) as shim:
                if shim.hello().stand is not Stand.OPEN and not has_arena(member, shim):
                    return False
    return True


def _stand(member: Member) -> Stand:
    try:
        with Shim(member.identity) as shim:
            return shim.hello().stand
    except NoSuchProcess:
        return Stand.OPEN


def _leave(member: Member) -> None:
    with Shim(member.identity) as shim:
        leave([(member, shim)])


def _go_on(dead: Journal, member: Member) -> None:
    """It has its memory there, or is given it; its gate is opened, and nobody needs what was kept for a way back."""
    from limosa.operation.stranded import let_arena_go

    with Shim(member.identity) as shim:
        _map_and_open(dead, member, shim, "target")
        let_arena_go(member, shim)


def _give_back(dead: Journal, member: Member, *, stays: bool) -> None:
    from limosa.operation.stranded import has_arena, let_arena_go

    with Shim(member.identity) as shim:
        if stays and shim.hello().stand is Stand.AWAY:
            if not has_arena(member, shim):
                fds, pieces = holders.get(member, shim.owner, key_of(dead.header.id, member, "source"))
                try:
                    put_aside(member, shim, pieces, fds, dead)
                finally:
                    holders.close_all(fds)
            return
        _map_and_open(dead, member, shim, "source")
        let_arena_go(member, shim)


def _map_and_open(dead: Journal, member: Member, shim: Shim, side: str) -> None:
    stand = shim.hello().stand
    if stand is Stand.AWAY:
        fds, pieces = holders.get(member, shim.owner, key_of(dead.header.id, member, side))
        try:
            stand = put_back(shim, pieces, fds)
        finally:
            holders.close_all(fds)
    if stand is Stand.CLOSED:
        shim.open_gate()


def _by_place(part: _Part, pieces: Sequence[Memory]) -> dict[tuple[str, str], list[Memory]]:
    found: dict[tuple[str, str], list[Memory]] = {}
    for piece in pieces:
        found.setdefault(part.places(piece), []).append(piece)
    return found

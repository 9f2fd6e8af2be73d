"""The parked way of a checkpoint: device memory goes into the image as chunks, most of it while the job computes.

Everything is copied while the job runs, with a hash of what arrived; then the GPU hashes all of it, what differs is
copied again, round after round for as long as it becomes less. In the pause the gates are closed, the memory taken
away from the job and what has changed since copied into memory, while the driver checkpoints what is left. The hash
that is compared is that of the bytes that arrived, never an older one of the GPU's: what changes and changes back in
between is found.

The job's memory is held by the vault, by the mover and here until it has its memory back, or has ended with its image
whole. A suspended job's memory is in an arena; it is read from there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from limosa import gpu
from limosa.image import DeviceMemory, DevicePiece
from limosa.image.chunks import USUAL_CHUNK
from limosa.ipc.packet import close_all
from limosa.operation import counting
from limosa.operation.journal import Journal, Member, Noted, Phase, added_up
from limosa.operation.parked import shares
from limosa.operation.parked.aside import arena_of, find_arena, parts_of
from limosa.operation.parked.calls import each
from limosa.operation.parked.carrier import Beside, Connected, Process
from limosa.operation.parked.holders import ARENA, Held, LostMemory, aside_key, key_of
from limosa.operation.parked.parkable import connected
from limosa.operation.parked.pieces import export
from limosa.operation.results import Round
from limosa.operation.work import Work
from limosa.parking.answers import Hello
from limosa.parking.hashes import Key
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.shim import Shim
from limosa.parking.staging import NICE, Saver
from limosa.process.memory import host_memory
from limosa.progress import Progress

MOST_ROUNDS = 8
SHRINKS = 0.8
"""A further round is worth it where less than this part of what was copied is found changed."""
HOLD_SPARE, HOLD_MOST = 64 << 20, 8 << 30
"""Memory for what changes until the pause: a quarter more than the last round found, and this; at most so much."""


class _Part(Process):
    """One process, and what is known of each piece of its memory."""

    def __init__(self, member: Member, shim: Shim, arena: Sequence[int] = ()):
        super().__init__(member, shim, arena)
        self.saw = shim.saw()
        # The driver is not asked where it has put the process aside.
        self.devices = shim.devices() if member.was == gpu.State.RUNNING else []
        self.bytes: dict[int, int] = {}
        self.gpus: dict[int, str] = {}
        self.share: dict[int, int] = {}
        self.copied: set[int] = set()  # of what several processes have, one alone is

    def held(self, side: str) -> list[Held]:
        return [Held(i, self.bytes[i], self.gpus[i]) for i in sorted(self.source)]


class _Suspended(_Part):
    """One that is suspended: its memory is in an arena, which the vault and the process itself hold."""

    sides = (ARENA,)

    def __init__(self, member: Member, shim: Shim, arena: list[int]):
        super().__init__(member, shim, arena)
        self.segments, layout = parts_of(member, arena)
        self.layout = layout.pieces
        self.bytes = {p.id: p.bytes for p in self.layout}
        self.gpus = {p.id: member.moved.get(p.gpu, p.gpu) for p in self.layout}
        self.share = {m.id: m.share for m in shim.memories()}
        self.let_go = False


class Pace(msgspec.Struct, frozen=True):
    """How what a running job has is copied.

    Attributes:
        rounds: how often what has changed is copied again while the job runs, at most; None: for as long as it becomes
            less; 0: everything is copied in the pause.
        rate: bytes a second, for copies made while the job runs; 0: as fast as it goes.
        ends: whether the job is to end: then the copies may take more of the processors from it.
    """

    rounds: int | None = None
    rate: float = 0.0
    ends: bool = False


class Saving(Beside[_Part]):
    """The parked part of one checkpoint.

    Args:
        work: the operation.
        awake, asleep: members that run under the shim, and those whose memory is in arenas, with connections to them.
        folder, chunk: the descriptor of the image's folder of chunks; bytes of a chunk.
        others: members that have nothing to park, as :class:`Beside` takes them.
        pace: how what a running job has is copied.
    """

    def __init__(
        self,
        work: Work,
        awake: Sequence[Connected],
        asleep: Sequence[Connected] = (),
        others: Sequence[Connected] = (),
        *,
        folder: int,
        chunk: int = USUAL_CHUNK,
        pace: Pace | None = None,
    ):
        super().__init__(work, others)
        self._folder, self._chunk, self._pace = folder, chunk, pace or Pace()
        self._limit = MOST_ROUNDS if self._pace.rounds is None else self._pace.rounds
        self._maybe_saver: Saver | None = None
        self.rounds: list[Round] = []
        self.device: list[DeviceMemory] = []
        self._parts = [_Part(member, shim) for member, shim in awake]
        self._parts += [_Suspended(m, shim, arena_of(self._residents, m, shim)) for m, shim in asleep]

    @property
    def _saver(self) -> Saver:
        assert self._maybe_saver is not None
        return self._maybe_saver

    @property
    def _running(self) -> list[_Part]:
        return [part for part in self._parts if not isinstance(part, _Suspended)]

    @property
    def shims(self) -> dict[int, Shim]:
        return {part.member.pid: part.shim for part in (*self._running, *self._others)}

    @property
    def bytes(self) -> int:
        return sum(part.bytes[i] for part in self._parts for i in part.copied)

    def held(self, pid: int) -> dict[str, int]:
        """Bytes by GPU that were taken out of a process, and that its member's do not count.

        What several have counts for the first of them, as in the manifest.
        """
        counted: set[int] = set()
        for part in self._parts:
            own = shares.one_each(part.share, sorted(part.bytes), counted)
            if part.member.pid == pid and not isinstance(part, _Suspended):
                return added_up({part.gpus[i]: part.bytes[i]} for i in own)
        return {}

    # -- while the job runs --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        running = self._running
        key = Key.fresh().raw if self._limit and running else None
        # The caller's own mover: it writes into a folder that is the caller's.
        saver = Saver(self._residents.mover(os.geteuid()), self._folder, self._chunk, key)
        self._maybe_saver = saver
        for part in self._parts:
            if isinstance(part, _Suspended):
                part.copied = self._not_shared(part, [p.id for p in part.layout])
                for uuid in sorted({part.gpus[i] for i in part.copied}):
                    mine = [p for p in part.layout if p.id in part.copied and part.gpus[p.id] == uuid]
                    saver.aside(part.member.pid, [(p.id, p.bytes, p.offset) for p in mine], uuid, part.segments)
        self._refuse_outside()  # it would be somebody else's and the image's, and no more the same
        self._follow()
        changed = self.bytes
        if self._limit and not running:
            self._one_round()  # what is suspended does not change
        elif self._limit:
            changed = self._copy_rounds()
        spare = host_memory()[1] // 4
        if running:
            self._weigh(running)
            saver.ready(min(changed + changed // 4 + HOLD_SPARE, HOLD_MOST, spare))

    def _weigh(self, running: Sequence[_Part]) -> None:
        """Note what the driver will carry."""
        inventory = gpu.inventory()
        for part in running:
            pieces = [m for m in part.shim.memories() if m.id in part.bytes]
            counting.note_beside(inventory, part.member, part.devices, pieces)

    def _copy_rounds(self) -> int:
        """Copy until it becomes no less; returns the bytes that the last look found changed."""
        changed, hashing = self.bytes, 0.0
        for _ in range(self._limit):
            copied = self._one_round(hashing)
            self._follow()
            self._saver.ready(0)
            found = self._saver.differ()
            changed, hashing = found.bytes, found.seconds
            if not changed or changed > copied * SHRINKS:
                break
        return changed

    def _one_round(self, hashing: float = 0.0) -> int:
        work = self._work
        number = len(self.rounds) + 1

        def told(done: int, total: int) -> None:
            work.progress(Progress("copy", done=done, total=total, message=f"round {number}, while the job runs"))

        with work.timed("copy", "device memory → image, while the job runs", total=self.bytes or None):
            pace = self._pace
            done = self._saver.run("copy", told=told, stop=work.stop_asked, rate=pace.rate, nice=NICE, ends=pace.ends)
        work.check()
        self.rounds.append(Round(chunks=done.chunks, bytes=done.bytes, seconds=done.seconds, hash_seconds=hashing))
        return done.bytes

    def _not_shared(self, part: _Part, ids: Iterable[int]) -> set[int]:
        """The pieces of a process for which no other process's copy counts."""
        there = {other.share.get(i, 0) for other in self._parts for i in other.copied} - {0}
        return set(shares.one_each(part.share, sorted(ids), there))

    def _follow(self) -> None:
        """Take in what was allocated and let go of what was freed since the last time."""
        saver, running = self._saver, self._running
        for part in running:
            shim = part.shim
            now = {m.id: m for m in shim.memories() if not m.shared}
            part.share.update({i: m.share for i, m in now.items()})
            gone = set(part.source) - set(now)
            saver.drop(part.member.pid, sorted(gone & part.copied))
            part.copied -= gone
            for id_ in gone:
                os.close(part.source.pop(id_))
                del part.bytes[id_], part.gpus[id_], part.share[id_]
            new = [m for i, m in sorted(now.items()) if i not in part.source]
            if new:
                new, fds = export(shim, new)
                for m, fd in zip(new, fds, strict=True):
                    part.source[m.id], part.bytes[m.id], part.gpus[m.id] = fd, m.bytes, part.devices[m.device]
            if new or gone:
                self._hold(part)
        for part in running:  # when all are known: who frees what others have leaves it to them
            new_ids = self._not_shared(part, set(part.source) - part.copied)
            part.copied |= new_ids
            for uuid in sorted({part.gpus[i] for i in new_ids}):
                ids = sorted(i for i in new_ids if part.gpus[i] == uuid)
                saver.take(part.member.pid, ids, [part.bytes[i] for i in ids], uuid, [part.source[i] for i in ids])

    # -- the pause -----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        running = self._running
        with self._work.timed("gate", "holding still"):
            self._close_gates(running)
            self._refuse_outside()
            self._follow()
            self._take_away(running)

    def copy(self) -> None:
        """Copy what has changed, in the background: the memory is still there, the driver works beside it."""

        def keep() -> None:
            done = self._saver.run("keep")
            self.rounds.append(Round(chunks=done.chunks, bytes=done.bytes, seconds=done.seconds, in_pause=True))
            self._work.timings["copy_in_pause"] = done.seconds

        self._copying.start(keep)

    def disconnect(self) -> None:
        for part in self._parts:
            if isinstance(part, _Suspended):
                # The job has it no more from here on: the mover has it in its place, as long as this lasts.
                self._residents.put(part.shim.owner, key_of(self._work.id, part.member, ARENA), part.arena)
                self._work.note(Noted.UNKEEP, Phase.BEGIN, part.member.pid)
                part.let_go = True
                part.shim.keep()
        super().disconnect()

    def arrive(self) -> None:
        saver = self._saver
        told = lambda done, total: self._work.progress(Progress("write", done=done, total=total))  # noqa: E731
        saver.run("write", told=told, ends=self._pace.ends)
        found = []
        numbers = {0: 0}  # the processes' own numbers of what they share are of 64 bits, and mean nothing elsewhere
        for share in (share for part in self._parts for share in part.share.values()):
            numbers.setdefault(share, len(numbers))
        copy_of = {part.share.get(i): (part.member.pid, i) for part in self._parts for i in part.copied}
        for part in self._parts:
            pid, ids = part.member.pid, sorted(part.bytes)
            copies = [(*((pid, i) if i in part.copied else copy_of[part.share[i]]), part.bytes[i]) for i in ids]
            there = [(i, part.bytes[i], part.gpus[i], numbers[part.share.get(i, 0)]) for i in ids]
            pieces = [
                DevicePiece(id=id_, bytes=size, gpu=uuid, share=share, chunks=chunks)
                for (id_, size, uuid, share), chunks in zip(there, saver.names(copies), strict=True)
            ]
            found.append(DeviceMemory(pid=pid, saw=part.saw, pieces=pieces))
        self.device = [process for process in found if process.pieces]

    # -- afterwards ----------------------------------------------------------------------------------------------

    def back(self) -> None:
        """What a checkpoint does that leaves the job running, and every undo."""
        self._copying.settle()  # it reads what is about to be given back
        self._all_home()
        self._forget()

    def _home(self, part: _Part) -> bool:
        if not isinstance(part, _Suspended):
            return super()._home(part)
        if part.let_go:
            part.shim.keep(part.arena)
            part.let_go = False
        return True

    def release(self) -> None:
        self._copying.settle()  # it reads what is about to be given back
        super().release()


class Saveable(msgspec.Struct):
    """The members of a job that run under the shim, with connections to them."""

    awake: list[tuple[Member, Shim]] = []  # those with memory that can be parked
    asleep: list[tuple[Member, Shim]] = []  # those whose memory is in an arena
    others: list[tuple[Member, Shim]] = []  # those with none
    only_so: bool = False  # whether the driver would lose some of that


def look_for(members: Sequence[Member]) -> Saveable:
    """Connect to the members that run under the shim, as :func:`parkable.connected` does.

    Not to those that are suspended and have nothing in an arena.
    """
    park: set[int] = set()

    def wanted(member: Member, hello: Hello) -> bool:
        if member.was == gpu.State.CHECKPOINTED:
            return hello.stand is Stand.AWAY
        if hello.bytes > 0:
            park.add(member.pid)
        return hello.stand is Stand.OPEN and member.was == gpu.State.RUNNING

    some = connected(members, wanted)
    asleep = [(member, shim) for member, shim in some if member.was == gpu.State.CHECKPOINTED]
    running = [(member, shim) for member, shim in some if member.was == gpu.State.RUNNING]
    awake = [(member, shim) for member, shim in running if member.pid in park]
    others = [(member, shim) for member, shim in running if member.pid not in park]
    try:
        came_so = any(piece.imported for _, shim in awake for piece in shim.memories())
    except BaseException:
        for _, shim in some:
            shim.close()
        raise
    return Saveable(awake, asleep, others, only_so=came_so or bool(asleep))


def keep_again(dead: Journal) -> None:
    """What ``recover`` does for suspended jobs: the arenas that they let go of for CRIU are theirs again.

    Raises LostMemory: nobody has one any more; FailedUndone: somebody could not be asked.
    """
    asleep = [m for m in dead.header.members if dead.began(Noted.UNKEEP, m.pid) and m.identity.alive()]
    each([(member, partial(_keep_again, member, dead.header.id)) for member in asleep])


def _keep_again(member: Member, operation: str) -> None:
    with Shim(member.identity) as shim, contextlib.closing(Residents()) as residents:
        fds, by_itself = find_arena(residents, shim, [aside_key(member), key_of(operation, member, ARENA)])
        if not fds and by_itself:
            raise LostMemory(pid=member.pid)
        try:
            shim.keep(fds)
            residents.put(shim.owner, aside_key(member), fds, mover=False)
        finally:
            close_all(fds)

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
from limosa.errors import FailedUndone, LimosaError, NoSuchProcess
from limosa.image import DeviceMemory, DevicePiece
from limosa.image.chunks import USUAL_CHUNK
from limosa.operation import counting, driver_steps
from limosa.operation.background import Background
from limosa.operation.journal import Journal, Member, added_up
from limosa.operation.parked import gates, shares
from limosa.operation.parked.aside import arena_of, find_arena, parts_of
from limosa.operation.parked.calls import each
from limosa.operation.parked.carrier import Carrier
from limosa.operation.parked.holders import ARENA, Held, LostMemory, aside_key, key_of
from limosa.operation.parked.parkable import hello_of
from limosa.operation.parked.pieces import export, put_back
from limosa.operation.parked.stranded import strand
from limosa.operation.results import Round
from limosa.operation.work import Work
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


class _Part:
    """One process: its pieces, each with the descriptor that leads to it; or the arena that its memory is in."""

    def __init__(self, member: Member, shim: Shim):
        self.member, self.owner = member, shim.owner
        self.shim: Shim | None = shim
        self.saw = shim.saw()
        # The driver is not asked where it has put the process aside.
        self.devices = shim.devices() if member.was == gpu.State.RUNNING else []
        self.source: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        self.gpus: dict[int, str] = {}
        self.share: dict[int, int] = {}
        self.touched = False  # its gate was going to be closed
        self.copied: set[int] = set()  # of what several processes have, one alone is

    @property
    def pid(self) -> int:
        return self.member.pid

    def connected(self) -> Shim:
        """Its shim, connected to again where that was let go of."""
        if self.shim is None:
            self.shim = Shim(self.member.identity)
        return self.shim

    def leave(self) -> None:
        """Let go of the connection: CRIU would meet it."""
        if self.shim is not None:
            self.shim.close()
            self.shim = None

    def close(self) -> None:
        for fd in self.source.values():
            os.close(fd)
        self.source.clear()
        self.leave()


class _Suspended(_Part):
    """One that is suspended: its memory is in an arena, which the vault and the process itself hold."""

    def __init__(self, member: Member, shim: Shim, arena: list[int]):
        super().__init__(member, shim)
        self.arena = arena
        self.segments, layout = parts_of(member, arena)
        self.layout = layout.pieces
        self.bytes = {p.id: p.bytes for p in self.layout}
        self.gpus = {p.id: member.moved.get(p.gpu, p.gpu) for p in self.layout}
        self.share = {m.id: m.share for m in shim.memories()}
        self.let_go = False

    def close(self) -> None:
        super().close()
        for fd in self.arena:
            os.close(fd)
        self.arena.clear()


class Saving(Carrier):
    """The parked part of one checkpoint.

    Args:
        work: the operation.
        awake: members that run under the shim, with connections to them.
        asleep: members whose memory is in arenas, the same.
        folder: the descriptor of the image's folder of chunks.
        chunk: bytes of a chunk.
        rounds: how often what has changed is copied again while the job runs: at most so often; None: for as long as it
            becomes less; 0: everything is copied in the pause.
        rate: bytes a second, for copies made while the job runs; 0: as fast as it goes.
    """

    def __init__(
        self,
        work: Work,
        awake: Sequence[tuple[Member, Shim]],
        asleep: Sequence[tuple[Member, Shim]] = (),
        *,
        folder: int,
        chunk: int = USUAL_CHUNK,
        rounds: int | None = None,
        rate: float = 0.0,
    ):
        self._work, self._folder, self._chunk, self._rate = work, folder, chunk, rate
        self._limit = MOST_ROUNDS if rounds is None else rounds
        self._parts: list[_Part] = []
        self._residents = Residents()
        self._saver: Saver | None = None
        self._copying = Background("limosa-copy")
        self.rounds: list[Round] = []
        self.device: list[DeviceMemory] = []
        for member, shim in awake:
            self._parts.append(_Part(member, shim))
        for member, shim in asleep:
            self._parts.append(_Suspended(member, shim, self._arena(member, shim)))

    def _arena(self, member: Member, shim: Shim) -> list[int]:
        return arena_of(self._residents, member, shim)

    @property
    def shims(self) -> dict[int, Shim]:
        return {part.pid: part.connected() for part in self._parts if not isinstance(part, _Suspended)}

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
            if part.pid == pid and not isinstance(part, _Suspended):
                return added_up({part.gpus[i]: part.bytes[i]} for i in own)
        return {}

    # -- while the job runs --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Have the memory held and mapped, and copied round after round."""
        running = [part for part in self._parts if not isinstance(part, _Suspended)]
        key = Key.fresh().raw if self._limit and running else None
        # The caller's own mover: it writes into a folder that is the caller's.
        self._saver = Saver(self._residents.mover(os.geteuid()), self._folder, self._chunk, key)
        for part in self._parts:
            if isinstance(part, _Suspended):
                part.copied = self._not_shared(part, [p.id for p in part.layout])
                for uuid in sorted({part.gpus[i] for i in part.copied}):
                    mine = [p for p in part.layout if p.id in part.copied and part.gpus[p.id] == uuid]
                    self._saver.aside(part.pid, [(p.id, p.bytes, p.offset) for p in mine], uuid, part.segments)
        shares.refuse_outside(self.shims)  # it would be somebody else's and the image's, and no more the same
        self._follow()
        changed = self.bytes if self._limit == 0 else self._copy_rounds() if running else self._copy_once()
        spare = host_memory()[1] // 4
        if running:
            self._weigh(running)
            self._saver.ready(min(changed + changed // 4 + HOLD_SPARE, HOLD_MOST, spare))

    def _weigh(self, running: Sequence[_Part]) -> None:
        """Note what the driver will carry."""
        inventory = gpu.inventory()
        for part in running:
            pieces = [m for m in part.connected().memories() if m.id in part.bytes]
            counting.note_beside(inventory, part.member, part.devices, pieces)

    def _copy_once(self) -> int:
        """What is suspended does not change."""
        self._one_round()
        return 0

    def _copy_rounds(self) -> int:
        """Copy until it becomes no less; returns the bytes that the last look found changed."""
        changed, hashing = self.bytes, 0.0
        for _ in range(self._limit):
            copied = self._one_round(hashing)
            self._follow()
            assert self._saver is not None
            self._saver.ready(0)
            found = self._saver.differ()
            changed, hashing = found.bytes, found.seconds
            if not changed or changed > copied * SHRINKS:
                break
        return changed

    def _one_round(self, hashing: float = 0.0) -> int:
        work = self._work
        assert self._saver is not None
        number = len(self.rounds) + 1

        def told(done: int, total: int) -> None:
            work.progress(Progress("copy", done=done, total=total, message=f"round {number}, while the job runs"))

        with work.timed("copy", "device memory → image, while the job runs", total=self.bytes or None):
            done = self._saver.run("copy", told=told, stop=work.stop_asked, rate=self._rate, nice=NICE)
        work.check()
        self.rounds.append(Round(chunks=done.chunks, bytes=done.bytes, seconds=done.seconds, hash_seconds=hashing))
        return done.bytes

    def _not_shared(self, part: _Part, ids: Iterable[int]) -> set[int]:
        """The pieces of a process for which no other process's copy counts."""
        there = {other.share.get(i, 0) for other in self._parts for i in other.copied} - {0}
        return set(shares.one_each(part.share, sorted(ids), there))

    def _follow(self) -> None:
        """Take in what was allocated and let go of what was freed since the last time."""
        saver = self._saver
        assert saver is not None
        running = [part for part in self._parts if not isinstance(part, _Suspended)]
        for part in running:
            shim = part.connected()
            now = {m.id: m for m in shim.memories() if not m.shared}
            part.share.update({i: m.share for i, m in now.items()})
            gone = set(part.source) - set(now)
            saver.drop(part.pid, sorted(gone & part.copied))
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
                ids = sorted(part.source)
                held = [part.source[i] for i in ids]
                key = key_of(self._work.id, part.member, "source")
                note = msgspec.json.encode([Held(i, part.bytes[i], part.gpus[i]) for i in ids])
                self._residents.put(part.owner, key, held, note)
        for part in running:  # when all are known: who frees what others have leaves it to them
            new_ids = self._not_shared(part, set(part.source) - part.copied)
            part.copied |= new_ids
            for uuid in sorted({part.gpus[i] for i in new_ids}):
                ids = sorted(i for i in new_ids if part.gpus[i] == uuid)
                saver.take(part.pid, ids, [part.bytes[i] for i in ids], uuid, [part.source[i] for i in ids])

    # -- the pause -----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Close all gates at once, follow what was allocated or freed since, and take the memory away.

        Raises:
            GateStaysOpen: one could not be closed in time; :meth:`back` opens the others.
        """
        with self._work.timed("gate", "holding still"):
            running = [part for part in self._parts if not isinstance(part, _Suspended)]
            for part in running:
                self._work.note("park", "begin", part.pid)
                part.touched = True
            gates.close([part.connected() for part in running], self._work)
            for part in running:
                gates.lower_stack(part.connected())
            shares.refuse_outside(self.shims)
            self._follow()
            for part in running:
                if part.connected().unmap() is not Stand.AWAY and part.source:
                    raise FailedUndone(f"process {part.pid} did not let go of its memory")

    def copy(self) -> None:
        """Copy what has changed, in the background: the memory is still there, the driver works beside it."""
        self._copying.start(self._keep)

    def _keep(self) -> None:
        assert self._saver is not None
        done = self._saver.run("keep")
        self.rounds.append(Round(chunks=done.chunks, bytes=done.bytes, seconds=done.seconds, in_pause=True))
        self._work.timings["copy_in_pause"] = done.seconds

    def wait(self) -> None:
        """Wait until all is copied.

        Raises:
            FailedUndone: it was not.
        """
        self._copying.wait()

    def disconnect(self) -> None:
        """Let the job have nothing of ours: no connection, no descriptor. CRIU dumps it now."""
        for part in self._parts:
            if isinstance(part, _Suspended):
                # The job has it no more from here on: the mover has it in its place, as long as this lasts.
                self._residents.put(part.owner, key_of(self._work.id, part.member, ARENA), part.arena)
                self._work.note("unkeep", "begin", part.pid)
                part.let_go = True
                part.connected().keep()
            part.leave()

    def arrive(self) -> None:
        """Write what was kept in memory, and note what the manifest says of all of it."""
        saver = self._saver
        assert saver is not None
        saver.run("write", told=lambda done, total: self._work.progress(Progress("write", done=done, total=total)))
        found = []
        numbers = {0: 0}  # the processes' own numbers of what they share are of 64 bits, and mean nothing elsewhere
        for share in (share for part in self._parts for share in part.share.values()):
            numbers.setdefault(share, len(numbers))
        copy_of = {part.share.get(i): (part.pid, i) for part in self._parts for i in part.copied}
        for part in self._parts:
            pieces = [(part.pid, id_, size) for id_, size in sorted(part.bytes.items())]
            copies = [(*(copy_of[part.share[i]] if i not in part.copied else (pid, i)), n) for pid, i, n in pieces]
            found.append(
                DeviceMemory(
                    pid=part.pid,
                    saw=part.saw,
                    pieces=[
                        DevicePiece(
                            id=id_, bytes=size, gpu=part.gpus[id_], share=numbers[part.share.get(id_, 0)], chunks=chunks
                        )
                        for (_, id_, size), chunks in zip(pieces, saver.names(copies), strict=True)
                    ],
                )
            )
        self.device = [process for process in found if process.pieces]

    # -- afterwards ----------------------------------------------------------------------------------------------

    def back(self) -> None:
        """Give every process what is its own back and open its gate; the driver has brought it home before.

        What a checkpoint does that leaves the job running, and every undo. Where the driver could not, for want of
        room, its memory goes into an arena and it stays suspended.
        """
        self._copying.settle()  # it reads what is about to be given back
        for part in self._parts:
            try:
                self._back(part)
            except NoSuchProcess:
                continue
            except LimosaError:
                if part.member.identity.alive():
                    raise
        self._forget()

    def _back(self, part: _Part) -> None:
        if isinstance(part, _Suspended):
            if part.let_go:
                part.connected().keep(part.arena)
                part.let_go = False
            return
        if not part.touched:  # it may not even answer: stopped by somebody, say
            return
        shim = part.connected()
        stand = shim.hello().stand
        if stand is Stand.AWAY:
            pieces = [Held(i, part.bytes[i], part.gpus[i]) for i in part.source]
            fds = list(part.source.values())
            if driver_steps.settled_state(self._work.driver, part.pid) == gpu.State.CHECKPOINTED:
                strand(part.member, shim, pieces, fds, away=False, operation=self._work.id)
                return
            stand = put_back(shim, pieces, fds)
        if stand is Stand.CLOSED:
            shim.open_gate()
        if shim.hello().stand is not Stand.OPEN:
            raise FailedUndone(f"process {part.pid} does not go on")

    def release(self) -> None:
        """Let go of everything."""
        self._copying.settle()  # it reads what is about to be given back
        self._forget()
        for part in self._parts:
            part.close()
        self._residents.close()

    def _forget(self) -> None:
        """Have the vault let go; one that was killed has."""
        for part in self._parts:
            with contextlib.suppress(LimosaError, OSError, EOFError):
                side = ARENA if isinstance(part, _Suspended) else "source"
                self._residents.drop(part.owner, key_of(self._work.id, part.member, side))

    def undo(self) -> None:
        """Both."""
        self.back()
        self.release()


class Saveable(msgspec.Struct):
    """The members of a job that run under the shim, with connections to them.

    Attributes:
        awake: those with memory that can be parked.
        asleep: those whose memory is in an arena.
        only_so: whether the driver would lose some of that.
    """

    awake: list[tuple[Member, Shim]] = []
    asleep: list[tuple[Member, Shim]] = []
    only_so: bool = False


def look_for(members: Sequence[Member]) -> Saveable:
    """Connect to the members that run under the shim and have something to park.

    Raises:
        CannotBeMoved: one runs under the shim and does not answer: the driver might lose its memory.
    """
    found = Saveable()
    try:
        for member in members:
            answer = hello_of(member)
            if answer is None:
                continue
            shim, hello = answer
            if hello.stand is Stand.AWAY and member.was == gpu.State.CHECKPOINTED:
                found.asleep.append((member, shim))
                found.only_so = True
            elif hello.stand is Stand.OPEN and hello.bytes and member.was == gpu.State.RUNNING:
                found.awake.append((member, shim))
                found.only_so |= any(piece.imported for piece in shim.memories())
            else:
                shim.close()
    except BaseException:
        for _, shim in found.awake + found.asleep:
            shim.close()
        raise
    return found


def keep_again(dead: Journal) -> None:
    """What ``recover`` does for suspended jobs: the arenas that they let go of for CRIU are theirs again.

    Raises:
        LostMemory: nobody has one any more.
        FailedUndone: somebody could not be asked.
    """
    asleep = [m for m in dead.header.members if dead.began("unkeep", m.pid) and m.identity.alive()]
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
            for fd in fds:
                os.close(fd)

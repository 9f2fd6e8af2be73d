"""The driver's calls as steps: lock, checkpoint, restore, unlock, and the one way back from all of them."""

from __future__ import annotations

from collections.abc import Sequence

from limosa.gpu import State
from limosa.operation import driver_steps, estimate, places, room
from limosa.operation.holding import refuse_growth, weigh_again
from limosa.operation.journal import Member, Noted
from limosa.operation.parked.bulk import Bulk
from limosa.operation.parked.gates import refuse_shut
from limosa.operation.parked.recovering import is_suspended
from limosa.operation.step import HOME, NOTHING, Finished, Left, Shape, Step, free, unsaid
from limosa.operation.steps.on_gpus import OnGpus
from limosa.operation.turns import COME, GO
from limosa.process.records import SuspendRecord
from limosa.terms import JobState, Release


class ReadyMemory(Step[OnGpus]):
    """Host memory for what the driver saves is made ready, while the job runs."""

    name, still, undone = "ready", False, "ready"
    left = "undone: the shim releases it as soon as nobody is connected"

    def applies(self, op: OnGpus) -> bool:
        return op.by_driver

    words, cost = unsaid, free

    def do(self, op: OnGpus) -> None:
        carrier = op.carrier
        op.bulk = Bulk(op.members, carrier.shims, carrier.others) if carrier is not None else Bulk(op.members)
        op.bulk.prepare()

    def undo(self, op: OnGpus) -> None:
        """Host memory that is still ready is released."""
        if op.bulk is not None:
            op.bulk.let_go()

    release = undo


class _DriverStep(Step[OnGpus], abstract=True):
    """Undone by asking the driver for each process's state, and leading it to the one that it had."""

    undone = HOME

    def applies(self, op: OnGpus) -> bool:
        return op.by_driver

    def undo(self, op: OnGpus) -> None:
        """The driver is asked for each process's state, and brings it back to the state and the GPU that it had."""
        work = op.work
        driver_steps.bring_back(work.driver, op.members, work.journal, work.id, work.progress, op.shims)


class Lock(_DriverStep):
    """The driver locks all members, in order. Limosa then checks that the job has not grown. A locked job cannot."""

    name, still, tells, after, stops, turn = "lock", True, "locking", "locked", False, GO
    left = "undone: every process is brought back to the state and the GPU that it had"

    def words(self, shape: Shape) -> str:
        return f"lock {pids(shape.awake)}" if shape.awake and not shape.alone else ""

    def cost(self, shape: Shape) -> float:
        return estimate.LOCK_FIXED if shape.members and not shape.alone else 0.0

    def do(self, op: OnGpus) -> None:
        driver_steps.lock(op.work, op.members)
        for prepared in op.prepared:
            refuse_growth(op.work.driver, prepared)
        if op.members:
            weigh_again(op.work, op.verb.comes, op.members)


class Checkpoint(_DriverStep):
    """The driver checkpoints all members at once: what it carries goes to each process's host memory.

    ``copies``: bytes a second of a copy that is made beside it, or 0.
    """

    name, still, tells, after, stops = "checkpoint", True, "device memory → host memory", "checkpointed", True
    left = Lock.left

    def __init__(self, copies: float = 0.0):
        self.copies = copies

    def size(self, op: OnGpus) -> int:
        return estimate.device_bytes(op.members)

    def words(self, shape: Shape) -> str:
        what = "what is left" if shape.parked else "device memory"
        return f"checkpoint {pids(shape.awake)}: {what} to host memory" if shape.awake and not shape.alone else ""

    def cost(self, shape: Shape) -> float:
        if shape.alone or not shape.awake:
            return 0.0
        seconds = estimate.checkpoint_seconds(shape.members)
        return less_parked(shape, seconds, estimate.CHECKPOINT_RATE, estimate.CHECKPOINT_FIXED, self.copies)

    def do(self, op: OnGpus) -> None:
        work, members = op.work, op.members
        to_come = estimate.checkpoint_seconds(members) + estimate.restore_seconds(members)
        work.check_pause(to_come, estimate.LOCK_FIXED)
        if work.claim is not None:  # the way back is spoken for as well, from the moment others could take it
            for uuid, size in room.needs(members, home=True).items():
                work.claim.gpus[uuid] = max(work.claim.gpus.get(uuid, 0), size)
            work.claim.save()
        driver_steps.checkpoint(work, members)


class Restore(_DriverStep):
    """The driver restores all members at once, each with its map. Limosa tells each shim where its process is.

    ``copies``: bytes a second of a copy that is made beside it, or 0.
    """

    name, still, tells, after, stops, turn = "restore", True, "host memory → device memory", "locked", True, COME
    left = "finished (unlocked) if no memory is parked and every process was restored; otherwise undone"

    def __init__(self, copies: float = 0.0):
        self.copies = copies

    def applies(self, op: OnGpus) -> bool:
        return bool(op.asleep)

    def size(self, op: OnGpus) -> int:
        return estimate.device_bytes(op.asleep)

    def words(self, shape: Shape) -> str:
        if shape.alone:
            return ""
        changed = {a: b for m in shape.members for a, b in m.map.items() if a != b}
        index = shape.indices
        told = ", ".join(f"GPU {index.get(a, a)} → GPU {index.get(b, b)}" for a, b in changed.items())
        return f"restore {pids(shape.members)}" + (f" with {told}" if told else "")

    def cost(self, shape: Shape) -> float:
        if shape.alone:
            return 0.0
        seconds = estimate.restore_seconds(shape.members)
        return less_parked(shape, seconds, estimate.RESTORE_RATE, estimate.RESTORE_FIXED, self.copies)

    def do(self, op: OnGpus) -> None:
        driver_steps.restore(op.work, op.asleep, op.shims)
        if op.verb.takes_back:
            op.work.has_taken(room.needs(op.members))

    def goes_on(self, left: Left) -> Finished | None:
        dead = left.dead
        if left.parked or dead.began(Noted.UNDO) or dead.began(Noted.RESTORE_HOME):
            return None  # a recover before this one may have led it home, and not have known that it had
        if not all(
            s in (State.LOCKED, State.RUNNING) and dead.began(Noted.RESTORE, pid) for pid, s in left.states.items()
        ):
            return None
        places.tell(dead.header.id, [m for m in left.alive if m.changes_gpu])
        for member in left.alive:
            if left.states[member.pid] == State.LOCKED:
                left.driver.unlock(member.pid, limit=driver_steps.CALL_SECONDS)
        return Finished("everything was restored: unlocked it (finished)", "running")


class Unlock(_DriverStep):
    """The driver unlocks all members, in order."""

    name, still, tells, after = "unlock", True, "unlocking", "running"
    left = Restore.left

    def applies(self, op: OnGpus) -> bool:
        return bool(op.locked)

    def words(self, shape: Shape) -> str:
        return f"unlock {pids(shape.members)}" if not shape.alone else ""

    cost = free

    def do(self, op: OnGpus) -> None:
        driver_steps.unlock(op.work, op.locked)


class LastLook(Step[OnGpus]):
    """Limosa looks for closed gates that this operation will not open: such a process would stand still for ever.

    It changes nothing. What was noted of a suspend is forgotten once all is done.
    """

    name, still, undone = "look", False, NOTHING
    left = Restore.left

    words, cost = unsaid, free

    def do(self, op: OnGpus) -> None:
        carried = op.carrier.shims if op.carrier is not None else {}
        ours = {*carried, *(op.bulk.pids if op.bulk is not None else ())}
        refuse_shut([m for m in op.members if m.pid not in ours])

    def release(self, op: OnGpus) -> None:
        """The record that the job is suspended is removed."""
        for prepared in op.prepared:
            SuspendRecord(root=prepared.root).forget()


class StaySuspended(Step[OnGpus]):
    """The arena is handed to the job, and a record is written. From then on the job counts as suspended.

    There is nothing to undo: it is the last thing.
    """

    name, still, after, stops, undone = "keep", True, "checkpointed", True, NOTHING
    left = "finished if the record was written and vault and job have all memory; otherwise undone"

    words, cost = unsaid, free

    def do(self, op: OnGpus) -> None:
        for member in op.members:
            member.identity.check()
        if op.carrier is not None:
            op.carrier.arrive()
        driver_steps.leave_suspended(op.members, release=op.release)

    def goes_on(self, left: Left) -> Finished | None:
        header, dead = left.dead.header, left.dead
        living = [root for root in header.roots if root.alive()]
        records = [r for root in living if (r := SuspendRecord.of(root, whole=True)) and r.since >= header.since]
        if len(records) < len(living):
            return None
        if records:
            release = records[0].release
        elif dead.began(Noted.UNDO) or dead.began(Noted.RESTORE_HOME):
            return None
        else:  # a process that has ended has no record; those that it has left behind may be suspended all the same
            release = Release.ALL if State.CHECKPOINTED in left.states.values() else Release.MEMORY_ONLY
        if not is_suspended(header.id, release, left.alive, left.states):
            return None
        return Finished(
            "it was suspended: finished", JobState.CHECKPOINTED if release == Release.ALL else JobState.PARKED
        )


def less_parked(shape: Shape, seconds: float, rate: float, fixed: float, copies: float = 0.0) -> float:
    """What a step of the driver's costs (``seconds`` if it carried everything) where the carrier takes what is parked.

    In bytes a second: ``rate`` is the driver's, ``copies`` that of a copy beside it (or 0). ``fixed``: seconds that it
    takes with nothing to carry.
    """
    if not shape.parked:
        return seconds
    beside = shape.parked / copies if copies else 0.0
    return max(fixed, seconds - shape.parked / rate, beside)


def pids(members: Sequence[Member]) -> str:
    """The pids of members, for a sentence."""
    return ", ".join(str(m.pid) for m in members)

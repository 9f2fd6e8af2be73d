"""Communicators of NCCL between the job's processes: closed before the job leaves, made again when it is back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from limosa import gpu
from limosa.errors import LimosaError
from limosa.gpu import State
from limosa.operation import driver_steps
from limosa.operation.communicators import closing
from limosa.operation.communicators.meeting import Said
from limosa.operation.journal import Member, Noted, Phase
from limosa.operation.parked import recovering
from limosa.operation.step import NOTHING, Finished, Left, Op, Shape, Step, free, unsaid
from limosa.operation.steps.on_gpus import OnGpus
from limosa.parking.shim import Shim
from limosa.terms import JobState

CLOSING, MAKING = 0.3, 0.05
"""Seconds that took at most, but for rare ones; measured with two ranks on H200 (docs/caveats.md)."""
_UNDO = "communicators"  # what its undo is called in the journal


class _OfRanks(Step[OnGpus], abstract=True):
    undone = _UNDO
    left = "undone: the communicators are made again"

    def applies(self, op: OnGpus) -> bool:
        return op.meets

    def undo(self, op: OnGpus) -> None:
        """The communicators are made again, and all ranks go on; those of a job that stays suspended stay closed."""
        if op.met:
            _back(op.work.driver, op.ranks, op.shims)


class WayBackOfCommunicators(_OfRanks):
    """Nothing is done yet. The way back of the communicators is the last one: it needs gates that are open."""

    name, still = "nccl", False

    words, cost = unsaid, free

    def do(self, op: OnGpus) -> None:
        pass


class CloseCommunicators(_OfRanks):
    """All ranks stop at the same call of every communicator. Those between processes are closed; handles stay valid."""

    name, still, tells, stops = "nccl-close", True, "closing communicators", True

    def words(self, shape: Shape) -> str:
        if not shape.awake:
            return ""
        if not shape.communicators:
            return "bring its ranks to the same call of NCCL" if shape.within else ""
        n = shape.communicators
        return f"close {n} NCCL communicator{'s' if n > 1 else ''} between its processes, at the same call of each"

    def cost(self, shape: Shape) -> float:
        return CLOSING if shape.communicators and shape.awake else 0.0

    def do(self, op: OnGpus) -> None:
        work = op.work
        ranks = closing.ranks_of(op.ranks, op.shims)
        try:
            groups = [group for group in closing.apart(ranks) if _meets([rank.said for rank in group])]
            if not groups:
                return
            work.note(Noted.COMMUNICATORS, Phase.BEGIN)
            op.met = True
            for group in groups:
                with work.spent("nccl-meet"):
                    closing.meet(group, work)
                closing.close(group, work)
        finally:
            closing.leave(ranks)

    def mend(self, left: Left) -> None:
        if left.dead.began(Noted.COMMUNICATORS):
            _back(left.driver, [member for member in left.alive if member.was != State.CHECKPOINTED])


def _back(driver: gpu.Driver, ranks: Sequence[Member], shims: Mapping[int, Shim] = MappingProxyType({})) -> None:
    """Makes again those of jobs that run. One that the driver does not speak of keeps no other job's closed."""
    living, asleep = [m for m in ranks if m.identity.alive()], set()
    untold: LimosaError | None = None
    for member in living:
        try:
            if driver_steps.settled_state(driver, member.pid) == State.CHECKPOINTED:
                asleep.add(member.root)
        except LimosaError as error:
            asleep.add(member.root)
            untold = untold or error
    closing.back([m for m in living if m.root not in asleep], shims)
    if untold is not None:
        raise untold


def _meets(saids: Sequence[Said]) -> bool:
    return bool(closing.between(saids)) or closing.within(saids)


class JoinCommunicators(Step[Op]):
    """The communicators are made again with new connections, and the ranks go on."""

    name, still, tells, undone = "nccl-join", True, "making communicators again", NOTHING
    left = "finished: the communicators are made again"

    def applies(self, op: Op) -> bool:
        return op.meets

    def words(self, shape: Shape) -> str:
        return "make the communicators again" if shape.communicators else ""

    def cost(self, shape: Shape) -> float:
        return MAKING if shape.communicators else 0.0

    def do(self, op: Op) -> None:
        if not op.closed:
            return
        try:
            closing.back(op.ranks, op.shims, lambda: op.work.try_note(Noted.JOIN, Phase.BEGIN))
        except LimosaError:
            if any(member.identity.alive() for member in op.ranks):  # some are half made: nobody can be led home
                op.work.try_note(Noted.JOIN, Phase.BEGIN)
                op.work.only_forward("the job is where it was to go, and waits: limosa recover makes its communicators")
            raise

    def goes_on(self, left: Left) -> Finished | None:
        """They are made by whoever finds it finished."""
        if not left.dead.began(Noted.JOIN):
            return None
        if left.parked:
            try:
                recovering.go_on(left.dead)
            except LimosaError:
                with contextlib.suppress(LimosaError):
                    closing.back(left.alive)  # one that fails keeps no other user's ranks
                raise
        return Finished("all was where it was to go: made its communicators again (finished)", JobState.RUNNING)


class JoinAgain(JoinCommunicators):
    """Of a job that runs on, the communicators are made again with new connections, and the ranks go on."""

    def words(self, shape: Shape) -> str:
        return super().words(shape) if shape.leave_running else ""

    def cost(self, shape: Shape) -> float:
        return super().cost(shape) if shape.leave_running else 0.0

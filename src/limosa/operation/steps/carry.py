"""Device memory that goes another way, beside the driver's steps: what the carriers do, as steps."""

from __future__ import annotations

from collections.abc import Sequence

from limosa.errors import CannotBeMoved, LimosaError, NoRoomOnGpu, NoRoomOnHost, NoSuchProcess, Reason
from limosa.gpu import State
from limosa.operation import estimate
from limosa.operation.holding import Grew, refuse_growth
from limosa.operation.parked import recovering
from limosa.operation.parked.aside import aside_shims
from limosa.operation.parked.carrier import Connected
from limosa.operation.parked.moving import Moving
from limosa.operation.parked.parkable import held_still, shims_of
from limosa.operation.parked.resuming import Resuming
from limosa.operation.parked.still import Still
from limosa.operation.parked.suspending import Suspending
from limosa.operation.step import BACK, NOTHING, Finished, Left, Shape, Step, free, unsaid
from limosa.operation.steps.driver import pids
from limosa.operation.steps.on_gpus import OnGpus
from limosa.operation.turns import COME, GO
from limosa.parking.protocol import Stand
from limosa.process.identity import ending
from limosa.progress import Progress
from limosa.terms import Release


class _Carried(Step[OnGpus], abstract=True):
    """Undone by giving every process its own memory back and opening its gate; the driver is back by then."""

    undone = BACK
    left = (
        "undone: every process gets its memory back and its gate opens. If its GPU is full, an arena takes the memory"
    )

    def applies(self, op: OnGpus) -> bool:
        return op.carrier is not None

    def undo(self, op: OnGpus) -> None:
        """Every process gets its own memory back, and its gate opens. What was suspended before stays suspended."""
        if op.carrier is not None:
            op.carrier.back()

    cost = free


class Prepare(_Carried):
    """Memory is made where the job's memory goes; vault and mover then hold both. A running job runs on meanwhile.

    Where that cannot be, the driver carries everything, unless it would lose it.
    """

    name, still = "prepare", False

    def applies(self, op: OnGpus) -> bool:
        return True  # it finds out whether there is anything to carry

    words = unsaid

    def do(self, op: OnGpus) -> None:
        shims = _shims(op)
        if not shims and not op.by_driver:
            raise Grew(pids=pids(op.members))
        others = _others(op, shims)
        if not shims:
            op.carrier = Still(op.work, others, stays=op.verb.sets_aside) if others else None
            return
        op.work.progress(Progress(self.name, message="memory on the other side"))
        if op.verb.takes_back:
            op.carrier = Resuming(op.work, shims, others)
            op.carrier.prepare()
        else:
            self._prepare(op, shims, others)
        if op.carrier is not None:
            op.work.parked_bytes = op.carrier.bytes

    def _prepare(self, op: OnGpus, shims: Sequence[Connected], others: Sequence[Connected]) -> None:
        """For a move or a suspend; where it fails the driver does it, but for what it would lose (CannotBeMoved)."""
        work, members = op.work, op.members
        pieces = [piece for _, shim in shims for piece in shim.memories()]
        came_so = any(piece.imported for piece in pieces)
        carrier: Suspending | Moving = Moving(work, shims, others)
        if op.verb.sets_aside:
            carrier = Suspending(work, shims, others, op.release)
        op.carrier = carrier
        try:
            carrier.prepare()
        except (LimosaError, OSError) as error:
            op.carrier = None
            if isinstance(carrier, Suspending):
                carrier.let_arenas_go()
            carrier.release()  # no gate was closed yet
            for member in members:
                if ending(member.pid):  # nothing else is in the way
                    raise NoSuchProcess(pid=member.pid) from error
            alone = not op.by_driver or not all(p.driver_fits for p in op.prepared)
            if alone or isinstance(error, (CannotBeMoved, NoRoomOnHost)):
                raise
            if came_so and isinstance(error, NoRoomOnGpu):
                raise
            if came_so:
                text = f"its memory came by the parked way, which is not open now ({error}); the driver would lose it"
                raise CannotBeMoved(detail=text) from error
            size = sum(piece.bytes for piece in pieces if not piece.shared)
            cost = op.verb.by_the_driver(members, size)
            text = f"the parked way is not open ({error}): the driver carries the memory, {cost}"
            work.warnings.append(Reason(id="driver-way", text=text))
            op.carrier = Still(work, _others(op, []), stays=op.verb.sets_aside)

    def release(self, op: OnGpus) -> None:
        """Vault and mover release what they held for the way back, and the connections to the job are closed."""
        if op.carrier is not None:
            op.carrier.release()


class Hold(_Carried):
    """All gates close at once. Limosa follows what was allocated or freed meanwhile, and the memory is unmapped.

    Then the copy begins; the driver does its part meanwhile. ``goes``: what becomes of the memory, in words.
    """

    name, still, turn = "park", True, GO

    def __init__(self, goes: str):
        self.goes = goes

    def words(self, shape: Shape) -> str:
        if shape.release != Release.ALL:
            return "hold the job still; device memory → host memory; its context stays"
        return f"hold {pids(shape.awake)} still; {self.goes}" if shape.parked and shape.awake else ""

    def do(self, op: OnGpus) -> None:
        op.carried.hold()
        if not op.by_driver:  # a locked job cannot grow, and this one is not locked
            for prepared in op.prepared:
                refuse_growth(op.work.driver, prepared)
        op.carried.copy()


class Fetch(_Carried):
    """The copy back from the arena begins. The driver's steps run beside it."""

    name, still, turn = "fetch", True, COME

    def words(self, shape: Shape) -> str:
        return "hold the job still; host memory → device memory; its context stays" if shape.away else ""

    def do(self, op: OnGpus) -> None:
        op.carried.copy()


class CopyWait(_Carried):
    """Limosa waits until the copy is complete."""

    name, still = "copy-wait", True

    words = unsaid

    def cost(self, shape: Shape) -> float:
        """Where the driver has no part in it this is all; else it is done beside the driver's steps, which say so."""
        if not shape.alone:
            return 0.0
        bytes_ = max(shape.parked, estimate.device_bytes(shape.away))
        return estimate.GATE_FIXED + bytes_ / estimate.ARENA_RATE

    def do(self, op: OnGpus) -> None:
        op.carried.wait()


class Arrive(_Carried):
    """The memory is mapped at the addresses that it had.

    ``stops``: whether the operation may still be cancelled before it: a resume may, of which the copy is the longest
    part; a move is past the longer half by then.
    """

    name, still, undone = "map", True, "parked-target"

    def __init__(self, *, stops: bool = False):
        self.stops = stops

    def words(self, shape: Shape) -> str:
        return "device memory is mapped where it was; the job goes on" if shape.parked and not shape.alone else ""

    def do(self, op: OnGpus) -> None:
        op.carried.arrive()

    def undo(self, op: OnGpus) -> None:
        """Memory that was mapped at the destination is unmapped."""
        op.carried.leave()


class Open(_Carried):
    """The gates open. After the first one there is no way back."""

    name, still, after, undone = "open", True, "running", NOTHING
    left = "finished: every gate is opened"

    words = unsaid

    def do(self, op: OnGpus) -> None:
        op.carried.open()

    def goes_on(self, left: Left) -> Finished | None:
        """Where a gate was going to be opened, or a process runs with what was mapped there."""
        if not left.parked or not recovering.go_on(left.dead):
            return None
        return Finished("every gate is open: finished", "running")


def _others(op: OnGpus, shims: Sequence[Connected]) -> Sequence[Connected]:
    """Those besides whose gates are to close, or were closed by a suspend; none where the driver has no part in it."""
    if not op.by_driver:
        return []
    was, stand = (State.CHECKPOINTED, Stand.CLOSED) if op.verb.takes_back else (State.RUNNING, Stand.OPEN)
    try:
        return held_still([m for m in op.members if m.was == was], stand, but={m.pid for m, _ in shims})
    except BaseException:
        for _, shim in shims:
            shim.close()
        raise


def _shims(op: OnGpus) -> Sequence[Connected]:
    """Connections to those whose memory is carried; the caller closes them."""
    if op.verb.takes_back:
        return aside_shims([m for m in op.members if m.was == State.CHECKPOINTED or m.away])
    return shims_of([m for m in op.members if m.was == State.RUNNING and (op.verb.sets_aside or m.changes_gpu)])

"""A job into an image: what ``checkpoint`` does beside the driver's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limosa.operation import estimate, room
from limosa.operation.step import BACK, NOTHING, Shape, Step, free, unsaid
from limosa.operation.steps.carry import Hold
from limosa.operation.steps.driver import Restore, Unlock, pids

if TYPE_CHECKING:
    from limosa.operation.steps.dumping import Dumping

_RECOVERED = "the job is brought back to what it was; a whole image is kept, an unfinished one removed"


class _Dumped(Step["Dumping"], abstract=True):
    """Undone, where there is anything to undo, by giving the job back what was taken from it."""

    undone, left, cost = BACK, _RECOVERED, free

    def undo(self, op: Dumping) -> None:
        op.not_saved()


class Save(_Dumped):
    """Device memory is copied into the image while the job runs, round after round."""

    name, still = "save", False

    def applies(self, op: Dumping) -> bool:
        return bool(op.members)

    def words(self, shape: Shape) -> str:
        if not shape.parked:
            return ""
        size = f"copy {room.gib(shape.parked)} of device memory"
        return f"{size} into the image while the job runs" if shape.awake else f"{size} from host memory into the image"

    def cost(self, shape: Shape) -> float:
        return shape.parked / min(estimate.CHUNKS_OUT_RATE, shape.rate or estimate.CHUNKS_OUT_RATE)

    def do(self, op: Dumping) -> None:
        op.save()


class HoldForImage(Hold):
    """All gates close and the memory is unmapped. What has changed since it was copied is copied again."""

    left = _RECOVERED

    def __init__(self) -> None:
        super().__init__("")

    def words(self, shape: Shape) -> str:
        return "hold the job still" if shape.parked and shape.awake else ""


class Leave(_Dumped):
    """Limosa closes all connections to the job: CRIU would find them. A suspended job releases its arena."""

    name, still, words = "leave", True, unsaid

    def applies(self, op: Dumping) -> bool:
        return bool(op.members)

    def do(self, op: Dumping) -> None:
        op.leave()


class Dump(_Dumped):
    """CRIU writes the job. If the job is to end, the image is committed while CRIU still holds it frozen."""

    name, still, tells, stops = "dump", True, "criu dump", True
    undone = NOTHING  # CRIU undoes what it has done; the folder is the operation's from its beginning

    def size(self, op: Dumping) -> int:
        return op.prepared[0].host_bytes

    def words(self, shape: Shape) -> str:
        return "criu dump of " + ("1 process" if shape.processes == 1 else f"{shape.processes} processes")

    def cost(self, shape: Shape) -> float:
        return estimate.dump_seconds(shape.host_bytes + shape.beside)

    def do(self, op: Dumping) -> None:
        op.dump()


class RestoreAgain(Restore):
    """A job that runs on is restored where it was."""

    left = _RECOVERED

    def words(self, shape: Shape) -> str:
        return f"restore {pids(shape.members)}" if shape.leave_running and shape.awake else ""

    def cost(self, shape: Shape) -> float:
        return super().cost(shape) if shape.leave_running else 0.0


class UnlockAgain(Unlock):
    """A job that runs on is unlocked."""

    left = _RECOVERED

    def words(self, shape: Shape) -> str:
        return super().words(shape) if shape.leave_running and shape.awake else ""


class GoOn(_Dumped):
    """A job that runs on has its memory mapped at the addresses that it had, and its gates open."""

    name, still, tells, after = "map", True, "memory back", "running"

    def applies(self, op: Dumping) -> bool:
        return op.leave_running

    def words(self, shape: Shape) -> str:
        runs = shape.leave_running and shape.parked and shape.awake
        return "device memory is mapped where it was; the job goes on" if runs else ""

    def do(self, op: Dumping) -> None:
        op.go_on()


class Commit(_Dumped):
    """The image is hashed, synced and renamed. From then on it counts. For a job that ends, ``dump`` has done this."""

    name, still, tells, undone = "commit", False, "hash and sync", NOTHING

    def applies(self, op: Dumping) -> bool:
        return op.leave_running

    def words(self, shape: Shape) -> str:
        return f"hash and sync, then commit: rename to {shape.output}"

    def cost(self, shape: Shape) -> float:
        return (shape.host_bytes + shape.beside) / estimate.HASH_RATE

    def do(self, op: Dumping) -> None:
        op.commit()


class SeeOff(_Dumped):
    """Limosa waits until a job that ends is reaped, so that its pids are free."""

    name, still, tells, undone = "reap", False, "waiting until the pids are free", NOTHING

    def applies(self, op: Dumping) -> bool:
        return not op.leave_running

    def words(self, shape: Shape) -> str:
        if shape.leave_running:
            return ""
        logs = ", its logs go too" if shape.log_goes else ""
        return f"remove {shape.container}{logs}" if shape.container else "end the job"

    def do(self, op: Dumping) -> None:
        op.see_off()

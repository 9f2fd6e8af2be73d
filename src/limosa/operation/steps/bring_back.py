"""An image into a job: what ``restore`` does. Until the job runs its image is the copy, and all undo is its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limosa.operation import estimate
from limosa.operation.step import NOTHING, Shape, Step, free, unsaid
from limosa.operation.steps.driver import less_parked, pids

if TYPE_CHECKING:
    from limosa.operation.steps.returning import Returning

TREE = "tree"
"""What the end of a half-restored job is called in journals."""

_RECOVERED = "finished where CRIU was done and everything fits; else ended: the image is the copy"


class _Returned(Step["Returning"], abstract=True):
    """Undone by ending the tree: the image is the copy."""

    undone, left = TREE, _RECOVERED

    words, cost = unsaid, free

    def undo(self, op: Returning) -> None:
        """What there is of the job is ended: the image is the copy."""
        op.end_tree()


class Sees(_Returned):
    """What the job is to see of the GPUs is noted, where others are hidden from it, before anything of it runs."""

    name, still, undone = "sees", False, "sees"

    def do(self, op: Returning) -> None:
        op.show_gpus()

    def undo(self, op: Returning) -> None:
        """It is forgotten."""
        op.hide_gpus()


class CutBack(_Returned):
    """Files that have grown since are cut back to the size that they had; their tails are kept."""

    name, still, undone = "rewind", False, "rewind"

    def words(self, shape: Shape) -> str:
        return ", ".join(f"cut {path} back to {size} bytes" for path, size in shape.files)

    def do(self, op: Returning) -> None:
        op.rewind()

    def undo(self, op: Returning) -> None:
        """Their tails are put back."""
        op.wind_forward()


class _OfChunks(_Returned, abstract=True):
    """Where the image has device memory as chunks."""

    def applies(self, op: Returning) -> bool:
        return bool(op.manifest.device)


class Load(_OfChunks):
    """Memory is made on the GPUs and filled from the image's chunks, beside what comes next."""

    name, still, tells, undone = "prepare", False, "memory on the GPUs", "chunks"

    def do(self, op: Returning) -> None:
        op.load()

    def undo(self, op: Returning) -> None:
        """It is let go of."""
        op.unload()


class Verified(_Returned):
    """What CRIU reads of the image was compared with its hashes. It changes nothing."""

    name, still, undone = "verified", False, NOTHING

    def words(self, shape: Shape) -> str:
        return "verify every hash" if shape.verify else ""

    def cost(self, shape: Shape) -> float:
        return (shape.host_bytes + shape.beside) / estimate.HASH_RATE

    def do(self, op: Returning) -> None:
        op.checked.wait()


class Names(_Returned):
    """What the job shared by name is made anew, and the names of its semaphores."""

    name, still, undone = "names", False, "names"

    def do(self, op: Returning) -> None:
        op.make_names()

    def undo(self, op: Returning) -> None:
        """It is removed again."""
        op.take_names_away()


class CriuRestore(_Returned):
    """CRIU brings the tree back."""

    name, noted, still, tells, after = "criu", "criu-restore", False, "criu restore", "checkpointed"

    def size(self, op: Returning) -> int:
        return op.manifest.host_bytes

    def words(self, shape: Shape) -> str:
        return "criu restore of " + ("1 process" if shape.processes == 1 else f"{shape.processes} processes")

    def cost(self, shape: Shape) -> float:
        return estimate.CRIU_RESTORE_FIXED + (shape.host_bytes + shape.beside) / estimate.CRIU_RESTORE_RATE

    def do(self, op: Returning) -> None:
        op.criu()


class RestoreThere(_Returned):
    """The driver restores what it carries, with the map that puts it on this machine's GPUs."""

    name, still, tells, after, stops = "restore", False, "host memory → device memory", "locked", True

    def applies(self, op: Returning) -> bool:
        return bool(op.members)

    def size(self, op: Returning) -> int:
        return estimate.device_bytes(op.members)

    def words(self, shape: Shape) -> str:
        return f"restore {pids(shape.members)}" if shape.members else ""

    def cost(self, shape: Shape) -> float:
        seconds = estimate.restore_seconds(shape.members)
        return less_parked(shape, seconds, estimate.RESTORE_RATE, estimate.RESTORE_FIXED)

    def do(self, op: Returning) -> None:
        op.restore()


class UnlockThere(_Returned):
    """The driver unlocks; where there are chunks the gates are closed still."""

    name, still, tells, after = "unlock", False, "unlocking", "running"

    def applies(self, op: Returning) -> bool:
        return bool(op.members)

    def words(self, shape: Shape) -> str:
        return f"unlock {pids(shape.members)}" if shape.members else ""

    def do(self, op: Returning) -> None:
        op.unlock()


class Loaded(_OfChunks):
    """Every byte that comes from chunks is there, and was compared."""

    name, still, tells = "wait", False, "device memory"

    def cost(self, shape: Shape) -> float:
        """What is left of it: it is done beside the steps before."""
        beside = Verified().cost(shape) + CriuRestore().cost(shape)
        return max(0.0, shape.parked / estimate.CHUNKS_IN_RATE - beside)

    def do(self, op: Returning) -> None:
        op.all_loaded()


class ArriveThere(_OfChunks):
    """That memory is mapped where it was, and the gates are opened: from the first one on there is no way back."""

    name, still, tells, after = "map", False, "memory", "running"

    def do(self, op: Returning) -> None:
        op.arrive()

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

_RECOVERED = "finished if CRIU was done and everything fits; otherwise the job is ended: the image is the copy"


def _who(shape: Shape) -> str:
    """Who comes back: the pids in an image of a container are its own, and mean nothing here."""
    return shape.container or pids(shape.members)


class _Returned(Step["Returning"], abstract=True):
    """Undone by ending the tree: the image is the copy."""

    undone, left = TREE, _RECOVERED

    words, cost = unsaid, free

    def undo(self, op: Returning) -> None:
        """All processes of the restored job are ended; the image is the copy."""
        op.end_tree()


class Sees(_Returned):
    """For a job of ``limosa run --gpus``, the file that lists its GPUs is written before any process runs."""

    name, still, undone = "sees", False, "sees"

    def do(self, op: Returning) -> None:
        op.show_gpus()

    def undo(self, op: Returning) -> None:
        """The file that lists the job's GPUs is removed."""
        op.hide_gpus()


class CutBack(_Returned):
    """Files that have grown are cut back to the size that they had. Their tails are kept."""

    name, still, undone = "rewind", False, "rewind"

    def words(self, shape: Shape) -> str:
        return ", ".join(f"cut {path} back to {size} bytes" for path, size in shape.files)

    def do(self, op: Returning) -> None:
        op.rewind()

    def undo(self, op: Returning) -> None:
        """Files that were cut get their tails back."""
        op.wind_forward()


class _OfChunks(_Returned, abstract=True):
    """Where the image has device memory as chunks."""

    def applies(self, op: Returning) -> bool:
        return bool(op.manifest.device)


class Load(_OfChunks):
    """Memory is made on the GPUs and filled from the image's chunks, beside the steps that follow."""

    name, still, tells, undone = "prepare", False, "memory on the GPUs", "chunks"

    def do(self, op: Returning) -> None:
        op.load()

    def undo(self, op: Returning) -> None:
        """Memory made for chunks is released."""
        op.unload()


class Verified(_Returned):
    """CRIU's files are compared with their hashes; pages of memory (a container's not) while CRIU copies them.

    It changes nothing.
    """

    name, still, undone = "verified", False, NOTHING

    def words(self, shape: Shape) -> str:
        return "verify every hash" if shape.verify else ""

    def cost(self, shape: Shape) -> float:
        return (shape.host_bytes + shape.beside) / estimate.HASH_RATE

    def do(self, op: Returning) -> None:
        op.verified()


class Names(_Returned):
    """Shared memory and semaphores that the job used by name are made anew."""

    name, still, undone = "names", False, "names"

    def do(self, op: Returning) -> None:
        op.make_names()

    def undo(self, op: Returning) -> None:
        """Shared memory and names made for the job are removed."""
        op.take_names_away()


class CriuRestore(_Returned):
    """CRIU restores the tree of processes."""

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
    """The driver restores what it carries, with the map to this machine's GPUs."""

    name, still, tells, after, stops = "restore", False, "host memory → device memory", "locked", True

    def applies(self, op: Returning) -> bool:
        return bool(op.members)

    def size(self, op: Returning) -> int:
        return estimate.device_bytes(op.members)

    def words(self, shape: Shape) -> str:
        return f"restore {_who(shape)}" if shape.members else ""

    def cost(self, shape: Shape) -> float:
        seconds = estimate.restore_seconds(shape.members)
        return less_parked(shape, seconds, estimate.RESTORE_RATE, estimate.RESTORE_FIXED)

    def do(self, op: Returning) -> None:
        op.restore()


class UnlockThere(_Returned):
    """The driver unlocks all members. Gates of processes with chunks are still closed."""

    name, still, tells, after = "unlock", False, "unlocking", "running"

    def applies(self, op: Returning) -> bool:
        return bool(op.members)

    def words(self, shape: Shape) -> str:
        return f"unlock {_who(shape)}" if shape.members else ""

    def do(self, op: Returning) -> None:
        op.unlock()


class Loaded(_OfChunks):
    """Limosa waits until every byte from chunks has arrived and was compared."""

    name, still, tells = "wait", False, "device memory"

    def cost(self, shape: Shape) -> float:
        """What is left of it: it is done beside the steps before."""
        beside = Verified().cost(shape) + CriuRestore().cost(shape)
        return max(0.0, shape.parked / estimate.CHUNKS_IN_RATE - beside)

    def do(self, op: Returning) -> None:
        op.all_loaded()


class ArriveThere(_Returned):
    """Memory from chunks is mapped at the addresses that it had, and the gates open. Then there is no way back."""

    name, still, tells, after = "map", False, "memory", "running"

    def applies(self, op: Returning) -> bool:
        return bool(op.manifest.device or op.shut)

    def do(self, op: Returning) -> None:
        op.arrive()

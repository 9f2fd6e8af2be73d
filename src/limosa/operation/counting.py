"""What a process holds on a GPU, and how much of it the driver carries: NVML's figure and the shim's together.

NVML counts imported memory (it came by the parked way, or was given back after an undone one) for nobody: seen on two
H200 with driver 580.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from limosa.errors import LimosaError
from limosa.gpu import GpuProcess, Inventory
from limosa.operation import claims
from limosa.operation.journal import Member
from limosa.parking.answers import Memory
from limosa.parking.shim import Shim, under_shim
from limosa.process.identity import Identity

_ANSWER_SECONDS = 1.0


def by_gpu(devices: Sequence[str], pieces: Iterable[Memory]) -> dict[str, tuple[int, int]]:
    """Bytes that a process has made itself, and that it has imported, by GPU UUID."""
    found: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        own, imported = found.get(devices[piece.device], (0, 0))
        size = (0, piece.bytes) if piece.imported else (piece.bytes, 0)
        found[devices[piece.device]] = own + size[0], imported + size[1]
    return found


def held(counted: int, own: int, imported: int) -> int:
    """Bytes that a process holds on a GPU: NVML's figure, made one with what its shim has made and has imported."""
    return max(counted, own) + imported


def beside(counted: int, own: int, imported: int) -> int:
    """Bytes of it that the driver carries where the shim's go the parked way."""
    return held(counted, own, imported) - own - imported


def note_beside(inventory: Inventory, member: Member, devices: Sequence[str], pieces: Iterable[Memory]) -> None:
    """Notes in ``beside`` what the driver will carry where these pieces go the parked way.

    The inventory is from before anything was unmapped; ``devices`` are the UUIDs of its GPUs by its own numbers.
    """
    parts = by_gpu(devices, pieces)
    member.beside = {
        uuid: beside(size, *parts.get(uuid, (0, 0))) for uuid, size in inventory.held({member.pid}).items()
    }


def completed(found: Inventory) -> Inventory:
    """NVML's inventory with what processes under the shim hold; one that does not answer at once is as NVML says."""
    parts: dict[int, dict[str, tuple[int, int]]] = {}
    silent = claims.being_worked_on()
    for pid in {p.pid for gpu in found.gpus for p in gpu.processes if p.pid and under_shim(p.pid)} - silent:
        with contextlib.suppress(LimosaError, OSError), Shim.to_look(Identity.of(pid), _ANSWER_SECONDS, 0.0) as shim:
            parts[pid] = by_gpu(shim.devices(), [m for m in shim.memories() if not (m.shared or m.away or m.owner)])

    def used(p: GpuProcess, uuid: str) -> GpuProcess:
        size = held(p.memory_used, *parts.get(p.pid, {}).get(uuid, (0, 0)))
        return msgspec.structs.replace(p, memory_used=size)

    gpus = [msgspec.structs.replace(gpu, processes=[used(p, gpu.uuid) for p in gpu.processes]) for gpu in found.gpus]
    return msgspec.structs.replace(found, gpus=gpus)

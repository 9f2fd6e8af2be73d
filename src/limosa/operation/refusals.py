"""Refusals that need NVML: pure functions from an inventory and the members to reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from limosa.errors import Reason
from limosa.gpu import Gpu, Inventory, State
from limosa.operation.journal import Member

SUSPEND_DRIVER, MOVE_DRIVER = 570, 580
"""The oldest driver branches with ``cuCheckpointProcess*``, and with ``gpuPairs``."""

PEER_BYTES = (512 + 480) << 20
"""From this much on a GPU (NVML's figure, so with a context of 480 MiB or more) an allocation of 512 MiB is possible.

Measured on two H200 with driver 580.159.04, 2026-11-21: a process whose GPUs have peer access to one another and that
made one cudaMalloc of 512 MiB or more is checkpointed and then cannot be restored, by no map: INVALID_VALUE, then 304
for ever. 510 MiB are restored, so are any number of smaller ones, cuMemCreate memory, and any size without peer access.
Neither peer access nor the sizes of allocations can be seen from outside."""


def gpu_refusals(
    inventory: Inventory, members: Sequence[Member], *, moves: bool, small: Collection[int] = ()
) -> list[Reason]:
    """Everything about the driver and the GPUs that forbids the operation; ``moves``: it changes GPUs.

    ``small``: processes without a large allocation of the driver's own: under the shim it is cuMemCreate memory.
    """
    by_uuid = {g.uuid: g for g in inventory.gpus}
    found = [
        *_old_driver(inventory, moves),
        *(_lost(index) for index in inventory.lost if members),
        *_mig(by_uuid, members),
        *(_peer_access(member) for member in members if member.pid not in small and _may_have_peers(member)),
        *_mps(inventory, members),
        *_chips(by_uuid, members),
    ]
    return list({(r.id, r.text): r for r in found}.values())


def _old_driver(inventory: Inventory, moves: bool) -> Iterator[Reason]:
    needed, what = (MOVE_DRIVER, "changing GPUs") if moves else (SUSPEND_DRIVER, "suspending")
    if inventory.driver_major < needed:
        text = f"driver {inventory.driver_version} is too old for {what}: {needed} or newer is needed"
        yield Reason(id="driver-too-old", text=text, exit_code=12, hint="install a newer NVIDIA driver")


def _lost(index: int) -> Reason:
    text = f"GPU {index} has fallen off the bus: a restore has to name every GPU that a job can open"
    return Reason(id="gpu-lost", text=text, exit_code=12, hint="reset that GPU, or restart the machine")


def _mig(by_uuid: Mapping[str, Gpu], members: Sequence[Member]) -> Iterator[Reason]:
    involved = {u for m in members for u in m.held} | {m.map.get(u, u) for m in members for u in m.held}
    for uuid in sorted(involved):
        if uuid in by_uuid and by_uuid[uuid].mig:
            text = f"GPU {by_uuid[uuid].index} is in MIG mode, which the driver cannot checkpoint"
            yield Reason(id="mig", text=text, exit_code=12, hint="turn MIG off on that GPU, or move to another")


def _may_have_peers(member: Member) -> bool:
    largest = max(member.held.values(), default=0)
    return member.was != State.CHECKPOINTED and len(member.held) > 1 and largest >= PEER_BYTES


def _peer_access(member: Member) -> Reason:
    text = f"process {member.pid} holds memory on {len(member.held)} GPUs: if they have peer access to one another "
    text += "and one of its allocations has 512 MiB or more, the driver cannot restore it and the job would be lost"
    hint = "if its GPUs do not copy to one another, or PyTorch runs with expandable_segments: --force=peer-access"
    return Reason(id="peer-access", text=text, exit_code=13, hint=hint, pid=member.pid, forceable=True)


def _mps(inventory: Inventory, members: Sequence[Member]) -> Iterator[Reason]:
    clients = {p.pid for g in inventory.gpus for p in g.mps_processes}
    for member in members:
        if member.pid in clients:
            text = f"process {member.pid} computes through MPS: the driver cannot checkpoint it"
            hint = "start the job without MPS"
            yield Reason(id="mps", text=text, exit_code=12, hint=hint, pid=member.pid, forceable=True)
    if inventory.mps:
        text = "an MPS server runs here; its clients cannot be checkpointed"
        hint = "--force=mps-server if this job is no client of it"
        yield Reason(id="mps-server", text=text, exit_code=12, hint=hint, forceable=True)


def _chips(by_uuid: Mapping[str, Gpu], members: Sequence[Member]) -> Iterator[Reason]:
    for member in members:
        for source, target in member.map.items():
            a, b = by_uuid.get(source), by_uuid.get(target)
            if source != target and source in member.held and a and b and not same_chip(a, b):
                text = f"GPU {a.index} is a {a.name} and GPU {b.index} a {b.name}: "
                text += "the driver can restore a job only on the same model"
                yield Reason(id="chip", text=text, exit_code=12, pid=member.pid)


def same_chip(a: Gpu, b: Gpu) -> bool:
    """Whether the driver would restore from one onto the other: equal name and equal memory size."""
    return a.name == b.name and a.memory_total == b.memory_total

"""Jobs of several ranks on the same GPUs: two that the driver has restored can hold each other up until both are lost.

The driver interrupts a process in the middle of a kernel to let another one onto the GPU. Once it has restored a
process it does so no more, and it ends that process if one of its kernels keeps others waiting for some seconds
(Xid 109, CUDA error 719: docs/caveats.md). A kernel of NCCL's waits for its peers: of two such jobs, each has one GPU
and waits for the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from limosa.errors import Reason
from limosa.gpu import Inventory
from limosa.ipc.side_by_side import within
from limosa.operation import room
from limosa.operation.communicators import peers
from limosa.operation.journal import Member
from limosa.parking.shim import under_shim

_MOST = 64
"""Processes that are asked."""


def in_the_way(inventory: Inventory, members: Sequence[Member]) -> list[Reason]:
    """Return the reason where ranks of another job are on two of the GPUs that these members go to, or stay on.

    Only processes under the shim are asked: Limosa moves no other ranks.
    """
    places, own = set(room.places(members)), {m.pid for m in members}
    if len(places) < 2:
        return []
    on: dict[int, set[int]] = {}
    for gpu in inventory.gpus:
        for process in gpu.processes if gpu.uuid in places else ():
            if process.pid not in own:
                on.setdefault(process.pid, set()).add(gpu.index)
    others = [pid for pid in list(on)[:_MOST] if under_shim(pid)]
    asked = within(peers.SECONDS, [partial(peers.ids_of, pid) for pid in others])
    ranks = sorted(pid for pid, ids in asked if ids)
    shared = sorted({index for pid in ranks for index in on[pid]})
    if len(shared) < 2:
        return []
    text = f"ranks of another job are on GPUs {', '.join(map(str, shared))} too ({peers.named(ranks)}): "
    text += "if both jobs were moved, their kernels can wait for each other until the driver ends them (CUDA error 719)"
    hint = "suspend that one first, or move it to other GPUs; --force=nccl-beside if it was never moved or restored"
    return [Reason(id="nccl-beside", text=text, exit_code=13, hint=hint, pid=members[0].pid, forceable=True)]

"""What the driver cannot checkpoint, recognised from outside (measured with driver 580)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from limosa.errors import Reason
from limosa.process.observation import JobObservation, ProcessObservation

_IPC = re.compile(r"^/dev/shm/cuda\.shm\.[^.]*\.([0-9a-f]+)\.")
_NCCL_MEMORY = "/dev/shm/nccl-"  # noqa: S108
_RDMA = re.compile(r"^/dev/(infiniband/uverbs\d+|gdrdrv)$")
_JAX = re.compile(r"/(xla_cuda_plugin|xla_extension)[^/]*\.so[^/]*$")
_MPS = re.compile(r"nvidia-(cuda-)?mps|nvidia_mps")
IPC_DRIVER = 610  # the first branch that checkpoints CUDA IPC


def cuda_hazards(
    obs: JobObservation,
    *,
    cuda_pids: Collection[int] | None = None,
    driver_branch: int | None = None,
    calm: Collection[int] = (),
) -> list[Reason]:
    """Return what of a job's CUDA state the driver cannot checkpoint or restore.

    Args:
        obs: the job.
        cuda_pids: the processes that hold CUDA state, as the driver said; None: all that have libcuda mapped.
        driver_branch: the driver's first number (580), where known.
        calm: processes whose calls wait at the shim's gate, or that it would not put at risk any more.

    Returns:
        ``managed-memory``, ``cuda-ipc``, ``nccl-ranks``, ``rdma``, ``jax`` (13), ``mps`` (12) and warnings
        ``nccl-peers-unknown``, ``mps-environment``.
    """
    holders = [p for p in obs.processes if p.has_libcuda and (cuda_pids is None or p.pid in cuda_pids)]
    return [
        *_managed(holders),
        *(_ipc(holders) if driver_branch is None or driver_branch < IPC_DRIVER else ()),
        *_nccl(obs, holders),
        *_mps(holders),
        *_rdma(holders),
        *_jax(process for process in holders if process.pid not in calm),
    ]


def _managed(holders: list[ProcessObservation]) -> Iterator[Reason]:
    for process in holders:
        if process.n_managed_maps:
            yield Reason(
                id="managed-memory",
                text=f"process {process.title} uses managed memory ({process.n_managed_maps} regions mapped from "
                "/dev/nvidia-uvm), which the driver cannot checkpoint",
                exit_code=13,
                hint="allocate with cudaMalloc instead of cudaMallocManaged",
                pid=process.pid,
                forceable=True,
            )


def _ipc(holders: list[ProcessObservation]) -> Iterator[Reason]:
    for process in holders:
        exporters = sorted({int(match[1], 16) for m in process.maps if (match := _IPC.match(m.path))})
        if not exporters:
            continue
        others = [str(pid) for pid in exporters if pid != process.pid]
        what = f"memory of process {', '.join(others)}" if others else "its memory with other processes"
        yield Reason(
            id="cuda-ipc",
            text=f"process {process.title} shares {what} by CUDA IPC: the driver could not restore whoever imports it",
            exit_code=13,
            hint=f"close the shared tensors, or use driver {IPC_DRIVER} or newer",
            pid=process.pid,
        )


def has_nccl(process: ProcessObservation) -> bool:
    """Return whether NCCL is in a library of its own there, before which the shim stands."""
    return any("/libnccl.so" in mapping.path for mapping in process.maps)


def is_rank(process: ProcessObservation) -> bool:
    """Return whether it shows signs of being a rank of NCCL's."""
    return any(thread.name.startswith(("pt_nccl_", "NCCL ")) for thread in process.threads) or any(
        mapping.path.startswith(_NCCL_MEMORY) for mapping in process.maps
    )


def late_ranks(obs: JobObservation, cuda_pids: Collection[int]) -> list[ProcessObservation]:
    """Return the ranks that have not begun to use a GPU yet, where others of the job have.

    A rank is what a launcher has started with RANK and WORLD_SIZE in its environment, as torchrun does, and not what
    that starts itself: that inherits both.
    """
    parent = {process.pid: process.ppid for process in obs.processes}
    named = {p.pid for p in obs.processes if "RANK" in p.env and p.env.get("WORLD_SIZE", "1") != "1"}
    ranks = {pid for pid in named if parent[pid] not in named}
    begun = set()
    for pid in cuda_pids:
        above = pid
        while above in parent and above not in ranks:
            above = parent[above]
        begun.add(above)
    late = [p for p in obs.processes if p.pid in ranks - begun and p.state not in ("Z", "X")]
    return late if ranks & begun else []


def _without_transports(process: ProcessObservation) -> bool:
    """Return whether peer-to-peer and shared memory are both off: that way NCCL was seen to survive."""
    return process.env.get("NCCL_P2P_DISABLE") == "1" and process.env.get("NCCL_SHM_DISABLE") == "1"


def _nccl(obs: JobObservation, holders: list[ProcessObservation]) -> Iterator[Reason]:
    ranks = [process for process in holders if is_rank(process)]
    if not ranks:
        return
    names = ", ".join(process.title for process in ranks)
    hint = "start it by limosa run -- torchrun …, or destroy the process group first, and create it again afterwards"
    if len(ranks) > 1:
        safe = all(map(_without_transports, ranks))
        ending = "peer-to-peer and shared memory are off, so this has a chance" if safe else "they would be lost"
        yield Reason(
            id="nccl-ranks",
            text=f"{len(ranks)} processes of the job are NCCL ranks ({names}): {ending}",
            exit_code=0 if safe else 13,
            hint=hint,
            pid=ranks[0].pid,
            forceable=True,
        )
        return
    (rank,) = ranks
    world = rank.env.get("WORLD_SIZE", "")
    if world == "1":
        return
    outside = sorted(set(_connections_outside(obs, rank)))
    if world.isdigit() or outside:
        evidence = f"WORLD_SIZE is {world}" if world.isdigit() else f"it is connected to {', '.join(outside[:3])}"
        yield Reason(
            id="nccl-ranks",
            text=f"process {rank.title} is an NCCL rank whose peers are outside of the job ({evidence})",
            exit_code=13,
            hint=hint,
            pid=rank.pid,
            forceable=True,
        )
    else:
        yield Reason(
            id="nccl-peers-unknown",
            text=f"process {rank.title} has an NCCL process group; whether it has peers cannot be seen from outside",
            hint=f"if it has: {hint}",
            pid=rank.pid,
        )


def _connections_outside(obs: JobObservation, rank: ProcessObservation) -> Iterator[str]:
    for socket in rank.sockets:
        if (
            socket.protocol == "tcp"
            and socket.state == "established"
            and not obs.pids.issuperset(socket.peer_pids or [0])
        ):
            yield socket.remote


def _mps(holders: list[ProcessObservation]) -> Iterator[Reason]:
    for process in holders:
        evidence = [f"descriptor {s.fd}" for s in process.sockets if _MPS.search(s.remote)]
        evidence += [f"descriptor {s.fd}" for s in process.sockets if any(_MPS.search(peer.name) for peer in s.peers)]
        evidence += [f"descriptor {fd.fd} ({fd.target})" for fd in process.fds if _MPS.search(fd.target)]
        evidence += [m.path for m in process.maps if _MPS.search(m.path)]
        if evidence:
            yield Reason(
                id="mps",
                text=f"process {process.title} is a client of MPS ({evidence[0]}), which the driver cannot checkpoint",
                exit_code=12,
                hint="start the job without MPS",
                pid=process.pid,
                forceable=True,
            )
        elif "CUDA_MPS_PIPE_DIRECTORY" in process.env:
            yield Reason(
                id="mps-environment",
                text=f"process {process.title} was started with CUDA_MPS_PIPE_DIRECTORY="
                f"{process.env['CUDA_MPS_PIPE_DIRECTORY']}; as a client of MPS it could not be checkpointed",
                pid=process.pid,
            )


def _rdma(holders: list[ProcessObservation]) -> Iterator[Reason]:
    """Whether GPU memory may be registered with a network adapter, or mapped by GDRCopy, which nobody can look up."""
    for process in holders:
        open_ones = [fd for fd in process.fds if _RDMA.match(fd.target)]
        if open_ones:
            fd = open_ones[0]
            yield Reason(
                id="rdma",
                text=f"process {process.title} has {fd.target} open (descriptor {fd.fd}): after a move a network "
                "adapter could go on using the old place of its GPU memory",
                exit_code=13,
                hint="let it close its connections first; --force=rdma if it has registered host memory only",
                pid=process.pid,
                forceable=True,
            )


def _asks_on(process: ProcessObservation) -> bool:
    """Return whether it goes on asking the driver about its work while it is checkpointed: it computes with JAX."""
    return process.has_libcuda and any(_JAX.search(mapping.path) for mapping in process.maps)


def _jax(holders: Iterable[ProcessObservation]) -> Iterator[Reason]:
    """Synchronises and queries of a checkpointed process do not wait: libcuda segfaults (measured with driver 580)."""
    for process in holders:
        if _asks_on(process):
            yield Reason(
                id="jax",
                text=f"process {process.title} computes with JAX, which keeps asking the driver about its work: if it "
                "asks while it is checkpointed, it ends with a segmentation fault",
                exit_code=13,
                hint="start it with limosa run, where its calls wait; --force=jax if you can lose it",
                pid=process.pid,
                forceable=True,
            )

"""The demo's job of two processes, each with a GPU, that talk over NCCL: a program that imports nothing of Limosa.

    python ranks.py FOLDER --framework cuda --steps N --pace SECONDS
    torchrun --standalone --nproc-per-node 2 ranks.py FOLDER --framework torch --steps N --pace SECONDS

cuda: each adds a part of what both have to what it has, on its device, and hashes it there; it asks for cuda.bindings
and libnccl. torch: DistributedDataParallel, whose losses depend on both. Rank R appends each hash or loss to
FOLDER/losses-R as ``step value time``, time by CLOCK_MONOTONIC. What a disturbance loses, repeats or bends shows in
both ranks, in every step that follows.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANKS = 2
FLOATS = 1 << 20
WIDTH, BATCH = 256, 32
_FLOAT, _SUM = 7, 0  # ncclFloat32, ncclSum


def main() -> None:
    """Compute until the last step, writing each value; or start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description="the demo's job of two ranks")
    parser.add_argument("folder")
    parser.add_argument("--framework", choices=("cuda", "torch"), required=True)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.02)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(start_ranks())
    rank = int(os.environ["RANK"])
    values = torch_losses(rank) if options.framework == "torch" else device_hashes(rank, Path(options.folder))
    path = os.path.join(options.folder, f"losses-{rank}")
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for step, value in zip(range(options.steps), values, strict=False):
        os.write(out, f"{step} {value} {time.monotonic():.6f}\n".encode())
        print(f"rank {rank} step {step} {value}", flush=True)
        time.sleep(options.pace)
    print("done", flush=True)


def start_ranks() -> int:
    """What torchrun does, without PyTorch: the first exit code that is not 0."""
    ranks = []
    for n in map(str, range(RANKS)):
        env = {**os.environ, "RANK": n, "LOCAL_RANK": n}
        command = [sys.executable, *sys.argv]
        ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    if any(rank.poll() for rank in ranks):
        for rank in ranks:
            rank.kill()  # it waits for the other one
    return next((code for rank in ranks if (code := rank.wait())), 0)


def torch_losses(rank: int) -> Iterator[str]:
    """Losses of a small training with DistributedDataParallel, without end."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic cuBLAS asks for
    import torch
    from torch import distributed, nn

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    distributed.init_process_group("nccl")
    layers = [nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Dropout(0.1), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    target = torch.randn(WIDTH, generator=torch.Generator().manual_seed(7)).cuda()
    while True:
        x = torch.randn(BATCH, WIDTH, device="cuda")
        loss = nn.functional.mse_loss(model(x).squeeze(1), torch.tanh(x @ target))
        adam.zero_grad()
        loss.backward()
        adam.step()
        yield float(loss.item()).hex()


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = [("internal", ctypes.c_char * 128)]


def device_hashes(rank: int, folder: Path) -> Iterator[str]:
    """The running hash after each step, without end."""
    from compute import Device  # type: ignore[import-not-found]  # its neighbour in this folder

    # As a program that is linked with it finds it.
    ctypes.CDLL("libnccl.so.2", ctypes.RTLD_GLOBAL)
    nccl = ctypes.CDLL(None)

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(nccl, name)(*arguments):
            raise SystemExit(f"{name}: {code}")

    device = Device(int(os.environ["LOCAL_RANK"]))
    communicator = ctypes.c_void_p()
    unique = UniqueId.from_buffer_copy(_unique_id(rank, folder, call))
    call("ncclCommInitRank", ctypes.byref(communicator), RANKS, unique, rank)
    mine, both, total = device.memory(4 * FLOATS), device.memory(4 * FLOATS), device.number()
    draws = random.Random(rank)
    device.fill(mine, FLOATS, draws)
    u64, pointer = ctypes.c_uint64, ctypes.c_void_p
    size, stream = ctypes.c_size_t(FLOATS), pointer(int(device.stream))
    while True:
        call("ncclAllReduce", pointer(mine), pointer(both), size, _FLOAT, _SUM, communicator, stream)
        factor = draws.uniform(-0.01, 0.01)
        device.run("saxpy", (mine, pointer), (both, pointer), (factor, ctypes.c_float), (FLOATS, u64))
        device.run("hash", (mine, pointer), (FLOATS // 2, u64), (total, pointer))
        yield f"{device.read(total):#018x}"


def _unique_id(rank: int, folder: Path, call: Any) -> bytes:
    """Rank 0 draws it, and the other one finds it in the job's folder."""
    path = folder / f"unique-id-{os.getppid()}"  # of the one that has started both, or another run's would be found
    if rank == 0:
        drawn = UniqueId()
        call("ncclGetUniqueId", ctypes.byref(drawn))
        path.with_suffix(".new").write_bytes(bytes(drawn))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_bytes()


if __name__ == "__main__":
    main()

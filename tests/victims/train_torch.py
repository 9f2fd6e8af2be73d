"""A PyTorch training with persistent DataLoader workers; one loss a step, as a hex float, into ``losses-<rank>``.

    python train_torch.py FOLDER [--steps N] [--pace S] [--device cpu|cuda] [--workers N] [--seed N] [--pin]
    torchrun --nproc-per-node=2 train_torch.py FOLDER …       (DDP over gloo on the CPU, nccl on GPUs)

A file ``hurry`` in the folder ends the pace.

The workers draw from their own generators for every sample and live through all epochs, so that anything that a
restore loses or repeats, in any of the processes, changes all later losses.
"""

import argparse
import multiprocessing
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH = 64, 16


class Noisy(Dataset):
    """Samples that depend on the worker's generator: never the same twice."""

    def __init__(self, seed):
        self.target = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return 16 * BATCH

    def __getitem__(self, index):
        x = torch.randn(WIDTH) + index / 1000
        return x, torch.tanh(x @ self.target)


def say(text):
    """One write a line, also where nothing is buffered: the ranks write into one file."""
    print(f"{text}\n", end="", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pin", action="store_true")
    options = parser.parse_args()

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", "0")) if options.device == "cuda" else None)
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1)).to(device)
    if world > 1:
        torch.distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
        model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(options.seed + 1000 * rank)  # other data and other dropout on each rank
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Noisy(options.seed),
        batch_size=BATCH,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        pin_memory=options.pin,
        generator=torch.Generator().manual_seed(options.seed + 1000 * rank),
    )
    path = os.path.join(options.folder, f"losses-{rank}")
    losses = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    step = 0
    while step < options.steps:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)).squeeze(1), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            os.write(losses, f"{step} {loss.item().hex()} {time.monotonic():.6f}\n".encode())
            if step == 0:
                say("READY")
            say(f"tick {step} {time.monotonic():.6f} rank {rank}")
            step += 1
            if step == options.steps:
                break
            time.sleep(0 if os.path.exists(os.path.join(options.folder, "hurry")) else options.pace)
    del loader  # ends its workers
    say("DONE")
    # PyTorch 2.13 deadlocks now and then when DDP's reducer is freed: the gloo group's destructor joins a thread that
    # waits for the GIL which its caller holds. So the process ends with the group and the model as they are.
    os._exit(0)
    if world > 1:
        # DDP's destructor joins gloo's thread with the GIL held, which that thread may want to free its last work.
        for worker in multiprocessing.active_children():
            worker.terminate()
        os._exit(0)


if __name__ == "__main__":
    main()

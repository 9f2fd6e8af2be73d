"""The demo's training job: a program of its own that imports nothing of Limosa.

    python train.py FOLDER --framework torch|numpy --device cpu|cuda --steps N --pace SECONDS

Learns a small function from noise that two worker processes draw (PyTorch: persistent DataLoader workers; NumPy:
multiprocessing) and appends each step's loss to FOLDER/losses as ``step hex-float time``, time by CLOCK_MONOTONIC.
Every loss depends on the state of all three processes and, with CUDA, of the GPU: what a disturbance loses, repeats or
bends shows in all that follow.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

WORKERS, WIDTH, BATCH = 2, 64, 32


def main() -> None:
    """Train until the last step, writing each loss."""
    parser = argparse.ArgumentParser(description="the demo's training")
    parser.add_argument("folder")
    parser.add_argument("--framework", choices=("torch", "numpy"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pace", type=float, default=0.02)
    options = parser.parse_args()
    losses = numpy_losses() if options.framework == "numpy" else torch_losses(options.device)
    out = os.open(os.path.join(options.folder, "losses"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for step, loss in zip(range(options.steps), losses, strict=False):
        os.write(out, f"{step} {loss.hex()} {time.monotonic():.6f}\n".encode())
        print(f"step {step} loss {loss:.6f}", flush=True)
        time.sleep(options.pace)
    print("done", flush=True)
    # The generator holds workers that would go on for ever; they are daemons and end with us.


def torch_losses(device: str) -> Iterator[float]:
    """Losses of a small PyTorch training with two persistent DataLoader workers, without end."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic cuBLAS asks for
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Noise(Dataset):  # type: ignore[misc,type-arg,unused-ignore]
        """Samples from the worker's own generator: never the same twice."""

        target = torch.randn(WIDTH, generator=torch.Generator().manual_seed(7))

        def __len__(self) -> int:
            return 16 * BATCH

        def __getitem__(self, index: int) -> Any:
            x = torch.randn(WIDTH) + index / 1000
            return x, torch.tanh(x @ self.target)

    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    layers = [nn.Linear(WIDTH, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(
        Noise(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(1),
    )
    while True:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)).squeeze(1), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield float(loss.item())


def numpy_losses() -> Iterator[float]:
    """Losses of a small NumPy training with two worker processes, without end."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the same sums in the same order
    import multiprocessing

    import numpy as np

    def produce(number: int, box: Any) -> None:
        random = np.random.default_rng([1, number])
        target = np.random.default_rng(7).normal(size=WIDTH)
        while True:
            x = random.normal(size=(BATCH, WIDTH))
            box.put((x, np.tanh(x @ target)))

    context = multiprocessing.get_context("fork")
    boxes = [context.Queue(maxsize=2) for _ in range(WORKERS)]
    for number, box in enumerate(boxes):
        context.Process(target=produce, args=(number, box), daemon=True).start()
    random = np.random.default_rng(1)
    w1, w2 = 0.1 * random.normal(size=(WIDTH, WIDTH)), 0.1 * random.normal(size=WIDTH)
    step = 0
    while True:
        x, y = boxes[step % WORKERS].get()
        keep = random.random(size=WIDTH) < 0.9
        hidden = np.tanh(x @ w1) * keep
        error = hidden @ w2 - y
        grad = np.outer(error, w2) * keep * (1 - hidden**2)
        w2 = w2 - 0.05 / BATCH * (hidden.T @ error)
        w1 = w1 - 0.05 / BATCH * (x.T @ grad)
        step += 1
        yield float(error @ error / BATCH)


if __name__ == "__main__":
    main()

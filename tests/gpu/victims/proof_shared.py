"""Two processes at one tensor: torch.multiprocessing hands device memory to a child, and both work on it in turns.

    python proof_shared.py FOLDER [--gb 0.5] [--hold N]

The parent adds to the tensor, the child multiplies and sums it; the sum (of integers) is traced.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.multiprocessing
from proof import Trace, done


def child(tensors, pipe):
    """Works on what it was handed until it is told to stop."""
    tensor = tensors.get()
    while pipe.recv():
        tensor.mul_(3).bitwise_and_(0xFFFF)
        torch.cuda.synchronize()
        pipe.send(int(tensor.sum().item()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--hold", type=int, default=0)
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    trace = Trace(options.folder, options.hold)
    tensor = torch.arange(int(options.gb * (1 << 30)) // 8, dtype=torch.int64, device="cuda") & 0xFFFF
    torch.cuda.synchronize()
    mine, its = context.Pipe()
    tensors = context.SimpleQueue()
    process = context.Process(target=child, args=(tensors, its))
    process.start()
    tensors.put(tensor)
    last = False
    while not last:
        tensor.add_(1)
        torch.cuda.synchronize()
        mine.send(True)
        while not mine.poll(1):
            if not process.is_alive():
                raise SystemExit(f"the child has ended ({process.exitcode})")
        total = mine.recv()
        last = trace.step(total, int(tensor[:4096].sum().item()))
    mine.send(False)
    process.join(60)
    if process.exitcode != 0:
        raise SystemExit(f"the child ended with {process.exitcode}")
    done()


if __name__ == "__main__":
    main()

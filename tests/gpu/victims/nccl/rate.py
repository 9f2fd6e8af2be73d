"""How fast an all-reduce of 1 GB is, all the time (see common.py for the options).

    torchrun --nproc-per-node=2 rate.py --record FILE [--pause 0.1]

A step is ten of them, each timed by the device; rank 0's record says GB/s of the bus (as nccl-tests count) of the
median one. The sum is checked.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
from common import begin, options

TIMES = 10


def timed(x, device):
    """Seconds that an all-reduce took."""
    if device.type != "cuda":
        begun = time.perf_counter()
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return time.perf_counter() - begun
    from_, to = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    from_.record()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    to.record()
    to.synchronize()
    return from_.elapsed_time(to) / 1e3


def main():
    chosen = options(pause=0.1)
    record = begin(chosen)
    size = int(os.environ.get("LIMOSA_RATE_BYTES", str(10**9)))
    x = torch.full((size // 4,), float(record.rank), device=record.device)
    last = False
    while not last:
        x.fill_(float(record.rank))
        spans = [timed(x, record.device) for _ in range(TIMES)]
        assert bool((x == 1).all()), "a sum is wrong"
        last = record.step(size / statistics.median(spans) / 1e9)  # × 2 (n - 1) / n, which is 1 for two
    record.end()


if __name__ == "__main__":
    main()

"""Numba at work: kernels of its own, compiled at run time; integers, so that the order of additions does not matter.

python proof_numba.py FOLDER [--gb 0.5] [--hold N]
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np

if not hasattr(np, "row_stack"):  # which numba-cuda names, and numpy has no longer
    np.row_stack = np.vstack

from numba import cuda
from proof import Trace, done


@cuda.jit
def turn(words, total):
    mine = np.uint64(0)
    for i in range(cuda.grid(1), words.size, cuda.gridsize(1)):
        words[i] = words[i] * np.uint32(1664525) + np.uint32(1013904223)
        mine += words[i]
    cuda.atomic.add(total, 0, mine)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--hold", type=int, default=0)
    options = parser.parse_args()
    trace = Trace(options.folder, options.hold)
    words = cuda.to_device(np.arange(int(options.gb * (1 << 30)) // 4, dtype=np.uint32))
    blocks, threads = (1024, 256) if words.size > 1 << 20 else (2, 32)
    last = False
    while not last:
        total = cuda.to_device(np.zeros(1, dtype=np.uint64))
        spare = cuda.device_array((4 + trace.steps % 5) << 20, dtype=np.uint8)  # of another size each time
        turn[blocks, threads](words, total)
        del spare
        last = trace.step(f"{int(total.copy_to_host()[0]):x}")
    done()


if __name__ == "__main__":
    main()

"""CuPy at work: elementwise kernels, a matrix product, a sort, memory of its pool that comes and goes.

python proof_cupy.py FOLDER [--gb 0.5] [--hold N]
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import cupy
from proof import Trace, digest, done

KERNEL = cupy.RawKernel(
    r"""
extern "C" __global__ void turn(unsigned int *words, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        words[i] = words[i] * 1664525u + 1013904223u;
}
""",
    "turn",
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--hold", type=int, default=0)
    options = parser.parse_args()
    trace = Trace(options.folder, options.hold)
    n = int(options.gb * (1 << 30)) // 4
    words = cupy.arange(n, dtype=cupy.uint32)
    matrix = (cupy.arange(512 * 512, dtype=cupy.float32).reshape(512, 512) % 97) / 97
    state = matrix.copy()
    last = False
    while not last:
        KERNEL((1024,), (256,), (words, n))
        state = cupy.tanh(state @ matrix / 256)
        spare = cupy.zeros((4 + trace.steps % 5) << 20, dtype=cupy.uint8)  # of another size each time
        some = cupy.sort(words[: 1 << 20])
        total = int(words.sum(dtype=cupy.uint64)) ^ int(some[1 << 19]) ^ int(spare.sum())
        last = trace.step(f"{total:x}", digest(cupy.asnumpy(state)))
    done()


if __name__ == "__main__":
    main()

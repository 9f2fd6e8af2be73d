"""Kernels that need much local memory and a stack, launched one by one and by a CUDA graph.

python proof_local.py FOLDER [--gb 0.5] [--stack BYTES --depth N] [--hold N]
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import cupy
from proof import Trace, digest, done

SOURCE = r"""
extern "C" __device__ __noinline__ float deep(int n, float x)
{
    volatile float pad[8];
    for (int i = 0; i < 8; i++)
        pad[i] = x + i;
    return n ? deep(n - 1, pad[n % 8]) * 0.5f + pad[n * 5 % 8] : x;
}

extern "C" __global__ void recurse(float *out, const float *in, int n, int depth)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    out[at] = deep(depth, in[at % n]);
}

extern "C" __global__ void local(float *out, const float *in, int n)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    float own[512], sum = 0;
    for (int i = 0; i < 512; i++)
        own[(i * 37 + at) % 512] = in[(at + i) % n] * (i % 7);
    for (int i = 0; i < 512; i++)
        sum += own[(i * 11 + (int)in[at % n]) % 512] * (1 + i % 3);
    out[at] = sum;
}
"""
THREADS = 1 << 17
STACK = 0  # cudaLimitStackSize


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--stack", type=int, default=0)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--hold", type=int, default=0)
    options = parser.parse_args()
    trace = Trace(options.folder, options.hold)
    if options.stack:
        cupy.cuda.runtime.deviceSetLimit(STACK, options.stack)
    module = cupy.RawModule(code=SOURCE)
    local, recurse = module.get_function("local"), module.get_function("recurse")
    held = cupy.arange(int(options.gb * (1 << 30)) // 4, dtype=cupy.uint32)
    given = (cupy.arange(THREADS) % 97).astype(cupy.float32)
    one, other = cupy.zeros(THREADS, cupy.float32), cupy.zeros(THREADS, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)

    def launch():
        local((THREADS // 256,), (256,), (one, given, THREADS))
        recurse((THREADS // 256,), (256,), (other, given, THREADS, options.depth))

    with stream:
        launch()
        stream.synchronize()
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
        last = False
        while not last:
            one.fill(0)
            other.fill(0)
            if trace.steps % 2:
                graph.launch(stream)
            else:
                launch()
            given += 1
            given %= 89
            total = int(held[trace.steps % 1000 :: 1000].sum(dtype=cupy.uint64))
            limit = cupy.cuda.runtime.deviceGetLimit(STACK)
            stream.synchronize()
            last = trace.step(f"{total:x}", limit, digest(cupy.asnumpy(one)), digest(cupy.asnumpy(other)))
    done()


if __name__ == "__main__":
    main()

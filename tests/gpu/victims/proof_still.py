"""Memory without a framework, and a thread for each call that ends a process which the driver has checkpointed.

    python proof_still.py FOLDER [--kind small|pool|large] [--mib 32] [--hold N]

small: pieces of 1 MiB, which the driver carries; pool: stream-ordered, which it carries, too; large: parked.
"""

import argparse
import ctypes
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from plain import Plain, u64
from proof import Trace, done

PIECE = 1 << 20
NOT_READY = 600


def asks(gpu, name, *arguments):
    """Asks it all the time. A query may answer that work is under way."""
    gpu.use()
    call = getattr(gpu.cuda, name)
    while (result := call(*arguments)) in (0, NOT_READY):
        time.sleep(0.0005)
    os.write(1, f"{name}: the driver says {result}\n".encode())
    os._exit(1)


def allocate(gpu, kind, size):
    """Addresses of pieces that are ``size`` together."""
    if kind == "small":
        return [gpu.alloc(PIECE) for _ in range(size // PIECE)]
    if kind == "large":
        at = gpu.alloc(size)
    else:
        found = u64()
        gpu.do("cuMemAllocAsync", ctypes.byref(found), ctypes.c_size_t(size), None)
        gpu.do("cuStreamSynchronize", None)
        at = found.value
    return range(at, at + size, PIECE)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kind", choices=["small", "pool", "large"], default="small")
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--hold", type=int, default=0)
    options = parser.parse_args()
    gpu, event = Plain(), ctypes.c_void_p()
    trace, pieces = Trace(options.folder, options.hold), allocate(gpu, options.kind, options.mib << 20)
    for at in pieces:
        gpu.stamp(at, PIECE, 0)
    gpu.do("cuEventCreate", ctypes.byref(event), 0)
    gpu.do("cuEventRecord", event, None)
    asked = [("cuCtxSynchronize",), ("cuStreamSynchronize", None), ("cuStreamQuery", None)]
    asked += [("cuEventSynchronize", event), ("cuEventQuery", event)]
    for what in asked:
        threading.Thread(target=asks, args=(gpu, *what), daemon=True).start()
    found, last = 0, False
    while not last:
        at = pieces[trace.steps % len(pieces)]
        found = gpu.hash(at, PIECE, found)
        gpu.stamp(at, PIECE, trace.steps + 1 + found % 1000)
        last = trace.step(f"{found:x}")
        time.sleep(0.005)
    done()


if __name__ == "__main__":
    main()

"""Somebody else on the GPUs: takes their free memory when told to.

python op_filler.py FOLDER LEAVE

Reads FOLDER/order (``<number> fill|empty <gpu>…``) and answers ``done <number>`` on stdout; ends with its parent or
when FOLDER/stop appears. ``fill`` takes all but LEAVE bytes of each GPU named.
"""

import ctypes
import os
import sys
import time

folder, leave = sys.argv[1], int(sys.argv[2])
cuda = ctypes.CDLL("libcuda.so.1")
CHUNK = 256 << 20


def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        raise RuntimeError(f"{name}: {code}")


call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
contexts, held = {}, {}
for index in range(count.value):
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
    contexts[index], held[index] = context, []


def fill(index):
    call("cuCtxSetCurrent", contexts[index])
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    size, large = free.value - leave, 16 << 30
    while size > 0:
        part = min(size, large if size > large else CHUNK)
        pointer = ctypes.c_uint64()
        if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(part)):
            if large == CHUNK:
                break  # what is left is not in one piece
            large = CHUNK
            continue
        held[index].append(pointer)
        size -= part
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    print(f"GPU {index}: {free.value >> 20} MiB left", flush=True)


def empty(index):
    call("cuCtxSetCurrent", contexts[index])
    while held[index]:
        call("cuMemFree_v2", held[index].pop())


last = "0"
print("READY", flush=True)
while not os.path.exists(os.path.join(folder, "stop")) and os.getppid() != 1:
    try:
        with open(os.path.join(folder, "order"), encoding="ascii") as file:
            number, what, *gpus = file.read().split()
    except (FileNotFoundError, ValueError):
        number = last
    if number != last:
        for gpu in gpus:
            (fill if what == "fill" else empty)(int(gpu))
        last = number
        print(f"done {number}", flush=True)
    time.sleep(0.002)
print("DONE", flush=True)
os._exit(0)

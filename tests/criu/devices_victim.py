"""A process with a forked child that inherited device mappings and descriptors (stand-ins, see test_plugin.py).

Argument: a file that both append lines to. Between two mappings of one device lies one of a regular file, so that a
descriptor is wanted for some mappings and not for others.
"""

import ctypes
import json
import mmap
import os
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
PAGE = mmap.PAGESIZE
MAP_FIXED = 0x10


def place(base: int, page: int, fd: int) -> int:
    got = libc.mmap(base + page * PAGE, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    assert got == base + page * PAGE, os.strerror(ctypes.get_errno())
    return got


def main() -> None:
    out = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    card = os.open("/dev/nvidia0", os.O_RDWR)
    os.open("/dev/nvidiactl", os.O_RDWR | os.O_NONBLOCK)
    os.open("/dev/nvidia-caps/nvidia-cap1", os.O_RDONLY)
    plain = os.open(sys.argv[1] + ".plain", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(plain, PAGE)
    base = libc.mmap(None, 16 * PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    # Where a descriptor is wanted: at the first of the card's, and at the first after that of the regular file.
    for page, fd in ((0, card), (1, card), (2, plain), (3, card), (5, card), (6, plain)):
        place(base, page, fd)
    name = "parent" if os.fork() else "child"
    number = 0
    while True:
        number += 1
        names = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in range(64) if os.path.lexists(f"/proc/self/fd/{fd}")}
        os.write(out, json.dumps([name, number, ctypes.string_at(base, 4).hex(), names]).encode() + b"\n")
        time.sleep(0.02)


main()

"""Has many of everything, and counts them at each tick: descriptors, mappings of every kind, sockets, locks, threads.

Arguments: the folder, then pairs of a word and a number.
"""

import ctypes
import mmap
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time

from common import folder, loop, own_semaphores

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
PAGE = mmap.PAGESIZE
kept, checks = [], []


def shared(n):
    pages = [mmap.mmap(-1, PAGE) for _ in range(n)]
    for i, page in enumerate(pages):
        page[:8] = i.to_bytes(8, "little")
    checks.append(lambda: [int.from_bytes(page[:8], "little") for page in pages] == list(range(n)))


def private(n):
    base = libc.mmap(None, ctypes.c_size_t(n * PAGE), 3, 0x22, -1, 0)
    for i in range(0, n, 2):  # every second page may only be read: neighbours do not become one
        ctypes.memset(base + (i + 1) * PAGE, 65, 8)
        assert libc.mprotect(ctypes.c_void_p(base + i * PAGE), ctypes.c_size_t(PAGE), 1) == 0
    checks.append(lambda: all(ctypes.string_at(base + i * PAGE, 2) == b"AA" for i in range(1, n, 2)))


def files(n):
    path = os.path.join(folder(), "file")
    kept.append([os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(n)])
    checks.append(lambda: all(os.fstat(fd).st_size == 0 for fd in kept[0]))


def sockets(n):
    pairs = [socket.socketpair() for _ in range(n // 2)]
    checks.append(lambda: all(a.send(b"x") == 1 and b.recv(1) == b"x" for a, b in pairs))


def pipes(n):
    kept.append([os.pipe() for _ in range(n)])


def semaphores(n):
    own_semaphores()
    locks = [multiprocessing.Lock() for _ in range(n)]
    checks.append(lambda: all(lock.acquire() or True for lock in locks) and not any(lock.release() for lock in locks))


def threads(n):
    threading.stack_size(1 << 16)
    for _ in range(n):
        threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()
    checks.append(lambda: len(os.listdir("/proc/self/task")) == n + 1)


def high(n):
    os.dup2(1, n)
    checks.append(lambda: os.fstat(n).st_ino == os.fstat(1).st_ino)


def path(n):
    """A file whose path has that many characters."""
    home = os.getcwd()
    while (left := n - len(os.getcwd()) - 1) > 200:
        name = "d" * min(200, left - 20)
        os.mkdir(name)
        os.chdir(name)
    kept.append(open("f" * left, "w"))  # noqa: SIM115
    assert len(os.readlink(f"/proc/self/fd/{kept[-1].fileno()}")) == n
    os.chdir(home)


for word, number in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
    globals()[word](int(number))


def check(n):
    assert all(found() for found in checks)


loop(check, 0.05)

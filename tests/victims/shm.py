"""Shared memory of three kinds between a process and its child: anonymous, /dev/shm by name, memfd."""

import mmap
import os
import signal
import time

from common import loop

anonymous = mmap.mmap(-1, 4096)
name = f"/dev/shm/limosa-test-{os.getpid()}"
with open(name, "w+b") as opened:
    opened.truncate(4096)
    named = mmap.mmap(opened.fileno(), 4096)
memfd = os.memfd_create("shared")
os.ftruncate(memfd, 4096)
file = mmap.mmap(memfd, 4096)
views = (anonymous, named, file)


def get(view, at):
    return int.from_bytes(view[at : at + 8], "little")


child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getppid()
    while os.getppid() == parent:
        for view in views:  # answer what stands in the first half in the second
            view[2048:2056] = view[0:8]
        time.sleep(0.001)
    os._exit(0)


def check(n):
    for view in views:
        view[0:8] = n.to_bytes(8, "little")
    until = time.monotonic() + 30
    while any(get(view, 2048) != n for view in views):
        assert time.monotonic() < until, [get(view, 2048) for view in views]
        time.sleep(0.001)


try:
    loop(check)
finally:
    os.unlink(name)
os.kill(child, signal.SIGTERM)
os.waitpid(child, 0)

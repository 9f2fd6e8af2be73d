"""multiprocessing.shared_memory, small and large, with a child: what is in it belongs to what has been counted."""

import multiprocessing
import os
import time
from multiprocessing.shared_memory import SharedMemory

from common import loop

SIZES = {"small": 64, "large": 3 << 20}


def get(view):
    return int.from_bytes(view[:8], "little")


def answer(names):
    """Doubles what stands there."""
    held = [SharedMemory(name) for name in names]
    parent = os.getppid()
    while os.getppid() == parent:
        for memory in held:
            memory.buf[-8:] = (2 * get(memory.buf)).to_bytes(8, "little")
        time.sleep(0.001)


if __name__ == "__main__":
    held = [SharedMemory(f"shm-{os.getpid()}-{name}", create=True, size=size) for name, size in SIZES.items()]
    child = multiprocessing.get_context("spawn").Process(target=answer, args=([m.name for m in held],), daemon=True)
    child.start()

    def check(n):
        for memory in held:
            assert get(memory.buf) == n - 1, (get(memory.buf), n)
            memory.buf[:8] = n.to_bytes(8, "little")
        until = time.monotonic() + 30
        while any(get(memory.buf[-8:]) != 2 * n for memory in held):
            assert time.monotonic() < until
            time.sleep(0.001)

    try:
        loop(check)
    finally:
        child.kill()
        for memory in held:
            memory.close()
            memory.unlink()

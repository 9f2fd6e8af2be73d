"""Host memory used once before anything is measured.

The memory of a virtual machine is backed when it is first used (seconds for each 8 GiB from one thread, measured): what
is measured first would pay for that. Several threads touch it, in as many mappings, and give it back to the
kernel, which hands the same pages out again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time

MADV_POPULATE_WRITE = 23  # Linux 5.14
_CHUNK = 64 << 20
_SPARE = 1 << 30  # bytes that are left to others


def available() -> int:
    """MemAvailable in bytes."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _room(threads: int) -> bool:
    """Whether there is room for a chunk a thread; on some machines memory grows while it is used, so wait a little."""
    for _ in range(60):
        if available() > _SPARE + threads * _CHUNK:
            return True
        time.sleep(0.05)
    return False


def touch(size: int, threads: int | None = None, patience: float = 120.0) -> tuple[int, float]:
    """Touches memory and gives it back.

    Stops early where the machine says that it has no more, or after ``patience`` seconds.

    Args:
        size: bytes.
        threads: how many touch at once; as many as there are cores, 16 at most, where None.
        patience: seconds.

    Returns:
        Bytes touched, seconds it took.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    count = threads or min(16, os.cpu_count() or 1)
    begin = time.monotonic()
    held: list[mmap.mmap] = []
    mutex = threading.Lock()
    left = size

    def work() -> None:
        nonlocal left
        while time.monotonic() - begin < patience:
            with mutex:
                if left <= 0:
                    return
                left -= _CHUNK
            if not _room(count):
                return
            part = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            address = ctypes.addressof(ctypes.c_char.from_buffer(part))
            if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_CHUNK), MADV_POPULATE_WRITE):
                for offset in range(0, _CHUNK, 4096):  # an older kernel
                    part[offset] = 1
            with mutex:
                held.append(part)

    workers = [threading.Thread(target=work) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    touched = len(held) * _CHUNK
    held.clear()
    return touched, time.monotonic() - begin

"""Files in the middle of being read and written, one opened with "w", one to append to, a folder, a mapping."""

import mmap
import os

from common import folder, loop

path = os.path.join(folder(), "")
with open(path + "input", "wb") as file:
    file.write(bytes(range(256)) * 4096)
reading = open(path + "input", "rb", buffering=0)  # noqa: SIM115
writing = open(path + "output", "wb", buffering=0)  # noqa: SIM115
appending = open(path + "history", "ab", buffering=0)  # noqa: SIM115
here = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
with open(path + "mapped", "wb") as file:
    file.truncate(8192)
with open(path + "mapped", "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 8192)


def check(n):
    byte = reading.read(1)
    if not byte:
        reading.seek(0)
        byte = reading.read(1)
    assert byte[0] == (n - 1) % 256, f"read {byte!r} at tick {n}"
    assert writing.tell() == n - 1
    writing.write(byte)
    appending.write(b"%d\n" % n)
    mapped[0:8] = n.to_bytes(8, "little")
    assert "input" in os.listdir(here)


loop(check)

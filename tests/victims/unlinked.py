"""A file that has been unlinked while it is open, another while it is mapped."""

import mmap
import os

from common import folder, loop

path = os.path.join(folder(), "gone")
file = open(path, "w+b", buffering=0)  # noqa: SIM115
file.write(os.urandom(100_000))
file.seek(0)
before = file.read()
os.unlink(path)
with open(path, "w+b") as other:
    other.truncate(65536)
    mapped = mmap.mmap(other.fileno(), 65536)
os.unlink(path)


def check(n):
    assert os.fstat(file.fileno()).st_nlink == 0
    file.seek(0)
    assert file.read() == before
    assert int.from_bytes(mapped[4096:4104], "little") == n - 1
    mapped[4096:4104] = n.to_bytes(8, "little")


loop(check)

"""A file that is open by a name that it has lost, and has another."""

import os

from common import folder, loop

path = os.path.join(folder(), "lost")
file = open(path, "w+b", buffering=0)  # noqa: SIM115
file.write(b"one of two names")
os.link(path, path + "-not")
os.unlink(path)


def check(n):
    assert os.path.samestat(os.fstat(file.fileno()), os.stat(path + "-not"))
    assert os.fstat(file.fileno()).st_nlink == 1


loop(check)

"""A deleted program, open, that runs with the rights of its owner: the second argument."""

import os
import sys

from common import folder, loop

MODE = 0o104755
path = os.path.join(folder(), "program")
with open(path, "wb") as file:
    file.write(os.urandom(1 << 20) * 16)
os.chown(path, int(sys.argv[2]), int(sys.argv[2]))
os.chmod(path, MODE)
held = os.open(path, os.O_RDONLY)
os.unlink(path)


def check(_):
    info = os.fstat(held)
    assert (info.st_mode, info.st_uid, info.st_size) == (MODE, int(sys.argv[2]), 16 << 20)


loop(check)

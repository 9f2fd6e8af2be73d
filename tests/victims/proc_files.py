"""Files that procfs has of the job itself, kept open: its own, of a child, and of a child that has ended."""

import os
import time

from common import loop, stopped

child = os.fork()
while child == 0:
    if stopped():
        os._exit(0)
    time.sleep(0.01)
ended = os.fork()
if ended == 0:
    os._exit(0)
names = ["self/statm", "self/mountinfo", "thread-self/stat", "self/net/tcp", "self/fdinfo/1", f"{child}/stat"]
files = {name: open(f"/proc/{name}", "rb", buffering=0) for name in names}  # noqa: SIM115
memory = open("/proc/self/mem", "rb", buffering=0)  # noqa: SIM115
of_ended = open(f"/proc/{ended}/stat", "rb")  # noqa: SIM115
os.waitpid(ended, 0)


def check(n):
    read = {name: os.pread(file.fileno(), 1 << 16, 0) for name, file in files.items()}
    assert len(read["self/statm"].split()) == 7
    assert int(read["thread-self/stat"].split()[0]) == os.getpid()
    assert int(read[f"{child}/stat"].split()[0]) == child
    assert b" / " in read["self/mountinfo"]
    assert b"local_address" in read["self/net/tcp"]
    assert b"flags" in read["self/fdinfo/1"]
    assert os.readlink(f"/proc/self/fd/{memory.fileno()}") == f"/proc/{os.getpid()}/mem"


loop(check)
os.waitpid(child, 0)

"""A process with two children, one of which has a child of its own; each stamps into a file of its own."""

import os
import signal
import sys
import time

from common import folder, loop, stopped


def stamp(name):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.path.join(folder(), name), "a", buffering=1) as file:
        n = 0
        while not stopped():
            n += 1
            file.write(f"{n} {os.getpid()} {os.getppid()}\n")
            time.sleep(0.02)
        file.write("DONE\n")


children = []
for name in ("left", "right"):
    pid = os.fork()
    if pid == 0:
        if name == "right" and (grandchild := os.fork()):
            stamp(name)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        stamp("leaf" if name == "right" else name)
        os._exit(0)
    children.append(pid)


def check(n):
    for pid in children:
        found, status = os.waitpid(pid, os.WNOHANG)
        assert found == 0 or stopped(), f"child {pid} has ended: {status}"
        if found:
            children.remove(pid)


loop(check)
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
sys.exit(0)

"""Starts a program in namespaces of its own, as a container runtime would: pid, mounts, network, IPC, UTS.

    python in_namespaces.py [--user FIRST] -- PROGRAM …

With ``--user`` also in a user namespace, as uid 0 of it, which is uid FIRST of the machine. The program is the first
process of its pid namespace, and ends with this one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID_NODEV_NOEXEC, MS_REC_PRIVATE = 14, 0x44000
libc = ctypes.CDLL(None, use_errno=True)


def do(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def own_user(first: int) -> None:
    """A child does what only root outside may: it says who we are in the new namespace."""
    ready, told = os.pipe()
    done, tell = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(tell)
        os.close(told)
        os.read(ready, 1)
        for kind in ("uid", "gid"):
            with open(f"/proc/{parent}/{kind}_map", "w") as file:
                file.write(f"0 {first} 1000\n")
        os._exit(0)
    do(libc.unshare(NEWUSER))
    os.write(told, b"x")
    assert os.waitpid(child, 0)[1] == 0, "there is no map of users"
    for fd in (ready, told, done, tell):
        os.close(fd)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--user", type=int, default=0)
    parser.add_argument("program", nargs="+")
    options = parser.parse_args()
    if options.user:
        own_user(options.user)
    do(libc.unshare(NEWUTS | NEWIPC | NEWPID | NEWNET))
    child = os.fork()
    if not child:
        do(libc.unshare(NEWNS))
        do(libc.prctl(1, signal.SIGKILL, 0, 0, 0))
        do(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None))
        do(libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None))
        os.execvp(options.program[0], options.program)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)


if __name__ == "__main__":
    main()

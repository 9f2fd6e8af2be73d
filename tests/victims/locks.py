"""Holds locks of every kind on files that it has mapped as well, and on some that it has not.

Arguments: the folder, then which kinds: posix, plain (POSIX without a mapping), twice (by two descriptors), ofd, flock,
lease, child (a second process has one, by an inherited descriptor), forbidden (the process may take no more).
"""

import ctypes
import fcntl
import mmap
import os
import struct
import sys
import time

from common import folder, loop

F_OFD_SETLK = 37
kept = []


def lock(fd, command, kind, start, length):
    return fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))


def made(name, flags=os.O_RDWR):
    path = os.path.join(folder(), name)
    with open(path, "wb") as file:
        file.write(bytes(32768))
    return path, os.open(path, flags)


def mapped(fd, writes=True):
    kept.append(mmap.mmap(fd, 32768, access=mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ))


for what in sys.argv[2:]:
    if what in ("posix", "plain"):
        path, fd = made(what)
        if what == "posix":
            mapped(fd)
        lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, 120, 1)
        lock(fd, fcntl.F_SETLK, fcntl.F_RDLCK, 128, 5)
        lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, 1 << 30, 0)
    elif what == "twice":  # the same file by two descriptors, one that only reads
        path, fd = made(what)
        reader = os.open(path, os.O_RDONLY)
        mapped(fd)
        lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, 0, 10)
        lock(reader, fcntl.F_SETLK, fcntl.F_RDLCK, 20, 10)
    elif what == "ofd":
        path, fd = made(what)
        mapped(fd)
        lock(fd, F_OFD_SETLK, fcntl.F_WRLCK, 0, 10)
        other = os.open(path, os.O_RDWR)
        lock(other, F_OFD_SETLK, fcntl.F_RDLCK, 20, 10)
    elif what == "flock":
        path, fd = made(what)
        mapped(fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
    elif what == "lease":
        path, fd = made(what, os.O_RDONLY)
        mapped(fd, writes=False)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    elif what == "child":
        path, fd = made(what)
        mapped(fd)
        lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, 0, 1)
        if os.fork() == 0:
            lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, 1, 1)
            while not os.path.exists(os.path.join(folder(), "stop")):
                time.sleep(0.02)
            os._exit(0)
    elif what == "forbidden":  # from here on fcntl(2) is answered with EPERM
        code = [(0x20, 0, 0, 0), (0x15, 0, 1, 72), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
        program = ctypes.create_string_buffer(struct.pack("H6xQ", len(code), ctypes.addressof(filters)))
        assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert ctypes.CDLL(None).prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP
loop()

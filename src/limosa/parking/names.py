"""The name of the socket of a process under the shim, and how it is found.

The name ("limosa/shim/1a2b3c4d", abstract) has a random number in it, so that nobody can take it first. The shim's
thread has the same number in its name ("limosa-1a2b3c4d"), which the kernel shows in ``/proc/PID/task``, where only
that process can write. Each client asks the kernel who is at the other end.

It is not a path, because in a restore as root CRIU would remove, bind and change the owner of a name in the user's
folder, which he may exchange for a link meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from limosa.parking.protocol import OLD_VERSION, STAND_IN, VERSION
from limosa.process.criu.bound import listening_names
from limosa.process.socket_entry import proc_unix

_THREAD = re.compile(rb"limosa-([0-9a-f]{8})\n?")
_OLD_THREAD = b"limosa-shim\n"
_PREFIX = "limosa/shim/"
_MOST_THREADS = 1 << 15
_MOST_NAMES = 8
_MOST_SOCKETS = 100_000  # a container can make more
_MOST_STAND_INS = 4096


class Name(NamedTuple):
    """What a socket may be called."""

    address: str  # as connect(2) takes it
    version: int  # of what is spoken there


def names_of(pid: int) -> list[Name]:
    """Return what the socket of a process may be called; nothing where it has no shim, or none that serves.

    Threads that the shim's own has made are called like it, also where it has taken another name since.
    """
    found: dict[Name, None] = {}
    try:
        with os.scandir(f"/proc/{pid}/task") as threads:
            for thread in itertools.islice(threads, _MOST_THREADS):
                name = _name(pid, f"{thread.path}/comm")
                if name is not None:
                    found[name] = None
                    if len(found) == _MOST_NAMES:
                        break
    except OSError:
        pass
    return list(found)


def is_asked(pid: int) -> bool:
    """Return whether somebody has a connection to the shim of a process."""
    names = {f"@{name.address[1:]}" for name in names_of(pid)}
    there = itertools.islice(proc_unix(pid), _MOST_SOCKETS) if names else ()
    return any(one.state == "established" and one.local in names for one in there)


def _name(pid: int, path: str) -> Name | None:
    try:
        with open(path, "rb") as file:
            text = file.read(64)
    except OSError:
        return None  # it has ended
    if text == _OLD_THREAD:
        return Name(f"\0{_PREFIX}{pid}", OLD_VERSION)
    form = _THREAD.fullmatch(text)
    return Name(f"\0{_PREFIX}{form[1].decode()}", VERSION) if form is not None else None


@contextlib.contextmanager
def stand_ins(images_fd: int) -> Iterator[dict[str, int]]:
    """What a restore puts in the place of the shims' sockets of an image, by what CRIU calls these; closed in the end.

    Others may have read their names and taken them since, and CRIU would fail. Each shim closes what stands in for its
    socket and makes one with another name.
    """
    prefix = b"\0" + _PREFIX.encode()
    inodes = [inode for inode, name in listening_names(images_fd).items() if name.startswith(prefix)]
    with contextlib.ExitStack() as open_:
        yield {f"socket:[{inode}]": open_.enter_context(_stand_in()).fileno() for inode in inodes[:_MOST_STAND_INS]}


def _stand_in() -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", STAND_IN, 0))
    return found

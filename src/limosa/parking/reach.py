"""Connecting to a shim whose namespaces are not ours.

The socket's name is one of the job's network namespace, and the shim admits root and its own user as *its* user
namespace calls them. So the connection is made there, by a thread that lives for nothing else: it enters the network
namespace, and is the job's user for this one call. Only the connected socket is brought back. Who is at its other end
the kernel says (SO_PEERCRED), whatever the job has bound or listens to there.

Whoever is not root enters namespaces of his own only (a rootless container's), and only a process with one thread may
enter a user namespace: that is ``reach_main.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import time

from limosa.process.namespaces import CLONE_NEWNET, enter, in_a_thread, is_ours
from limosa.process.openat import closing, last_error
from limosa.process.status import uids_of
from limosa.start import popen, python

_SETRESUID = {"x86_64": 117}.get(os.uname().machine, 147)  # of the newer machines, arm64 among them
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_KEPT = 0xFFFFFFFF  # (uid_t)-1
_libc = ctypes.CDLL(None, use_errno=True)


def connect(pid: int, address: str, seconds: float) -> socket.socket:
    """Return a connection to a name in the network namespace that a process is in.

    Args:
        pid: the process.
        address: the name, as connect(2) takes it.
        seconds: how long that may take, and each thing that is asked on the connection.

    Raises:
        OSError: nobody listens there, it may not be entered, or the process has gone.
    """
    other_net, other_user = not is_ours(pid, "net"), not is_ours(pid, "user")
    if not other_net and not other_user:
        return _connected(address, seconds)
    if os.geteuid():
        return _by_a_child(pid, address, seconds)
    made: list[socket.socket] = []
    in_a_thread(lambda: made.append(_connected_there(pid, address, seconds, other_net, other_user)))
    return made[0]


def _connected(address: str, seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(seconds)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _connected_there(pid: int, address: str, seconds: float, other_net: bool, other_user: bool) -> socket.socket:
    """Connect as one of those who live there. The calling thread is of no use to anybody else afterwards."""
    if other_net:
        with closing(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)) as fd:
            enter(fd, CLONE_NEWNET)
    if not other_user:
        return _connected(address, seconds)
    # Root of this machine is nobody in there. The real and the saved id stay, so that no signal or trace of that user's
    # comes near; the C library's function would change all threads.
    user = ctypes.c_uint32(uids_of(pid)[1])
    dumpable = _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    if _libc.syscall(ctypes.c_long(_SETRESUID), ctypes.c_uint32(_KEPT), user, ctypes.c_uint32(_KEPT)):
        raise last_error()
    try:
        return _connected(address, seconds)
    finally:
        if dumpable == 1:  # the kernel has changed that for all of this program
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _by_a_child(pid: int, address: str, seconds: float) -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        ours.settimeout(seconds)
        begun = time.monotonic()
        child = popen(
            python("limosa.parking.reach_main", str(pid), address.removeprefix("\0"), str(seconds)),
            stdin=its,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            its.close()
            said, fds, _, _ = socket.recv_fds(ours, 64, 1)
            connection = socket.socket(fileno=fds[0]) if fds else None
        finally:
            child.kill()
            child.wait()
    if connection is None:
        number = int(said) if said.isdigit() else 0
        raise OSError(number, os.strerror(number)) if number else ConnectionError("it could not be reached")
    with contextlib.suppress(ValueError):
        connection.settimeout(max(0.001, seconds - (time.monotonic() - begun)))
    return connection

"""Messages with descriptors between Limosa and its resident helpers (vault, mover): SOCK_SEQPACKET, msgpack.

One packet is one message; its descriptors come with it or not at all. More than ``MOST`` descriptors go in several
packets, which the one who speaks says (``more``).
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

MOST = 200
_BYTES = 1 << 17
_CREDENTIALS = struct.Struct("3i")


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message.

    Raises:
        OSError: the other end is gone, or the limit of the socket is up.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([msgspec.msgpack.encode(message)], rights)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message; the descriptors are the caller's to close.

    Raises:
        EOFError: the other end has gone.
        ValueError: this is no message.
        OSError: the limit of the socket is up.
    """
    data, rights, flags, _ = connection.recvmsg(_BYTES, socket.CMSG_SPACE(MOST * 4), socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, value in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array.array("i", value[: len(value) // 4 * 4])
    try:
        if not data:
            raise EOFError
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a packet that was cut off")
        message = msgspec.msgpack.decode(data)
        if not isinstance(message, dict):
            raise ValueError("no message")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return which process is at the other end, and whose it is (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return int(pid), int(uid)

"""Messages with descriptors between Limosa and its resident helpers (vault, mover): SOCK_SEQPACKET, msgpack.

A message with more than ``MOST`` descriptors goes in several packets: all but the last say ``more`` and carry nothing
but descriptors. What would not fit into a packet goes beside it, as a sealed file.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from limosa.parking.segments import layout_file

VERSION = 2
"""Of what residents understand; in what they answer to ``ping``. ``ping``, ``keys`` and ``end`` never change."""
MOST = 200
LARGEST = 32 << 10
"""Bytes of a message that go in the packet itself."""
_BESIDE = "its message is beside it"
_MOST_BESIDE = 256 << 20
_MOST_PACKETS = 1 << 12
_BYTES = 1 << 17
_SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
_CREDENTIALS = struct.Struct("3i")


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message, with ``MOST`` descriptors at most.

    Raises:
        OSError: the other end is gone, or the limit of the socket is up.
    """
    data = msgspec.msgpack.encode(message)
    beside = layout_file(data) if len(data) > LARGEST else -1
    try:
        if beside >= 0:
            data, fds = msgspec.msgpack.encode({_BESIDE: True}), [*fds, beside]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        _send(connection, data, rights)
    finally:
        if beside >= 0:
            os.close(beside)


def _send(connection: socket.socket, data: bytes, rights: list[tuple[int, int, Any]]) -> None:
    limit = connection.gettimeout()
    end = time.monotonic() + (60.0 if limit is None else limit)
    while True:
        try:
            connection.sendmsg([data], rights)
        except OSError as error:  # so many descriptors may be under way, and the other end is slow
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > end:
                raise
            time.sleep(0.001)
        else:
            return


def send_all(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message with as many descriptors as there are.

    Raises:
        OSError: the other end is gone, or the limit of the socket is up.
    """
    last = max(0, len(fds) - 1) // MOST * MOST
    for start in range(0, last, MOST):
        send(connection, {"more": True}, fds[start : start + MOST])
    send(connection, message, fds[last:])


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one packet; the descriptors are the caller's to close.

    Raises:
        EOFError: the other end has gone.
        ValueError: this is no message.
        OSError: the limit of the socket is up, or no more descriptors may be open here.
    """
    space = socket.CMSG_SPACE((MOST + 1) * 4)
    data, rights, flags, _ = connection.recvmsg(_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, value in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array.array("i", value[: len(value) // 4 * 4])
    try:
        if not data:
            raise EOFError
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if flags & socket.MSG_TRUNC:
            raise ValueError("a packet that was cut off")
        message = _decode(data)
        if _BESIDE in message:
            message = _decode(_read(fds))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def receive_all(connection: socket.socket, limit: float) -> tuple[dict[str, Any], list[int]]:
    """Receive a message with all its descriptors, which are the caller's to close.

    Args:
        connection: where from; its limit is what is left of this one then.
        limit: seconds for all of it.

    Raises:
        EOFError, ValueError, OSError: as :func:`receive`.
    """
    found: list[int] = []
    end = time.monotonic() + limit
    try:
        for _ in range(_MOST_PACKETS):
            connection.settimeout(max(0.001, end - time.monotonic()))
            message, fds = receive(connection)
            found += fds
            if not message.get("more"):
                return message, found
        raise ValueError("a message without an end")
    except BaseException:
        for fd in found:
            os.close(fd)
        raise


def _decode(data: bytes) -> dict[str, Any]:
    try:
        message = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no message: {error}") from error
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message


def _read(fds: list[int]) -> bytes:
    """Reads and closes the last of these, which nobody may change or have us wait for."""
    if not fds:
        raise ValueError("no message")
    with open(fds.pop(), "rb") as file:
        try:
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError("no message") from error
        if seals & _SEALED != _SEALED or os.fstat(file.fileno()).st_size > _MOST_BESIDE:
            raise ValueError("no message")
        file.seek(0)
        return file.read()


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return which process is at the other end, and whose it is (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return int(pid), int(uid)

"""Messages with descriptors between Limosa and its resident helpers (vault, mover): SOCK_SEQPACKET, msgpack.

A message with more than ``MOST`` descriptors goes in several packets: all but the last say ``more`` and carry nothing
but descriptors. What would not fit into a packet goes beside it, as a sealed file.

What comes is bounded before anything is made of it, and decoded as what it should be, never as whatever it is: a packet
of empty maps is a hundred times as large in memory.
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
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from limosa.parking.receive import Deadline, Given, Wrong
from limosa.parking.receive import receive as _receive
from limosa.parking.segments import SEALED, layout_file

VERSION = 3
"""Of what residents understand; in what they answer to ``ping``. ``ping``, ``keys`` and ``end`` never change."""
MOST = 200
LARGEST = 32 << 10
"""Bytes of a message that go in the packet itself."""
MOST_DESCRIPTORS = 1 << 18
"""Of one message."""
_BESIDE = "its message is beside it"
_MOST_BESIDE = 32 << 20
_BYTES = 1 << 17
_FOR_EVER = 1e9
_CREDENTIALS = struct.Struct("3i")
_T = TypeVar("_T")

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Word = Annotated[str, msgspec.Meta(max_length=200)]
"""A key, the UUID of a GPU, the name of an error."""
Text = Annotated[str, msgspec.Meta(max_length=4000)]
Note = Annotated[bytes, msgspec.Meta(max_length=_MOST_BESIDE)]
Numbers = Annotated[list[Count], msgspec.Meta(max_length=MOST_DESCRIPTORS)]
Words = Annotated[list[Word], msgspec.Meta(max_length=1024)]


class _Head(msgspec.Struct):
    more: bool = False
    beside: bool = msgspec.field(default=False, name=_BESIDE)


class Message(NamedTuple):
    """A message that has come: its bytes, which are not believed yet, and its descriptors."""

    data: bytes
    given: Given
    more: bool = False

    def read_as(self, type_: type[_T]) -> _T:
        """Return it as what it should be.

        Raises:
            Wrong: it is something else.
        """
        return _decode(self.data, type_)


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


def receive(connection: socket.socket, limit: float | None = None, *, fds: int = MOST, memory: bool = False) -> Message:
    """Receive one packet; its descriptors are to be closed by whoever has it.

    Args:
        connection: where from.
        limit: seconds until it has to be there; None: the connection's own.
        fds: how many descriptors may come with it.
        memory: whether these are to be of memory.

    Raises:
        EOFError: the other end has gone.
        Wrong: this is no message.
        OSError: the time is up, or no more descriptors may be open here.
    """
    seconds = connection.gettimeout() if limit is None else limit
    return _one(connection, Deadline(_FOR_EVER if seconds is None else seconds), fds, memory)


def _one(connection: socket.socket, deadline: Deadline, fds: int, memory: bool) -> Message:
    data, given = _receive(connection, _BYTES, fds + 1, deadline, memory=memory)  # one more: what is beside it
    try:
        head = _decode(data, _Head)
        if head.beside:
            data = _read(given.take_last())
        if len(given) > fds:
            raise Wrong("descriptors came that nobody asked for")
        return Message(data, given, head.more)
    except BaseException:
        given.close()
        raise


def receive_all(
    connection: socket.socket, limit: float, *, fds: int | None = MOST_DESCRIPTORS, memory: bool = False
) -> Message:
    """Receive a message with all its descriptors.

    Args:
        connection: where from; its limit is what is left of this one then.
        limit: seconds for all of it.
        fds: how many descriptors there may be.
        memory: whether these are to be of memory.

    Raises:
        EOFError, Wrong, OSError: as :func:`receive`.
    """
    most = MOST_DESCRIPTORS if fds is None else fds
    deadline = Deadline(limit)
    with Given() as found:
        while True:
            message = _one(connection, deadline, min(MOST, most - len(found)), memory)
            brought = len(message.given)
            found.add(message.given)
            if not message.more:
                return Message(message.data, Given(found.take()))
            if not brought:
                raise Wrong("a packet that brings nothing")


def _decode(data: bytes, type_: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Wrong(f"no message: {error}") from error


def _read(fd: int) -> bytes:
    """Reads and closes a file that nobody may change, in size either, or have us wait for."""
    try:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise Wrong("no message: what is beside it is no file in memory") from error
        size = os.fstat(fd).st_size
        if seals & SEALED != SEALED or size > _MOST_BESIDE:
            raise Wrong("no message: what is beside it is not sealed, or too large")
        data = os.pread(fd, size, 0)
        if len(data) != size:
            raise Wrong("no message: it is not all there")
        return data
    finally:
        os.close(fd)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return which process is at the other end, and whose it is (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return int(pid), int(uid)

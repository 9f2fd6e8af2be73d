"""Messages with descriptors between Limosa and its resident helpers (vault, mover): SOCK_SEQPACKET, msgpack.

A message with more than ``MOST`` descriptors goes in several packets: all but the last say ``more`` and carry nothing
but descriptors. What would not fit into a packet goes beside it, as a sealed file.

What comes is bounded before anything is made of it, and decoded as what it should be, never as whatever it is: a packet
of empty maps is a hundred times as large in memory.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from limosa.ipc import packet
from limosa.ipc.packet import Deadline, Given, Wrong
from limosa.ipc.sealed import is_sealed, sealed_file

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
FOR_EVER = 1e9
_SEND_SECONDS = 60.0
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


def send(connection: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Send one message, with ``MOST`` descriptors at most.

    Raises:
        OSError: the other end is gone, or the limit of the socket is up.
    """
    data = msgspec.msgpack.encode(message)
    beside = sealed_file(data) if len(data) > LARGEST else -1
    try:
        if beside >= 0:
            data, fds = msgspec.msgpack.encode({_BESIDE: True}), [*fds, beside]
        _send(connection, data, fds)
    finally:
        if beside >= 0:
            os.close(beside)


def _send(connection: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    limit = connection.gettimeout()
    deadline = Deadline(_SEND_SECONDS if limit is None else limit)
    while True:
        try:
            packet.send(connection, [data], fds)
        except OSError as error:  # so many descriptors may be under way, and the other end is slow
            if error.errno != errno.ETOOMANYREFS or deadline.over:
                raise
            time.sleep(0.001)
        else:
            return


def send_all(connection: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
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
    return _one(connection, Deadline(FOR_EVER if seconds is None else seconds), fds, memory)


def _one(connection: socket.socket, deadline: Deadline, fds: int, memory: bool) -> Message:
    data, given = packet.receive(connection, _BYTES, fds + 1, deadline, memory=memory)  # one more: what is beside it
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
        if not is_sealed(fd) or (size := os.fstat(fd).st_size) > _MOST_BESIDE:
            raise Wrong("no message: what is beside it is not sealed, or too large")
        data = os.pread(fd, size, 0)
        if len(data) != size:
            raise Wrong("no message: it is not all there")
        return data
    finally:
        os.close(fd)

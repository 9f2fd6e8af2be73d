"""Messages with descriptors between Limosa and its resident helpers (vault, mover): SOCK_SEQPACKET, msgpack.

A message with more than ``MOST`` descriptors, or of more than ``LARGEST`` bytes, goes in several packets: all but the
last say ``more`` and carry descriptors or a part of it.

A descriptor that was not asked for is never accepted: if root closed one on a user's own file system (FUSE), or a
socket that lingers, it would wait for that user.

A message is limited before it is decoded, and decoded as the expected type, never as whatever it is: a packet of empty
maps is a hundred times as large in memory.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from limosa.ipc import packet
from limosa.ipc.packet import Deadline, Given, Wrong
from limosa.structs import ready

VERSION = 4
"""Of what residents understand; in what they answer to ``ping``. ``ping``, ``keys`` and ``end`` never change."""
MOST = 200
LARGEST = 32 << 10
"""Bytes of a message that go in one packet."""
MOST_DESCRIPTORS = 1 << 18
"""Of one message."""
_MOST_BYTES = 32 << 20
_BYTES = 1 << 17
FOR_EVER = 1e9
_SEND_SECONDS = 60.0
_T = TypeVar("_T")

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Word = Annotated[str, msgspec.Meta(max_length=200)]
"""A key, the UUID of a GPU, the name of an error."""
Text = Annotated[str, msgspec.Meta(max_length=4000)]
Note = Annotated[bytes, msgspec.Meta(max_length=_MOST_BYTES)]
Numbers = Annotated[list[Count], msgspec.Meta(max_length=MOST_DESCRIPTORS)]
Words = Annotated[list[Word], msgspec.Meta(max_length=1024)]


class _Head(msgspec.Struct):
    more: bool = False
    part: Annotated[bytes, msgspec.Meta(max_length=LARGEST)] = msgspec.field(default=b"", name="a part of a message")


class _Part(_Head, omit_defaults=True):
    """A packet with a part of a message, or with descriptors before it."""


class Message(NamedTuple):
    """A message that has come: its bytes, which are not believed yet, and its descriptors."""

    data: bytes
    given: Given
    more: bool = False
    part: bytes = b""

    def read_as(self, type_: type[_T]) -> _T:
        """Return it as what it should be.

        Raises:
            Wrong: it is something else.
        """
        return _decode(self.data, type_)


def send(connection: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Send one message, with as many descriptors as there are.

    Raises:
        OSError: the other end is gone, or the limit of the socket is up for all of it.
    """
    data, last = msgspec.msgpack.encode(message), max(0, len(fds) - 1) // MOST * MOST
    *before, end = [data[start : start + LARGEST] for start in range(0, len(data), LARGEST)]
    packets = [(msgspec.msgpack.encode(_Part(more=True)), fds[start : start + MOST]) for start in range(0, last, MOST)]
    packets += [(msgspec.msgpack.encode(_Part(more=True, part=part)), ()) for part in before]
    packets.append((msgspec.msgpack.encode(_Part(part=end)) if before else data, fds[last:]))
    limit = connection.gettimeout()
    deadline = Deadline(_SEND_SECONDS if limit is None else limit)
    try:
        for each, some in packets:
            _send(connection, each, some, deadline)
    finally:
        connection.settimeout(limit)


def _send(connection: socket.socket, data: bytes, fds: Sequence[int], deadline: Deadline) -> None:
    while True:
        connection.settimeout(deadline.left())
        try:
            packet.send(connection, [data], fds)
        except OSError as error:  # so many descriptors may be under way, and the other end is slow
            time.sleep(0.001)
            if error.errno != errno.ETOOMANYREFS or deadline.over:
                raise
        else:
            return


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
    data, given = packet.receive(connection, _BYTES, fds, deadline, memory=memory)
    try:
        head = _decode(data, _Head)
        return Message(data, given, head.more, head.part)
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
    data = bytearray()
    with Given() as found:
        while True:
            message = _one(connection, deadline, min(MOST, most - len(found)), memory)
            brought = len(message.given) + len(message.part)
            found.add(message.given)
            data += message.part
            if len(data) > _MOST_BYTES:
                raise Wrong("a message that is too large")
            if not message.more:
                if data and not message.part:
                    raise Wrong("the last part of a message is missing")
                return Message(bytes(data) or message.data, Given(found.take()))
            if not brought:
                raise Wrong("a packet that brings nothing")


def _decode(data: bytes, type_: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=ready(type_))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Wrong(f"no message: {error}") from error

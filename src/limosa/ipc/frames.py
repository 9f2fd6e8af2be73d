"""The messages between a controller and its worker: frames of msgpack over a socketpair.

A frame is its length (4 bytes, big endian) and one message. A request names a call of the worker's table; its reply
carries the value or the error. Replies come in any order: the number ties them to their requests.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgspec

import limosa.errors
from limosa.errors import LimosaError
from limosa.structs import ready

MAX_FRAME = 64 << 20
_LENGTH = struct.Struct(">I")


class Request(msgspec.Struct, array_like=True):
    """Call ``call`` with ``args``; ``number`` is unique within a connection."""

    number: int
    call: str
    args: list[Any] = []


class ErrorRecord(msgspec.Struct, array_like=True):
    """An error: its class in ``limosa.errors``, and what it was made of."""

    kind: str
    message: str
    hint: str = ""
    job_state: str = ""
    fields: dict[str, Any] = {}


class Reply(msgspec.Struct, array_like=True):
    """The answer to the request of that number."""

    number: int
    value: Any = None
    error: ErrorRecord | None = None


_requests = msgspec.msgpack.Decoder(ready(Request))
_replies = msgspec.msgpack.Decoder(ready(Reply))


def _plain(value: object) -> object:
    """What msgpack has no form for travels as text (numbers and names inside of errors' fields)."""
    return str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def pack_error(error: BaseException) -> ErrorRecord:
    """Turn an exception into a record; one that is none of Limosa's becomes an internal error."""
    if isinstance(error, LimosaError):
        return ErrorRecord(type(error).__name__, error.message, error.hint, error.job_state, error.fields)
    return ErrorRecord("LimosaError", f"internal error in the worker: {type(error).__name__}: {error}")


def unpack_error(record: ErrorRecord) -> LimosaError:
    """Turn a record into the exception that it was."""
    kind = getattr(limosa.errors, record.kind, LimosaError)
    if not (isinstance(kind, type) and issubclass(kind, LimosaError)):
        kind = LimosaError
    return kind(record.message, hint=record.hint, job_state=record.job_state, **record.fields)


def frame(message: Request | Reply) -> bytes:
    """Return the bytes of one message."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what arrives into messages.

    Args:
        replies: whether the other side sends replies (else requests).
    """

    def __init__(self, *, replies: bool):
        self._decoder: msgspec.msgpack.Decoder[Any] = _replies if replies else _requests
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes as they came.

        Returns:
            The messages that are complete now.

        Raises:
            ValueError: a frame is longer than anything that is ever sent, or no message.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            messages.append(self._decoder.decode(body))
        return messages


class Sender:
    """Sends whole frames from any thread."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Request | Reply, fd: int = -1) -> None:
        """Send one message.

        Args:
            message: what is sent.
            fd: a descriptor that goes with it, or -1.

        Raises:
            OSError: the other side is gone.
        """
        data = frame(message)
        with self._lock:
            sent = socket.send_fds(self._connection, [data], [fd]) if fd >= 0 else 0
            self._connection.sendall(data[sent:])

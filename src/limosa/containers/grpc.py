"""Calls to a daemon that speaks gRPC on a socket of root's: containerd.

Only what its interface needs: one call at a time on a connection of its own, with one message or several each way,
bounded. HTTP/2 is h2's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import unquote

from limosa import start
from limosa.errors import CannotBeMoved, FailedUndone

_MOST_BYTES = 16 << 20  # of one message; gRPC's own limit is 4 MiB
_MOST_AT_ONCE = 1 << 20
_TICK = 0.02
_PREFIX = struct.Struct(">?I")  # of a message: compressed or not, its length
_CREDENTIALS = struct.Struct("3i")
NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION = 5, 6, 9


class Refused(Exception):
    """The daemon has answered a call with an error.

    Attributes:
        status: gRPC's number of it.
    """

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Broken(FailedUndone):
    """The connection is no more; what was asked for may have been done or not."""


def peer_of(path: str) -> int:
    """Return who listens on a socket: a pid.

    Raises:
        CannotBeMoved: nobody does, or it is not root's.
    """
    with contextlib.closing(_connected(path)) as connection:
        return int(_credentials(connection)[0])


def call(
    path: str,
    method: str,
    request: bytes | Iterable[bytes],
    metadata: Mapping[str, str],
    *,
    seconds: float = 60.0,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[bytes]:
    """Yield what a method answers, message by message.

    Args:
        path: of the socket.
        method: "containerd.services.tasks.v1.Tasks/Get".
        request: what it is asked, in one message or several.
        metadata: more of its header.
        seconds: how long it may say nothing.
        tick: called now and then; what it raises ends the call.

    Raises:
        CannotBeMoved: nobody listens, or it is not root's.
        Refused: it has answered with an error.
        Broken: it does not answer.
    """
    requests = iter([request] if isinstance(request, bytes) else request)
    with contextlib.closing(_connected(path)) as connection:
        yield from _Call(connection, method, requests, metadata, seconds, tick).answers()


def _connected(path: str) -> socket.socket:
    if not start.trusted(os.path.dirname(path)):
        raise CannotBeMoved(detail=f"others than root can change {os.path.dirname(path)}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        if _credentials(connection)[1] not in (0, os.geteuid()):
            raise CannotBeMoved(detail=f"it is not root who listens on {path}")
    except OSError as error:
        connection.close()
        raise CannotBeMoved(detail=f"{path}: {error.strerror}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


class _Call:
    """One call under way."""

    def __init__(
        self,
        connection: socket.socket,
        method: str,
        requests: Iterator[bytes],
        metadata: Mapping[str, str],
        seconds: float,
        tick: Callable[[], None],
    ):
        from h2.config import H2Configuration
        from h2.connection import H2Connection

        self.connection, self.method, self.seconds, self.tick = connection, method, seconds, tick
        self.requests, self.unsent, self.all_sent = requests, b"", False
        self.received, self.status, self.ended = bytearray(), {"grpc-status": ""}, False
        self.heard = 0.0
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(_MOST_BYTES)
        self.stream = self.h2.get_next_available_stream_id()
        usual = {"content-type": "application/grpc", "te": "trailers"}
        first = {":method": "POST", ":scheme": "http", ":path": f"/{method}", ":authority": "localhost"}
        self.h2.send_headers(self.stream, list({**first, **usual, **metadata}.items()))
        self.h2.increment_flow_control_window(_MOST_BYTES, self.stream)

    def answers(self) -> Iterator[bytes]:
        self.connection.settimeout(_TICK)
        self.heard = time.monotonic()
        while True:
            self._turn(hears=False)
            yield from self._messages()
            if self.ended:
                break
            self.tick()
            self._turn(hears=True)
        if self.status["grpc-status"] != "0":
            status = self.status["grpc-status"]
            text = unquote(self.status.get("grpc-message", "")) or f"status {status}"
            raise Refused(int(status) if status.isdecimal() else 2, text)

    def _turn(self, *, hears: bool) -> None:
        """Say what can be said, or hear what there is."""
        from h2.exceptions import ProtocolError

        try:
            if not hears:
                self._send()
                return
            try:
                data = self.connection.recv(_MOST_AT_ONCE)
            except TimeoutError:
                if time.monotonic() > self.heard + self.seconds:
                    raise Broken(what=self.method, detail=f"no answer in {self.seconds:.0f} s") from None
                return
            if not data:
                raise Broken(what=self.method, detail="the connection was closed")
            self.heard = time.monotonic()
            self._hear(data)
        except (OSError, ProtocolError) as error:
            raise Broken(what=self.method, detail=str(error)) from error

    def _send(self) -> None:
        while not self.all_sent and not self.ended:
            if not self.unsent:
                following = next(self.requests, None)
                if following is None:
                    self.all_sent = True
                    self.h2.end_stream(self.stream)
                    break
                self.unsent = _PREFIX.pack(False, len(following)) + following
            room = min(self.h2.local_flow_control_window(self.stream), self.h2.max_outbound_frame_size)
            if room <= 0:
                break
            self.h2.send_data(self.stream, self.unsent[:room])
            self.unsent = self.unsent[room:]
            self._flush()
        self._flush()

    def _flush(self) -> None:
        data = self.h2.data_to_send()
        if data:
            self.connection.settimeout(self.seconds)
            self.connection.sendall(data)
            self.connection.settimeout(_TICK)

    def _hear(self, data: bytes) -> None:
        from h2 import events

        for event in self.h2.receive_data(data):
            if isinstance(event, events.DataReceived):
                self.received += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, self.stream)
            elif isinstance(event, events.ResponseReceived | events.TrailersReceived):
                self.status.update((str(name), str(value)) for name, value in event.headers)
            elif isinstance(event, events.StreamEnded):
                self.ended = True
            elif isinstance(event, events.StreamReset | events.ConnectionTerminated) and not self.ended:
                raise Broken(what=self.method, detail="the daemon has ended the call")

    def _messages(self) -> Iterator[bytes]:
        while len(self.received) >= _PREFIX.size:
            compressed, length = _PREFIX.unpack_from(self.received)
            if compressed or length > _MOST_BYTES:
                raise Broken(what=self.method, detail="an answer that was not asked for")
            if len(self.received) < _PREFIX.size + length:
                return
            whole = bytes(self.received[_PREFIX.size : _PREFIX.size + length])
            del self.received[: _PREFIX.size + length]
            yield whole

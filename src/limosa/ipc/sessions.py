"""The server's side of messages: each client has a thread of its own, so that a slow one holds up nobody but itself."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from limosa.ipc.messages import MOST_DESCRIPTORS, Message, receive, send_all
from limosa.ipc.packet import Given, peer


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


class Answer(NamedTuple):
    """What is said to a client.

    Attributes:
        said: the message.
        fds: descriptors that go with it.
        sent: called with them afterwards, also where they could not be sent.
    """

    said: dict[str, Any]
    fds: Sequence[int] = ()
    sent: Callable[[Sequence[int]], None] = close_all


class Session(Protocol):
    """What a server knows of one client."""

    def answer(self, message: Message, came: Given) -> Answer:
        """Do what is asked; descriptors that are not taken are closed afterwards."""

    def gone(self) -> None:
        """The client is not there any more."""


_S = TypeVar("_S", bound=Session)


class Sessions(Generic[_S]):
    """The clients of a server: its own user's, and root's.

    Args:
        make: makes the session of one that has connected.
    """

    def __init__(self, make: Callable[[], _S]):
        self._make = make
        self._living: set[_S] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._living)

    def all(self) -> list[_S]:
        """Return the sessions of those that are there."""
        with self._lock:
            return list(self._living)

    def accept(self, listening: socket.socket) -> None:
        """Take in those that have connected to a socket that does not wait."""
        while True:
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left for him
                time.sleep(0.05)
                return
            if peer(connection)[1] not in (0, os.geteuid()):
                connection.close()
                continue
            connection.setblocking(True)
            session = self._make()
            with self._lock:
                self._living.add(session)
            threading.Thread(target=self._run, args=(connection, session), daemon=True).start()

    def _run(self, connection: socket.socket, session: _S) -> None:
        try:
            serve(connection, session)
        finally:
            with self._lock:
                self._living.discard(session)


def serve(connection: socket.socket, session: Session) -> None:
    """Answer one client until it has gone, or says what cannot be understood; closes the connection."""
    coming = Given()
    try:
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:
                message = receive(connection)
                coming.add(message.given)
                if len(coming) > MOST_DESCRIPTORS:
                    return
                if not message.more:
                    _answer(connection, session, message, Given(coming.take()))
    finally:
        connection.close()
        coming.close()  # what was not finished is forgotten
        session.gone()


def _answer(connection: socket.socket, session: Session, message: Message, came: Given) -> None:
    with came:
        answer = session.answer(message, came)
    try:
        send_all(connection, answer.said, answer.fds)
    finally:
        answer.sent(answer.fds)


def listen(path: str) -> socket.socket:
    """Return a socket that listens at a path, for its owner alone, and does not wait.

    Raises:
        OSError: it cannot.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        found.bind(path)
        os.chmod(path, 0o600)
        found.listen(64)
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found

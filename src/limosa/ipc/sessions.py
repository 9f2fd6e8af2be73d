"""The server's side of messages: each client has its own thread, so that a slow one delays only itself."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from limosa.ipc.messages import FOR_EVER, Message, receive_all, send
from limosa.ipc.packet import Given, close_all, hang_up, peer

MOST_CLIENTS = 256
"""At once: who comes then waits until one has gone."""
SEND_SECONDS = 60.0
"""That a client may take to read an answer, or a packet of one."""
_MOST_NAME = 107  # bytes of a path (unix(7))
_AT_ONCE = 64
_NO_ROOM_SECONDS = 0.05


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

    A client is taken in only when there is a thread for it. Where no more can be started (RLIMIT_NPROC, pids.max), one
    that is done serves the next: clients wait, and what the server holds for others stays held.

    Args:
        make: makes the session of one that has connected.
    """

    def __init__(self, make: Callable[[], _S]):
        self._make = make
        self._living: set[_S] = set()
        self._lock = threading.Lock()
        self._taken: queue.SimpleQueue[tuple[socket.socket, _S]] = queue.SimpleQueue()
        self._free = 0  # threads that wait for a client

    def __len__(self) -> int:
        with self._lock:
            return len(self._living)

    def all(self) -> list[_S]:
        """Return the sessions of those that are there."""
        with self._lock:
            return list(self._living)

    def accept(self, listening: socket.socket) -> None:
        """Take in those that have connected to a socket that does not wait."""
        for _ in range(_AT_ONCE):
            try:
                if len(self) >= MOST_CLIENTS or not self._has_thread():
                    time.sleep(_NO_ROOM_SECONDS)
                    return
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left for him
                time.sleep(_NO_ROOM_SECONDS)
                return
            if peer(connection)[1] not in (0, os.geteuid()):
                hang_up(connection)
                continue
            session = self._make()
            with self._lock:
                self._living.add(session)
                self._free -= 1
            self._taken.put((connection, session))

    def _has_thread(self) -> bool:
        with self._lock:
            if self._free:
                return True
            self._free += 1  # before it is there: whoever is done meanwhile need not stay
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except (RuntimeError, MemoryError):
            with self._lock:
                self._free -= 1
            return False
        return True

    def _run(self) -> None:
        """Serves a client, and the next where nobody else waits for him."""
        while True:
            connection, session = self._taken.get()
            stays = False
            try:
                serve(connection, session)
                stays = True
            finally:
                with self._lock:
                    self._living.discard(session)
                    stays = stays and not self._free
                    self._free += stays
            if not stays:
                return


def serve(connection: socket.socket, session: Session) -> None:
    """Answer one client until it has gone, or says what cannot be understood; closes the connection."""
    with contextlib.ExitStack() as stack:  # whatever of it fails, the rest is done
        stack.callback(connection.close)
        stack.callback(session.gone)
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:  # a message that is not finished is forgotten
                _answer(connection, session, receive_all(connection, FOR_EVER))


def _answer(connection: socket.socket, session: Session, message: Message) -> None:
    with contextlib.ExitStack() as stack:
        with message.given as came:
            answer = session.answer(message, came)
            stack.callback(answer.sent, answer.fds)
        connection.settimeout(SEND_SECONDS)
        send(connection, answer.said, answer.fds)


def listen(path: str) -> socket.socket:
    """Return a socket that listens at a path, for its owner alone, and does not wait.

    Raises:
        OSError: it cannot.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        _bind(found, path)
        os.chmod(path, 0o600)
        found.listen(64)
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found


def _bind(listening: socket.socket, path: str) -> None:
    """Bind a socket to a path of any length: the kernel takes 107 bytes, and a folder's descriptor is a short name."""
    if len(os.fsencode(path)) <= _MOST_NAME:
        listening.bind(path)
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listening.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)

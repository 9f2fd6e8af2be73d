"""The worker's side of the protocol: reads requests, runs each in a thread of its own, ends with its controller.

The table of calls is given, so that tests run this loop with calls that are slow, fail or never come back.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from limosa.errors import IllegalState, InvalidArgument, InvalidMap, NoCudaState, NoSuchProcess
from limosa.ipc.frames import Frames, Reply, Request, Sender, pack_error

SET_WILL = "set_will"
PING = "ping"
AVAILABLE = "available"
LEAVE = "leave"
"""Its controller has given up on it: it is to end when it can, and to wait for nobody else."""
ASKING = frozenset({"state", "restore_thread_id", "inventory", "facts", AVAILABLE, PING})
"""Calls that change nothing."""
_UNHEARD = ASKING - {AVAILABLE, PING}
_ASKING_SECONDS = 0.2
_MOST_GIVEN = 4
"""As many descriptors as are taken at a time: a request has one at most."""
Table = Mapping[str, Callable[..., Any]]
_EXPECTED = (IllegalState, InvalidArgument, InvalidMap, NoCudaState, NoSuchProcess)
"""Answers about the process that was asked about, after which the driver is as it was."""


class Left(NamedTuple):
    """What a controller has left.

    Attributes:
        wills: commands that are to run now.
        initialised: whether it had the driver initialised here.
        spoilt: whether the driver has answered anything as it should not, or the controller has given up on it.
    """

    wills: list[list[str]]
    initialised: bool
    spoilt: bool


def serve(connection: socket.socket, table: Table, controller: int | None = None) -> Left:
    """Serve one controller until it is gone, then let the calls under way finish.

    Args:
        connection: the worker's end of the socketpair.
        table: call → function; what it returns must be something msgpack can hold.
        controller: a pidfd of the controller. Its death ends the loop also where a child that it forked still
            holds the other end of the socketpair.

    Returns:
        What it has left.
    """
    loop = _Loop(connection, table)
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if controller is not None:
        poller.register(controller, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        dead = controller in ready
        # What the controller said before it died still counts: above all its last word on the will.
        if not loop.read(until_empty=dead) or dead:
            break
    loop.finish()
    return Left([argv for argv, _ in loop.wills.values()], loop.initialised, loop.spoilt)


class _Loop:
    """The state of one worker: its wills and the calls under way."""

    def __init__(self, connection: socket.socket, table: Table):
        self.wills: dict[str, tuple[list[str], int]] = {}  # by name; with what is held open meanwhile, or -1
        self._given: deque[int] = deque()  # descriptors that have come, in their order
        self.initialised = self.spoilt = False
        self._connection = connection
        self._table = table
        self._frames = Frames(replies=False)
        self._sender = Sender(connection)
        self._running: dict[threading.Thread, str] = {}
        self._changed = threading.Condition()

    def read(self, *, until_empty: bool) -> bool:
        """Take what has arrived.

        Args:
            until_empty: go on until nothing is left.

        Returns:
            False at the end of the stream.
        """
        while True:
            try:
                flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                data, control, _, _ = self._connection.recvmsg(1 << 16, socket.CMSG_SPACE(_MOST_GIVEN * 4), flags)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._given += _descriptors(control)
            try:
                requests = self._frames.feed(data)
            except Exception:
                return False  # nobody who speaks like this is our controller: end as if it were gone
            for request in requests:
                self._take(request)
            if not until_empty:
                return True

    def finish(self) -> None:
        """Wait for every call under way, however long it takes: none can be broken off.

        Nobody needs the answer of one that only asks: of a process that was stopped it may never come.
        """
        until = time.monotonic() + _ASKING_SECONDS
        with self._changed:
            while any(call not in _UNHEARD for call in self._running.values()) or (
                self._running and time.monotonic() < until
            ):
                self._changed.wait(_ASKING_SECONDS)
            self.spoilt |= bool(self._running)

    def _take(self, request: Request) -> None:
        """Answer at once what concerns the worker itself; start a thread for the rest."""
        if request.call == SET_WILL:
            argv, name, holds, *_ = [*request.args, None, None, None]
            self._set_will(argv, str(name or ""), self._given.popleft() if holds and self._given else -1)
            self._reply(Reply(request.number))
        elif request.call == LEAVE:
            self.spoilt = True
            self._reply(Reply(request.number))
        elif request.call == PING:
            self._reply(Reply(request.number, "pong"))
        else:
            thread = threading.Thread(target=self._run, args=(request,), name=request.call, daemon=True)
            with self._changed:
                self._running[thread] = request.call
            thread.start()

    def _set_will(self, argv: list[Any] | None, name: str, fd: int) -> None:
        """Remember a will, and hold what came with it; without ``argv``, forget both."""
        _, old = self.wills.pop(name, ([], -1))
        if old >= 0:
            os.close(old)
        if argv:
            self.wills[name] = [str(part) for part in argv], fd
        elif fd >= 0:
            os.close(fd)

    def _run(self, request: Request) -> None:
        """Make one call and answer."""
        try:
            function = self._table.get(request.call)
            if function is None:
                raise LookupError(f"this worker has no call {request.call!r}")
            reply = Reply(request.number, function(*request.args))
            self.initialised |= request.call == AVAILABLE
        except BaseException as error:
            self.spoilt |= not isinstance(error, _EXPECTED)
            reply = Reply(request.number, None, pack_error(error))
        try:
            self._reply(reply)
        finally:
            with self._changed:
                self._running.pop(threading.current_thread(), None)
                self._changed.notify_all()

    def _reply(self, reply: Reply) -> None:
        """Send a reply; a controller that is gone needs none."""
        try:
            self._sender.send(reply)
        except OSError:
            pass
        except Exception as error:  # a value that msgpack cannot hold: say so instead of never answering
            try:
                self._sender.send(Reply(reply.number, None, pack_error(error)))
            except OSError:
                pass


def _descriptors(control: list[tuple[int, int, bytes]]) -> array.array[int]:
    """Return what has come beside the bytes."""
    fds = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds

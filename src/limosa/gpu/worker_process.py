"""One worker process as its controller sees it: started, asked, let go."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from limosa import start
from limosa.ipc.frames import Frames, Reply, Request, Sender


class Slot:
    """One call: what was asked, and the place for its answer."""

    def __init__(self, call: str, pid: int):
        self.call = call
        self.pid = pid
        self.since = time.monotonic()
        self.done = threading.Event()
        self.reply: Reply | None = None
        self.given_up = False


class Ends(Protocol):
    """What is needed of a ``subprocess.Popen``."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""


class Launched(NamedTuple):
    """A worker that has just been started: our end of its socketpair, itself, and what it writes to stderr."""

    connection: socket.socket
    process: Ends
    words: int


def launch() -> Launched:
    """Start a worker process.

    It gets a session of its own, "/" as working directory and nothing of ours but its end of the socketpair, so that
    neither our terminal nor whoever waits for our pipes to close is concerned with it. CUDA_VISIBLE_DEVICES and
    CUDA_DEVICE_ORDER are none of its environment: what the controller may see is not what the job may.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    words = os.memfd_create("limosa-worker-stderr")
    try:
        with theirs:
            process = start.popen(
                start.python("limosa.gpu.worker_main", str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        os.close(words)
        raise
    return Launched(ours, process, words)


class WorkerProcess:
    """One worker process and the calls it owes an answer to.

    Args:
        on_end: called from the reading thread when the worker is gone.
        start: starts it.

    Attributes:
        pending: request number → the call it owes an answer to, also those that were given up on.
        answered: whether it has ever answered.
        dead: whether it is gone.
        last_words: what it wrote last to its standard error before it was gone, "" for nothing.
        initialised: whether the driver was found and initialised in it; ``initialising`` is held meanwhile.
    """

    def __init__(self, on_end: Callable[[WorkerProcess], None], start: Callable[[], Launched] = launch):
        self.connection, self.process, self._words = start()
        self.pending: dict[int, Slot] = {}
        self.answered = False
        self.dead = False
        self.last_words = ""
        self.initialised = False
        self.initialising = threading.Lock()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self._retired = False
        self._numbers = 0
        self._sender = Sender(self.connection)
        self._on_end = on_end
        self._reader = threading.Thread(target=self._read, name="limosa-worker-replies", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def submit(self, call: str, pid: int, args: list[Any]) -> Slot:
        """Send a request.

        Args:
            call: a call of the worker's table.
            pid: the process it is about, 0 for none.
            args: all its arguments.

        Returns:
            Where the answer will be; ``done`` without a reply means that the worker is gone.
        """
        slot = Slot(call, pid)
        with self.lock:
            self._numbers += 1
            number = self._numbers
            dead = self.dead
            if not dead:
                self.pending[number] = slot
        if dead:
            slot.done.set()
            return slot
        try:
            self._sender.send(Request(number, call, args))
        except OSError:
            pass  # it died: the reader finds out and answers every slot
        return slot

    def retire(self) -> None:
        """Take no more calls; let go of the process when it has answered all it owes."""
        with self.lock:
            self._retired = True
            owes = bool(self.pending)
        if not owes:
            self.hang_up()

    def hang_up(self) -> None:
        """Tell the worker that no more will come; it ends when its calls have."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def wait(self, seconds: float) -> None:
        """Wait until it has ended and nothing of it is open here; no longer than so."""
        end = time.monotonic() + seconds
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        self._reader.join(max(0.0, end - time.monotonic()))

    def _read(self) -> None:
        """Hand out replies until the worker is gone."""
        frames = Frames(replies=True)
        try:
            while data := self.connection.recv(1 << 16):
                for reply in frames.feed(data):
                    self._deliver(reply)
        except (OSError, ValueError, msgspec.MsgspecError):
            pass
        self.last_words = self._said()
        with self.changed:
            self.dead = True
            left = list(self.pending.values())
            self.pending.clear()
            self.changed.notify_all()
        for slot in left:
            slot.done.set()
        self.connection.close()
        self._on_end(self)
        self.process.wait()

    def _said(self) -> str:
        """Return the last line of the worker's standard error and close it."""
        if self._words < 0:
            return ""
        try:
            size = os.fstat(self._words).st_size
            lines = os.pread(self._words, 4096, max(0, size - 4096)).decode(errors="replace").strip().splitlines()
        finally:
            os.close(self._words)
            self._words = -1
        return lines[-1] if lines else ""

    def _deliver(self, reply: Reply) -> None:
        """Give a reply to whoever waits for it."""
        with self.changed:
            self.answered = True
            slot = self.pending.pop(reply.number, None)
            finished = self._retired and not self.pending
            self.changed.notify_all()
        if slot is not None:
            slot.reply = reply
            slot.done.set()
        if finished:
            self.hang_up()

"""One worker process as its controller sees it: started, asked, let go."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from limosa import start
from limosa.ipc.frames import Frames, Reply, Request, Sender

START_SECONDS = 30.0
"""In which a worker that starts says who it is."""


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


def launch(waits_at: str = "") -> Launched:
    """Start a worker process.

    Args:
        waits_at: where it is to wait for another controller when this one has gone (:mod:`limosa.gpu.worker_idle`); it
            is nobody's child then. "": it ends with this one.

    It gets a session of its own, "/" as working directory and nothing of ours but its end of the socketpair, so that
    neither our terminal nor whoever waits for our pipes to close is concerned with it. CUDA_VISIBLE_DEVICES and
    CUDA_DEVICE_ORDER are none of its environment: what the controller may see is not what the job may.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    words = os.memfd_create("limosa-worker-stderr")
    me = -1
    try:
        with theirs:
            me = os.pidfd_open(os.getpid())
            process = start.popen(
                start.python("limosa.gpu.worker_main", str(theirs.fileno()), str(me), waits_at),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs.fileno(), me),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        os.close(words)
        raise
    finally:
        if me >= 0:
            os.close(me)
    if not waits_at:
        return Launched(ours, process, words)
    threading.Thread(target=process.wait, name="limosa-worker-starts", daemon=True).start()  # it leaves no zombie
    return Launched(ours, Apart(), words)


class Apart:
    """A worker that is nobody's child: another controller may have had it before, or may have it next.

    Attributes:
        pid: its process id; 0 until it has said so.
    """

    def __init__(self, pid: int = 0):
        self.pid = 0
        self._handle = -1
        self._waits = False
        if pid:
            self.is_called(pid)

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def is_called(self, pid: int) -> None:
        """It has said who it is."""
        if pid == self.pid:
            return
        with contextlib.suppress(OSError):  # it has ended already
            self._handle = os.pidfd_open(pid)
        self.pid = pid

    def waits(self) -> None:
        """It has said that it goes on, without us."""
        self._waits = True

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, or waits for another controller.

        Raises:
            subprocess.TimeoutExpired: it does neither.
        """
        if self._handle >= 0 and not self._waits and not _ended(self._handle, timeout):
            raise subprocess.TimeoutExpired("limosa-worker", timeout or 0.0)
        return 0


def _ended(handle: int, timeout: float | None) -> bool:
    poller = select.poll()  # a select has no room for descriptors past 1023
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(None if timeout is None else timeout * 1000))


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
        self._called = threading.Event()  # by its pid, or gone
        self._numbers = 0
        self._sender = Sender(self.connection)
        self._on_end = on_end
        self._reader = threading.Thread(target=self._read, name="limosa-worker-replies", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id; one that is just coming up is waited for."""
        if not self.process.pid:
            self._called.wait(START_SECONDS)
        return self.process.pid

    def submit(self, call: str, pid: int, args: list[Any], fd: int = -1) -> Slot:
        """Send a request.

        Args:
            call: a call of the worker's table.
            pid: the process it is about, 0 for none.
            args: all its arguments.
            fd: a descriptor that goes with it, or -1.

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
            self._sender.send(Request(number, call, args), fd)
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
        """Wait until it has ended, or is another's, and nothing of it is open here; no longer than so."""
        end = time.monotonic() + seconds
        if isinstance(self.process, Apart):
            self._reader.join(seconds)  # it may say last that it waits for another controller
        try:
            self.process.wait(max(0.0, end - time.monotonic()))
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
            self._called.set()
            left = list(self.pending.values())
            self.pending.clear()
            self.changed.notify_all()
        for slot in left:
            slot.done.set()
        self.connection.close()
        self._on_end(self)
        if not isinstance(self.process, Apart):
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

    def _says(self, value: object) -> None:
        """Note what a worker says of itself."""
        if isinstance(self.process, Apart):
            if isinstance(value, int) and 0 < value < 1 << 31:
                self.process.is_called(value)
                self._called.set()
            else:
                self.process.waits()

    def _deliver(self, reply: Reply) -> None:
        """Give a reply to whoever waits for it."""
        if reply.number == 0:  # of itself: its pid, or that it waits for another controller now
            self._says(reply.value)
            return
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

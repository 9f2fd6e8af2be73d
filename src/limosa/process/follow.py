"""Follows a job: copies its log as it grows, passes signals on to it, and learns how it ended.

Used by an attached ``limosa run`` and by ``limosa restore --attach``. The job must be a child of this process, or the
kernel tells nobody else its exit code: ``run`` starts it as one, ``restore`` adopts it (``adopting``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import msgspec

from limosa.errors import NoSuchProcess, Zombie
from limosa.process import job_log
from limosa.process.identity import Handle, Identity, read_stat
from limosa.process.records import EndedRecord

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_STEP = 0.05  # seconds between looks at the log: below what a reader notices, and 20 fstat(2) a second
_CHUNK = 1 << 16

TO_GROUP = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""What a terminal would send to the whole foreground process group: goes to the job's process group."""

TO_ROOT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What ``kill`` would send to one process: goes to the job's root, which knows what to tell its children."""


class Ended(msgspec.Struct, frozen=True):
    """How a followed job ended.

    Attributes:
        exit_code: its exit code, 128 + the number of the signal that ended it, or None where it is not known.
        image: the image, where a checkpoint ended it, else "".
        image_id: that image's id.
    """

    exit_code: int | None
    image: str = ""
    image_id: str = ""


class Signals:
    """Catches the signals that are meant for the job and passes them on, also those that come before it is there.

    A context manager, for the main thread. Signals that the caller ignores (``nohup``) are not passed on.
    """

    def __init__(self) -> None:
        self._target: Identity | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (*TO_GROUP, *TO_ROOT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def to(self, job: Identity) -> None:
        """Names the job; what has come in before reaches it now."""
        self._target = job
        early, self._early = self._early, []
        for number in early:
            _pass_on(job, number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._target is None:
            self._early.append(number)
        else:
            _pass_on(self._target, number)


def _pass_on(job: Identity, number: int) -> None:
    """Sends a signal on; the job's pid cannot have been reused while it is our unreaped child."""
    with contextlib.suppress(OSError, NoSuchProcess):
        if number in TO_GROUP and os.getpgid(job.pid) == job.pid and job.alive():
            os.killpg(job.pid, number)
        else:
            with Handle(job) as handle:
                handle.signal(number)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """While it holds, descendants of this process that lose their parent become its children (prctl(2)).

    For the time of a restore only: later orphans of the job are init's business, not ours to reap.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def stop_adopting() -> None:
    """Ends what ``adopting`` or ``restore(adopt=True)`` began; children that there are stay ours."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def child(pid: int) -> Identity:
    """The identity of a child of ours that may have ended already: its exit code waits for us.

    Raises:
        NoSuchProcess: there is no such process, not even a zombie.
    """
    return Identity(pid, read_stat(pid).start_time)


class Tail:
    """Copies what is appended to a log to a function.

    Args:
        fd: the log, open for reading, and closed by ``close``; -1 for nothing to copy.
        offset: where to begin, in bytes.
        write: takes the bytes.
    """

    def __init__(self, fd: int, offset: int, write: Callable[[bytes], None]):
        self._write = write
        self._offset = offset
        self._fd = fd

    def copy(self) -> bool:
        """Copies what is there now (one chunk); whether there was something."""
        if self._fd < 0:
            return False
        try:
            size = os.fstat(self._fd).st_size
            if size < self._offset:
                self._offset = 0  # cut back (`: > log`): what is appended from here on is new
            data = os.pread(self._fd, _CHUNK, self._offset)
        except OSError:
            return False
        self._offset += len(data)
        if data:
            self._write(data)
        return bool(data)

    def copy_rest(self) -> None:
        """Copies all that is there now; not what is appended meanwhile, which may be without end."""
        end = os.fstat(self._fd).st_size if self._fd >= 0 else 0
        while self._offset < end and self.copy():
            pass

    def close(self) -> None:
        """Stops."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def log_end(path: str) -> int:
    """The size of a log in bytes, 0 where it cannot be looked at: where ``follow`` begins after a restore."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def last_lines(fd: int, count: int) -> int:
    """Where the last ``count`` lines of an open file begin, in bytes; 0 where it has fewer."""
    at = end = os.fstat(fd).st_size
    left = count + (end > 0 and os.pread(fd, 1, end - 1) == b"\n")  # the newline at the end begins no line
    if count == 0:
        return end
    while at > 0:
        begin = max(0, at - _CHUNK)
        data = os.pread(fd, at - begin, begin)
        while (found := data.rfind(b"\n")) >= 0:
            left -= 1
            if left == 0:
                return begin + found + 1
            data = data[:found]
        at = begin
    return 0


def follow_job(
    job: Identity, log: str, write: Callable[[bytes], None], *, offset: int | None = None, own: bool = False
) -> Ended:
    """Copies the job's log until the job has ended, reaps it, and says how it ended.

    Passing signals on is the caller's business (``Signals``).

    Args:
        job: its root, a child of this process.
        log: the file its output goes to, or "".
        write: takes what is appended to it.
        offset: where in the log to begin, in bytes; its end now where None.
        own: this process has opened the log for the job; else somebody says that it is the job's (``job_log``).

    Raises:
        NoSuchProcess: there was no such process to begin with.
    """
    fd = -1
    with contextlib.suppress(OSError):  # a log that was removed or hidden: the job is followed all the same
        fd = (job_log.open_own(log) if own else job_log.open_said(log, job.pid)) if log else -1
    tail = Tail(fd, os.fstat(fd).st_size if offset is None and fd >= 0 else offset or 0, write)
    try:
        with contextlib.ExitStack() as stack:
            try:
                handle = stack.enter_context(Handle(job))
                while not handle.wait(0 if tail.copy() else _STEP):
                    pass
            except Zombie:
                pass  # it ended before we looked; its exit code waits for us
        code = _reap(job.pid)
        tail.copy_rest()
    finally:
        tail.close()
    record = EndedRecord.of(job) if code in (None, 128 + signal.SIGKILL) else None
    if record is None or not os.path.isdir(record.image):
        return Ended(code)
    record.forget()
    return Ended(code, record.image, record.image_id)


def _reap(pid: int) -> int | None:
    """The exit code of our child that has ended; None where it is not ours."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code

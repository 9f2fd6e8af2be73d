"""The identity of a process: its pid and start time, held by a pidfd while something is done to it.

A pid alone is reused by the kernel; pid and start time (field 22 of ``/proc/PID/stat``, proc(5)) never are within one
boot. A thread's id opens ``/proc/TID`` just as a pid does, so ``Tgid`` in ``/proc/PID/status`` is compared first.
"""

from __future__ import annotations

import os
import select
import signal
from types import TracebackType
from typing import Annotated

import msgspec

from limosa.errors import NoSuchProcess, NotAProcess, OwnAncestor, PermissionDenied, PidReused, UsageError, Zombie
from limosa.process.slurp import slurp
from limosa.process.status import status_of

_PF_EXITING = 0x4  # include/linux/sched.h, in the flags of /proc/PID/stat
_PF_KTHREAD = 0x00200000
_PENDING = ("SigPnd", "ShdPnd")
_LONGEST_PID = 10  # digits of a pid_t

END_SECONDS = 20.0
"""How long the end of a process with a GPU may take: its memory is let go of by the kernel's own thread."""


class Stat(msgspec.Struct, frozen=True):
    """What Limosa uses of ``/proc/PID/stat`` (proc(5))."""

    pid: int
    name: str
    state: str
    ppid: int
    pgid: int
    sid: int
    tty_nr: int
    n_threads: int
    start_time: int
    kernel: bool = False

    @property
    def ended(self) -> bool:
        """True for a real zombie; a process whose main thread alone has ended shows Z too and still runs."""
        return self.state in "ZX" and self.n_threads <= 1

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it: the driver answers about it only after SIGCONT (measured)."""
        return self.state == "T"


def read_stat(pid: int) -> Stat:
    """Read ``/proc/PID/stat``.

    Args:
        pid: a process id (a thread id is answered as well; :meth:`Identity.of` tells them apart).

    Returns:
        The fields Limosa uses.

    Raises:
        NoSuchProcess: there is nothing of that id (or it ended while it was read).
        PermissionDenied: ``/proc`` is mounted with ``hidepid``.
    """
    try:
        raw = slurp(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        raise NoSuchProcess(pid=pid) from None
    except PermissionError:
        raise PermissionDenied(detail=f"process {pid} belongs to somebody else (/proc hides it)", pid=pid) from None
    # The name stands in parentheses and may itself hold spaces and parentheses: cut at the last one.
    opening, closing = raw.index(b"("), raw.rindex(b")")
    rest = raw[closing + 2 :].split()
    return Stat(
        pid=pid,
        name=raw[opening + 1 : closing].decode(errors="replace"),
        state=rest[0].decode(),
        ppid=int(rest[1]),
        pgid=int(rest[2]),
        sid=int(rest[3]),
        tty_nr=int(rest[4]),
        n_threads=int(rest[17]),
        start_time=int(rest[19]),
        kernel=bool(int(rest[6]) & _PF_KTHREAD),
    )


def ending(pid: int) -> bool:
    """Return whether a process is on its way out: it has ended, or none of its threads will run its program again.

    A process with a GPU takes up to seconds for that, and is there meanwhile; the driver answers all sorts of things
    about it (measured: 304 and NOT_INITIALIZED).
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    return all(_thread_ending(f"/proc/{pid}/task/{tid}") for tid in threads)


def has_gone(pid: int) -> bool:
    """Return whether a process that answers no more has ended; one that is just ending is waited for."""
    if not ending(pid):
        return False
    try:
        with Handle(Identity.of(pid)) as handle:
            return handle.wait(END_SECONDS)
    except NoSuchProcess:
        return True


def _thread_ending(folder: str) -> bool:
    """Return whether a thread is a zombie, is exiting, or has a SIGKILL that nothing can take back."""
    try:
        stat = slurp(f"{folder}/stat")
        rest = stat[stat.rindex(b")") + 2 :].split()
        if rest[0] in (b"Z", b"X") or int(rest[6]) & _PF_EXITING:
            return True
        return is_pending(folder, signal.SIGKILL)
    except (OSError, ValueError):
        return True


def is_pending(folder: str, number: signal.Signals) -> bool:
    """Return whether a signal has been sent to a process or thread that has not taken it yet.

    Args:
        folder: ``/proc/PID`` or ``/proc/PID/task/TID``.
        number: the signal.

    Raises:
        OSError: there is no such process, or it may not be looked at.
    """
    status = status_of(folder)
    return any(int(status[name][0], 16) >> (number - 1) & 1 for name in _PENDING)


def boot_id() -> str:
    """Return the kernel's id of this boot: pid and start time mean nothing in another."""
    return slurp("/proc/sys/kernel/random/boot_id").decode().strip()


def _thread_group(pid: int) -> int:
    """Return the process that ``pid`` belongs to (``Tgid`` of ``/proc/PID/status``)."""
    try:
        return int(status_of(pid)["Tgid"][0])
    except (FileNotFoundError, ProcessLookupError, KeyError):
        raise NoSuchProcess(pid=pid) from None


def pid_in(text: str) -> int | None:
    """Return the pid that a text is; None where it is anything else, a name for instance.

    Examples:
        >>> pid_in("4711"), pid_in("train"), pid_in("²")
        (4711, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LONGEST_PID else None


class Identity(msgspec.Struct, frozen=True, order=True):
    """A process: its pid and when it started.

    Attributes:
        pid: the process id in Limosa's pid namespace.
        start_time: clock ticks since boot, field 22 of ``/proc/PID/stat``.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, le=0x7FFFFFFF)]
    start_time: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Return the identity of a living process.

        Args:
            pid: a process id, 1 or more.

        Raises:
            UsageError: ``pid`` is not a positive whole number.
            NoSuchProcess: there is no such process.
            NotAProcess: ``pid`` is a thread's id.
            Zombie: the process has ended and waits to be reaped.
        """
        if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid <= 0x7FFFFFFF:
            raise UsageError(detail=f"{pid!r} is not a process id")
        stat = read_stat(pid)
        group = _thread_group(pid)
        if group != pid:
            raise NotAProcess(pid=pid, tgid=group)
        if stat.ended:
            raise Zombie(pid=pid, ppid=stat.ppid)
        return cls(pid, stat.start_time)

    def alive(self) -> bool:
        """Return whether this very process still runs: not gone, not a zombie, not another with its pid."""
        try:
            stat = read_stat(self.pid)
        except NoSuchProcess:
            return False
        return stat.start_time == self.start_time and not stat.ended

    def check(self) -> None:
        """Do nothing where this very process still runs.

        Raises:
            NoSuchProcess: it is gone.
            Zombie: it has ended.
            PidReused: another process has its pid now.
        """
        stat = read_stat(self.pid)
        if stat.start_time != self.start_time:
            raise PidReused(pid=self.pid)
        if stat.ended:
            raise Zombie(pid=self.pid, ppid=stat.ppid)

    def to_str(self) -> str:
        """Return ``"PID@START"``, which :meth:`from_str` reads."""
        return f"{self.pid}@{self.start_time}"

    @classmethod
    def from_str(cls, text: str) -> Identity:
        """Read what :meth:`to_str` wrote.

        Raises:
            UsageError: the text is not of that form.
        """
        pid, at, start = text.partition("@")
        if not (at and pid.isascii() and pid.isdigit() and start.isascii() and start.isdigit()):
            raise UsageError(detail=f"{text!r} does not name a process (PID@START)")
        return cls(int(pid), int(start))


class Handle:
    """A pidfd of a process whose identity was compared after it was opened: signals can reach no other process.

    Use as a context manager.

    Args:
        identity: the process.

    Attributes:
        identity: the process.
        fd: the pidfd (pidfd_open(2)), closed on exit.

    Raises:
        NoSuchProcess, Zombie, PidReused: as :meth:`Identity.check`.
    """

    def __init__(self, identity: Identity):
        self.identity = identity
        try:
            self.fd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            raise NoSuchProcess(pid=identity.pid) from None
        except OSError:
            # EINVAL (ENOENT on newer kernels) for a thread's id. Identity.of says so in words.
            Identity.of(identity.pid)
            raise
        try:
            identity.check()
        except BaseException:
            self.close()
            raise

    def signal(self, number: int) -> None:
        """Send a signal (pidfd_send_signal(2)).

        Raises:
            NoSuchProcess: the process has ended.
            PermissionDenied: it belongs to somebody else.
        """
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            raise NoSuchProcess(pid=self.identity.pid) from None
        except PermissionError:
            raise PermissionDenied(detail=f"process {self.identity.pid} belongs to somebody else") from None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the process has ended (a pidfd turns readable then; a zombie counts as ended).

        Args:
            timeout: seconds; None waits for ever.

        Returns:
            Whether it has ended.
        """
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(None if timeout is None else max(0, int(timeout * 1000))))

    def close(self) -> None:
        """Close the pidfd; the handle cannot be used afterwards."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ancestors(pid: int | None = None) -> list[Identity]:
    """Return the ancestors of a process, its parent first, as far as this pid namespace shows them.

    Args:
        pid: the process; Limosa's own where None. It is not part of the answer.

    Raises:
        NoSuchProcess: there is no such process.
    """
    found: list[Identity] = []
    current = read_stat(os.getpid() if pid is None else pid).ppid
    while current > 0 and all(current != known.pid for known in found):
        try:
            stat = read_stat(current)
        except (NoSuchProcess, PermissionDenied):
            break  # it ended just now (its children have another parent), or /proc hides it
        found.append(Identity(current, stat.start_time))
        current = stat.ppid
    return found


def refuse_ancestor(identity: Identity) -> None:
    """Refuse to work on Limosa itself or on what it was started from: stopping those would stop Limosa.

    Raises:
        OwnAncestor: the process is Limosa itself or one of its ancestors.
    """
    if identity.pid == os.getpid() or any(identity == known for known in ancestors()):
        raise OwnAncestor(pid=identity.pid)

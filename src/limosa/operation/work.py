"""One operation under way: its clock, its journal and claim, its undo stack, the worker that makes its driver calls.

Each step pushes its undo before it acts. When a step fails, runs out of time or is cancelled, the stack is unwound
newest first and the error that started it is raised again, its exit code saying that the job is as it was. When an
undo fails as well, everything is left where it is, the journal stays for ``recover``, and
:class:`UndoFailed` (40) is raised.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

from limosa import gpu, start
from limosa.errors import (
    CancelledUndone,
    CannotBeMoved,
    DriverError,
    DriverHung,
    DriverTimeout,
    FailedUndone,
    LeftSuspended,
    LimosaError,
    NoRoomOnHost,
    NoSuchProcess,
    NotFinished,
    NotSupported,
    PauseTooLong,
    PermissionDenied,
    Reason,
    TimedOutUndone,
    UndoFailed,
)
from limosa.operation import drivers
from limosa.operation.claims import Claim, make
from limosa.operation.journal import Header, Journal, Member, Noted, Phase, common_state
from limosa.operation.turns import GO, STILL_SECONDS, Turn
from limosa.process import places
from limosa.process.identity import Identity
from limosa.process.limits import many_descriptors
from limosa.progress import Progress, ProgressFn, silent
from limosa.terms import JobState

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORWARD = "forward"  # in place of all undos, where there is no way back
_NO_HOST_MEMORY = ("cuCheckpointProcessCheckpoint", "CUDA_ERROR_OUT_OF_MEMORY")


class Clock:
    """How long a verb may still take, and whether it was cancelled: for its planning as for its steps.

    ``started``: when it began (monotonic), where that was before now: a second try has no more time than was left.
    """

    def __init__(
        self,
        operation: str,
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        started: float | None = None,
    ):
        self.operation = operation
        self.started = time.monotonic() if started is None else started
        self.timeout = timeout
        self.cancel = cancel if cancel is not None else threading.Event()

    @property
    def left(self) -> float | None:
        """Seconds until the time limit, at least 0; None without one."""
        if self.timeout is None:
            return None
        return max(0.0, self.started + self.timeout - time.monotonic())

    def at_most(self, seconds: float) -> float:
        """``seconds``, or what is left where that is less; never 0, which means "for ever" to some."""
        left = self.left
        return seconds if left is None else max(0.001, min(seconds, left))

    def stop_asked(self) -> bool:
        """Whether the caller has cancelled or the time is up."""
        return self.cancel.is_set() or self.left == 0.0

    is_set = stop_asked  # as an event has it: what hashing and verifying take as ``cancel=``

    def check(self) -> None:
        """Stops here, between steps, if cancelled or out of time: CancelledUndone, TimedOutUndone."""
        if self.cancel.is_set():
            raise CancelledUndone(what=self.operation)
        if self.left == 0.0:
            raise TimedOutUndone(what=self.operation, seconds=self.timeout)


class Work(Clock):
    """An operation under way; a context manager that undoes on the way out of an exception.

    ``timeout`` is for all of it, ``max_pause`` for how long the job may stand still, in seconds. ``driver``: the
    caller's, who closes it; None: one of its own. ``brings_job``: there is no job before it (a restore). ``turn``: its
    turns among several jobs that are worked on side by side; None: it is alone.
    """

    def __init__(  # noqa: PLR0913 - options are keywords
        self,
        operation: str,
        *,
        timeout: float | None = None,
        max_pause: float | None = None,
        progress: ProgressFn = silent,
        cancel: threading.Event | None = None,
        started: float | None = None,
        driver: gpu.Driver | None = None,
        brings_job: bool = False,
        turn: Turn | None = None,
    ):
        super().__init__(operation, timeout=timeout, cancel=cancel, started=started)
        self.id = f"{operation}-{os.getpid()}-{time.time_ns():x}"
        self.max_pause = max_pause
        self.brings_job = brings_job
        self.progress = _harmless(progress)
        self.timings: dict[str, float] = {}
        self.warnings: list[Reason] = []
        self.journal: Journal | None = None
        self.claim: Claim | None = None
        self.paused_at: float | None = None
        self.state_before = ""
        self.doubtful: dict[int, BaseException] = {}  # pids whose restore has failed, maybe for good
        self.parked_bytes = 0
        self.made: dict[str, int] = {}  # bytes by GPU that are there already for what is to be restored
        self._image = ""
        self._full = ""
        self._undo: list[tuple[str, Callable[[], None]]] = []
        self._driver, self._is_ours = driver, driver is None
        self.turn = turn
        self._limits = contextlib.ExitStack()

    # -- time --------------------------------------------------------------------------------------------------

    def check_pause(self, to_come: float, undo_costs: float) -> None:
        """Stops here (PauseTooLong) if the job would stand still for too long and turning back is the shorter way.

        Both are estimated seconds until it runs again: if the operation goes on, and if everything is undone.
        """
        if self.max_pause is None or self.paused_at is None or undo_costs >= to_come:
            return
        estimate = time.monotonic() - self.paused_at + to_come
        if estimate > self.max_pause:
            raise PauseTooLong(estimate=estimate, limit=self.max_pause)

    @contextlib.contextmanager
    def timed(self, step: str, message: str = "", total: int | None = None) -> Iterator[None]:
        """Times a step under its name (seconds, added up) and reports its beginning."""
        self.progress(Progress(step, done=0 if total else None, total=total, message=message))
        with self.spent(step):
            yield

    @contextlib.contextmanager
    def spent(self, what: str) -> Iterator[None]:
        """Times a part of a step under a name of its own (seconds, added up); nobody is told."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.timings[what] = self.timings.get(what, 0.0) + time.monotonic() - begun

    def pause_begins(self) -> None:
        """The job stands still from here."""
        self.paused_at = time.monotonic()

    def pause_ends(self) -> None:
        """The job runs again."""
        if self.paused_at is not None:
            self.timings["pause_seconds"] = time.monotonic() - self.paused_at
            self.paused_at = None

    def take_turn(self, name: str) -> None:
        """Waits for a turn (``turns.GO`` or ``COME``) among several jobs, where there are several, or CancelledUndone.

        Until it stands still the time limit is the job's own: what it waits for others does not count.
        """
        if self.turn is None:
            return
        begun = time.monotonic()
        still = STILL_SECONDS if self.max_pause is None else 0.0
        self.turn.take(name, lambda: self.check() if self.cancel.is_set() else None, still)
        if name == GO:
            self.started += time.monotonic() - begun

    def end_turn(self) -> None:
        """Lets go of the turn, if there is one."""
        if self.turn is not None:
            self.turn.end()

    # -- driver, journal, claim --------------------------------------------------------------------------------

    @property
    def driver(self) -> gpu.Driver:
        """The client of the driver worker, which starts at first use."""
        if self._driver is None:
            self._driver = drivers.driver()
        return self._driver

    def begin(  # noqa: PLR0913 - options are keywords
        self,
        members: Sequence[Member],
        *,
        roots: Sequence[Identity] = (),
        tree: Sequence[Identity] = (),
        image: str = "",
        leave_running: bool = False,
        gpus: Mapping[str, int] | None = None,
        shared: bool = False,
        names: Sequence[str] = (),
        uses: Sequence[str] = (),
        configured: Mapping[str, str] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Journal:
        """Claims the job (Busy), opens the journal, and leaves the worker its will: undo if this process dies.

        ``gpus``: bytes to claim by GPU UUID; ``shared``, ``names``, ``uses``: as a claim has them; ``configured``: as
        the journal has it. ``check`` looks, under the lock of all claims, whether all that is there.
        """
        self._image = image
        header = Header(
            id=self.id,
            operation=self.operation,
            roots=list(roots),
            members=list(members),
            tree=list(tree),
            controller=Identity.of(os.getpid()),
            image=image,
            leave_running=leave_running,
            configured=dict(configured or {}),
        )
        claim = Claim(
            id=self.id,
            operation=self.operation,
            holder=header.controller,
            pids=list(tree),
            gpus=dict(gpus or {}),
            paths=[image] if image else [],
            shared=shared,
            names=list(names),
            uses=list(uses),
        )
        self.state_before = JobState.GONE if self.brings_job else common_state(members)
        self.claim = make(claim, check)
        self.push("claim", self._release)
        self.journal = Journal.create(header)
        # The worker may still be coming up: a job that CRIU alone works on need not stand in line for that.
        self.driver.set_will(self._will(), wait=False, name=self.id, holds=self.journal.fd)
        return self.journal

    def has_taken(self, gpus: Mapping[str, int]) -> None:
        """Says of room on GPUs that was claimed that it is taken now: others would count it twice."""
        if self.claim is not None:
            self.claim.gpus = {uuid: max(0, size - gpus.get(uuid, 0)) for uuid, size in self.claim.gpus.items()}
            with contextlib.suppress(LimosaError, OSError):  # others wait for longer then
                self.claim.save()

    def armed(self) -> None:
        """Makes sure that the worker has its will, before what cannot be taken back; DriverHung: nobody could undo."""
        self.driver.set_will(self._will(), name=self.id, holds=self.journal.fd if self.journal is not None else -1)

    def _will(self) -> list[str]:
        return start.python("limosa.operation.orphan", self.id)

    def note(self, step: Noted, phase: Phase, pid: int = 0, **data: object) -> None:
        """Journals a record, where there is a journal."""
        if self.journal is not None:
            self.journal.note(step, phase, pid, **data)

    def try_note(self, step: Noted, phase: Phase, pid: int = 0, **data: object) -> None:
        """Journals a record of what cannot be changed any more: going on without it is better than stopping."""
        if self.journal is not None:
            self.journal.try_note(step, phase, pid, **data)

    def _release(self) -> None:
        if self.claim is not None:
            self.claim.release()
            self.claim = None

    # -- undo --------------------------------------------------------------------------------------------------

    def push(self, name: str, undo: Callable[[], None]) -> None:
        """Registers how to undo the step that comes next."""
        self._undo.append((name, undo))

    def only_forward(self, told: str) -> None:
        """There is no way back any more: what fails from here on leaves the journal, for ``recover`` to go on."""

        def undo() -> None:
            raise FailedUndone(told)

        self._undo = [(_FORWARD, undo)]

    def drop(self, name: str) -> None:
        """Forgets the newest undo of that name: its step is past undoing, or undone."""
        for i in range(len(self._undo) - 1, -1, -1):
            if self._undo[i][0] == name:
                del self._undo[i]
                return

    def __enter__(self) -> Work:
        self._limits.enter_context(many_descriptors())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end_turn()  # others need not wait until it is undone, which may take as long as the driver hangs
        try:
            if error is None:
                self._end()
                return
            roots = self.journal.header.roots if self.journal is not None else []
            members = self.journal.header.members if self.journal is not None else []
            begun = bool(self._undo or roots)
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                self._full = self._folder_of(error)  # now: the undo makes room
            if self._undo:
                self.progress(Progress("undo", message=f"{self.operation}: {error}; undoing"))
                self._unwind(error)
            self._end()
            raised = self.translated(error)
            if self.doubtful and self.state_before != JobState.RUNNING and not self.brings_job:
                raised = self._doubt(error)
            if roots and not self.brings_job and not any(r.alive() for r in roots):
                gone = ", ".join(str(r.pid) for r in roots)
                raised = NoSuchProcess(f"process {gone} has ended in the middle: {error}", pid=roots[0].pid)
                raised.job_state = JobState.GONE
            elif isinstance(raised, LimosaError) and raised.exit_code in (10, 12, 20, 21):
                raised = self._without_a_member(members, raised)
            if begun and isinstance(raised, LimosaError) and not raised.job_state:
                raised.job_state = self.state_before
            if raised is not error:
                raise raised from error
        finally:
            self.end_turn()
            self._limits.close()
            if self._driver is not None and self._is_ours:
                self._driver.close()

    def _folder_of(self, error: OSError) -> str:
        """The folder that is full, as far as can be told: what was written to, else the one that has the least room."""
        if isinstance(error.filename, str) and os.path.isabs(error.filename):
            return os.path.dirname(error.filename)
        folders = [str(places.base()), *([os.path.dirname(self._image)] if self._image else [])]
        return min(folders, key=_room)

    def _unwind(self, error: BaseException) -> None:
        suspended: LeftSuspended | None = None
        while self._undo:
            name, undo = self._undo.pop()
            try:
                self.try_note(Noted.UNDO, Phase.BEGIN, name=name)  # the driver's state tells recover as much
                undo()
                self.try_note(Noted.UNDO, Phase.DONE, name=name)
            except LeftSuspended as left:
                suspended = left  # the rest is undone all the same: folders, claims
            except BaseException as undo_error:
                self.try_note(Noted.UNDO, Phase.FAILED, name=name)
                if self.journal is not None:
                    self.journal.close()
                if self._driver is not None:
                    with contextlib.suppress(DriverHung):
                        self._driver.set_will(None, name=self.id)
                forward = name == _FORWARD
                raise (NotFinished if forward else UndoFailed)(
                    what=self.operation,
                    detail=str(error),
                    undo_detail=str(undo_error) if forward else f"{name}: {undo_error}",
                    job_state=JobState.UNKNOWN,
                ) from undo_error
        if suspended is not None:
            self._end()
            raise suspended

    def _end(self) -> None:
        """Nothing is left to undo: forget the will, the journal and the claim."""
        self._undo.clear()
        if self.journal is not None:
            self.journal.finish()
            self.journal = None
        self._release()
        # Last, so that there is no moment at which we could die and nobody would tidy up; without a journal the will
        # does nothing. A worker that has died has no will any more.
        if self._driver is not None:
            with contextlib.suppress(DriverHung):
                self._driver.set_will(None, name=self.id)
        self.timings["total"] = time.monotonic() - self.started

    def _doubt(self, error: BaseException) -> UndoFailed:
        """A suspended job whose restore has failed: "as it was" cannot be promised of it.

        One that ran before needs none of this: its undo has restored it, or has failed.
        """
        pids = ", ".join(map(str, self.doubtful))
        return UndoFailed(
            f"{self.operation} failed: {error}. Process {pids} is suspended as before, but drivers were seen to refuse "
            "a process for ever once its restore had failed",
            hint=f"try again, when there is room: limosa resume {pids}. Its host memory holds all there is of it: do "
            "not end it",
            job_state=JobState.CHECKPOINTED,
        )

    def _without_a_member(self, members: Sequence[Member], error: LimosaError) -> LimosaError:
        """One answer to the end of one process of several, whichever step was the first to notice: the rest runs on."""
        ended = [m.pid for m in members if not self.brings_job and not m.identity.alive()]
        if not ended or isinstance(error, UndoFailed):
            return error
        told = ", ".join(map(str, ended))
        return FailedUndone(
            what=self.operation,
            detail=f"process {told} of the job has ended in the middle ({error})",
            hint="the job is as it was, without that process; if it goes on like this, try again",
        )

    def translated(self, error: BaseException) -> BaseException:
        """The error as the caller of the operation sees it, after the undo."""
        if isinstance(error, DriverTimeout):
            return TimedOutUndone(
                f"process {error.fields.get('pid')} could not be locked in time, and everything was undone: "
                "it waits for another process (a collective?) or its threads do not come back from the driver",
                hint="several NCCL ranks cannot be held one by one; try again, or raise --timeout",
                what=self.operation,
                seconds=self.timeout or 0,
            )
        if isinstance(error, NotSupported) and error.fields.get("call") != "cuCheckpointProcessRestore":
            return CannotBeMoved(
                detail=f"the driver cannot checkpoint process {error.fields.get('pid')} ({error.result}); it runs on",
                hint="managed memory, or CUDA IPC before driver 610, does this",
            )
        if isinstance(error, CancelledUndone) and not self.cancel.is_set() and self.left == 0.0:
            return TimedOutUndone(what=self.operation, seconds=self.timeout)  # hashing knows one way to be stopped
        if isinstance(error, KeyboardInterrupt):
            return CancelledUndone(what=self.operation)
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return NoRoomOnHost(
                detail=f"no room is left in {self._full} ({error.strerror}): {self.operation} was undone",
                hint=f"df -h {self._full}",
            )
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return NoRoomOnHost(detail=f"{self.operation}: {error}")
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
            return PermissionDenied(detail=str(error))
        if isinstance(error, DriverError) and (error.fields.get("call"), error.result) == _NO_HOST_MEMORY:
            return NoRoomOnHost(
                detail=f"the driver found no host memory for the device memory of process {error.fields.get('pid')}; "
                "it runs on",
                hint="end something that uses host memory, or raise the memory limit of its cgroup",
            )
        if isinstance(error, (DriverError, DriverHung, OSError)):
            return FailedUndone(what=self.operation, detail=str(error))
        if isinstance(error, LimosaError) or not isinstance(error, Exception):
            return error
        return LimosaError(detail=f"{type(error).__name__}: {error}")


def _room(folder: str) -> int:
    """Bytes that may still be written to the disk of a folder; 0 where nobody can say."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


def _harmless(progress: ProgressFn) -> ProgressFn:
    """A progress function whose failure is its own affair: it must not keep an undo from being done."""

    def told(message: Progress) -> None:
        with contextlib.suppress(Exception):
            progress(message)

    return told

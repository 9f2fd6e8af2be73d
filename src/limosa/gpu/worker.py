"""The client of the resident worker: driver calls with limits, which the caller can give up on.

A driver call cannot be broken off and may never come back, so the controller makes none itself. A call that
exceeds its limit raises :class:`~limosa.errors.DriverHung`; its worker is left to end by itself (it is never killed:
a restore may be under way in it) and further calls go to another. The state of the job is then read from the
driver, never assumed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from limosa.errors import DriverHung, GpuUnavailable, InvalidArgument, LimosaError
from limosa.gpu import nvml
from limosa.gpu.checks import check_pairs, check_pid, check_timeout
from limosa.gpu.facts import DriverFacts
from limosa.gpu.gpus import Inventory
from limosa.gpu.names import LockResult, State
from limosa.gpu.worker_loop import ASKING, LEAVE, SET_WILL
from limosa.gpu.worker_process import Launched, Slot, WorkerProcess, launch
from limosa.ipc.frames import unpack_error
from limosa.structs import ready

_CLOSED = "this limosa.gpu.Driver has been closed: make another one"
INIT_LIMIT = 120.0
"""Seconds for ``cuInit``: 2.7 s were seen with eight GPUs, more with no persistence mode."""


class Driver:
    """The driver's calls, made in a worker process that starts when it is first needed.

    Thread-safe; calls on different processes go in parallel. Time limits are in seconds; None waits for ever. Without
    a driver every driver call raises a :class:`~limosa.errors.GpuUnavailable`; the will works all the same.

    Args:
        start: starts a worker; tests give one that runs :func:`limosa.gpu.worker_loop.serve` with calls of their own.

    Examples:
        >>> with Driver() as driver:
        ...     driver.pid is None  # nothing was asked of it yet
        True
    """

    def __init__(self, *, start: Callable[[], Launched] = launch) -> None:
        self._start = start
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._worker: WorkerProcess | None = None
        self._retired: list[WorkerProcess] = []
        self._wills: dict[str, tuple[list[str], int]] = {}
        self._missing: GpuUnavailable | None = None
        self._closed = False

    # --- the driver -----------------------------------------------------------------------------------------

    def available(self, limit: float | None = INIT_LIMIT) -> None:
        """Do nothing where the driver can checkpoint; found once and kept.

        Raises:
            BindingsTooOld, SymbolMissing, DriverTooOld, GpuUnavailable: see :func:`limosa.gpu.driver.available`.
            DriverHung: ``cuInit`` has not come back.
        """
        self._ready(limit)

    def state(self, pid: int, timeout: float | None = 5.0) -> State:
        """Return a process's checkpoint state.

        Raises:
            NoCudaState: it holds no CUDA state.
            DriverHung: no answer in time; that is normal while a checkpoint or restore of it is under way.
            NoSuchProcess, DriverError, GpuUnavailable: see :func:`limosa.gpu.driver.state`.
        """
        return State(self._call("state", pid, [], timeout))

    def states(self, pids: Iterable[int], timeout: float | None = 5.0) -> dict[int, State | LimosaError]:
        """Return the states of several processes, asked at the same time.

        Args:
            pids: the processes.
            timeout: seconds for all of them together.

        Returns:
            pid → state, or the error that :meth:`state` would raise for it.

        Raises:
            GpuUnavailable: there is no driver to ask.
        """
        wanted = [check_pid(pid) for pid in pids]
        worker = self._ready(INIT_LIMIT)
        end = None if timeout is None else time.monotonic() + timeout
        slots = [(pid, worker.submit("state", pid, [pid])) for pid in wanted]
        found: dict[int, State | LimosaError] = {}
        for pid, slot in slots:
            try:
                left = None if end is None else max(0.0, end - time.monotonic())
                found[pid] = State(self._value(worker, slot, left, timeout))
            except LimosaError as error:
                found[pid] = error
        return found

    def restore_thread_id(self, pid: int, timeout: float | None = 5.0) -> int:
        """Return the id of the thread that restores a process."""
        return int(self._call("restore_thread_id", pid, [], timeout))

    def lock(self, pid: int, timeout_ms: int = 0, limit: float | None = None) -> LockResult:
        """Lock a running process.

        Args:
            pid: the process.
            timeout_ms: milliseconds after which the driver gives up and lets it run on; 0: never.
            limit: seconds after which Limosa gives up on the driver (a stopped target hangs it past ``timeout_ms``).

        Raises:
            DriverHung: the limit was reached; the lock may still be taken later.
            IllegalState, NoCudaState, …: see :func:`limosa.gpu.driver.lock`.
        """
        return LockResult(self._call("lock", pid, [check_timeout(timeout_ms)], limit))

    def checkpoint(self, pid: int, limit: float | None = None) -> None:
        """Bring a locked process's device memory to its host memory.

        Raises:
            DriverHung: the limit was reached; it may still be under way (:meth:`wait_under_way`).
            NotSupported, IllegalState, …: see :func:`limosa.gpu.driver.checkpoint`.
        """
        self._call("checkpoint", pid, [], limit)

    def restore(self, pid: int, mapping: Mapping[str, str] | None = None, limit: float | None = None) -> None:
        """Bring a checkpointed process's memory back to GPUs.

        Args:
            pid: the process.
            mapping: UUID → UUID, complete (:func:`limosa.gpu.complete_map`, :func:`limosa.gpu.identity_map`).
            limit: seconds.

        Raises:
            DriverHung: the limit was reached; it may still be under way (:meth:`wait_under_way`).
            InvalidMap, IllegalState, …: see :func:`limosa.gpu.driver.restore`.
        """
        check_pairs(mapping)
        self._call("restore", pid, [dict(mapping) if mapping else None], limit)

    def unlock(self, pid: int, limit: float | None = 30.0) -> None:
        """Let a locked process go on.

        Raises:
            DriverHung: the limit was reached.
            IllegalState, …: see :func:`limosa.gpu.driver.unlock`.
        """
        self._call("unlock", pid, [], limit)

    def inventory(self, limit: float | None = None) -> Inventory:
        """Return the GPUs by NVML, which needs no checkpoint calls (:func:`limosa.gpu.inventory`).

        Args:
            limit: seconds; None: ``nvml.INVENTORY_LIMIT``.

        Raises:
            GpuUnavailable: there is no NVML, or it has not answered.
            DriverHung: the worker has ended meanwhile.
        """
        worker = self._current()
        limit = nvml.INVENTORY_LIMIT if limit is None else limit
        try:
            found = self._value(worker, worker.submit("inventory", 0, []), limit, limit)
            return msgspec.convert(found, ready(Inventory))
        except DriverHung as error:
            if error.fields.get("worker_died"):
                raise
            hint = "a GPU may hang: does nvidia-smi answer?"
            raise GpuUnavailable(detail=f"NVML has not answered for {limit:g} s", hint=hint) from error

    def facts(self, limit: float | None = INIT_LIMIT) -> DriverFacts:
        """Return what ``doctor`` wants to know; never raises for a missing driver.

        Raises:
            DriverHung: the driver has not answered.
        """
        worker = self._current()
        value = self._value(worker, worker.submit("facts", 0, []), limit, limit)
        return msgspec.convert(value, ready(DriverFacts), strict=False)

    # --- calls that were given up on --------------------------------------------------------------------------

    def under_way(self, pid: int) -> str | None:
        """Return the call that is under way on a process in one of this client's workers, None where there is none.

        After :class:`~limosa.errors.DriverHung` this goes on saying so until the driver has come back.
        """
        with self._lock:
            workers = [*self._retired, *([self._worker] if self._worker else [])]
        for worker in workers:
            with worker.lock:
                for slot in worker.pending.values():
                    if slot.pid == pid and slot.call not in ASKING:
                        return slot.call
        return None

    def wait_under_way(self, pid: int, timeout: float | None = None) -> bool:
        """Wait until no call is under way on a process any more.

        Args:
            pid: the process.
            timeout: seconds; None waits for ever.

        Returns:
            Whether none is; its outcome is then to be read with :meth:`state`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self.under_way(pid):
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    # --- the worker itself --------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The worker's process id, None where none runs, or has not said yet which it is."""
        with self._lock:
            worker = self._worker
        living = worker is not None and not worker.dead and self._owner == os.getpid()
        return worker.pid or None if worker is not None and living else None

    def start(self) -> None:
        """Start the worker without waiting for it, so that the first call finds it up."""
        self._current()

    def warm(self) -> None:
        """Start the worker and ``cuInit`` in it without waiting, so that a later call finds them done."""
        self._current().submit("available", 0, [])

    def set_will(
        self,
        argv: list[str] | None,
        limit: float | None = 30.0,
        *,
        wait: bool = True,
        name: str = "",
        holds: int = -1,
    ) -> None:
        """Say what the worker shall become when this process is gone, however it ends.

        Armed when this returns. The command runs detached (its own session, /dev/null as standard streams, "/" as
        working directory) once the calls under way have finished.

        Args:
            argv: the command, its program by full path; None: nothing.
            limit: seconds.
            wait: False returns as soon as the will is sent. A worker that is still coming up reads it also when we are
                gone by then, and it stands before any call that is sent later; only that the worker cannot come up is
                not noticed: say it again, with ``wait``, before it is too late.
            name: whose will it is: of several operations each has its own, and all of them run.
            holds: a descriptor of which the worker holds a copy until the will runs or is cleared: what is locked by
                it stays locked as long as the worker may still act for us.

        Raises:
            DriverHung: the worker does not answer.
        """
        with self._lock:
            copy = os.dup(holds) if argv and holds >= 0 else -1
            _, old = self._wills.pop(name, ([], -1))
            if old >= 0:
                os.close(old)
            if argv:
                self._wills[name] = list(argv), copy
            elif self._worker is None or self._worker.dead:
                return
            worker = self._current()  # one that is new gets all of them: said twice does no harm
            # Before anybody gives up on this worker: its last word on a will is then that there is none.
            slot = _tell_will(worker, name, argv, copy)
        if wait:
            self._value(worker, slot, limit, limit)

    def close(self, wait: float = 5.0) -> None:
        """Clear the wills and let the worker go; it ends, or waits for another controller, when its calls have.

        Every call after this raises :class:`~limosa.errors.InvalidArgument`; closing again does nothing.

        Args:
            wait: seconds to wait for that.
        """
        with self._lock:
            self._closed = True
            names = list(self._wills)
            for _, fd in self._wills.values():
                if fd >= 0:
                    os.close(fd)
            self._wills = {}
            worker, self._worker = self._worker, None
        if worker is None or self._owner != os.getpid():
            return
        for name in names:
            _tell_will(worker, name)
        worker.hang_up()
        worker.wait(wait)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current(self) -> WorkerProcess:
        """Return the worker that takes calls, a new one where there is none (or a fork inherited it)."""
        if self._owner != os.getpid() and not self._closed:
            self._begin()
        with self._lock:
            if self._closed:
                raise InvalidArgument(detail=_CLOSED)
            if self._worker is not None and not self._worker.dead:
                return self._worker
            worker = self._worker = WorkerProcess(self._ended, self._start)
            for name, (argv, fd) in self._wills.items():
                _tell_will(worker, name, argv, fd)
            return worker

    def _ended(self, worker: WorkerProcess) -> None:
        """A worker is gone: forget it; where a will depended on it another has to take it over at once."""
        with self._lock:
            if worker in self._retired:
                self._retired.remove(worker)
            if self._worker is not worker:
                return
            self._worker = None
            if self._wills and worker.answered and not self._closed:
                try:
                    self._current()
                except OSError:
                    pass

    def _ready(self, limit: float | None) -> WorkerProcess:
        """Return a worker in which the driver is initialised."""
        if self._missing is not None and not self._closed and self._owner == os.getpid():
            raise type(self._missing)(self._missing.message, hint=self._missing.hint, **self._missing.fields)
        worker = self._current()
        with worker.initialising:
            if not worker.initialised:
                try:
                    self._value(worker, worker.submit("available", 0, []), limit, limit)
                except GpuUnavailable as error:
                    self._missing = error
                    raise
                worker.initialised = True
        return worker

    def _call(self, call: str, pid: int, args: list[Any], limit: float | None) -> Any:
        """Make one driver call on one process."""
        check_pid(pid)
        worker = self._ready(INIT_LIMIT)
        return self._value(worker, worker.submit(call, pid, [pid, *args]), limit, limit)

    def _value(self, worker: WorkerProcess, slot: Slot, wait: float | None, limit: float | None) -> Any:
        """Wait for an answer.

        Args:
            worker: who was asked.
            slot: what was asked.
            wait: seconds to wait from now.
            limit: the limit as the caller gave it, for the message.

        Raises:
            DriverHung: it did not come in time, or the worker has ended.
            LimosaError: it is an error.
        """
        if not slot.done.wait(wait):
            # An asker behind a checkpoint or restore of the same process is expected to wait: no fault of the worker.
            expected = slot.call in ASKING and slot.pid > 0 and self.under_way(slot.pid) is not None
            slot.given_up = True
            if not expected:
                self._give_up(worker)
            raise DriverHung(call=slot.call, pid=slot.pid, seconds=limit or 0.0, job_state="unknown")
        reply = slot.reply
        if reply is None:
            words = worker.last_words
            raise DriverHung(
                f"the worker process {worker.pid} ended during {slot.call}"
                + (f" on process {slot.pid}, which may have taken effect" if slot.pid else "")
                + (f" (its last words: {words})" if words else ""),
                call=slot.call,
                pid=slot.pid,
                seconds=time.monotonic() - slot.since,
                worker_died=True,
                job_state="unknown",
            )
        if reply.error is not None:
            raise unpack_error(reply.error)
        return reply.value

    def _give_up(self, worker: WorkerProcess) -> None:
        """Leave a worker to its calls. Another takes the will over before this one loses it."""
        with self._lock:
            if self._worker is not worker:
                return
            self._worker = None
            self._retired.append(worker)
            names = list(self._wills)
            if names:
                self._current()
        for name in names:
            _tell_will(worker, name)
        worker.submit(LEAVE, 0, [])
        worker.retire()


def _tell_will(worker: WorkerProcess, name: str, argv: list[str] | None = None, holds: int = -1) -> Slot:
    """Tell a worker a will, with what it holds as long as it has it; without ``argv``, that there is none."""
    return worker.submit(SET_WILL, 0, [list(argv) if argv else None, name, holds >= 0], holds)

"""One CUDA process, acted on from this process: a superset of ``cuda.core.checkpoint.Process``.

For programs that hold their own threads and limits. Calls block for as long as the driver does; operations on jobs
use :class:`limosa.gpu.Driver` instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from limosa.errors import DriverTimeout, IllegalState, InvalidArgument, InvalidMap, LimosaError
from limosa.gpu import driver
from limosa.gpu.checks import check_pairs, check_pid
from limosa.gpu.gpus import find_gpu, uuid_text
from limosa.gpu.names import LockResult, State, normal_uuid
from limosa.gpu.nvml import inventory


class Process:
    """A CUDA process that can be locked, checkpointed, restored and unlocked.

    ``running → lock → locked → checkpoint → checkpointed → restore → locked → unlock → running``

    When to use which: ``cuda.core.checkpoint.Process`` where a program has cuda.core anyway and wants the calls of the
    driver and no more. This class, with the same names, where it also wants typed errors, ``try_lock``,
    ``wait_for_state``, GPUs named in any way, or an import that loads no libcuda. Each acts on one process. For a job
    (a process and its children), with planning and a way back, use :func:`limosa.move` and its like.

    Args:
        pid: its process id; whether there is such a process is looked at before each call.

    Raises:
        InvalidArgument: ``pid`` is not a positive whole number (a ValueError and a TypeError as well).

    Examples:
        >>> Process(4711).pid
        4711
    """

    __slots__ = ("_pid",)

    def __init__(self, pid: int):
        self._pid = check_pid(pid)

    @classmethod
    def current(cls) -> Process:
        """Return the calling process. Locking oneself blocks one's own CUDA calls."""
        return cls(os.getpid())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._pid

    @property
    def state(self) -> State:
        """The checkpoint state; a number that Limosa has no word for is kept as such.

        Raises:
            NoCudaState: the process holds no CUDA state.
            DriverError, GpuUnavailable, NoSuchProcess: see :func:`limosa.gpu.driver.state`.
        """
        return driver.state(self._pid)

    @property
    def is_running(self) -> bool:
        """Whether the state is "running"."""
        return self.state == State.RUNNING

    @property
    def is_locked(self) -> bool:
        """Whether the state is "locked"."""
        return self.state == State.LOCKED

    @property
    def is_checkpointed(self) -> bool:
        """Whether the state is "checkpointed"."""
        return self.state == State.CHECKPOINTED

    @property
    def restore_thread_id(self) -> int:
        """The id of the process's thread that restores it."""
        return driver.restore_thread_id(self._pid)

    def lock(self, timeout_ms: int = 0) -> None:
        """Block the process's further CUDA calls.

        Args:
            timeout_ms: milliseconds to wait for its running GPU work; 0 waits for ever.

        Raises:
            DriverTimeout: it could not be locked in time and runs on.
            IllegalState: it is not running.
        """
        if self.try_lock(timeout_ms) is LockResult.TIMED_OUT:
            raise DriverTimeout(
                call="cuCheckpointProcessLock",
                pid=self._pid,
                code=600,
                result="CUDA_ERROR_NOT_READY",
                meaning=f"the process could not be locked within {timeout_ms} ms and runs on",
                job_state="running",
            )

    def try_lock(self, timeout_ms: int) -> LockResult:
        """Block the process's further CUDA calls, if that can be had in time.

        Args:
            timeout_ms: milliseconds to wait for its running GPU work; 0 waits for ever.

        Returns:
            ``LOCKED``, or ``TIMED_OUT`` where it runs on.

        Raises:
            IllegalState: it is not running.
        """
        return driver.lock(self._pid, timeout_ms)

    def checkpoint(self) -> None:
        """Bring the locked process's device memory to its host memory and let go of its GPUs.

        Raises:
            NotSupported: it uses something that cannot be checkpointed; it stays locked.
            IllegalState: it is not locked.
        """
        driver.checkpoint(self._pid)

    def restore(self, gpu_mapping: Mapping[Any, Any] | None = None) -> None:
        """Bring the checkpointed process's memory back to its GPUs, or to others; it is locked then.

        Args:
            gpu_mapping: for every GPU whose device node the process could open when it was checkpointed, the GPU it
                becomes. Each named by index, ``GPU-<uuid>``, bare UUID, PCI bus id, ``cuda.core.Device`` or
                ``CUuuid``. Passed on as it is (:func:`limosa.gpu.complete_map` completes one); None: each stays.

        Raises:
            InvalidMap: two sources on one GPU, or no mapping.
            UnknownGpu: a name is none of a GPU of this machine.
            IllegalState: it is not checkpointed.
            DriverError: the driver refuses the map (``CUDA_ERROR_INVALID_VALUE``); it is still checkpointed.
        """
        driver.restore(self._pid, mapping_by_uuid(gpu_mapping))

    def unlock(self) -> None:
        """Let the locked process go on.

        Raises:
            IllegalState: it is not locked.
        """
        driver.unlock(self._pid)

    def suspend(self, timeout_ms: int = 0) -> None:
        """Lock and checkpoint. Where the checkpoint fails the process is unlocked and runs on.

        Args:
            timeout_ms: for the lock; 0 waits for ever.

        Raises:
            As :meth:`lock` and :meth:`checkpoint`.
        """
        self.lock(timeout_ms)
        try:
            self.checkpoint()
        except LimosaError as error:
            # What state it is in is read, not assumed: only a locked process is let go on.
            if self.is_locked:
                self.unlock()
                error.job_state = "running"
            raise

    def resume(self, gpu_mapping: Mapping[Any, Any] | None = None) -> None:
        """Restore and unlock.

        Args:
            gpu_mapping: as for :meth:`restore`.

        Raises:
            As :meth:`restore`; the process is still checkpointed then.
        """
        self.restore(gpu_mapping)
        self.unlock()

    def toggle(self) -> State:
        """Suspend a running process, resume a checkpointed one.

        Returns:
            The state that it is in now.

        Raises:
            IllegalState: it is in neither state (locked, failed, or under way).
        """
        before = self.state
        if before == State.RUNNING:
            self.suspend()
        elif before == State.CHECKPOINTED:
            self.resume()
        else:
            raise IllegalState(
                call="toggle",
                pid=self._pid,
                code=401,
                result="CUDA_ERROR_ILLEGAL_STATE",
                meaning=f"the process is {before}: only a running or a checkpointed one can be toggled",
                job_state=str(before),
            )
        return self.state

    def wait_for_state(self, state: State | str, timeout: float | None = None) -> State:
        """Wait until the process is in a state.

        The driver tells no one of changes: it is asked again and again, at first every millisecond, then more rarely.

        Args:
            state: the state to wait for.
            timeout: seconds; None waits for ever.

        Returns:
            That state.

        Raises:
            DriverTimeout: it was not reached in time; ``fields["state"]`` is the last one seen.
        """
        try:
            wanted = State(state)
        except ValueError:
            raise InvalidArgument(detail=f"{state!r} is no state of a process") from None
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.001
        while (seen := self.state) != wanted:
            if end is not None and time.monotonic() >= end:
                raise DriverTimeout(
                    f"process {self._pid} was not {wanted} within {timeout:g} s; it is {seen}",
                    call="wait_for_state",
                    pid=self._pid,
                    state=str(seen),
                    job_state=str(seen),
                )
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        return wanted

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pid})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Process) and other._pid == self._pid

    def __hash__(self) -> int:
        return hash(self._pid)


def mapping_by_uuid(gpu_mapping: Mapping[Any, Any] | None) -> dict[str, str] | None:
    """Turn the names in a map into UUIDs.

    NVML is asked only where a name is an index or a PCI bus id.

    Args:
        gpu_mapping: GPU → GPU, each named in any of the ways of :func:`limosa.gpu.find_gpu`.

    Returns:
        UUID → UUID; None for None.

    Raises:
        InvalidMap: it is no mapping, or a GPU stands twice on a side.
        UnknownGpu: no GPU is called so.
    """
    if gpu_mapping is None:
        return None
    if not isinstance(gpu_mapping, Mapping):
        raise InvalidMap(detail="a GPU map must be a mapping from GPU to GPU")
    result: dict[str, str] = {}
    for old, new in gpu_mapping.items():
        source = _uuid(old)
        if source in result:
            raise InvalidMap(detail=f"the map names {source} twice as a source")
        result[source] = _uuid(new)
    check_pairs(result)
    return result


def _uuid(spec: object) -> str:
    """Return the UUID of one name."""
    if not isinstance(spec, int):
        known = normal_uuid(uuid_text(spec))
        if known:
            return known
    return find_gpu(inventory(), spec).uuid

"""The driver's checkpoint calls: thin, typed, in this process. Everything else goes through them.

Functions over ``cuda.bindings.driver``, which is loaded at the first call, so that this module can be imported where
there is no libcuda. A call may block for as long as the driver likes: :class:`limosa.gpu.Driver` makes the same calls
in a worker process that can be given up on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

from limosa.errors import DriverError, SymbolMissing
from limosa.gpu.binding import arguments, find, words
from limosa.gpu.checks import check_imports, check_pairs, check_pid, check_process, check_timeout
from limosa.gpu.meanings import INVALID_VALUE, NOT_READY, OPERATING_SYSTEM, SUCCESS, UNKNOWN, driver_error
from limosa.gpu.names import LockResult, State

_GET_STATE = "cuCheckpointProcessGetState"


def available() -> None:
    """Do nothing where the driver can checkpoint; the answer is found once and kept.

    Raises:
        BindingsTooOld: cuda.bindings is missing or lacks the checkpoint calls.
        DriverTooOld: there is no NVIDIA driver, or it is older than 570.
        SymbolMissing: libcuda lacks one of the calls.
        GpuUnavailable: ``cuInit`` fails (no GPU).
    """
    find()


def state(pid: int) -> State:
    """Return a process's checkpoint state (``cuCheckpointProcessGetState``).

    It blocks while a checkpoint or restore of that process is under way.

    Args:
        pid: a process id.

    Raises:
        NoCudaState: the process holds no CUDA state.
        InvalidArgument, NoSuchProcess, NotAProcess: there is no such process.
        GpuUnavailable: see :func:`available`.
        DriverError: the driver fails in another way.
    """
    return State.from_code(int(_call(_GET_STATE, pid)))


def restore_thread_id(pid: int) -> int:
    """Return the id of the thread that restores a process (``cuCheckpointProcessGetRestoreThreadId``).

    Raises:
        As :func:`state`.
    """
    return int(_call("cuCheckpointProcessGetRestoreThreadId", pid))


def lock(pid: int, timeout_ms: int = 0) -> LockResult:
    """Lock a running process: its CUDA calls block from here on (``cuCheckpointProcessLock``).

    Args:
        pid: a process id.
        timeout_ms: milliseconds to wait for its running GPU work; 0 waits for ever.

    Returns:
        ``TIMED_OUT`` where the driver gave up; the process runs on then.

    Raises:
        IllegalState: it is not running.
        As :func:`state`.
    """
    timeout_ms = check_timeout(timeout_ms)
    try:
        _call("cuCheckpointProcessLock", pid, timeout_ms=timeout_ms)
    except DriverError as error:
        if error.fields["code"] == NOT_READY and timeout_ms:
            return LockResult.TIMED_OUT
        raise
    return LockResult.LOCKED


def checkpoint(pid: int) -> None:
    """Bring a locked process's device memory to its host memory and let go of its GPUs.

    ``cuCheckpointProcessCheckpoint``. The memory then counts as the process's own host memory.

    Raises:
        HeldByImport: it would be its end; nothing was tried, and it is locked as before.
        NotSupported: it uses something that cannot be checkpointed; it stays locked.
        IllegalState: it is not locked.
        As :func:`state`.
    """
    check_imports(pid)
    _call("cuCheckpointProcessCheckpoint", pid)


def restore(pid: int, mapping: Mapping[str, str] | None = None) -> None:
    """Bring a checkpointed process's memory back to the GPUs; it is locked then (``cuCheckpointProcessRestore``).

    Args:
        pid: a process id.
        mapping: UUID → UUID for every GPU that the process could open when it was checkpointed
            (:func:`limosa.gpu.complete_map`); None or empty passes none.

    Raises:
        InvalidMap: two sources on one GPU, or something that is no UUID.
        IllegalState: it is not checkpointed.
        As :func:`state`.
    """
    _call("cuCheckpointProcessRestore", pid, pairs=check_pairs(mapping))


def unlock(pid: int) -> None:
    """Let a locked process go on (``cuCheckpointProcessUnlock``).

    Raises:
        IllegalState: it is not locked.
        As :func:`state`.
    """
    _call("cuCheckpointProcessUnlock", pid)


def _call(call: str, pid: int, **values: Any) -> Any:
    """Validate, call the driver, turn its answer into a value or a typed error."""
    check_pid(pid)
    binding = find()
    check_process(pid)
    args, keep = arguments(binding, call, **values)
    try:
        answer = getattr(binding, call)(pid, *args)
    except ValueError as error:  # the bindings have no name for the number that the driver gave
        if call == _GET_STATE:
            return _raw_state(pid)  # which changes nothing, so that it may be asked twice
        raise driver_error(call, pid, -1, name="an unknown CUresult", words=str(error)) from error
    except RuntimeError as error:
        raise SymbolMissing(detail=f"the NVIDIA driver cannot be asked for {call}: {error}") from error
    finally:
        del keep
    return _value(binding, call, pid, answer)


def _value(binding: Any, call: str, pid: int, answer: Sequence[Any]) -> Any:
    """Return the second part of ``(CUresult, value)``.

    Raises:
        DriverError: the first part is not success.
    """
    code = int(answer[0])
    if code == SUCCESS:
        return answer[1] if len(answer) > 1 else None
    raise driver_error(
        call,
        pid,
        code,
        name=str(getattr(answer[0], "name", "")),
        words=words(binding, answer[0]),
        process_gone=not os.path.exists(f"/proc/{pid}"),
        hint=_hint(call, code),
    )


def _hint(call: str, code: int) -> str:
    """Return the way out of failures that have a known cause."""
    if call == "cuCheckpointProcessRestore" and code == INVALID_VALUE:
        return (
            "the map must name every GPU whose device node the process can open, each once on either side; "
            "the process is still checkpointed and a restore with a right map brings it back"
        )
    if call == "cuCheckpointProcessCheckpoint" and code == UNKNOWN:
        return "after one checkpoint that has failed the driver checkpoints a process no more; unlocked, it runs on"
    if code == OPERATING_SYSTEM:
        return "is the process yours, and is it still there?"
    return ""


def _raw_state(pid: int) -> int:
    """Ask libcuda for a state without the bindings."""
    number = ctypes.c_int(-1)
    code = int(ctypes.CDLL("libcuda.so.1").cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(number)))
    if code != SUCCESS:
        raise driver_error(_GET_STATE, pid, code)
    return number.value

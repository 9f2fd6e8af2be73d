"""What the driver's error numbers mean for a checkpoint call: one table from CUresult to error class and words.

The numbers are those of ``cuda.h`` (CUresult); the words come from the driver's documentation of the checkpoint calls
and from what was measured (``docs/caveats.md``).
"""

from __future__ import annotations

from limosa.errors import (
    DriverError,
    DriverNoSuchProcess,
    DriverTimeout,
    IllegalState,
    NoCudaState,
    NotSupported,
)

SUCCESS = 0
INVALID_VALUE = 1
NOT_INITIALIZED = 3
NO_DEVICE = 100
OPERATING_SYSTEM = 304
UNKNOWN = 999
ILLEGAL_STATE = 401
NOT_FOUND = 500
NOT_READY = 600

_MEANINGS: dict[int, tuple[str, str]] = {
    1: ("CUDA_ERROR_INVALID_VALUE", "the driver does not accept an argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "there is not enough memory, on the GPU or on the host"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "the process holds no CUDA state"),
    100: ("CUDA_ERROR_NO_DEVICE", "the driver finds no GPU"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "a context that the call needs is missing"),
    304: ("CUDA_ERROR_OPERATING_SYSTEM", "a call to the operating system failed"),
    401: ("CUDA_ERROR_ILLEGAL_STATE", "the process is not in a state in which this can be done"),
    500: ("CUDA_ERROR_NOT_FOUND", "something that was named is not there"),
    600: ("CUDA_ERROR_NOT_READY", "the process could not be locked in time: its running GPU work did not end"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "the process's GPU work has accessed memory that is not its own"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "the process's GPU work has failed"),
    800: ("CUDA_ERROR_NOT_PERMITTED", "the driver does not permit it"),
    801: ("CUDA_ERROR_NOT_SUPPORTED", "the process uses something that the driver cannot checkpoint"),
    999: ("CUDA_ERROR_UNKNOWN", "the driver does not say why"),
}

_CLASSES: dict[int, type[DriverError]] = {
    NOT_INITIALIZED: NoCudaState,
    ILLEGAL_STATE: IllegalState,
    NOT_READY: DriverTimeout,
    801: NotSupported,
}


def driver_error(
    call: str, pid: int, code: int, *, name: str = "", words: str = "", process_gone: bool = False, hint: str = ""
) -> DriverError:
    """Return the typed error for a failed driver call.

    Args:
        call: the driver function, ``cuCheckpointProcessLock``.
        pid: the process it was called for.
        code: the CUresult's number.
        name: the CUresult's name as the bindings know it, or "".
        words: the driver's own meaning (``cuGetErrorString``), or "".
        process_gone: whether ``/proc`` has no such process any more; the driver has no number for that.
        hint: a way out where one is known.

    Returns:
        An error to raise; ``fields`` has call, pid, code, result and meaning.
    """
    known_name, known_words = _MEANINGS.get(code, ("", ""))
    kind = _CLASSES.get(code, DriverError)
    meaning = known_words
    if words and words != meaning:
        meaning = f"{known_words} ({words})" if known_words else words
    if process_gone:
        kind, meaning = DriverNoSuchProcess, "there is no such process any more"
    return kind(
        call=call,
        pid=pid,
        code=code,
        result=name or known_name or f"CUresult {code}",
        meaning=meaning or "the driver does not say what it means",
        hint=hint,
    )

"""``cuda.bindings.driver``: found once, initialised once, and the structures that its checkpoint calls take.

Before the first call ``cuInit`` runs in this process: a restore needs it (or persistence mode), and without it the
driver's NOT_INITIALIZED could be about this process as well as about the target. No context is made.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Sequence
from typing import Any

from limosa.errors import BindingsTooOld, DriverTooOld, GpuUnavailable, SymbolMissing
from limosa.gpu.meanings import NO_DEVICE, SUCCESS

SYMBOLS = (
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)
OPTIONAL_SYMBOLS = ("cuCheckpointOperationComplete",)
_STRUCTURES = ("CUcheckpointLockArgs", "CUcheckpointRestoreArgs", "CUcheckpointGpuPair", "CUprocessState")
_OLDEST_CUDA = 12080  # cuCheckpointProcess* came with CUDA 12.8, driver 570

_once = threading.Lock()
_found: Any = None
_missing: GpuUnavailable | None = None


def find() -> Any:
    """Return the binding with the driver initialised; found, or found missing, once and kept.

    Raises:
        BindingsTooOld: cuda.bindings is missing or lacks the checkpoint calls.
        DriverTooOld: there is no NVIDIA driver, or it is older than 570.
        SymbolMissing: libcuda lacks one of the calls.
        GpuUnavailable: ``cuInit`` fails (no GPU).
    """
    global _found, _missing
    with _once:
        if _missing is not None:
            raise type(_missing)(_missing.message, hint=_missing.hint, **_missing.fields)
        if _found is None:
            try:
                _found = initialise()
            except GpuUnavailable as error:
                _missing = error
                raise
        return _found


def initialise() -> Any:
    """Find the bindings, libcuda and its calls, and run ``cuInit``.

    Returns:
        ``cuda.bindings.driver``, ready to be called.

    Raises:
        As :func:`find`.
    """
    binding = load_binding()
    try:
        error, version = binding.cuDriverGetVersion()
    except RuntimeError as problem:  # the bindings say so when they cannot load libcuda
        raise DriverTooOld(detail="there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)") from problem
    if int(error) != SUCCESS:
        raise DriverTooOld(detail=f"the NVIDIA driver does not tell its version ({getattr(error, 'name', error)})")
    if int(version) < _OLDEST_CUDA:
        raise DriverTooOld(
            detail=f"the NVIDIA driver knows CUDA {int(version) // 1000}.{int(version) % 1000 // 10} only",
            hint="driver 570 can suspend a job, driver 580 can change its GPUs",
        )
    lacking = [name for name in SYMBOLS if not has_symbol(binding, name)]
    if lacking:
        raise SymbolMissing(detail=f"the NVIDIA driver has no {lacking[0]}")
    (error,) = binding.cuInit(0)
    if int(error) == NO_DEVICE:
        raise GpuUnavailable(detail="the NVIDIA driver finds no GPU")
    if int(error) != SUCCESS:
        raise GpuUnavailable(
            detail=f"the NVIDIA driver cannot be initialised: {getattr(error, 'name', error)} {words(binding, error)}"
        )
    return binding


def load_binding() -> Any:
    """Return ``cuda.bindings.driver`` if it has the checkpoint calls; libcuda is not loaded yet.

    Raises:
        BindingsTooOld: it is missing or too old.
    """
    try:
        binding = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BindingsTooOld(
            detail=f"the Python package cuda-bindings cannot be loaded ({error})",
            hint="pip install 'cuda-bindings>=12.8'",
        ) from error
    lacking = [name for name in (*SYMBOLS, *_STRUCTURES) if not hasattr(binding, name)]
    if lacking:
        raise BindingsTooOld(
            detail=f"the installed cuda-bindings have no {lacking[0]}", hint="pip install 'cuda-bindings>=12.8'"
        )
    return binding


def libcuda_found() -> bool:
    """Return whether libcuda can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_symbol(binding: Any, name: str) -> bool:
    """Return whether the driver has a function: libcuda exports it, or ``cuGetProcAddress`` knows it.

    Args:
        binding: ``cuda.bindings.driver`` with libcuda found.
        name: the function.
    """
    try:
        if hasattr(ctypes.CDLL("libcuda.so.1"), name):
            return True
    except OSError:
        pass
    try:
        error, version = binding.cuDriverGetVersion()
        error, pointer, *_ = binding.cuGetProcAddress(name.encode(), int(version), 0)
        return int(error) == SUCCESS and bool(int(pointer))
    except Exception:
        return False


def arguments(
    binding: Any, call: str, *, timeout_ms: int = 0, pairs: Sequence[tuple[bytes, bytes]] | None = None
) -> tuple[tuple[Any, ...], list[Any]]:
    """Make what a call takes after the pid; the one place where the driver's structures are filled.

    The driver reserves the checkpoint and unlock structures (and parts of the others) for later: where they get
    fields, they are filled here. The bindings make them zeroed, as the driver asks of what is reserved.

    Args:
        binding: ``cuda.bindings.driver``.
        call: the driver function.
        timeout_ms: for the lock.
        pairs: for the restore, UUID bytes old → new.

    Returns:
        The arguments, and what must be kept alive until the call has returned.
    """
    if call == "cuCheckpointProcessLock":
        args = binding.CUcheckpointLockArgs()
        args.timeoutMs = timeout_ms
        return (args,), []
    if call == "cuCheckpointProcessRestore":
        if not pairs:
            return (None,), []
        keep: list[Any] = []
        made = []
        for old, new in pairs:
            pair = binding.CUcheckpointGpuPair()
            pair.oldUuid = _cuuuid(binding, old, keep)
            pair.newUuid = _cuuuid(binding, new, keep)
            made.append(pair)
        args = binding.CUcheckpointRestoreArgs()
        args.gpuPairs = made
        args.gpuPairsCount = len(made)
        return (args,), [*keep, *made]
    if call in ("cuCheckpointProcessCheckpoint", "cuCheckpointProcessUnlock"):
        return (None,), []
    return (), []  # the two that ask take the pid alone


def _cuuuid(binding: Any, raw: bytes, keep: list[Any]) -> Any:
    """Make a ``CUuuid``, which can only be filled by pointing it at memory."""
    buffer = ctypes.create_string_buffer(raw, 16)
    keep.append(buffer)
    return binding.CUuuid(ctypes.addressof(buffer))


def words(binding: Any, result: Any) -> str:
    """Return the driver's own meaning of a result (``cuGetErrorString``), "" where it has none."""
    try:
        error, meaning = binding.cuGetErrorString(result)
    except Exception:
        return ""
    if int(error) != SUCCESS or meaning is None:
        return ""
    return meaning.decode(errors="replace") if isinstance(meaning, bytes) else str(meaning)

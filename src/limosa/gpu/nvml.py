"""The GPUs of this machine and the processes on them, by NVML (``nvidia-ml-py``).

NVML counts every GPU of the machine in PCI order whatever CUDA_VISIBLE_DEVICES says. A checkpointed job holds nothing
on a GPU and is therefore not among its processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from limosa.errors import BindingsTooOld, DriverTooOld, GpuUnavailable, SymbolMissing
from limosa.gpu.gpus import Gpu, GpuProcess, Inventory
from limosa.gpu.names import normal_pci
from limosa.start import clean

T = TypeVar("T")
SOFTWARE_PREFIX = "Soft GPU"
_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
_nvml_lock = threading.Lock()
_nvml: Any = None
INVENTORY_LIMIT = 30.0
"""Seconds after which NVML counts as hung: the first question of a machine without persistence mode may take ten."""
_KEPT_SECONDS = 1.0
"""How long what an administrator sets is not asked again: an operation looks several times, also in the pause."""
_kept: dict[Hashable, tuple[float, Any]] = {}


def inventory() -> Inventory:
    """Ask NVML for all GPUs.

    Returns:
        What is there now.

    Raises:
        DriverTooOld: there is no NVIDIA driver, or it is not loaded.
        BindingsTooOld: ``nvidia-ml-py`` is missing.
        SymbolMissing: NVML lacks a function that is needed.
        GpuUnavailable: NVML fails in another way, or has not answered for ``INVENTORY_LIMIT`` seconds.
    """
    if not clean("LD_LIBRARY_PATH"):  # the loader of this process has it as it was: the worker's has not
        from limosa.gpu.worker import Driver

        with Driver() as driver:
            return driver.inventory(INVENTORY_LIMIT)
    found: list[Inventory | BaseException] = []

    def ask() -> None:
        try:
            found.append(_inventory())
        except BaseException as error:
            found.append(error)

    # A thread that can be left behind: NVML hangs where a GPU does, and cannot be broken off.
    thread = threading.Thread(target=ask, name="nvml", daemon=True)
    thread.start()
    thread.join(INVENTORY_LIMIT)
    if not found:
        raise GpuUnavailable(
            detail=f"NVML has not answered for {INVENTORY_LIMIT:g} s", hint="a GPU may hang: does nvidia-smi answer?"
        )
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def warm() -> None:
    """Begin to load NVML without waiting for it, which takes a tenth of a second; :func:`inventory` says what fails."""

    def look() -> None:
        with contextlib.suppress(Exception):
            inventory()

    if clean("LD_LIBRARY_PATH"):  # else :func:`inventory` asks a worker
        threading.Thread(target=look, name="limosa-nvml", daemon=True).start()


def _inventory() -> Inventory:
    """Ask NVML, however long it takes."""
    nvml = _load()
    try:
        driver_version = _text(nvml.nvmlSystemGetDriverVersion())
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        gpus, lost = [], []
        for index in range(int(nvml.nvmlDeviceGetCount())):
            try:
                gpus.append(_read(nvml, index))
            except nvml.NVMLError as error:
                if int(getattr(error, "value", -1)) != nvml.NVML_ERROR_GPU_IS_LOST:
                    raise
                lost.append(index)
    except nvml.NVMLError as error:
        raise _unavailable(nvml, error) from error
    except UnicodeDecodeError as error:  # e.g. everybody in a node of software GPUs may write to its state
        raise GpuUnavailable(detail="NVML answers with a name that is no text") from error
    return Inventory(
        driver_version=driver_version,
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=gpus,
        mps=_keep("mps", _mps_running),
        software=any(gpu.name.startswith(SOFTWARE_PREFIX) for gpu in gpus),
        lost=lost,
    )


def _load() -> Any:
    """Return pynvml, initialised once for this process (a driver without persistence mode stays awake that way)."""
    global _nvml
    with _nvml_lock:
        if _nvml is not None:
            return _nvml
        try:
            import pynvml
        except ImportError as error:
            raise BindingsTooOld(detail=f"the Python package nvidia-ml-py cannot be loaded ({error})") from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _unavailable(pynvml, error) from error
        _nvml = pynvml
        return pynvml


def _unavailable(nvml: Any, error: Any) -> GpuUnavailable:
    """Turn an NVML error into one of the kinds of "not available"."""
    code = int(getattr(error, "value", -1))
    if code == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return DriverTooOld(detail="there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)")
    if code == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return DriverTooOld(detail="the NVIDIA driver is not loaded (NVML: driver not loaded)")
    if code == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return DriverTooOld(
            detail="the NVIDIA driver's library and its kernel module have different versions",
            hint="restart the machine",
        )
    if code == nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        return SymbolMissing(detail=f"this driver's NVML lacks a function ({error})")
    return GpuUnavailable(detail=f"NVML answers: {error}")


def _read(nvml: Any, index: int) -> Gpu:
    """Read one GPU; what a chip or a driver does not support is left at its default."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total, used, free = _memory(nvml, handle)
    mode, mig, persistence = _keep((nvml, index), lambda: _settings(nvml, handle))
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)).lower().replace("gpu-", "GPU-"),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total=total,
        memory_used=used,
        memory_free=free,
        minor=_optional(nvml, lambda: int(nvml.nvmlDeviceGetMinorNumber(handle)), None),
        pci_bus_id=normal_pci(_optional(nvml, lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId), "")) or "",
        mig=mig,
        persistence=persistence,
        compute_mode=_COMPUTE_MODES[mode] if 0 <= mode < len(_COMPUTE_MODES) else str(mode),
        processes=_processes(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        mps_processes=_processes(nvml, lambda: nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)),
    )


def _settings(nvml: Any, handle: Any) -> tuple[int, bool, bool]:
    """Return the compute mode, whether MIG is on, and persistence mode."""
    return (
        int(_optional(nvml, lambda: nvml.nvmlDeviceGetComputeMode(handle), 0)),
        bool(_optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)),
        bool(_optional(nvml, lambda: nvml.nvmlDeviceGetPersistenceMode(handle), 0)),
    )


def _keep(key: Hashable, ask: Callable[[], T]) -> T:
    """Ask something once in ``_KEPT_SECONDS``."""
    asked_at, found = _kept.get(key, (0.0, None))
    now = time.monotonic()
    if not asked_at or now - asked_at > _KEPT_SECONDS:
        found = ask()
        _kept[key] = (now, found)
    return found  # type: ignore[no-any-return]


def _memory(nvml: Any, handle: Any) -> tuple[int, int, int]:
    """Return total, used and free bytes; v1 counts what the driver reserves as used, so v2 is asked first."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(info.total), int(info.used), int(info.free)


def _processes(nvml: Any, ask: Callable[[], Any]) -> list[GpuProcess]:
    """Read a list of processes, several entries of one pid (MIG instances) added up."""
    found: dict[int, int] = {}
    entries: list[Any] = _optional(nvml, ask, [])
    for entry in entries:
        found[int(entry.pid)] = found.get(int(entry.pid), 0) + int(entry.usedGpuMemory or 0)
    return [GpuProcess(pid, used) for pid, used in sorted(found.items())]


def _optional(nvml: Any, ask: Callable[[], Any], default: T) -> T:
    """Ask something that not every GPU or driver answers."""
    try:
        return ask()  # type: ignore[no-any-return]
    except nvml.NVMLError as error:
        kinds = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        if int(getattr(error, "value", -1)) in kinds:
            return default
        raise


def _text(value: str | bytes) -> str:
    """NVML's strings are bytes in some releases of nvidia-ml-py."""
    return value.decode() if isinstance(value, bytes) else value


def _mps_running() -> bool:
    """Look for nvidia-cuda-mps-control or -server (``/proc/PID/comm`` keeps 15 characters of a name).

    Root's and the caller's own: anybody may call a process so, and a user's own server has no clients but his.
    """
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/comm", "rb") as file:
                    named = file.read().startswith(b"nvidia-cuda-mps")
                if named and _user_of(entry) in (0, os.geteuid()):
                    return True
            except (OSError, LookupError, ValueError):
                continue
    return False


def _user_of(pid: str) -> int:
    """Whose a process is; who owns its files in /proc says less: those of one that may not be dumped are root's."""
    with open(f"/proc/{pid}/status", "rb") as file:
        return int(file.read().split(b"\nUid:")[1].split()[1])

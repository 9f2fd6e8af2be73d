"""Facts about the driver for ``limosa doctor``: versions, calls, persistence. Never raises for an answer."""

from __future__ import annotations

import msgspec

from limosa.errors import GpuUnavailable, LimosaError
from limosa.gpu import binding, driver
from limosa.gpu.gpus import Inventory
from limosa.gpu.nvml import inventory
from limosa.structs import ready

SUSPEND_DRIVER = 570
CHANGE_GPUS_DRIVER = 580


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine's driver can do.

    Attributes:
        driver_version: "580.159.04", "" where there is none.
        cuda_version: "13.0", "" where there is none.
        bindings_version: of cuda-bindings, "" where they are missing.
        bindings_ok: they have the checkpoint calls.
        bindings_detail: what is wrong with them, "".
        available: jobs can be suspended here.
        problem_id: the error's id where not ("driver-too-old" …), "".
        problem: what is wrong, in words, "".
        hint: the way out, "".
        symbols: driver function → whether libcuda has it; empty without libcuda.
        can_suspend: the driver's version is high enough to suspend (570).
        can_change_gpus: the driver's version is high enough to change GPUs (580).
        persistence: GPU index → whether persistence mode is on.
        gpus: how many there are.
        mps: whether MPS runs.
        mig: indices of the GPUs in MIG mode.
        software: whether these are software GPUs.
    """

    driver_version: str = ""
    cuda_version: str = ""
    bindings_version: str = ""
    bindings_ok: bool = False
    bindings_detail: str = ""
    available: bool = False
    problem_id: str = ""
    problem: str = ""
    hint: str = ""
    symbols: dict[str, bool] = {}
    can_suspend: bool = False
    can_change_gpus: bool = False
    persistence: dict[int, bool] = {}
    gpus: int = 0
    mps: bool = False
    mig: list[int] = []
    software: bool = False


def can_suspend(found: Inventory) -> bool:
    """Return whether the driver is new enough to suspend a job (570)."""
    return found.driver_major >= SUSPEND_DRIVER


def can_change_gpus(found: Inventory) -> bool:
    """Return whether the driver is new enough to bring a job back on other GPUs (580)."""
    return found.driver_major >= CHANGE_GPUS_DRIVER


def driver_facts() -> DriverFacts:
    """Look at bindings, libcuda and NVML; every failure is part of the answer.

    Runs ``cuInit`` in this process; :meth:`limosa.gpu.Driver.facts` does it in the worker.
    """
    facts: dict[str, object] = {"bindings_version": _bindings_version()}
    try:
        bindings = binding.load_binding()
        facts["bindings_ok"] = True
    except GpuUnavailable as error:
        bindings = None
        facts["bindings_detail"] = error.message
    try:
        driver.available()
        facts["available"] = True
    except LimosaError as error:
        facts.update(problem_id=error.id, problem=error.message, hint=error.hint)
    if bindings is not None and binding.libcuda_found():
        names = (*binding.SYMBOLS, *binding.OPTIONAL_SYMBOLS)
        facts["symbols"] = {name: binding.has_symbol(bindings, name) for name in names}
    try:
        found = inventory()
    except GpuUnavailable:
        return msgspec.convert(facts, ready(DriverFacts))
    facts.update(
        driver_version=found.driver_version,
        cuda_version=found.cuda_version,
        can_suspend=can_suspend(found),
        can_change_gpus=can_change_gpus(found),
        persistence={gpu.index: gpu.persistence for gpu in found.gpus},
        gpus=len(found.gpus),
        mps=found.mps,
        mig=[gpu.index for gpu in found.gpus if gpu.mig],
        software=found.software,
    )
    return msgspec.convert(facts, ready(DriverFacts))


def _bindings_version() -> str:
    """Return the version of the installed cuda-bindings, "" where there are none."""
    import importlib.metadata

    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return ""

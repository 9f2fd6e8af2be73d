"""The GPUs of a machine as records, and the names that people call them by. Nothing here asks the driver."""

from __future__ import annotations

import msgspec

from limosa.errors import GpuUnavailable, InvalidMap, UnknownGpu
from limosa.gpu.names import normal_pci, normal_uuid, uuid_of_bytes


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that holds memory on a GPU.

    Attributes:
        pid: as NVML says it: in the pid namespace of whoever asks, 0 where it cannot be seen from there.
        memory_used: bytes on this GPU; 0 where NVML does not tell.
    """

    pid: int
    memory_used: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Attributes:
        index: NVML's (and nvidia-smi's) number.
        uuid: ``GPU-…``, lower case.
        name: the chip as NVML calls it ("NVIDIA H200"); a job can only move between GPUs of one name.
        memory_total: bytes.
        memory_used: bytes taken by processes.
        memory_free: bytes free; what is neither used nor free is reserved by the driver.
        minor: its device node is ``/dev/nvidia<minor>``; None where NVML does not tell.
        pci_bus_id: ``DDDDDDDD:BB:DD.F``, lower case.
        mig: whether MIG mode is on.
        persistence: whether persistence mode is on.
        compute_mode: "default", "exclusive_process", "exclusive_thread" or "prohibited".
        processes: who computes on it.
        mps_processes: who computes on it through MPS.
    """

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    memory_free: int
    minor: int | None = None
    pci_bus_id: str = ""
    mig: bool = False
    persistence: bool = False
    compute_mode: str = "default"
    processes: list[GpuProcess] = []
    mps_processes: list[GpuProcess] = []

    def used_by(self, pid: int) -> int:
        """Return the bytes that a process holds here (0: nothing)."""
        return sum(process.memory_used for process in self.processes + self.mps_processes if process.pid == pid)

    def holds(self, pid: int) -> bool:
        """Return whether a process has anything here, even if NVML does not say how much."""
        return any(process.pid == pid for process in self.processes + self.mps_processes)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of this machine at one moment; goes through JSON and back.

    Attributes:
        driver_version: "580.159.04".
        cuda_version: the newest CUDA that this driver knows, "13.0".
        gpus: in NVML's order.
        mps: whether an MPS control daemon or server runs.
        software: whether the GPUs are Limosa's software GPUs.
        lost: indices of GPUs that NVML counts and that answer no more (they fell off the bus); not in ``gpus``.
    """

    driver_version: str
    cuda_version: str
    gpus: list[Gpu]
    mps: bool = False
    software: bool = False
    lost: list[int] = []

    @property
    def driver_major(self) -> int:
        """The driver's branch, 580 for "580.159.04"; 0 where it cannot be read."""
        head = self.driver_version.split(".")[0]
        return int(head) if head.isascii() and head.isdigit() else 0

    def by_uuid(self) -> dict[str, Gpu]:
        """Return the GPUs by UUID."""
        return {gpu.uuid: gpu for gpu in self.gpus}

    def held(self, pids: set[int]) -> dict[str, int]:
        """Return what these processes hold together.

        Returns:
            GPU UUID → bytes, for the GPUs on which at least one of them is; 1 where NVML tells no figure, so that
            "holds something" and a figure above 0 are the same.
        """
        found: dict[str, int] = {}
        for gpu in self.gpus:
            if any(gpu.holds(pid) for pid in pids):
                found[gpu.uuid] = max(1, sum(gpu.used_by(pid) for pid in pids))
        return found


def find_gpu(inventory: Inventory, spec: object) -> Gpu:
    """Return the GPU that is named by an index, ``GPU-<uuid>``, bare UUID, PCI bus id, Device or ``CUuuid``.

    Args:
        inventory: where to look.
        spec: the name; a string of digits is an index; the first 8 or more digits of a UUID will do where only one
            GPU has them.

    Raises:
        UnknownGpu: no GPU is called so, or more than one.
        GpuUnavailable: an index of a GPU that has fallen off the bus.
    """
    if isinstance(spec, Gpu):
        spec = spec.uuid
    if isinstance(spec, int) and not isinstance(spec, bool):
        found = _by_index(inventory, spec)
    else:
        text = uuid_text(spec)
        if text.isascii() and text.isdigit() and len(text) < 8:
            found = _by_index(inventory, int(text))
        elif normal_uuid(text):
            found = [gpu for gpu in inventory.gpus if gpu.uuid == normal_uuid(text)]
        elif normal_pci(text):
            found = [gpu for gpu in inventory.gpus if gpu.pci_bus_id == normal_pci(text)]
        else:
            prefix = text.lower().removeprefix("gpu-")
            found = [gpu for gpu in inventory.gpus if len(prefix) >= 8 and gpu.uuid[4:].startswith(prefix)]
    if len(found) != 1:
        there = ", ".join(f"GPU {gpu.index}" for gpu in found or inventory.gpus)
        if found:
            raise UnknownGpu(f"{str(spec)!r} could be each of {there}", hint="limosa gpus shows them", spec=str(spec))
        hint = f"there are {there}" if len(inventory.gpus) > 1 else f"there is {there or 'none'}"
        raise UnknownGpu(hint=f"{hint} (limosa gpus shows more)", spec=str(spec))
    return found[0]


def _by_index(inventory: Inventory, index: int) -> list[Gpu]:
    """Return the GPU with NVML's number, if there is one."""
    if index in inventory.lost:
        raise GpuUnavailable(detail=f"GPU {index} has fallen off the bus", hint="reset it, or restart the machine")
    return [gpu for gpu in inventory.gpus if gpu.index == index]


def uuid_text(spec: object) -> str:
    """Return the text in a GPU name that is an object: a string, a ``cuda.core.Device`` or a ``CUuuid``.

    Raises:
        UnknownGpu: it is none of these.
    """
    if isinstance(spec, str):
        return spec.strip()
    raw = getattr(spec, "bytes", None)  # CUuuid
    if isinstance(raw, bytes) and len(raw) == 16:
        return uuid_of_bytes(raw)
    uuid = getattr(spec, "uuid", None)  # cuda.core.Device
    if isinstance(uuid, str):
        return uuid
    raise UnknownGpu(spec=str(spec))


def parse_map(text: str, inventory: Inventory) -> dict[str, str]:
    """Read ``a=b,c=d`` (what ``--map`` takes).

    Args:
        text: pairs source=destination, each a name that :func:`find_gpu` takes.
        inventory: where to look for them.

    Returns:
        UUID → UUID.

    Raises:
        InvalidMap: it is not of that form, or names a source twice.
        UnknownGpu: a GPU is not there.
    """
    changes: dict[str, str] = {}
    for pair in text.split(","):
        left, equals, right = pair.partition("=")
        if not equals or not left.strip() or not right.strip() or "=" in right:
            raise InvalidMap(detail=f"{pair.strip()!r} is not SOURCE=DESTINATION (as in --map 0=1,1=0)")
        source, destination = find_gpu(inventory, left.strip()), find_gpu(inventory, right.strip())
        if source.uuid in changes:
            raise InvalidMap(detail=f"the map {text!r} names GPU {source.index} twice as a source")
        changes[source.uuid] = destination.uuid
    return changes

"""Inventories as records: two H200 as they were read, and made-up machines of any size."""

from __future__ import annotations

import msgspec

from limosa.gpu.gpus import Gpu, GpuProcess, Inventory

MIB = 1 << 20
H200 = "NVIDIA H200"


def gpu(index: int, name: str = H200, **changes: object) -> Gpu:
    made = Gpu(
        index=index,
        uuid=f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}",
        name=name,
        memory_total=143771 * MIB,
        memory_used=4 * MIB,
        memory_free=143000 * MIB,
        minor=index,
        pci_bus_id=f"00000000:{0x0F + index:02x}:00.0",
        persistence=True,
    )
    return msgspec.structs.replace(made, **changes)


def machine(*gpus: Gpu) -> Inventory:
    return Inventory(driver_version="580.159.04", cuda_version="13.0", gpus=list(gpus))


TWO = machine(gpu(0, processes=[GpuProcess(4711, 5000 * MIB), GpuProcess(4712, 0)]), gpu(1))

"""The GPU room: the driver's checkpoint states and calls, GPUs and who is on them, GPU maps.

Importing it loads neither libcuda nor NVML, nor the modules behind the names until one is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limosa.on_demand import on_demand

if TYPE_CHECKING:
    from limosa.gpu.access import openable as openable
    from limosa.gpu.access import opened as opened
    from limosa.gpu.facts import DriverFacts as DriverFacts
    from limosa.gpu.facts import driver_facts as driver_facts
    from limosa.gpu.gpus import Gpu as Gpu
    from limosa.gpu.gpus import GpuProcess as GpuProcess
    from limosa.gpu.gpus import Inventory as Inventory
    from limosa.gpu.gpus import find_gpu as find_gpu
    from limosa.gpu.gpus import parse_map as parse_map
    from limosa.gpu.maps import changes_to as changes_to
    from limosa.gpu.maps import complete_map as complete_map
    from limosa.gpu.maps import identity_map as identity_map
    from limosa.gpu.names import LockResult as LockResult
    from limosa.gpu.names import State as State
    from limosa.gpu.nvml import inventory as inventory
    from limosa.gpu.process import Process as Process
    from limosa.gpu.worker import Driver as Driver

_WHERE = {
    "Driver": "worker",
    "DriverFacts": "facts",
    "Gpu": "gpus",
    "GpuProcess": "gpus",
    "Inventory": "gpus",
    "LockResult": "names",
    "Process": "process",
    "State": "names",
    "changes_to": "maps",
    "complete_map": "maps",
    "driver_facts": "facts",
    "find_gpu": "gpus",
    "identity_map": "maps",
    "inventory": "nvml",
    "openable": "access",
    "opened": "access",
    "parse_map": "gpus",
}

__all__ = list(_WHERE)

on_demand(__name__)

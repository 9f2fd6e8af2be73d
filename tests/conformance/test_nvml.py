"""NVML against the driver: the same GPUs, told by both."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.jobs import Controller, Job, plain
from conformance.node import REAL, Node

ZERO = {"gpu": 0}
NOT_FOUND, INVALID_ARGUMENT = "NVML 6", "NVML 2"


def test_count(controller: Controller) -> None:
    assert controller.told("nvmlDeviceGetCount") == len(controller.uuids) == 2


def test_uuids(controller: Controller) -> None:
    assert {gpu["uuid"] for gpu in controller.inventory()} == set(controller.uuids)


@pytest.mark.parametrize("place", [0, 1])
def test_memory(place: int, controller: Controller) -> None:
    index = controller.inventory()[place]["index"]
    total = controller.told("nvmlDeviceGetMemoryInfo", {"gpu": index})["total"]
    assert 0 <= total - controller.do("cuDeviceTotalMem", place) <= 2 << 30  # the driver keeps some for itself


@pytest.mark.parametrize("place", [0, 1])
def test_bus_id(place: int, controller: Controller) -> None:
    index = controller.inventory()[place]["index"]
    told = controller.told("nvmlDeviceGetPciInfo", {"gpu": index})
    assert plain(told["busId"]).lower().endswith(plain(controller.do("cuDeviceGetPCIBusId", 32, place)).lower())


@pytest.mark.parametrize("place", [0, 1])
def test_name(place: int, controller: Controller) -> None:
    index = controller.inventory()[place]["index"]
    told = plain(controller.do("cuDeviceGetName", 96, place))
    assert plain(controller.told("nvmlDeviceGetName", {"gpu": index})) == told


@pytest.mark.parametrize("place", [0, 1])
def test_minor_number_is_that_of_the_device_node(place: int, controller: Controller, node: Node) -> None:
    minor = controller.inventory()[place]["minor"]
    root = Path("/") if REAL else Path(f"/proc/{controller.pid}/root")
    found = os.stat(root / f"dev/nvidia{minor}")
    assert stat.S_ISCHR(found.st_mode)
    assert os.minor(found.st_rdev) == minor


def test_cuda_driver_version(controller: Controller) -> None:
    assert controller.told("nvmlSystemGetCudaDriverVersion") == controller.do("cuDriverGetVersion")


def test_driver_version(controller: Controller) -> None:
    assert controller.told("nvmlSystemGetDriverVersion").split(".")[0] == "580"


@pytest.mark.parametrize("way", ["UUID", "PciBusId"])
def test_a_handle_by(way: str, controller: Controller) -> None:
    if way == "UUID":
        key = controller.told("nvmlDeviceGetUUID", {"gpu": 1})
    else:
        key = plain(controller.told("nvmlDeviceGetPciInfo", {"gpu": 1})["busId"])
    assert controller.told(f"nvmlDeviceGetHandleBy{way}", key) == 1


@pytest.mark.parametrize(
    ("call", "key", "result"),
    [
        ("nvmlDeviceGetHandleByIndex", 2, INVALID_ARGUMENT),
        ("nvmlDeviceGetHandleByIndex", 99, INVALID_ARGUMENT),
        ("nvmlDeviceGetHandleByUUID", "GPU-00000000-0000-0000-0000-000000000000", NOT_FOUND),
        ("nvmlDeviceGetHandleByUUID", "nonsense", NOT_FOUND),
        ("nvmlDeviceGetHandleByPciBusId", "0000ffff:ff:1f.0", NOT_FOUND),
    ],
)
def test_no_handle_by(call: str, key: int | str, result: str, controller: Controller) -> None:
    assert controller.nvml(call, key).result == result


def test_memory_adds_up(controller: Controller) -> None:
    told = controller.told("nvmlDeviceGetMemoryInfo", ZERO)
    assert told["free"] + told["used"] == told["total"]


def test_compute_mode_is_default(controller: Controller) -> None:
    assert controller.told("nvmlDeviceGetComputeMode", ZERO) == 0


def test_mig_is_off(controller: Controller) -> None:
    assert controller.told("nvmlDeviceGetMigMode", ZERO) == [0, 0]


def test_compute_capability(controller: Controller) -> None:
    assert controller.told("nvmlDeviceGetCudaComputeCapability", ZERO) == [9, 0]


def test_a_process_without_a_context_is_on_no_gpu(controller: Controller) -> None:
    assert controller.bytes_of(controller.pid) == {}


def test_no_mps_processes(controller: Controller) -> None:
    assert controller.told("nvmlDeviceGetMPSComputeRunningProcesses", ZERO) == []


@pytest.mark.parametrize("contexts", [1, 2])
def test_a_process_is_listed_once_for_each_gpu(
    contexts: int, controller: Controller, start: Callable[..., Job]
) -> None:
    job = start().start_up(0)
    if contexts == 2:
        job.do("cuDevicePrimaryCtxRetain", 1)
    listed = [
        process["pid"]
        for gpu in (0, 1)
        for process in controller.told("nvmlDeviceGetComputeRunningProcesses", {"gpu": gpu})
    ]
    assert listed.count(job.pid) == contexts


@pytest.mark.alone
def test_the_driver_and_nvml_agree_on_free_memory(controller: Controller, work: Job) -> None:
    index = controller.inventory()[0]["index"]
    free = work.do("cuMemGetInfo")[0]
    assert abs(controller.told("nvmlDeviceGetMemoryInfo", {"gpu": index})["free"] - free) <= 1 << 30

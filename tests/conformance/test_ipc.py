"""The rules of legacy CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.jobs import MIB, Job, prop

Start = Callable[..., Job]


def handle_of(job: Job, address: int) -> dict[str, str]:
    return {"s": "CUipcMemHandle", "raw": job.do("cuIpcGetMemHandle", address)}


@pytest.fixture
def importer(start: Start) -> Job:
    return start().start_up().load()


def test_both_see_the_same_memory(work: Job, memory: int, importer: Job) -> None:
    there = importer.do("cuIpcOpenMemHandle", handle_of(work, memory), 1)
    work.stamped(memory, 512, 1)
    importer.check_stamps(there, 512, 1)
    importer.stamped(there, 512, 2)
    work.check_stamps(memory, 512, 2)


def test_a_handle_of_an_address_inside_opens_the_whole(work: Job, importer: Job) -> None:
    memory = work.do("cuMemAlloc", 4 * MIB)
    handle = handle_of(work, memory + 8192)
    there = importer.do("cuIpcOpenMemHandle", handle, 1)
    assert importer.do("cuMemGetAddressRange", there)[1] == 4 * MIB
    work.do("cuMemFree", memory)


def test_opening_in_the_exporter_itself(work: Job, memory: int) -> None:
    assert work.says("cuIpcOpenMemHandle", handle_of(work, memory), 1) == "INVALID_CONTEXT"


def test_opening_twice(work: Job, memory: int, importer: Job) -> None:
    handle = handle_of(work, memory)
    first, second = (importer.do("cuIpcOpenMemHandle", handle, 1) for _ in range(2))
    assert first == second


def test_closing(work: Job, memory: int, importer: Job) -> None:
    there = importer.do("cuIpcOpenMemHandle", handle_of(work, memory), 1)
    assert importer.says("cuIpcCloseMemHandle", there) == "SUCCESS"
    assert importer.says("cuIpcCloseMemHandle", there) == "INVALID_VALUE"


def test_an_opened_memory_cannot_be_freed(work: Job, memory: int, importer: Job) -> None:
    there = importer.do("cuIpcOpenMemHandle", handle_of(work, memory), 1)
    assert importer.says("cuMemFree", there) == "INVALID_VALUE"


def test_an_opened_memory_cannot_be_shared_on(work: Job, memory: int, importer: Job) -> None:
    there = importer.do("cuIpcOpenMemHandle", handle_of(work, memory), 1)
    assert importer.says("cuIpcGetMemHandle", there) == "INVALID_VALUE"


@pytest.mark.parametrize("kind", ["nonsense", "pinned", "vmm"])
def test_a_handle_of_what_is_no_plain_device_memory(kind: str, work: Job) -> None:
    address = 1 << 46
    if kind == "pinned":
        address = work.pinned()
    elif kind == "vmm":
        address = work.do("cuMemAddressReserve", 2 * MIB, 0, 0, 0)
        work.do("cuMemMap", address, 2 * MIB, 0, work.do("cuMemCreate", 2 * MIB, prop(), 0), 0)
    assert work.says("cuIpcGetMemHandle", address) == "INVALID_VALUE"


@pytest.mark.parametrize("kind", ["zeros", "ones"])
def test_a_handle_that_is_none(kind: str, importer: Job) -> None:
    raw = {"zeros": "00" * 64, "ones": "ff" * 64}[kind]
    assert importer.says("cuIpcOpenMemHandle", {"s": "CUipcMemHandle", "raw": raw}, 1) == "INVALID_VALUE"


def test_opening_with_wrong_flags(work: Job, memory: int, importer: Job) -> None:
    assert importer.says("cuIpcOpenMemHandle", handle_of(work, memory), 0) == "INVALID_VALUE"


def test_opening_after_the_exporter_is_gone(start: Start, importer: Job) -> None:
    exporter = start().start_up()
    handle = handle_of(exporter, exporter.do("cuMemAlloc", 4 * MIB))
    exporter.kill()
    assert importer.says("cuIpcOpenMemHandle", handle, 1) == "INVALID_HANDLE"

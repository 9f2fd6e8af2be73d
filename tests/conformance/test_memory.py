"""The rules of plain allocation, host memory, copies, memsets, pools, and what a pointer tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conformance.jobs import MIB, Job, enum

SIZES = [1, 8, 256, 1000, 4096, MIB, 2 * MIB + 1]


def attribute(name: str) -> dict[str, str]:
    return enum(f"CUpointer_attribute.CU_POINTER_ATTRIBUTE_{name}")


@pytest.fixture
def job(job_in: Callable[[str], Job]) -> Job:
    """A job that may be kept busy."""
    return job_in("running")


@pytest.fixture
def pinned(work: Job) -> Iterator[int]:
    address = work.pinned(8192)
    yield address
    work.says("cuMemFreeHost", address)


def freed(job: Job) -> int:
    """An address where device memory was."""
    address = job.do("cuMemAlloc", 64 * MIB)
    job.do("cuMemFree", address)
    return int(address)


# --- cuMemAlloc, cuMemFree --------------------------------------------------------------------------------------------


def test_alloc_of_nothing(work: Job) -> None:
    assert work.says("cuMemAlloc", 0) == "INVALID_VALUE"


@pytest.mark.parametrize("size", [1 << 40, 1 << 62], ids=["1-TiB", "4-EiB"])
def test_alloc_of_more_than_there_is(size: int, work: Job) -> None:
    assert work.says("cuMemAlloc", size) == "OUT_OF_MEMORY"


def test_running_out_of_memory_does_no_harm(work: Job) -> None:
    work.says("cuMemAlloc", 1 << 40)
    address = work.do("cuMemAlloc", 4096)
    assert work.says("cuMemFree", address) == "SUCCESS"


@pytest.mark.parametrize("size", SIZES)
def test_an_allocation_is_aligned_and_of_the_size_asked_for(size: int, work: Job) -> None:
    address = work.do("cuMemAlloc", size)
    assert address % 256 == 0
    assert work.do("cuMemGetAddressRange", address + size - 1) == [address, size]
    work.do("cuMemFree", address)


def test_free_of_null(work: Job) -> None:
    assert work.says("cuMemFree", 0) == "SUCCESS"


@pytest.mark.parametrize("kind", ["inside", "nonsense", "host", "pinned"])
def test_free_of_what_is_no_allocations_start(kind: str, memory: int, pinned: int, work: Job) -> None:
    address = {"inside": memory + 256, "nonsense": 0x1234567000, "host": work.scratch, "pinned": pinned}[kind]
    assert work.says("cuMemFree", address) == "INVALID_VALUE"
    assert work.says("cuMemsetD8", memory, 0, MIB) == "SUCCESS"


def test_free_twice(work: Job) -> None:
    address = work.do("cuMemAlloc", 4096)
    work.do("cuMemFree", address)
    assert work.says("cuMemFree", address) == "INVALID_VALUE"


def test_free_waits_for_the_work_on_the_device(job: Job) -> None:
    stream = job.do("cuStreamCreate", 1)
    memory = job.do("cuMemAlloc", 4096)
    flag = job.spin(stream)
    freeing = job.start("cuMemFree", memory)
    assert freeing.result(0.5) == "BLOCKED"
    job.raise_flag(flag)
    assert freeing.result(60) == "SUCCESS"


def test_alloc_does_not_wait_for_the_work_on_the_device(job: Job) -> None:
    flag = job.spin(job.do("cuStreamCreate", 1))
    assert job.says("cuMemAlloc", 4096, limit=60) == "SUCCESS"
    job.raise_flag(flag)


def test_info_counts_an_allocation(work: Job) -> None:
    free, total = work.do("cuMemGetInfo")
    address = work.do("cuMemAlloc", 256 * MIB)
    assert 0 < free <= total
    assert free - work.do("cuMemGetInfo")[0] >= 192 * MIB  # others allocate and free beside this
    work.do("cuMemFree", address)


def test_total_memory_is_the_same_by_both_calls(work: Job) -> None:
    assert work.do("cuMemGetInfo")[1] == work.do("cuDeviceTotalMem", 0)


@pytest.mark.parametrize("element", [4, 8, 16])
def test_pitch_is_a_multiple_of_512(element: int, work: Job) -> None:
    address, pitch = work.do("cuMemAllocPitch", 1000, 10, element)
    assert pitch >= 1000
    assert pitch % 512 == 0
    work.do("cuMemFree", address)


@pytest.mark.parametrize(("width", "height", "element"), [(0, 1, 4), (1, 0, 4), (8, 8, 3)])
def test_pitch_of_wrong_sizes(width: int, height: int, element: int, work: Job) -> None:
    assert work.says("cuMemAllocPitch", width, height, element) == "INVALID_VALUE"


@pytest.mark.parametrize("where", ["before-the-first", "unknown"])
def test_address_range_of_what_is_no_device_memory(where: str, work: Job) -> None:
    assert work.says("cuMemGetAddressRange", {"before-the-first": 4096, "unknown": 1 << 46}[where]) == "NOT_FOUND"


def test_allocations_do_not_overlap(work: Job) -> None:
    made = [work.do("cuMemAlloc", 1000) for _ in range(8)]
    for n, address in enumerate(made):
        work.do("cuMemsetD8", address, n + 1, 1000)
    assert [work.read(address, 1000) for address in made] == [bytes([n + 1]) * 1000 for n in range(8)]
    for address in made:
        work.do("cuMemFree", address)


# --- host memory ------------------------------------------------------------------------------------------------------


def test_host_alloc_of_nothing(work: Job) -> None:
    assert work.do("cuMemHostAlloc", 0, 0) == 0


@pytest.mark.parametrize("kind", ["nonsense", "plain", "device", "twice"])
def test_free_host_of_what_is_not_pinned(kind: str, memory: int, work: Job) -> None:
    address = {"nonsense": 0x1234567000, "plain": work.scratch, "device": memory}.get(kind) or work.pinned()
    if kind == "twice":
        work.do("cuMemFreeHost", address)
    assert work.says("cuMemFreeHost", address) == "INVALID_VALUE"


def test_pinned_memory_has_the_same_address_on_the_device(pinned: int, work: Job) -> None:
    assert work.do("cuMemHostGetDevicePointer", pinned, 0) == pinned


def test_device_pointer_of_plain_host_memory(work: Job) -> None:
    assert work.says("cuMemHostGetDevicePointer", work.scratch, 0) == "INVALID_VALUE"


@pytest.mark.parametrize(("asked", "told"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_flags_of_pinned_memory(asked: int, told: int, work: Job) -> None:
    """PORTABLE is 1; DEVICEMAP, 2, is always on."""
    address = work.do("cuMemHostAlloc", 4096, asked)
    assert work.do("cuMemHostGetFlags", address) == told
    work.do("cuMemFreeHost", address)


@pytest.fixture
def registered(work: Job) -> Iterator[int]:
    address = work.run("memory", 16384)
    work.do("cuMemHostRegister", address, 8192, 2)
    yield address
    work.says("cuMemHostUnregister", address)


def test_registered_memory_is_reached_by_a_kernel(registered: int, work: Job) -> None:
    work.fill(work.do("cuMemHostGetDevicePointer", registered, 0), 4, 0x0101010101010101)
    work.do("cuCtxSynchronize")
    assert work.peek(registered, 32) == b"\1" * 32


@pytest.mark.parametrize("offset", [0, 4096], ids=["whole", "part"])
def test_register_twice(offset: int, registered: int, work: Job) -> None:
    assert work.says("cuMemHostRegister", registered + offset, 4096, 2) == "HOST_MEMORY_ALREADY_REGISTERED"


def test_register_nothing(work: Job) -> None:
    assert work.says("cuMemHostRegister", work.scratch, 0, 0) == "INVALID_VALUE"


@pytest.mark.parametrize("kind", ["never", "inside", "twice", "pinned"])
def test_unregister_of_what_is_not_registered(kind: str, registered: int, pinned: int, work: Job) -> None:
    address = {"never": work.scratch, "inside": registered + 4096, "pinned": pinned}.get(kind, registered)
    if kind == "twice":
        work.do("cuMemHostUnregister", registered)
    result = "INVALID_VALUE" if kind in ("inside", "pinned") else "HOST_MEMORY_NOT_REGISTERED"
    assert work.says("cuMemHostUnregister", address) == result


# --- copies and memsets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["HtoD-DtoH", "unified", "async", "device", "pinned"])
def test_a_copy_arrives_whole(way: str, memory: int, pinned: int, work: Job) -> None:
    data = bytes(n % 251 for n in range(4096))
    host = pinned if way in ("pinned", "async") else work.scratch
    work.poke(host, data)
    other = memory + 65536
    if way == "unified":
        work.do("cuMemcpy", memory, host, 4096)
        work.do("cuMemcpy", host + 4096 if host == pinned else work.scratch + 8192, memory, 4096)
    elif way == "async":
        work.do("cuMemcpyHtoDAsync", memory, host, 4096, 0)
        work.do("cuMemcpyDtoHAsync", host + 4096, memory, 4096, 0)
        work.do("cuStreamSynchronize", 0)
    else:
        work.do("cuMemcpyHtoD", memory, host, 4096)
        work.do("cuMemcpyDtoD", other, memory, 4096)
        work.do("cuMemcpyDtoH", host + 4096 if host == pinned else work.scratch + 8192, other, 4096)
    assert work.peek(host + 4096 if host == pinned else work.scratch + 8192, 4096) == data


@pytest.mark.parametrize("size", [0, 1, 3, 4095])
def test_a_copy_of_odd_size_touches_nothing_beyond(size: int, memory: int, work: Job) -> None:
    work.do("cuMemsetD8", memory, 0xEE, 8192)
    work.poke(work.scratch, b"\x11" * 4096)
    work.do("cuMemcpyHtoD", memory, work.scratch, size)
    assert work.read(memory, 4097) == b"\x11" * size + b"\xee" * (4097 - size)


@pytest.mark.parametrize("call", ["cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyHtoDAsync"])
@pytest.mark.parametrize("kind", ["beyond-the-end", "freed"])
def test_a_copy_outside_of_an_allocation(kind: str, call: str, work: Job) -> None:
    address = work.do("cuMemAlloc", 4 * MIB) + 4 * MIB - 64 if kind == "beyond-the-end" else freed(work)
    size = 128 if kind == "freed" else 16 * MIB
    host = work.run("memory", size)
    args = {"cuMemcpyDtoH": (host, address, size), "cuMemcpyDtoD": (address, address + 8, size)}
    args["cuMemcpyHtoDAsync"] = (address, host, size, 0)
    assert work.says(call, *args.get(call, (address, host, size))) == "INVALID_VALUE"


@pytest.mark.parametrize(
    ("call", "value", "width"), [("cuMemsetD8", 0xAB, 1), ("cuMemsetD16", 0xABCD, 2), ("cuMemsetD32", 0xABCDEF01, 4)]
)
@pytest.mark.parametrize("how", ["", "Async"], ids=["sync", "async"])
def test_memset_writes(call: str, value: int, width: int, how: str, memory: int, work: Job) -> None:
    work.do("cuMemsetD8", memory, 0, 1024)
    work.do(f"{call}{how}", memory, value, 100, *([0] if how else []))
    work.do("cuCtxSynchronize")
    assert work.read(memory, 100 * width + 1) == value.to_bytes(width, "little") * 100 + b"\0"


@pytest.mark.parametrize("call", ["cuMemsetD16", "cuMemsetD32"])
def test_memset_at_an_address_that_is_not_aligned(call: str, memory: int, work: Job) -> None:
    assert work.says(call, memory + 1, 0, 4) == "INVALID_VALUE"


@pytest.mark.parametrize("kind", ["beyond-the-end", "freed"])
def test_memset_outside_of_an_allocation(kind: str, memory: int, work: Job) -> None:
    address = memory if kind == "beyond-the-end" else freed(work)
    assert work.says("cuMemsetD8", address, 0, 64 * MIB if kind == "beyond-the-end" else 64) == "INVALID_VALUE"


def test_memset_2d(work: Job) -> None:
    address, pitch = work.do("cuMemAllocPitch", 64, 4, 4)
    work.do("cuMemsetD8", address, 0, pitch * 4)
    work.do("cuMemsetD2D8", address, pitch, 0x5A, 64, 4)
    assert work.read(address + pitch, 65) == b"\x5a" * 64 + b"\0"
    work.do("cuMemFree", address)


def test_peer_copy_between_the_gpus(start: Callable[..., Job]) -> None:
    job = start().start_up()
    second = job.do("cuDevicePrimaryCtxRetain", 1)
    here = job.do("cuMemAlloc", 4096)
    job.do("cuMemsetD8", here, 0x42, 4096)
    job.do("cuCtxSetCurrent", second)
    there = job.do("cuMemAlloc", 4096)
    job.do("cuMemcpyPeer", there, second, here, job.context, 4096)
    assert job.read(there, 4096) == b"\x42" * 4096


# --- allocation in stream order ---------------------------------------------------------------------------------------


def test_async_memory_is_there_after_its_stream(work: Job) -> None:
    address = work.do("cuMemAllocAsync", 4096, 0)
    work.do("cuMemsetD8Async", address, 3, 4096, 0)
    work.do("cuStreamSynchronize", 0)
    assert work.read(address, 64) == b"\3" * 64
    assert work.says("cuMemFreeAsync", address, 0) == "SUCCESS"


def test_async_alloc_of_nothing(work: Job) -> None:
    assert work.do("cuMemAllocAsync", 0, 0) == 0


def test_async_alloc_of_more_than_there_is(work: Job) -> None:
    assert work.says("cuMemAllocAsync", 1 << 44, 0) == "OUT_OF_MEMORY"


def test_async_memory_may_be_freed_by_the_plain_call(work: Job) -> None:
    address = work.do("cuMemAllocAsync", 4096, 0)
    assert work.says("cuMemFree", address) == "SUCCESS"


def test_plain_memory_may_be_freed_in_stream_order(work: Job) -> None:
    address = work.do("cuMemAlloc", 4096)
    assert work.says("cuMemFreeAsync", address, 0) == "SUCCESS"
    work.do("cuCtxSynchronize")


def test_free_async_of_nonsense(work: Job) -> None:
    assert work.says("cuMemFreeAsync", 0x1234567000, 0) == "INVALID_VALUE"


def test_the_default_pool_is_one_for_each_device(work: Job) -> None:
    first, second = work.do("cuDeviceGetDefaultMemPool", 0), work.do("cuDeviceGetDefaultMemPool", 1)
    assert first != second
    assert work.do("cuDeviceGetDefaultMemPool", 0) == first


def test_the_default_pool_is_the_current_one(work: Job) -> None:
    assert work.do("cuDeviceGetMemPool", 0) == work.do("cuDeviceGetDefaultMemPool", 0)


POOL_ATTRIBUTES = {"RELEASE_THRESHOLD": 0, "REUSE_FOLLOW_EVENT_DEPENDENCIES": 1, "REUSE_ALLOW_OPPORTUNISTIC": 1}


@pytest.mark.parametrize("name", POOL_ATTRIBUTES)
def test_the_default_pools_attributes(name: str, work: Job) -> None:
    pool = work.do("cuDeviceGetDefaultMemPool", 0)
    told = work.do("cuMemPoolGetAttribute", pool, enum(f"CUmemPool_attribute.CU_MEMPOOL_ATTR_{name}"))
    assert told == POOL_ATTRIBUTES[name]


# --- what a pointer tells ---------------------------------------------------------------------------------------------

TOLD: list[tuple[str, str, Any]] = [
    ("device", "MEMORY_TYPE", 2),
    ("pinned", "MEMORY_TYPE", 1),
    ("device", "DEVICE_ORDINAL", 0),
    ("pinned", "DEVICE_ORDINAL", 0),
    ("device", "IS_MANAGED", 0),
    ("managed", "IS_MANAGED", 1),
    ("managed", "MEMORY_TYPE", 2),
    ("device", "MAPPED", 1),
    ("device", "IS_LEGACY_CUDA_IPC_CAPABLE", 1),
    ("pinned", "IS_LEGACY_CUDA_IPC_CAPABLE", 0),
    ("device", "RANGE_SIZE", MIB),
]


@pytest.mark.parametrize(("kind", "name", "value"), TOLD)
def test_pointer_attribute(kind: str, name: str, value: Any, memory: int, pinned: int, work: Job) -> None:
    managed = enum("CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL")
    address = {"device": memory, "pinned": pinned}.get(kind) or work.do("cuMemAllocManaged", 4096, managed)
    assert work.do("cuPointerGetAttribute", attribute(name), address + 64) == value
    if kind == "managed":
        work.do("cuMemFree", address)


@pytest.mark.parametrize("name", ["RANGE_START_ADDR", "DEVICE_POINTER", "CONTEXT"])
def test_pointer_attribute_that_is_an_address(name: str, memory: int, work: Job) -> None:
    told = work.do("cuPointerGetAttribute", attribute(name), memory + 64)
    assert told == {"RANGE_START_ADDR": memory, "DEVICE_POINTER": memory + 64, "CONTEXT": work.context}[name]


def test_pointer_attribute_host_pointer_of_pinned_memory(pinned: int, work: Job) -> None:
    assert work.do("cuPointerGetAttribute", attribute("HOST_POINTER"), pinned + 64) == pinned + 64


def test_pointer_attribute_host_pointer_of_device_memory(memory: int, work: Job) -> None:
    assert work.says("cuPointerGetAttribute", attribute("HOST_POINTER"), memory) == "INVALID_VALUE"


@pytest.mark.parametrize("name", ["MEMORY_TYPE", "CONTEXT", "DEVICE_POINTER", "BUFFER_ID"])
@pytest.mark.parametrize("kind", ["host", "freed", "null"])
def test_pointer_attribute_of_what_the_driver_does_not_know(kind: str, name: str, work: Job) -> None:
    address = {"host": work.scratch, "null": 0}.get(kind)
    if address is None:
        address = work.do("cuMemAlloc", 32 * MIB)
        work.do("cuMemFree", address)
    assert work.says("cuPointerGetAttribute", attribute(name), address) == "INVALID_VALUE"


def test_buffer_ids_differ(memory: int, work: Job) -> None:
    other = work.do("cuMemAlloc", 4096)
    ids = [work.do("cuPointerGetAttribute", attribute("BUFFER_ID"), a) for a in (memory, memory + 8, other)]
    work.do("cuMemFree", other)
    assert ids[0] == ids[1] != ids[2]


def test_several_pointer_attributes_at_once(memory: int, work: Job) -> None:
    names = ["MEMORY_TYPE", "DEVICE_ORDINAL"]
    assert work.do("cuPointerGetAttributes", 2, [attribute(name) for name in names], memory) == [2, 0]


def test_several_pointer_attributes_of_what_the_driver_does_not_know(work: Job) -> None:
    answer = work.ask("cuPointerGetAttributes", 1, [attribute("MEMORY_TYPE")], work.scratch)
    assert (answer.result, answer.value) == ("SUCCESS", [0])


# --- managed memory ---------------------------------------------------------------------------------------------------


def test_managed_memory_is_read_by_host_and_device(work: Job) -> None:
    address = work.do("cuMemAllocManaged", 4096, enum("CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL"))
    work.poke(address, b"\x21" * 64)
    work.fill(address + 64, 8, 0x2222222222222222)
    work.do("cuCtxSynchronize")
    assert work.peek(address, 128) == b"\x21" * 64 + b"\x22" * 64
    work.do("cuMemFree", address)


@pytest.mark.parametrize(("size", "flags"), [(0, "GLOBAL"), (4096, "SINGLE")])
def test_managed_alloc_with_wrong_arguments(size: int, flags: str, work: Job) -> None:
    assert work.says("cuMemAllocManaged", size, enum(f"CUmemAttach_flags.CU_MEM_ATTACH_{flags}")) == "INVALID_VALUE"

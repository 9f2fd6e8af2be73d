"""The rules of initialisation, devices, contexts, limits and peer access; and a process after a fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.jobs import Job, enum, lock_args, plain, text

Start = Callable[..., Job]
STACK = enum("CUlimit.CU_LIMIT_STACK_SIZE")

# --- before cuInit ----------------------------------------------------------------------------------------------------

BEFORE: dict[str, tuple[list[Any], str]] = {
    "cuDriverGetVersion": ([], "SUCCESS"),
    "cuGetErrorName": ([enum("CUresult.CUDA_ERROR_UNKNOWN")], "SUCCESS"),
    "cuGetErrorString": ([enum("CUresult.CUDA_ERROR_UNKNOWN")], "SUCCESS"),
    "cuDeviceGetCount": ([], "NOT_INITIALIZED"),
    "cuDeviceGet": ([0], "NOT_INITIALIZED"),
    "cuDevicePrimaryCtxRetain": ([0], "NOT_INITIALIZED"),
    "cuCtxGetCurrent": ([], "NOT_INITIALIZED"),
    "cuCtxSynchronize": ([], "NOT_INITIALIZED"),
    "cuMemAlloc": ([4096], "NOT_INITIALIZED"),
    "cuMemGetInfo": ([], "NOT_INITIALIZED"),
    "cuStreamCreate": ([0], "NOT_INITIALIZED"),
    "cuMemAddressReserve": ([2 << 20, 0, 0, 0], "NOT_INITIALIZED"),
}


@pytest.fixture(scope="session")
def fresh_ones() -> Any:
    made: list[Job] = []
    yield made
    for job in made:
        job.kill()


@pytest.fixture
def untouched(fresh_ones: list[Job], node: Any, turn: None) -> Job:
    """A process that never calls cuInit."""
    from conformance.conftest import recording

    if not fresh_ones:
        fresh_ones.append(Job(node.prefix, dict(node.env), "untouched", recording))
    return fresh_ones[0]


@pytest.mark.parametrize("call", BEFORE)
def test_before_cuinit(call: str, untouched: Job) -> None:
    args, result = BEFORE[call]
    assert untouched.says(call, *args) == result


def test_cuinit_with_flags(start: Start) -> None:
    assert start().says("cuInit", 1) == "INVALID_VALUE"


def test_cuinit_again(work: Job) -> None:
    assert work.says("cuInit", 0) == "SUCCESS"


# --- without a context ------------------------------------------------------------------------------------------------

WITHOUT: dict[str, tuple[list[Any], str]] = {
    "cuCtxGetCurrent": ([], "SUCCESS"),
    "cuCtxGetDevice": ([], "INVALID_CONTEXT"),
    "cuCtxSynchronize": ([], "INVALID_CONTEXT"),
    "cuCtxPopCurrent": ([], "INVALID_CONTEXT"),
    "cuCtxGetLimit": ([STACK], "INVALID_CONTEXT"),
    "cuMemAlloc": ([4096], "INVALID_CONTEXT"),
    "cuMemGetInfo": ([], "INVALID_CONTEXT"),
    "cuMemHostAlloc": ([4096, 0], "INVALID_CONTEXT"),
    "cuStreamCreate": ([0], "INVALID_CONTEXT"),
    "cuEventCreate": ([0], "INVALID_CONTEXT"),
    "cuStreamQuery": ([0], "INVALID_CONTEXT"),
    "cuMemAddressReserve": ([2 << 20, 0, 0, 0], "SUCCESS"),
    "cuDeviceGetDefaultMemPool": ([0], "SUCCESS"),
    "cuDeviceTotalMem": ([0], "SUCCESS"),
}


@pytest.mark.parametrize("call", WITHOUT)
def test_without_a_current_context(call: str, work: Job) -> None:
    args, result = WITHOUT[call]
    assert work.says(call, *args, thread="without-a-context") == result


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordinal", [-1, 2, 1000])
def test_a_device_that_is_not_there(ordinal: int, work: Job) -> None:
    assert work.says("cuDeviceGet", ordinal) == "INVALID_DEVICE"


@pytest.mark.parametrize(
    "call", ["cuDeviceGetUuid", "cuDeviceTotalMem", "cuDevicePrimaryCtxRetain", "cuDeviceGetDefaultMemPool"]
)
def test_a_call_about_a_device_that_is_not_there(call: str, work: Job) -> None:
    assert work.says(call, 7) == "INVALID_DEVICE"


def test_the_two_devices_differ(work: Job) -> None:
    assert work.do("cuDeviceGetCount") == 2
    assert work.uuid(0) != work.uuid(1)
    assert work.do("cuDeviceGetPCIBusId", 32, 0) != work.do("cuDeviceGetPCIBusId", 32, 1)


def test_a_device_by_its_bus_id(work: Job) -> None:
    assert work.do("cuDeviceGetByPCIBusId", text(plain(work.do("cuDeviceGetPCIBusId", 32, 1)))) == 1


def test_a_device_by_a_bus_id_that_is_none(work: Job) -> None:
    assert work.says("cuDeviceGetByPCIBusId", text("ffff:ff:1f.0")) == "INVALID_DEVICE"


ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "WARP_SIZE": 32,
    "MAX_THREADS_PER_BLOCK": 1024,
    "UNIFIED_ADDRESSING": 1,
    "MANAGED_MEMORY": 1,
    "CAN_MAP_HOST_MEMORY": 1,
    "INTEGRATED": 0,
    "COMPUTE_MODE": 0,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "MEMORY_POOLS_SUPPORTED": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "MAX_BLOCK_DIM_X": 1024,
    "MAX_GRID_DIM_X": 2147483647,
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_device_attribute(name: str, work: Job) -> None:
    assert (
        work.do("cuDeviceGetAttribute", enum(f"CUdevice_attribute.CU_DEVICE_ATTRIBUTE_{name}"), 0) == ATTRIBUTES[name]
    )


# --- contexts ---------------------------------------------------------------------------------------------------------


def test_retaining_the_primary_context_again_gives_the_same(work: Job) -> None:
    assert work.do("cuDevicePrimaryCtxRetain", 0) == work.context
    work.do("cuDevicePrimaryCtxRelease", 0)


def test_a_primary_context_is_inactive_until_it_is_retained(job: Job) -> None:
    assert job.do("cuDevicePrimaryCtxGetState", 1) == [0, 0]
    job.do("cuDevicePrimaryCtxRetain", 1)
    assert job.do("cuDevicePrimaryCtxGetState", 1)[1] == 1
    job.do("cuDevicePrimaryCtxRelease", 1)
    assert job.do("cuDevicePrimaryCtxGetState", 1)[1] == 0


def test_releasing_a_primary_context_that_nobody_retains(job: Job) -> None:
    assert job.says("cuDevicePrimaryCtxRelease", 1) == "INVALID_CONTEXT"


def test_flags_of_an_active_primary_context(work: Job) -> None:
    assert work.says("cuDevicePrimaryCtxSetFlags", 0, 4) == "SUCCESS"
    assert work.do("cuDevicePrimaryCtxGetState", 0) == [4, 1]
    work.do("cuDevicePrimaryCtxSetFlags", 0, 0)


def test_a_thread_begins_without_a_context(work: Job) -> None:
    assert work.do("cuCtxGetCurrent", thread="another") == 0


def test_push_and_pop(work: Job) -> None:
    work.do("cuCtxPushCurrent", work.context, thread="pushes")
    assert work.do("cuCtxGetCurrent", thread="pushes") == work.context
    assert work.do("cuCtxPopCurrent", thread="pushes") == work.context
    assert work.do("cuCtxGetCurrent", thread="pushes") == 0


def test_a_context_that_is_made_is_current_and_gone_when_destroyed(work: Job) -> None:
    made = work.do("cuCtxCreate", None, 0, 0, thread="makes")
    assert work.do("cuCtxGetCurrent", thread="makes") == made
    assert work.says("cuCtxDestroy", made, thread="makes") == "SUCCESS"
    assert work.do("cuCtxGetCurrent", thread="makes") == 0


def test_destroying_the_primary_context(work: Job) -> None:
    assert work.says("cuCtxDestroy", work.context, thread="destroys") == "INVALID_CONTEXT"


def test_destroying_no_context(work: Job) -> None:
    assert work.says("cuCtxDestroy", 0) == "INVALID_VALUE"


def test_memory_goes_with_its_context(job: Job) -> None:
    made = job.do("cuCtxCreate", None, 0, 0, thread="makes")
    memory = job.do("cuMemAlloc", 64 << 20, thread="makes")
    job.do("cuCtxDestroy", made, thread="makes")
    kind = enum("CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE")
    assert job.says("cuPointerGetAttribute", kind, memory) == "INVALID_VALUE"


@pytest.mark.parametrize(("asked", "given"), [(1024, 1024), (4096, 4096), (1000, 1008)])
def test_the_stack_limit(asked: int, given: int, work: Job) -> None:
    work.do("cuCtxSetLimit", STACK, asked)
    assert work.do("cuCtxGetLimit", STACK) == given
    work.do("cuCtxSetLimit", STACK, 1024)


def test_the_stack_limit_at_first(work: Job) -> None:
    assert work.do("cuCtxGetLimit", STACK) == 1024


@pytest.mark.parametrize(("name", "value"), [("MALLOC_HEAP_SIZE", 8 << 20), ("PRINTF_FIFO_SIZE", 8650752)])
def test_limit_at_first(name: str, value: int, work: Job) -> None:
    assert work.do("cuCtxGetLimit", enum(f"CUlimit.CU_LIMIT_{name}")) == value


def test_api_version(work: Job) -> None:
    assert work.do("cuCtxGetApiVersion", work.context) == 3020


# --- peer access ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second", "can"), [(0, 1, 1), (1, 0, 1), (0, 0, 0)])
def test_who_can_reach_whom(first: int, second: int, can: int, work: Job) -> None:
    assert work.do("cuDeviceCanAccessPeer", first, second) == can


def test_peer_access_is_enabled_once(job: Job) -> None:
    second = job.do("cuDevicePrimaryCtxRetain", 1)
    assert job.says("cuCtxEnablePeerAccess", second, 0) == "SUCCESS"
    assert job.says("cuCtxEnablePeerAccess", second, 0) == "PEER_ACCESS_ALREADY_ENABLED"
    assert job.says("cuCtxDisablePeerAccess", second) == "SUCCESS"
    assert job.says("cuCtxDisablePeerAccess", second) == "PEER_ACCESS_NOT_ENABLED"


def test_peer_access_to_oneself(work: Job) -> None:
    assert work.says("cuCtxEnablePeerAccess", work.context, 0) == "PEER_ACCESS_UNSUPPORTED"


def test_peer_access_with_flags(job: Job) -> None:
    second = job.do("cuDevicePrimaryCtxRetain", 1)
    assert job.says("cuCtxEnablePeerAccess", second, 1) == "INVALID_VALUE"


# --- after a fork -----------------------------------------------------------------------------------------------------

FORKED = {
    "cuInit": ([0], 3),
    "cuDeviceGetCount": ([0x10], 3),
    "cuCtxSynchronize": ([], 3),
    "cuMemAlloc_v2": ([0x10, 4096], 3),
}


@pytest.mark.parametrize("call", FORKED)
def test_a_forked_child_has_no_driver(call: str, work: Job) -> None:
    args, result = FORKED[call]
    given = [work.scratch if arg == 0x10 else arg for arg in args]
    assert work.run("fork", [[call, given]])["results"] == [result]


def test_a_child_forked_before_cuinit_has_one(start: Start) -> None:
    job = start()
    assert job.run("fork", [["cuInit", [0]]])["results"] == [0]


def test_a_fork_does_not_disturb_the_parent(work: Job, memory: int) -> None:
    work.stamped(memory, 512, 3)
    work.run("fork", [])
    work.check_stamps(memory, 512, 3)


def test_a_parent_with_a_forked_child_goes_through_a_cycle(job: Job, controller: Any) -> None:
    memory = job.stamped(job.do("cuMemAlloc", 4096), 512, 4)
    job.run("fork", [])
    controller.cycle(job.pid, controller.swap)
    job.check_stamps(memory, 512, 4)


@pytest.mark.parametrize("call", ["Lock", "Checkpoint"])
def test_a_child_forked_by_a_locked_job(call: str, job: Job, controller: Any) -> None:
    assert controller.lock(job.pid) == "SUCCESS"
    child = job.run("fork", [])["pid"]
    args = lock_args(200) if call == "Lock" else None
    assert controller.asked(call, child, args, limit=60).result == "NOT_INITIALIZED"
    assert controller.unlock(job.pid) == "SUCCESS"

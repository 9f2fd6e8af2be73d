"""Contexts: primary and others, which is current in which thread, limits, flags, peer access."""

from __future__ import annotations

from typing import Any

import pytest
from softgpu.far import Far


@pytest.fixture
def job(node: Any) -> Far:
    """A program that has initialised the driver and has no context."""
    program = Far(node)
    program("ok(cu.cuInit(0))")
    return program


def test_without_a_context(job: Far) -> None:
    for call in ("cuMemAlloc(16)", "cuCtxSynchronize()", "cuStreamCreate(0)", "cuEventCreate(0)", "cuCtxGetDevice()"):
        assert job(f"word(cu.{call}[0])") == "INVALID_CONTEXT", call
    assert job("int(ok(cu.cuCtxGetCurrent()))") == 0
    assert job("word(cu.cuCtxPopCurrent()[0])") == "INVALID_CONTEXT"


def test_primary_context_counts_who_retains_it(job: Far) -> None:
    state = "[int(x) for x in ok(cu.cuDevicePrimaryCtxGetState(0))]"
    assert job(state) == [0, 0]
    assert job("word(cu.cuDevicePrimaryCtxRelease(0)[0])") == "INVALID_CONTEXT"
    job("first = ok(cu.cuDevicePrimaryCtxRetain(0)); second = ok(cu.cuDevicePrimaryCtxRetain(0))")
    assert job("int(first) == int(second)")
    job("ok(cu.cuDevicePrimaryCtxRelease(0))")
    assert job(state) == [0, 1]
    job("ok(cu.cuDevicePrimaryCtxRelease(0))")
    assert job(state) == [0, 0]
    assert job("word(cu.cuDevicePrimaryCtxRelease(0)[0])") == "INVALID_CONTEXT"


def test_primary_context_released_takes_its_memory_along(job: Far) -> None:
    job("context(0); address = plain(4, 1); free = ok(cu.cuMemGetInfo())[0]")
    job("ok(cu.cuDevicePrimaryCtxRelease(0))")
    assert job("word(cu.cuMemAlloc(16)[0])") == "CONTEXT_IS_DESTROYED"
    job("again = ok(cu.cuDevicePrimaryCtxRetain(0))")
    assert job("ok(cu.cuMemGetInfo())[0] - free") == 4 << 20
    assert job("word(cu.cuMemcpyDtoH(bytearray(16), address, 16)[0])") == "INVALID_VALUE"


def test_primary_context_reset(job: Far) -> None:
    job("context(0); address = plain(4, 1); ok(cu.cuDevicePrimaryCtxReset(0))")
    assert job("[int(x) for x in ok(cu.cuDevicePrimaryCtxGetState(0))]") == [0, 0]
    job("start(0)")
    assert job("word(cu.cuMemcpyDtoH(bytearray(16), address, 16)[0])") == "INVALID_VALUE"


def test_primary_context_flags(job: Far) -> None:
    assert job("word(cu.cuDevicePrimaryCtxSetFlags(0, 4)[0])") == "SUCCESS"
    assert job("ok(cu.cuDevicePrimaryCtxGetState(0))[0]") == 4
    job("context(0)")
    assert job("ok(cu.cuCtxGetFlags())") == 4
    assert job("[word(cu.cuDevicePrimaryCtxSetFlags(0, f)[0]) for f in (3, 7, 0x100)]") == ["INVALID_VALUE"] * 3


def test_stack_of_contexts(job: Far) -> None:
    job("import ctypes; raw = ctypes.CDLL('libcuda.so.1')")
    job("contexts = [ctypes.c_void_p() for _ in range(2)]")
    job("assert [raw.cuCtxCreate_v2(ctypes.byref(contexts[i]), 0, i) for i in (0, 1)] == [0, 0]")
    assert job("int(ok(cu.cuCtxGetDevice()))") == 1
    assert job("int(ok(cu.cuCtxPopCurrent())) == contexts[1].value")
    assert job("int(ok(cu.cuCtxGetDevice()))") == 0
    job("ok(cu.cuCtxPushCurrent(contexts[1].value))")
    assert job("int(ok(cu.cuCtxGetDevice()))") == 1
    job("ok(cu.cuCtxSetCurrent(contexts[0].value))")
    assert job("int(ok(cu.cuCtxGetDevice()))") == 0
    job("ok(cu.cuCtxSetCurrent(0))")
    assert job("int(ok(cu.cuCtxGetCurrent())) == contexts[0].value")
    job("ok(cu.cuCtxDestroy(contexts[0].value))")
    assert job("int(ok(cu.cuCtxGetCurrent()))") == 0
    assert job("word(cu.cuCtxDestroy(contexts[0].value)[0])") == "INVALID_CONTEXT"
    assert job("word(cu.cuCtxDestroy(0)[0])") == "INVALID_VALUE"
    assert job("word(cu.cuCtxPushCurrent(contexts[0].value)[0])") == "INVALID_CONTEXT"
    assert job("word(cu.cuCtxSetCurrent(12345)[0])") == "INVALID_CONTEXT"


def test_current_is_each_threads_own(job: Far) -> None:
    job("context(1)")
    assert job.send("int(ok(cu.cuCtxGetCurrent()))").value() == 0
    assert job.send("context(0)\nother = int(ok(cu.cuCtxGetDevice()))").value() is None
    assert job("[other, int(ok(cu.cuCtxGetDevice()))]") == [0, 1]


def test_destroyed_while_current_elsewhere(job: Far) -> None:
    job("import ctypes; raw = ctypes.CDLL('libcuda.so.1'); mine = ctypes.c_void_p()")
    job("assert raw.cuCtxCreate_v2(ctypes.byref(mine), 0, 0) == 0")
    assert job.send("ok(cu.cuCtxDestroy(mine.value))").value() is None
    assert job("word(cu.cuMemAlloc(16)[0])") == "CONTEXT_IS_DESTROYED"


def test_a_context_destroyed_ends_a_kernel_that_would_not(job: Far) -> None:
    job("import ctypes; raw = ctypes.CDLL('libcuda.so.1'); mine = ctypes.c_void_p()")
    job("assert raw.cuCtxCreate_v2(ctypes.byref(mine), 0, 0) == 0")
    job("spin()")
    assert job("word(cu.cuCtxDestroy(mine.value)[0])") == "SUCCESS"
    job("context(0)")
    assert job("word(cu.cuCtxSynchronize()[0])") == "SUCCESS"


def test_a_context_destroyed_waits_for_no_other(job: Far) -> None:
    """Not for an event of another context that is never reached, nor does it call a host function then."""
    job("context(1); spin(); e = ok(cu.cuEventCreate(2)); ok(cu.cuEventRecord(e, 0))")
    job("raw = ctypes.CDLL('libcuda.so.1'); mine = ctypes.c_void_p(); called = []")
    job("function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)")
    job("assert raw.cuCtxCreate_v2(ctypes.byref(mine), 0, 0) == 0")
    job("ok(cu.cuStreamWaitEvent(0, e, 0)); assert raw.cuLaunchHostFunc(None, function, None) == 0")
    assert job("word(cu.cuStreamQuery(0)[0])") == "NOT_READY"
    assert job("word(cu.cuCtxDestroy(mine.value)[0])") == "SUCCESS"
    assert job("called") == []
    job("release()")


def test_handles_of_a_destroyed_context(job: Far) -> None:
    job("context(0); stream = ok(cu.cuStreamCreate(0)); event = ok(cu.cuEventCreate(0))")
    job("ok(cu.cuDevicePrimaryCtxReset(0)); context(0)")
    assert job("word(cu.cuStreamQuery(stream)[0])") == "INVALID_HANDLE"
    assert job("word(cu.cuEventQuery(event)[0])") == "INVALID_HANDLE"


def test_limits(job: Far) -> None:
    job("context(0); limit = cu.CUlimit")
    assert job("ok(cu.cuCtxGetLimit(limit.CU_LIMIT_STACK_SIZE))") == 1024
    job("ok(cu.cuCtxSetLimit(limit.CU_LIMIT_STACK_SIZE, 16))")
    assert job("ok(cu.cuCtxGetLimit(limit.CU_LIMIT_STACK_SIZE))") == 16
    assert job("word(cu.cuCtxSetLimit(limit.CU_LIMIT_STACK_SIZE, 1 << 40)[0])") == "INVALID_VALUE"
    assert job("word(cu.cuCtxGetLimit(limit.CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH)[0])") == "UNSUPPORTED_LIMIT"
    assert job("ok(cu.cuCtxGetLimit(limit.CU_LIMIT_MALLOC_HEAP_SIZE))") == 8 << 20


def test_peer_access(job: Far) -> None:
    """A kernel reaches another GPU's memory only where access has been enabled; a copy always."""
    job("context(1); there = plain(1, 7); other = ok(cu.cuCtxGetCurrent())")
    job("ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0)))); mine = ok(cu.cuCtxGetCurrent())")
    assert job("word(cu.cuCtxEnablePeerAccess(mine, 0)[0])") == "PEER_ACCESS_UNSUPPORTED"
    assert job("word(cu.cuCtxDisablePeerAccess(other)[0])") == "PEER_ACCESS_NOT_ENABLED"
    assert job("word(cu.cuCtxEnablePeerAccess(other, 1)[0])") == "INVALID_VALUE"
    assert job("word(cu.cuCtxEnablePeerAccess(other, 0)[0])") == "SUCCESS"
    assert job("word(cu.cuCtxEnablePeerAccess(other, 0)[0])") == "PEER_ACCESS_ALREADY_ENABLED"
    job("module = ok(cu.cuModuleLoadData(PTX.read_bytes() + b'\\0')); u = ctypes.c_uint64")
    job("fill = ok(cu.cuModuleGetFunction(module, b'fill'))")
    launch = "cu.cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, 0, ((there, 4, 9), (u, u, u)), 0)"
    job(f"ok({launch})")
    assert job("word(cu.cuCtxSynchronize()[0])") == "SUCCESS"
    job("back = bytearray(32); ok(cu.cuMemcpyDtoH(back, there, 32))")
    assert job("list(back) == [9, 0, 0, 0, 0, 0, 0, 0] * 4")
    job("ok(cu.cuCtxDisablePeerAccess(other))")
    job("ok(cu.cuMemcpyPeer(there, other, there + 64, other, 16))")
    job(f"ok({launch})")
    assert job("word(cu.cuCtxSynchronize()[0])") == "ILLEGAL_ADDRESS"


def test_a_context_takes_device_memory(new_node: Any) -> None:
    """As much as the node says, and OUT_OF_MEMORY where that is not to be had."""
    node = new_node(gpus=1, memory="64MiB", rates={"context_bytes": 48 << 20})
    job = Far(node)
    job("start()")
    assert job("ok(cu.cuMemGetInfo())[0]") <= 16 << 20
    second = Far(node)
    second("ok(cu.cuInit(0))")
    assert second("word(cu.cuDevicePrimaryCtxRetain(0)[0])") == "OUT_OF_MEMORY"
    job("ok(cu.cuDevicePrimaryCtxRelease(0))")
    assert second("word(cu.cuDevicePrimaryCtxRetain(0)[0])") == "SUCCESS"


def test_no_room_on_purpose(new_node: Any) -> None:
    """A rule that says that device memory is full is one for contexts too; the next call succeeds."""
    job = Far(new_node(faults=["function=cuDevicePrimaryCtxRetain memory=device"]))
    job("ok(cu.cuInit(0))")
    assert job("[word(cu.cuDevicePrimaryCtxRetain(0)[0]) for _ in range(2)]") == ["OUT_OF_MEMORY", "SUCCESS"]


def test_calls_that_fail_on_purpose(new_node: Any) -> None:
    """Instead of the work, or after it was done."""
    node = new_node(
        faults=[
            "function=cuInit nth=2 result=CUDA_ERROR_UNKNOWN",
            "function=cuMemcpyHtoD* result=CUDA_ERROR_ECC_UNCORRECTABLE",
            "function=cuMemsetD8* nth=2 after=CUDA_ERROR_LAUNCH_FAILED",
        ]
    )
    job = Far(node)
    assert job("[word(cu.cuInit(0)[0]) for _ in range(3)]") == ["SUCCESS", "UNKNOWN", "SUCCESS"]
    job("context(0); a = int(ok(cu.cuMemAlloc(16))); ok(cu.cuMemsetD8(a, 1, 8)); back = bytearray(8)")
    assert job("word(cu.cuMemcpyHtoD(a, bytes(8), 8)[0])") == "ECC_UNCORRECTABLE"
    job("ok(cu.cuMemcpyDtoH(back, a, 8))")
    assert job("list(back)") == [1] * 8
    assert job("word(cu.cuMemsetD8(a, 2, 8)[0])") == "LAUNCH_FAILED"
    job("ok(cu.cuMemcpyDtoH(back, a, 8))")
    assert job("list(back)") == [2] * 8


def test_what_starting_takes(new_node: Any) -> None:
    node = new_node(rates={"init_fixed": 0.15, "context_fixed": 0.2})  # two GPUs
    took = [1e9, 1e9]
    for _ in range(8):  # the quickest: whoever is held up only takes longer
        job = Far(node)
        job("begin = time.monotonic(); ok(cu.cuInit(0)); middle = time.monotonic(); context(0); end = time.monotonic()")
        took = [min(pair) for pair in zip(took, job("[middle - begin, end - middle]"), strict=True)]
        assert took[0] >= 0.3
        assert took[1] >= 0.2
        if took[0] < 0.9 and took[1] < 0.8:
            return
    raise AssertionError(took)


def test_compute_modes(node: Any) -> None:
    """Prohibited: no context. Exclusive: one process."""
    first, second = Far(node), Far(node)
    first("ok(cu.cuInit(0))")
    second("ok(cu.cuInit(0))")
    node.switches.compute_mode(0, "prohibited")
    node.switches.compute_mode(1, "exclusive_process")
    assert first("[word(cu.cuDevicePrimaryCtxRetain(i)[0]) for i in (0, 1)]") == ["DEVICE_UNAVAILABLE", "SUCCESS"]
    assert second("word(cu.cuDevicePrimaryCtxRetain(1)[0])") == "DEVICE_UNAVAILABLE"
    first("ok(cu.cuDevicePrimaryCtxRelease(1))")
    assert second("word(cu.cuDevicePrimaryCtxRetain(1)[0])") == "SUCCESS"

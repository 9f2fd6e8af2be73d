"""What a job can call while it is locked, and while it is checkpointed: what answers, what waits for the unlock.

One job is asked for everything at once, each call in a thread of its own that had the context current before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from conformance.conftest import recording
from conformance.differences import expected
from conformance.jobs import POSIX, Controller, Job, access, enum, launching, number, pointer, prop, text
from conformance.node import Node
from conformance.remote import Answer, Pending

Given = dict[str, int]
# What each call is given; `v` has the job's handles and addresses.
CALLS: dict[str, Callable[[Given], list[Any]]] = {
    "cuInit": lambda v: [0],
    "cuDriverGetVersion": lambda v: [],
    "cuGetErrorName": lambda v: [enum("CUresult.CUDA_ERROR_UNKNOWN")],
    "cuGetProcAddress": lambda v: [text("cuMemAlloc"), 12000, 0],
    "cuDeviceGet": lambda v: [0],
    "cuDeviceGetCount": lambda v: [],
    "cuDeviceGetName": lambda v: [64, 0],
    "cuDeviceGetUuid": lambda v: [0],
    "cuDeviceGetPCIBusId": lambda v: [32, 0],
    "cuDeviceTotalMem": lambda v: [0],
    "cuDeviceGetAttribute": lambda v: [
        enum("CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
        0,
    ],
    "cuDeviceCanAccessPeer": lambda v: [0, 1],
    "cuDeviceGetDefaultMemPool": lambda v: [0],
    "cuDevicePrimaryCtxGetState": lambda v: [0],
    "cuDevicePrimaryCtxRetain": lambda v: [0],
    "cuCtxGetCurrent": lambda v: [],
    "cuCtxSetCurrent": lambda v: [v["context"]],
    "cuCtxPushCurrent": lambda v: [v["context"]],
    "cuCtxGetDevice": lambda v: [],
    "cuCtxGetLimit": lambda v: [enum("CUlimit.CU_LIMIT_STACK_SIZE")],
    "cuCtxSetLimit": lambda v: [enum("CUlimit.CU_LIMIT_STACK_SIZE"), 1024],
    "cuCtxGetApiVersion": lambda v: [v["context"]],
    "cuCtxGetStreamPriorityRange": lambda v: [],
    "cuCtxSynchronize": lambda v: [],
    "cuMemGetInfo": lambda v: [],
    "cuMemAlloc": lambda v: [4096],
    "cuMemAllocAsync": lambda v: [4096, 0],
    "cuMemAllocHost": lambda v: [4096],
    "cuMemHostAlloc": lambda v: [4096, 0],
    "cuMemHostRegister": lambda v: [v["unregistered"], 4096, 0],
    "cuMemFree": lambda v: [v["to_free"]],
    "cuMemFreeHost": lambda v: [v["host_to_free"]],
    "cuMemGetAddressRange": lambda v: [v["memory"]],
    "cuMemHostGetDevicePointer": lambda v: [v["pinned"], 0],
    "cuPointerGetAttribute": lambda v: [enum("CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE"), v["memory"]],
    "cuMemcpyHtoD": lambda v: [v["memory"], v["pinned"], 64],
    "cuMemcpyDtoH": lambda v: [v["pinned"], v["memory"], 64],
    "cuMemcpyDtoD": lambda v: [v["memory"], v["memory"] + 2048, 64],
    "cuMemcpyDtoHAsync": lambda v: [v["pinned"], v["memory"], 64, 0],
    "cuMemsetD8": lambda v: [v["memory"], 1, 64],
    "cuMemsetD8Async": lambda v: [v["memory"], 1, 64, 0],
    "cuMemGetAllocationGranularity": lambda v: [
        prop(),
        enum("CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM"),
    ],
    "cuMemAddressReserve": lambda v: [2 << 20, 0, 0, 0],
    "cuMemAddressFree": lambda v: [v["to_unreserve"], 2 << 20],
    "cuMemCreate": lambda v: [2 << 20, prop(exportable=True), 0],
    "cuMemExportToShareableHandle": lambda v: [v["handle"], POSIX, 0],
    "cuMemMap": lambda v: [v["reserved"], 2 << 20, 0, v["handle"], 0],
    "cuMemSetAccess": lambda v: [v["mapped"], 2 << 20, access(), 1],
    "cuMemRelease": lambda v: [v["handle_to_release"]],
    "cuIpcGetMemHandle": lambda v: [v["memory"]],
    "cuStreamCreate": lambda v: [0],
    "cuStreamQuery": lambda v: [v["stream"]],
    "cuStreamSynchronize": lambda v: [v["stream"]],
    "cuStreamGetPriority": lambda v: [v["stream"]],
    "cuStreamWaitEvent": lambda v: [v["stream"], v["event"], 0],
    "cuStreamDestroy": lambda v: [v["stream_to_destroy"]],
    "cuEventCreate": lambda v: [0],
    "cuEventRecord": lambda v: [v["event"], v["stream"]],
    "cuEventQuery": lambda v: [v["event"]],
    "cuEventSynchronize": lambda v: [v["event"]],
    "cuModuleGetFunction": lambda v: [v["module"], text("fill")],
    "cuModuleLoadData": lambda v: [
        text(".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry fill() { ret; }\n")
    ],
    "cuFuncGetAttribute": lambda v: [
        enum("CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK"),
        v["fill"],
    ],
    "cuLaunchKernel": lambda v: launching(v["fill"], pointer(v["memory"]), number(16), number(1))[1:],
    "cuLaunchHostFunc": lambda v: [v["stream"], v["callback"], 0],
}
# These wait for the unlock.
WAITS = {
    *("cuInit", "cuDeviceGetDefaultMemPool", "cuCtxGetLimit", "cuCtxSetLimit", "cuModuleGetFunction"),
    *("cuModuleLoadData", "cuLaunchKernel", "cuLaunchHostFunc"),
    *("cuMemAlloc", "cuMemAllocAsync", "cuMemAllocHost", "cuMemHostAlloc", "cuMemHostRegister", "cuMemFree"),
    *("cuMemFreeHost", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyDtoHAsync", "cuMemsetD8"),
    *("cuMemsetD8Async", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemRelease"),
    *("cuStreamCreate", "cuStreamDestroy", "cuEventCreate", "cuEventRecord"),
}
# These answer although the process is locked, and look at memory of the device for it, which is not there while the
# process is checkpointed.
ABOUT_WORK = {"cuCtxSynchronize", "cuStreamQuery", "cuStreamSynchronize", "cuEventQuery", "cuEventSynchronize"}
# All others answer at once, also while the process is checkpointed, where some cannot.
FAILS = {
    "cuDeviceGetName": "OPERATING_SYSTEM",
    "cuMemGetInfo": "OPERATING_SYSTEM",
    "cuIpcGetMemHandle": "OPERATING_SYSTEM",
    "cuMemExportToShareableHandle": "UNKNOWN",
}


@dataclass
class Asked:
    """How each call ended half a second after it was made, and in the end."""

    first: dict[str, Answer]
    last: dict[str, Answer]
    state: str


def ask_all(job: Job, controller: Controller, state: str) -> Asked:
    given: Given = {"context": job.context, "module": job.module, "fill": job.functions["fill"]}
    for name in ("memory", "to_free"):
        given[name] = job.do("cuMemAlloc", 4096)
    for name in ("pinned", "host_to_free"):
        given[name] = job.pinned()
    for name in ("stream", "stream_to_destroy"):
        given[name] = job.do("cuStreamCreate", 1)
    for name in ("handle", "handle_to_release", "for_mapped"):
        given[name] = job.do("cuMemCreate", 2 << 20, prop(exportable=True), 0)
    for name in ("reserved", "mapped", "to_unreserve"):
        given[name] = job.do("cuMemAddressReserve", 2 << 20, 0, 0, 0)
    job.do("cuMemMap", given["mapped"], 2 << 20, 0, given["for_mapped"], 0)
    given["unregistered"] = job.run("memory", 4096)
    given["event"] = job.do("cuEventCreate", 0)
    given["callback"] = job.run("callback", "blocked", "host", False, None)
    asked = [name for name in CALLS if state == "locked" or name not in ABOUT_WORK]
    for name in asked:
        job.enter(name)
    job.do("cuCtxSynchronize")
    assert controller.lock(job.pid) == "SUCCESS"
    if state == "checkpointed":
        assert controller.checkpoint(job.pid) == "SUCCESS"
    pending: dict[str, Pending] = {name: job.start(name, *CALLS[name](given), thread=name) for name in asked}
    end = time.monotonic() + 60
    while not all(one.done() for name, one in pending.items() if name not in WAITS) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.7)
    first = {name: one.answer(0) for name, one in pending.items()}
    now = controller.state(job.pid, 5)
    if state == "checkpointed":
        assert controller.restore(job.pid) == "SUCCESS"
    assert controller.unlock(job.pid) == "SUCCESS"
    return Asked(first, {name: one.answer(60) for name, one in pending.items()}, now)


@pytest.fixture(scope="session")
def kept() -> dict[str, Asked]:
    return {}


@pytest.fixture
def asked(
    request: pytest.FixtureRequest, kept: dict[str, Asked], turn: None, node: Node, controller: Controller
) -> Iterator[Asked]:
    state = request.param
    if state not in kept:
        job = Job(node.prefix, dict(node.env), "asked", recording).start_up().load()
        try:
            kept[state] = ask_all(job, controller, state)
        finally:
            job.kill()
    return kept[state]


@pytest.mark.xdist_group("blocked")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("asked", ["locked"], indirect=True)
def test_call_while_locked(asked: Asked, call: str) -> None:
    assert asked.first[call].result == ("BLOCKED" if call in WAITS else "SUCCESS")


@pytest.mark.xdist_group("blocked")
@pytest.mark.parametrize("call", [call for call in CALLS if call not in ABOUT_WORK])
@pytest.mark.parametrize("asked", ["checkpointed"], indirect=True)
def test_call_while_checkpointed(asked: Asked, call: str) -> None:
    assert asked.first[call].result == ("BLOCKED" if call in WAITS else FAILS.get(call, "SUCCESS"))


@pytest.mark.hazard
@pytest.mark.parametrize("call", sorted(ABOUT_WORK))
def test_a_question_about_work_while_checkpointed(call: str, start: Callable[..., Job], controller: Controller) -> None:
    job = start().start_up()
    handle = {"cuStream": lambda: job.do("cuStreamCreate", 1), "cuEvent": lambda: job.do("cuEventCreate", 0)}
    args = [make() for kind, make in handle.items() if call.startswith(kind)]
    job.do("cuCtxSynchronize")
    controller.suspend(job.pid)
    assert job.says(call, *args, limit=2) == expected("a question about work while checkpointed")


@pytest.mark.xdist_group("blocked")
@pytest.mark.parametrize("asked", ["locked", "checkpointed"], indirect=True)
def test_all_that_waited_succeeds_after_the_unlock(asked: Asked) -> None:
    failed = FAILS if asked.state == "CHECKPOINTED" else {}
    wanted = {name: failed.get(name, "SUCCESS") for name in asked.last}
    assert {name: one.result for name, one in asked.last.items()} == wanted


@pytest.mark.xdist_group("blocked")
@pytest.mark.parametrize("asked", ["locked", "checkpointed"], indirect=True)
def test_calls_that_wait_do_not_change_the_state(asked: Asked, request: pytest.FixtureRequest) -> None:
    assert asked.state == request.node.callspec.params["asked"].upper()


def test_a_call_that_waits_in_a_locked_job_does_not_hold_up_the_checkpoint(job: Job, controller: Controller) -> None:
    assert controller.lock(job.pid) == "SUCCESS"
    waiting = job.start("cuMemAlloc", 4096)
    time.sleep(0.1)
    assert controller.checkpoint(job.pid, limit=60) == "SUCCESS"
    assert waiting.result(0.1) == "BLOCKED"
    controller.resume(job.pid, controller.swap)
    assert waiting.result(60) == "SUCCESS"


@pytest.mark.parametrize("call", ["cuCtxSynchronize", "cuMemAlloc", "cuLaunchKernel"])
def test_a_call_that_waited_through_a_move_works_on_the_new_gpu(call: str, job: Job, controller: Controller) -> None:
    memory = job.do("cuMemAlloc", 4096)
    assert controller.lock(job.pid) == "SUCCESS"
    args = {"cuMemAlloc": [4096], "cuCtxSynchronize": []}.get(call)
    waiting = job.start(
        *(launching(job.functions["fill"], pointer(memory), number(512), number(7)) if args is None else [call, *args])
    )
    time.sleep(0.1)
    assert controller.checkpoint(job.pid) == "SUCCESS"
    controller.resume(job.pid, controller.swap)
    assert waiting.result(60) == "SUCCESS"
    if call == "cuLaunchKernel":
        assert job.words(memory, 2) == (7, 7)

"""What is as it was after lock, checkpoint, restore, unlock: on the same GPUs, and on exchanged ones.

One job that has one of everything (rich.py) goes through one cycle; each test looks at one thing, and leaves the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.conftest import recording
from conformance.jobs import MIB, POSIX, PTX, Controller, Job, access, enum, launching, number, pointer, prop, text
from conformance.node import Node
from conformance.rich import PITCH_HEIGHT, QUESTIONS, SPAN, Rich

pytestmark = pytest.mark.xdist_group("survives")


@pytest.fixture(scope="session")
def kept(node: Node) -> Any:
    made: dict[str, Rich] = {}
    yield made
    for rich in made.values():
        rich.job.kill()


@pytest.fixture(params=["same", "swapped"])
def rich(request: pytest.FixtureRequest, kept: dict[str, Rich], node: Node, controller: Controller) -> Rich:
    """The job after its cycle."""
    where = request.param
    if where in kept and not kept[where].job.alive():
        del kept[where]
    if where not in kept:
        made = Rich(Job(node.prefix, dict(node.env), f"rich-{where}", recording))
        controller.cycle(made.job.pid, controller.swap if where == "swapped" else controller.identity)
        made.moved = where == "swapped"
        made.freed_range = made.job.says("cuMemGetAddressRange", made.freed)
        kept[where] = made
    return kept[where]


# --- questions have the answers that they had -------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS)
def test_same_answer(question: str, rich: Rich) -> None:
    assert rich.question(question) == rich.before[question]


# --- contents ---------------------------------------------------------------------------------------------------------

STAMPED = {
    "plain": (4096, 1),
    "small": (1, 2),
    "odd": (125, 3),
    "large": (4096, 4),
    "pitched": (64, 5),
    "async": (512, 6),
    "pooled": (512, 7),
    "vmm": (512, 8),
    "released": (512, 9),
    "exported": (512, 10),
}


@pytest.mark.parametrize("kind", STAMPED)
def test_device_memory_keeps_address_and_contents(kind: str, rich: Rich) -> None:
    words, epoch = STAMPED[kind]
    rich.job.check_stamps(rich.have[kind], words, epoch)


def test_vmm_memory_that_was_mapped_nowhere_keeps_its_contents(rich: Rich) -> None:
    job, address = rich.job, rich.have["reserved"]
    job.do("cuMemMap", address, SPAN, 0, rich.have["unmapped_handle"], 0)
    job.do("cuMemSetAccess", address, SPAN, access(), 1)
    job.check_stamps(address, 512, 11)
    job.do("cuMemUnmap", address, SPAN)


@pytest.mark.parametrize(("kind", "byte", "thread"), [("on_second", 0x77, "second"), ("on_made", 0x66, "made")])
def test_memory_of_other_contexts_keeps_its_contents(kind: str, byte: int, thread: str, rich: Rich) -> None:
    job = rich.job
    job.do("cuMemcpyDtoH", job.scratch, rich.have[kind], 4096, thread=thread)
    assert job.peek(job.scratch, 4096) == bytes([byte]) * 4096


@pytest.mark.parametrize("kind", ["pinned", "registered"])
def test_host_memory_keeps_its_contents(kind: str, rich: Rich) -> None:
    assert rich.job.peek(rich.have[kind], 8) == {"pinned": b"pinned!!", "registered": b"register"}[kind]


@pytest.mark.parametrize("kind", ["pinned", "registered"])
def test_a_kernel_reads_and_writes_host_memory_where_it_did(kind: str, rich: Rich) -> None:
    job = rich.job
    job.fill(rich.have[f"{kind}_device"] + 4096, 8, 0x1122334455667788)
    job.do("cuCtxSynchronize")
    assert job.peek(rich.have[kind] + 4096, 64) == (0x1122334455667788).to_bytes(8, "little") * 8


def test_the_pitch_is_still_right(rich: Rich) -> None:
    assert rich.have["pitch"] % 4 == 0
    last = rich.have["pitched"] + rich.have["pitch"] * (PITCH_HEIGHT - 1)
    assert rich.job.says("cuMemsetD8", last, 0, 100) == "SUCCESS"


# --- handles work -----------------------------------------------------------------------------------------------------

WORKS: dict[str, Callable[[Rich], list[Any]]] = {
    "stream-query": lambda r: ["cuStreamQuery", r.have["stream"]],
    "stream-synchronise": lambda r: ["cuStreamSynchronize", r.have["stream"]],
    "stream-create": lambda r: ["cuStreamCreate", 0],
    "event-record": lambda r: ["cuEventRecord", r.have["never"], r.have["stream"]],
    "event-synchronise": lambda r: ["cuEventSynchronize", r.have["later"]],
    "stream-waits-for-event": lambda r: ["cuStreamWaitEvent", r.have["urgent"], r.have["event"], 0],
    "launch": lambda r: launching(r.job.functions["fill"], pointer(r.have["spare"]), number(8), number(1)),
    "launch-in-a-stream": lambda r: launching(
        r.job.functions["fill"], pointer(r.have["spare"]), number(8), number(1), stream=r.have["urgent"]
    ),
    "function-of-a-module": lambda r: ["cuModuleGetFunction", r.job.module, text("saxpy")],
    "module-load": lambda r: ["cuModuleLoadData", {"b": PTX.read_bytes().hex() + "00"}],
    "host-callback": lambda r: ["cuLaunchHostFunc", r.have["stream"], r.have["callback"], 0],
    "malloc": lambda r: ["cuMemAlloc", 4096],
    "malloc-async": lambda r: ["cuMemAllocAsync", 4096, r.have["stream"]],
    "malloc-from-pool": lambda r: ["cuMemAllocFromPoolAsync", 4096, r.have["pool"], 0],
    "malloc-host": lambda r: ["cuMemHostAlloc", 4096, 0],
    "managed": lambda r: ["cuDeviceGetAttribute", enum("CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY"), 0],
    "memory-info": lambda r: ["cuMemGetInfo"],
    "vmm-create": lambda r: ["cuMemCreate", SPAN, prop(), 0],
    "vmm-reserve": lambda r: ["cuMemAddressReserve", SPAN, 0, 0, 0],
    "vmm-retain": lambda r: ["cuMemRetainAllocationHandle", r.have["vmm"]],
    "vmm-export-again": lambda r: ["cuMemExportToShareableHandle", r.have["exported_handle"], POSIX, 0],
    "vmm-import-own": lambda r: ["cuMemImportFromShareableHandle", r.have["fd"], POSIX],
    "ipc-handle": lambda r: ["cuIpcGetMemHandle", r.have["plain"]],
    "copy-to-peer": lambda r: [
        "cuMemcpyPeer",
        r.have["on_second"] + 8192,
        r.have["second_context"],
        r.have["spare"],
        r.job.context,
        4096,
    ],
    "context-create": lambda r: ["cuCtxCreate", None, 0, 0],
}


@pytest.mark.parametrize("what", WORKS)
def test_still_works(what: str, rich: Rich) -> None:
    thread = what if what == "context-create" else "main"  # where it may become the current one
    assert rich.job.says(*WORKS[what](rich), thread=thread) == "SUCCESS"
    assert rich.job.says("cuCtxSynchronize") == "SUCCESS"


def test_peer_access_is_still_enabled(rich: Rich) -> None:
    result = rich.job.says("cuCtxEnablePeerAccess", rich.have["second_context"], 0)
    assert result == "PEER_ACCESS_ALREADY_ENABLED"


def test_a_kernel_reads_peer_memory(rich: Rich) -> None:
    job, have = rich.job, rich.have
    job.write(have["spare"], bytes(8))
    assert job.launch("hash", pointer(have["on_second"]), number(1), pointer(have["spare"])) == "SUCCESS"
    word = 0x7777777777777777
    assert job.words(have["spare"]) == ((word ^ (word >> 29)),)


def test_freed_memory_stays_free(rich: Rich) -> None:
    assert rich.freed_range == "NOT_FOUND"


def test_a_host_callback_runs_once_for_each_time_it_is_launched(rich: Rich) -> None:
    job = rich.job
    before = job.run("callback_state", "rich")["count"]
    job.do("cuLaunchHostFunc", rich.have["stream"], rich.have["callback"], 0)
    job.do("cuStreamSynchronize", rich.have["stream"])
    assert job.run("callback_state", "rich")["count"] == before + 1


def test_memory_can_be_freed(rich: Rich) -> None:
    job = rich.job
    address = job.do("cuMemAlloc", 4096)
    assert job.says("cuMemFree", address) == "SUCCESS"
    assert job.says("cuMemFree", rich.have.pop("extra", 0)) == "SUCCESS"


# --- what the job thinks it is on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 1])
def test_the_uuid_that_the_job_sees_is_that_of_where_it_is(device: int, rich: Rich, controller: Controller) -> None:
    assert rich.job.uuid(device) == controller.uuids[1 - device if rich.moved else device]


@pytest.mark.parametrize("device", [0, 1])
def test_the_bus_id_that_the_job_sees_is_the_old_one(device: int, rich: Rich, controller: Controller) -> None:
    told = controller.do("cuDeviceGetPCIBusId", 32, device)
    assert rich.job.do("cuDeviceGetPCIBusId", 32, device) == told


def test_nvml_sees_it_where_it_is(rich: Rich, controller: Controller) -> None:
    assert controller.gpus_of(rich.job.pid) == {0, 1}


# --- descriptors ------------------------------------------------------------------------------------------------------


def test_another_process_imports_a_descriptor_that_was_exported_before(rich: Rich, start: Callable[..., Job]) -> None:
    other = start().start_up(1 if rich.moved else 0).load()
    fd = other.run("take_fd", rich.job.pid, rich.have["fd"])
    handle = other.do("cuMemImportFromShareableHandle", fd, POSIX)
    address = other.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    other.do("cuMemMap", address, SPAN, 0, handle, 0)
    other.do("cuMemSetAccess", address, SPAN, access(1 if rich.moved else 0), 1)
    other.check_stamps(address, 512, 10)


def test_the_exporter_keeps_its_contents_when_another_holds_the_descriptor(
    start: Callable[..., Job], controller: Controller
) -> None:
    job, other = start().start_up().load(), start().start_up().load()
    handle = job.do("cuMemCreate", SPAN, prop(exportable=True), 0)
    address = job.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    job.do("cuMemMap", address, SPAN, 0, handle, 0)
    job.do("cuMemSetAccess", address, SPAN, access(), 1)
    job.stamped(address, 512, 5)
    fd = job.do("cuMemExportToShareableHandle", handle, POSIX, 0)
    other.run("take_fd", job.pid, fd)
    controller.cycle(job.pid, controller.identity)
    job.check_stamps(address, 512, 5)


def test_memory_that_another_process_holds_lives_through_the_exporters_checkpoint(
    start: Callable[..., Job], controller: Controller
) -> None:
    job, other = start().start_up().load(), start().start_up().load()
    handle = job.do("cuMemCreate", SPAN, prop(exportable=True), 0)
    address = job.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    job.do("cuMemMap", address, SPAN, 0, handle, 0)
    job.do("cuMemSetAccess", address, SPAN, access(), 1)
    job.stamped(address, 512, 5)
    fd = other.run("take_fd", job.pid, job.do("cuMemExportToShareableHandle", handle, POSIX, 0))
    job.do("cuMemUnmap", address, SPAN)
    job.do("cuMemRelease", handle)
    controller.suspend(job.pid)
    imported = other.do("cuMemImportFromShareableHandle", fd, POSIX)
    there = other.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    other.do("cuMemMap", there, SPAN, 0, imported, 0)
    other.do("cuMemSetAccess", there, SPAN, access(), 1)
    other.check_stamps(there, 512, 5)


def test_a_job_brings_memory_back_at_the_address_that_it_kept(
    start: Callable[..., Job], controller: Controller
) -> None:
    """The fast path in small: memory away before the checkpoint, its address kept, other memory there afterwards."""
    job, mover = start().start_up().load(), start().start_up().load()
    handle = job.do("cuMemCreate", SPAN, prop(exportable=True), 0)
    address = job.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    job.do("cuMemMap", address, SPAN, 0, handle, 0)
    job.do("cuMemUnmap", address, SPAN)
    job.do("cuMemRelease", handle)
    controller.suspend(job.pid)
    made = mover.do("cuMemCreate", SPAN, prop(1, exportable=True), 0)
    fd = mover.do("cuMemExportToShareableHandle", made, POSIX, 0)
    controller.resume(job.pid, controller.swap)
    imported = job.do("cuMemImportFromShareableHandle", job.run("take_fd", mover.pid, fd), POSIX)
    assert job.says("cuMemMap", address, SPAN, 0, imported, 0) == "SUCCESS"
    assert job.says("cuMemSetAccess", address, SPAN, access(), 1) == "SUCCESS"
    job.check_stamps(job.stamped(address, 512, 6), 512, 6)


def test_large_memory_is_copied_whole(job: Job, controller: Controller) -> None:
    size = 256 * MIB
    memory = job.stamped(job.do("cuMemAlloc", size), size // 8, 3)
    out = job.do("cuMemAlloc", 8)
    sums = []
    for pairs in (None, controller.swap, controller.swap):
        if pairs:
            controller.cycle(job.pid, pairs)
        job.do("cuMemsetD8", out, 0, 8)
        assert job.launch("hash", pointer(memory), number(size // 8), pointer(out)) == "SUCCESS"
        sums.append(job.words(out))
    assert sums[0] == sums[1] == sums[2]

"""What cannot be checkpointed or restored, and what state that leaves."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.jobs import MIB, POSIX, Controller, Job, access, enum, lock_args, prop

Start = Callable[..., Job]
# Under the shim a legacy handle of large memory is one of its own, and what was opened by it is imported memory.
SHIM = "LIMOSA_CONFORMANCE_SHIM" in os.environ
IMPORTER, AGAIN = ("NOT_SUPPORTED", "NOT_SUPPORTED") if SHIM else ("INVALID_VALUE", "OPERATING_SYSTEM")


# --- managed memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def managed(job: Job) -> Job:
    job.memory = job.do("cuMemAllocManaged", MIB, enum("CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL"))
    job.poke(job.memory, b"kept" * 1024)
    return job


def test_managed_memory_lock_succeeds(managed: Job, controller: Controller) -> None:
    assert controller.lock(managed.pid) == "SUCCESS"


def test_managed_memory_checkpoint_is_not_supported_and_the_job_stays_locked(
    managed: Job, controller: Controller
) -> None:
    assert controller.lock(managed.pid) == "SUCCESS"
    assert controller.checkpoint(managed.pid) == "NOT_SUPPORTED"
    assert controller.state(managed.pid) == "LOCKED"


def test_managed_memory_unlock_brings_the_job_back_unharmed(managed: Job, controller: Controller) -> None:
    controller.lock(managed.pid)
    controller.checkpoint(managed.pid)
    assert controller.unlock(managed.pid) == "SUCCESS"
    assert controller.state(managed.pid) == "RUNNING"
    assert managed.peek(managed.memory, 4096) == b"kept" * 1024
    assert managed.says("cuCtxSynchronize") == "SUCCESS"


def test_managed_memory_further_checkpoints_fail_in_another_way(managed: Job, controller: Controller) -> None:
    controller.lock(managed.pid)
    assert [controller.checkpoint(managed.pid) for _ in range(3)] == ["NOT_SUPPORTED", "UNKNOWN", "UNKNOWN"]


def test_managed_memory_freed_after_a_checkpoint_that_failed_is_too_late(managed: Job, controller: Controller) -> None:
    """The driver remembers: no later checkpoint of that process succeeds, whatever it holds by then."""
    controller.lock(managed.pid)
    controller.checkpoint(managed.pid)
    controller.unlock(managed.pid)
    managed.do("cuMemFree", managed.memory)
    for _ in range(2):
        assert controller.lock(managed.pid) == "SUCCESS"
        assert controller.checkpoint(managed.pid) == "UNKNOWN"
        assert controller.state(managed.pid) == "LOCKED"
        assert controller.unlock(managed.pid) == "SUCCESS"
    assert managed.says("cuCtxSynchronize") == "SUCCESS"


def test_managed_memory_once_freed_is_no_obstacle(managed: Job, controller: Controller) -> None:
    managed.do("cuMemFree", managed.memory)
    controller.cycle(managed.pid)
    assert managed.says("cuCtxSynchronize") == "SUCCESS"


def test_managed_memory_on_the_host_side_is_refused_too(job: Job, controller: Controller) -> None:
    job.do("cuMemAllocManaged", MIB, enum("CUmemAttach_flags.CU_MEM_ATTACH_HOST"))
    controller.lock(job.pid)
    assert controller.checkpoint(job.pid) == "NOT_SUPPORTED"


# --- CUDA IPC in use --------------------------------------------------------------------------------------------------


class Shared:
    """A job that exports memory by legacy IPC and one that has opened it."""

    def __init__(self, start: Start):
        self.exporter, self.importer = start().start_up(), start().start_up()
        self.memory = self.exporter.do("cuMemAlloc", 4 * MIB)
        self.exporter.do("cuMemsetD8", self.memory, 0x33, 4 * MIB)
        self.exporter.do("cuCtxSynchronize")
        handle = self.exporter.do("cuIpcGetMemHandle", self.memory)
        self.opened = self.importer.do("cuIpcOpenMemHandle", {"s": "CUipcMemHandle", "raw": handle}, 1)


@pytest.fixture
def shared(start: Start) -> Shared:
    return Shared(start)


def test_ipc_exporter_goes_through_a_cycle(shared: Shared, controller: Controller) -> None:
    controller.cycle(shared.exporter.pid)
    assert shared.exporter.read(shared.memory, 64) == b"\x33" * 64


def test_ipc_importer_is_checkpointed(shared: Shared, controller: Controller) -> None:
    assert controller.lock(shared.importer.pid) == "SUCCESS"
    assert controller.checkpoint(shared.importer.pid) == "SUCCESS"


@pytest.mark.hazard
@pytest.mark.parametrize("given", ["none", "identity"])
def test_ipc_importer_cannot_be_restored(given: str, shared: Shared, controller: Controller) -> None:
    controller.suspend(shared.importer.pid)
    pairs = controller.identity if given == "identity" else None
    assert controller.restore(shared.importer.pid, pairs) == IMPORTER
    assert controller.state(shared.importer.pid) == "CHECKPOINTED"


@pytest.mark.hazard
def test_ipc_importer_is_lost_for_good(shared: Shared, controller: Controller) -> None:
    controller.suspend(shared.importer.pid)
    assert controller.restore(shared.importer.pid) == IMPORTER
    assert controller.restore(shared.importer.pid, controller.identity) == AGAIN


def test_ipc_closed_before_is_no_obstacle(shared: Shared, controller: Controller) -> None:
    shared.importer.do("cuIpcCloseMemHandle", shared.opened)
    controller.cycle(shared.importer.pid)
    assert shared.importer.says("cuCtxSynchronize") == "SUCCESS"


@pytest.mark.hazard
def test_ipc_both_sides_at_once(shared: Shared, controller: Controller) -> None:
    both = (shared.importer.pid, shared.exporter.pid)
    for pid in both:
        assert controller.lock(pid) == "SUCCESS"
    assert [controller.checkpoint(pid) for pid in both] == ["SUCCESS", "SUCCESS"]
    assert controller.restore(shared.exporter.pid) == "SUCCESS"
    assert controller.restore(shared.importer.pid) == IMPORTER


@pytest.mark.parametrize("side", ["exporter", "importer"])
def test_ipc_of_an_event(side: str, start: Start, controller: Controller) -> None:
    exporter, importer = start().start_up(), start().start_up()
    handle = exporter.do("cuIpcGetEventHandle", exporter.do("cuEventCreate", 4 | 2))  # interprocess, without timing
    importer.do("cuIpcOpenEventHandle", {"s": "CUipcEventHandle", "raw": handle})
    pid = (exporter if side == "exporter" else importer).pid
    controller.suspend(pid)
    assert controller.restore(pid) == "SUCCESS"
    assert controller.unlock(pid) == "SUCCESS"


def test_a_handle_that_nobody_has_opened_is_no_obstacle(job: Job, controller: Controller) -> None:
    memory = job.do("cuMemAlloc", MIB)
    job.do("cuIpcGetMemHandle", memory)
    controller.cycle(job.pid, controller.swap)
    assert job.says("cuMemFree", memory) == "SUCCESS"


# --- exported VMM memory ----------------------------------------------------------------------------------------------


def exported(job: Job) -> tuple[int, int]:
    """A handle of VMM memory, and its descriptor in the job."""
    handle = job.do("cuMemCreate", 2 * MIB, prop(exportable=True), 0)
    return handle, job.do("cuMemExportToShareableHandle", handle, POSIX, 0)


@pytest.mark.parametrize("where", ["same", "swapped"])
def test_vmm_memory_exported_and_held_by_the_job_itself(where: str, job: Job, controller: Controller) -> None:
    exported(job)
    controller.cycle(job.pid, controller.swap if where == "swapped" else None)
    assert job.says("cuCtxSynchronize") == "SUCCESS"


@pytest.mark.parametrize("side", ["exporter", "importer"])
def test_vmm_memory_that_another_process_has_imported(side: str, start: Start, controller: Controller) -> None:
    exporter, importer = start().start_up(), start().start_up()
    _, fd = exported(exporter)
    mine = importer.run("take_fd", exporter.pid, fd)
    importer.do("cuMemImportFromShareableHandle", mine, POSIX)
    pid = (exporter if side == "exporter" else importer).pid
    assert controller.lock(pid) == "SUCCESS"
    assert controller.checkpoint(pid) == "SUCCESS"
    assert controller.restore(pid) == ("SUCCESS" if side == "exporter" else "NOT_SUPPORTED")


@pytest.mark.hazard
def test_vmm_memory_of_its_own_that_was_let_go_of_and_imported_again(job: Job, controller: Controller) -> None:
    handle, fd = exported(job)
    job.do("cuMemRelease", handle)
    job.do("cuMemImportFromShareableHandle", fd, POSIX)
    controller.suspend(job.pid)
    assert controller.restore(job.pid) == "NOT_SUPPORTED"


def test_vmm_memory_imported_and_released_again(start: Start, controller: Controller) -> None:
    exporter, importer = start().start_up(), start().start_up()
    _, fd = exported(exporter)
    mine = importer.run("take_fd", exporter.pid, fd)
    handle = importer.do("cuMemImportFromShareableHandle", mine, POSIX)
    importer.do("cuMemRelease", handle)
    importer.run("close", mine)
    controller.cycle(importer.pid)
    assert importer.says("cuCtxSynchronize") == "SUCCESS"


# --- no room ----------------------------------------------------------------------------------------------------------


def test_no_room_for_the_copy_in_host_memory(job: Job, controller: Controller) -> None:
    """The address space is what can be made too small from outside; the driver's mmap fails all the same."""
    memory = job.do("cuMemAlloc", 256 * MIB)
    job.do("cuMemsetD8", memory, 7, 256 * MIB)
    job.do("cuCtxSynchronize")
    assert controller.lock(job.pid) == "SUCCESS"
    pages = int(Path(f"/proc/{job.pid}/statm").read_text().split()[0])
    resource.prlimit(job.pid, resource.RLIMIT_AS, (pages * 4096 + 64 * MIB, resource.RLIM_INFINITY))
    assert controller.checkpoint(job.pid) == "OUT_OF_MEMORY"
    resource.prlimit(job.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert controller.state(job.pid) == "LOCKED"
    assert controller.unlock(job.pid) == "SUCCESS"
    assert job.read(memory, 64) == b"\7" * 64
    assert controller.lock(job.pid) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "UNKNOWN", "it is not tried again"
    assert controller.unlock(job.pid) == "SUCCESS"
    assert job.read(memory, 64) == b"\7" * 64


class Crowded:
    """A checkpointed job whose GPU has been filled by another meanwhile."""

    def __init__(self, start: Start, controller: Controller):
        self.job, self.hog = start().start_up(), start().start_up()
        self.job.do("cuMemAlloc", 512 * MIB)
        controller.suspend(self.job.pid)
        step = 1 << 40
        while step >= 16 * MIB:
            free, _ = self.hog.do("cuMemGetInfo")
            step = min(step, free)
            if free < 256 * MIB or self.hog.says("cuMemAlloc", step) != "SUCCESS":
                step //= 2
            if free < 256 * MIB:
                break


@pytest.mark.alone
@pytest.mark.hazard
def test_restore_without_room_on_the_gpu_fails_and_poisons_the_job(start: Start, controller: Controller) -> None:
    crowded = Crowded(start, controller)
    pid = crowded.job.pid
    assert controller.restore(pid) == "OUT_OF_MEMORY"
    assert controller.state(pid) == "CHECKPOINTED"
    crowded.hog.kill()
    # There is room now, and it makes no difference any more.
    assert controller.restore(pid) == "OPERATING_SYSTEM"
    assert controller.unlock(pid) == "ILLEGAL_STATE"
    assert controller.state(pid) == "CHECKPOINTED"


@pytest.mark.alone
@pytest.mark.hazard
def test_restore_elsewhere_when_there_is_no_room_here(start: Start, controller: Controller) -> None:
    crowded = Crowded(start, controller)
    controller.resume(crowded.job.pid, controller.swap)
    assert controller.gpus_of(crowded.job.pid) == {1}


# --- reported and not so: what must go well ---------------------------------------------------------------------------


@pytest.mark.hazard
@pytest.mark.parametrize("call", ["cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"])
def test_the_first_call_after_a_restore_is_a_synchronise(call: str, job: Job, controller: Controller) -> None:
    event = job.do("cuEventCreate", 0)
    job.do("cuEventRecord", event, 0)
    args = {"cuCtxSynchronize": [], "cuStreamSynchronize": [0], "cuEventSynchronize": [event]}[call]
    controller.cycle(job.pid)
    assert job.says(call, *args) == "SUCCESS"


@pytest.mark.hazard
def test_a_job_that_waits_in_a_synchronise_when_it_is_locked(job: Job, controller: Controller) -> None:
    """It waits at the lock with its kernel already over, is checkpointed there, and comes back from it afterwards."""
    stream = job.do("cuStreamCreate", 1)
    flag = job.spin(stream)
    job.enter("waits")
    waiting = job.start("cuStreamSynchronize", stream, thread="waits")
    locking = controller.begin("Lock", job.pid, lock_args(0))
    assert locking.result(0.5) == "BLOCKED"
    job.raise_flag(flag)
    assert locking.result(60) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "SUCCESS"
    controller.resume(job.pid, controller.swap)
    assert waiting.result(60) == "SUCCESS"


@pytest.mark.parametrize("given", ["none", "identity"])
def test_a_job_on_both_gpus_with_a_controller_that_has_contexts_on_both(
    given: str, job: Job, start: Start, controller: Controller
) -> None:
    caller = start().start_up(0)
    caller.do("cuDevicePrimaryCtxRetain", 1)
    job.do("cuDevicePrimaryCtxRetain", 1)
    caller = Controller.of(caller)
    caller.uuids = controller.uuids
    caller.cycle(job.pid, caller.identity if given == "identity" else None)
    assert controller.gpus_of(job.pid) == {0, 1}


@pytest.mark.parametrize("size", [510, 512], ids=["510-MiB", "512-MiB"])
@pytest.mark.hazard
def test_two_gpus_with_peer_access_and_one_large_allocation(size: int, job: Job, controller: Controller) -> None:
    """A PyTorch process with this is lost from 512 MiB on (docs/caveats.md); these calls alone do not do it."""
    second = job.do("cuDevicePrimaryCtxRetain", 1)
    job.do("cuCtxEnablePeerAccess", second, 0)
    job.do("cuMemAlloc", size * MIB)
    job.do("cuCtxSetCurrent", second)
    job.do("cuMemAlloc", MIB)
    controller.suspend(job.pid)
    assert controller.restore(job.pid, controller.identity) == "SUCCESS"


@pytest.mark.parametrize("kind", ["without-peer-access", "vmm"])
def test_two_gpus_and_one_large_allocation_of_another_kind(kind: str, job: Job, controller: Controller) -> None:
    second = job.do("cuDevicePrimaryCtxRetain", 1)
    if kind == "vmm":
        job.do("cuCtxEnablePeerAccess", second, 0)
        handle = job.do("cuMemCreate", 512 * MIB, prop(), 0)
        address = job.do("cuMemAddressReserve", 512 * MIB, 0, 0, 0)
        job.do("cuMemMap", address, 512 * MIB, 0, handle, 0)
        job.do("cuMemSetAccess", address, 512 * MIB, access(), 1)
    else:
        job.do("cuMemAlloc", 512 * MIB)
    controller.cycle(job.pid, controller.identity)
    assert job.says("cuCtxSynchronize") == "SUCCESS"

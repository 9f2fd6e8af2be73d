"""The checkpoint calls' arguments: null pointers, structures with reserved bytes set, and who is calling."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from conformance.jobs import Controller, Job, lock_args, packed_pairs, restore_args

JobIn = Callable[[str], Job]
# A state in which each call that takes arguments is legal.
LEGAL_IN = {"Lock": "running", "Checkpoint": "locked", "Restore": "checkpointed", "Unlock": "locked"}
BYTES = 64  # the size of each of the argument structures


@pytest.mark.parametrize("call", ["GetState", "GetRestoreThreadId"])
@pytest.mark.parametrize("state", ["running", "checkpointed"])
def test_nowhere_to_put_the_answer(call: str, state: str, controller: Controller, job_in: JobIn) -> None:
    assert controller.raw(f"cuCheckpointProcess{call}", job_in(state).pid, None) == "INVALID_VALUE"


@pytest.mark.parametrize("call", LEGAL_IN)
def test_no_arguments_at_all_are_taken(call: str, controller: Controller, job_in: JobIn) -> None:
    job = job_in(LEGAL_IN[call])
    assert controller.raw(f"cuCheckpointProcess{call}", job.pid, None) == "SUCCESS"


@pytest.mark.parametrize("call", LEGAL_IN)
def test_zeroed_arguments_are_taken(call: str, controller: Controller, job_in: JobIn) -> None:
    job = job_in(LEGAL_IN[call])
    controller.poke(controller.scratch, bytes(BYTES))
    assert controller.raw(f"cuCheckpointProcess{call}", job.pid, controller.scratch) == "SUCCESS"


# A byte of each part of the structures that cuda.h calls reserved.
RESERVED = [
    *(("Lock", offset) for offset in (4, 8, 63)),
    *(("Checkpoint", offset) for offset in (0, 56)),
    *(("Restore", offset) for offset in (12, 40, 56)),
    *(("Unlock", offset) for offset in (0, 56)),
]


@pytest.mark.parametrize(("call", "offset"), RESERVED)
def test_a_reserved_byte_that_is_not_zero(call: str, offset: int, controller: Controller, job_in: JobIn) -> None:
    job = job_in(LEGAL_IN[call])
    before = controller.state(job.pid)
    data = bytearray(BYTES)
    data[offset] = 1
    controller.poke(controller.scratch, bytes(data))
    assert controller.raw(f"cuCheckpointProcess{call}", job.pid, controller.scratch) == "INVALID_VALUE"
    assert controller.state(job.pid) == before


def test_a_count_of_zero_with_a_pointer_is_no_map(controller: Controller, job_in: JobIn) -> None:
    job = job_in("checkpointed")
    controller.poke(controller.scratch, packed_pairs(controller.identity))
    assert controller.asked("Restore", job.pid, restore_args(controller.scratch, 0)).result == "SUCCESS"
    assert controller.state(job.pid) == "LOCKED"


@pytest.mark.parametrize("count", [1, 2])
def test_a_count_without_a_pointer(
    count: int, controller: Controller, another_controller: Callable[[], Controller], job_in: JobIn
) -> None:
    job = job_in("checkpointed")
    caller = another_controller()
    assert caller.asked("Restore", job.pid, restore_args(None, count)).result == "DIED -11"  # of the caller
    assert controller.state(job.pid) == "CHECKPOINTED"


def test_more_pairs_than_there_can_be_gpus(controller: Controller, job_in: JobIn) -> None:
    job = job_in("checkpointed")
    pairs = controller.identity + [(struct.pack("<QQ", n, 7).hex(),) * 2 for n in range(62)]
    assert controller.restore(job.pid, pairs) == "INVALID_VALUE"
    assert controller.state(job.pid) == "CHECKPOINTED"


@pytest.mark.parametrize("call", ["Checkpoint", "Restore", "Unlock"])
def test_wrong_arguments_in_a_wrong_state(call: str, controller: Controller, job_in: JobIn) -> None:
    job = job_in("running")
    controller.poke(controller.scratch, b"\1" * BYTES if call != "Restore" else bytes(12) + b"\1" * 52)
    assert controller.raw(f"cuCheckpointProcess{call}", job.pid, controller.scratch) == "INVALID_VALUE"
    assert controller.state(job.pid) == "RUNNING"


# --- who is calling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["GetState", "GetRestoreThreadId", *LEGAL_IN])
def test_a_controller_that_has_not_initialised(
    call: str, start: Callable[..., Job], controller: Controller, job_in: JobIn
) -> None:
    job = job_in(LEGAL_IN.get(call, "running"))
    caller = start()
    args = {"Lock": (lock_args(1000),), "GetState": (), "GetRestoreThreadId": ()}.get(call, (None,))
    assert caller.says(f"cuCheckpointProcess{call}", job.pid, *args) == "SUCCESS"


@pytest.mark.parametrize("call", ["GetState", "Lock", "Checkpoint", "Restore", "Unlock"])
def test_a_controller_that_has_contexts_itself(call: str, work: Job, controller: Controller, job_in: JobIn) -> None:
    job = job_in(LEGAL_IN.get(call, "running"))
    args = {"Lock": (lock_args(1000),), "GetState": ()}.get(call, (None,))
    assert work.says(f"cuCheckpointProcess{call}", job.pid, *args) == "SUCCESS"


def test_a_controller_that_sees_no_gpu(start: Callable[..., Job], controller: Controller, job_in: JobIn) -> None:
    job = job_in("running")
    caller = start(CUDA_VISIBLE_DEVICES="")
    assert caller.says("cuInit", 0) == "NO_DEVICE"
    assert caller.says("cuCheckpointProcessGetState", job.pid) == "SUCCESS"


def test_a_controller_that_sees_one_gpu_restores_with_the_full_map(
    start: Callable[..., Job], controller: Controller, job_in: JobIn
) -> None:
    job = job_in("checkpointed")
    caller = Controller.of(start(CUDA_VISIBLE_DEVICES="1")).init()
    assert len(caller.uuids) == 1
    assert caller.restore(job.pid, controller.swap) == "SUCCESS"


def test_a_locked_controller_cannot_be_blocked_by_its_own_lock(
    start: Callable[..., Job], controller: Controller, job_in: JobIn
) -> None:
    job = job_in("running")
    caller = start().start_up()
    assert controller.lock(caller.pid) == "SUCCESS"
    assert caller.says("cuCheckpointProcessGetState", job.pid, limit=60) == "SUCCESS"


def test_a_checkpointed_process_may_control_another(
    start: Callable[..., Job], controller: Controller, job_in: JobIn
) -> None:
    job = job_in("running")
    caller = start().start_up()
    controller.suspend(caller.pid)
    assert caller.says("cuCheckpointProcessGetState", job.pid, limit=60) == "SUCCESS"

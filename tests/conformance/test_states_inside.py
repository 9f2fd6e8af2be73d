"""Every checkpoint call about a CUDA process, in every state that it can be in: what it answers, what state follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.jobs import Controller, Job, lock_args
from conformance.remote import Pending

JobIn = Callable[[str], Job]


def begin(controller: Controller, call: str, pid: int) -> Pending:
    simple: dict[str, tuple[Any, ...]] = {
        "state": ("GetState",),
        "thread-id": ("GetRestoreThreadId",),
        "lock-no-limit": ("Lock", lock_args(0)),
        "lock-1-ms": ("Lock", lock_args(1)),
        "lock-10-s": ("Lock", lock_args(10000)),
        "checkpoint": ("Checkpoint", None),
        "restore-no-arguments": ("Restore", None),
        "unlock": ("Unlock", None),
    }
    if call in simple:
        name, *args = simple[call]
        return controller.begin(name, pid, *args)
    return controller.begin_restore(pid, {"identity": controller.identity, "swap": controller.swap}[call[8:]])


CALLS = (
    *("state", "thread-id", "lock-no-limit", "lock-1-ms", "lock-10-s", "checkpoint"),
    *("restore-no-arguments", "restore-identity", "restore-swap", "unlock"),
)
SAME = ("initialised", "running", "locked", "checkpointed", "restored", "refused")
# Where a call is legal, and the state that follows it; it is ILLEGAL_STATE everywhere else and changes nothing.
LEGAL = {
    "lock": ({"initialised", "running"}, "LOCKED"),
    "checkpoint": ({"locked", "restored"}, "CHECKPOINTED"),
    "restore": ({"checkpointed", "refused"}, "LOCKED"),
    "unlock": ({"locked", "restored"}, "RUNNING"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", SAME)
def test_call_in_state(state: str, call: str, controller: Controller, job_in: JobIn) -> None:
    job = job_in(state)
    before = controller.state(job.pid)
    answer = begin(controller, call, job.pid).answer()
    if call in ("state", "thread-id"):
        assert answer.result == "SUCCESS"
        assert controller.state(job.pid) == before
        return
    legal, follows = LEGAL[call.partition("-")[0]]
    assert answer.result == ("SUCCESS" if state in legal else "ILLEGAL_STATE")
    assert controller.state(job.pid) == (follows if state in legal else before)


@pytest.mark.parametrize("state", SAME)
def test_the_restore_thread_is_one_of_the_process_in_state(state: str, controller: Controller, job_in: JobIn) -> None:
    job = job_in(state)
    thread = controller.thread_id(job.pid).value
    assert thread in job.threads()
    assert thread != job.pid


def test_the_restore_thread_stays_the_same_through_a_cycle(controller: Controller, job_in: JobIn) -> None:
    job = job_in("running")
    before = controller.thread_id(job.pid).value
    controller.cycle(job.pid)
    assert controller.thread_id(job.pid).value == before


def test_a_process_without_a_context_goes_through_a_cycle(controller: Controller, job_in: JobIn) -> None:
    job = job_in("initialised")
    controller.cycle(job.pid)
    assert controller.state(job.pid) == "RUNNING"
    assert job.says("cuDeviceGetCount") == "SUCCESS"


def test_a_process_without_a_context_makes_one_after_a_cycle(controller: Controller, start: Callable[..., Job]) -> None:
    job = start().init()
    controller.cycle(job.pid)
    context = job.do("cuDevicePrimaryCtxRetain", 0)
    job.do("cuCtxSetCurrent", context)
    assert job.says("cuMemAlloc", 4096) == "SUCCESS"


@pytest.mark.parametrize("times", [2, 5])
def test_cycles_one_after_the_other(times: int, controller: Controller, job_in: JobIn) -> None:
    job = job_in("running")
    for _ in range(times):
        controller.cycle(job.pid)
    assert controller.state(job.pid) == "RUNNING"


def test_checkpoint_again_without_an_unlock_between(controller: Controller, job_in: JobIn) -> None:
    job = job_in("restored")
    assert controller.checkpoint(job.pid) == "SUCCESS"
    assert controller.restore(job.pid) == "SUCCESS"
    assert controller.unlock(job.pid) == "SUCCESS"


def test_lock_and_unlock_many_times(controller: Controller, job_in: JobIn) -> None:
    job = job_in("running")
    for _ in range(20):
        assert controller.lock(job.pid) == "SUCCESS"
        assert controller.unlock(job.pid) == "SUCCESS"


# --- a stopped process answers nothing --------------------------------------------------------------------------------


def test_the_restore_thread_of_a_stopped_process_is_told(controller: Controller, start: Callable[..., Job]) -> None:
    job = start().init()
    job.stop()
    assert controller.thread_id(job.pid, limit=60).value in job.threads()


@pytest.mark.parametrize("call", [call for call in CALLS if call != "thread-id"])
def test_call_about_a_stopped_process_blocks(call: str, controller: Controller, start: Callable[..., Job]) -> None:
    job = start().init()
    job.stop()
    pending = begin(controller, call, job.pid)
    assert pending.result(1.0) == "BLOCKED"
    job.kill()
    pending.answer(3)


@pytest.mark.parametrize(
    ("state", "call", "follows"),
    [
        ("running", "lock-1-ms", "LOCKED"),
        ("locked", "checkpoint", "CHECKPOINTED"),
        ("locked", "unlock", "RUNNING"),
        ("checkpointed", "restore-identity", "LOCKED"),
        ("checkpointed", "state", "CHECKPOINTED"),
    ],
)
def test_a_call_about_a_stopped_process_ends_when_it_goes_on(
    state: str, call: str, follows: str, controller: Controller, job_in: JobIn
) -> None:
    job = job_in(state)
    job.stop()
    try:
        pending = begin(controller, call, job.pid)
        assert pending.result(1.0) == "BLOCKED"
    finally:
        job.go_on()
    assert pending.result() == "SUCCESS"
    assert controller.state(job.pid) == follows

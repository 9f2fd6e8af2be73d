"""Blocking and time-outs: a lock behind work, several controllers at once, a controller that dies, calls in flight."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from conformance.jobs import MIB, Controller, Job, Pending, lock_args

JobIn = Callable[[str], Job]
Another = Callable[[], Controller]
BIG = 320 * MIB  # enough for a checkpoint and a restore to take a while


@pytest.fixture
def job(job_in: Callable[[str], Job]) -> Job:
    """A running job with a context and kernels; whatever it is busy with is ended after the test."""
    return job_in("running")


# --- a lock waits for the job's work ----------------------------------------------------------------------------------


class Busy:
    """What a job may be busy with, and how that is ended."""

    def __init__(self, job: Job, kind: str):
        self.job, self.kind = job, kind
        self.stream = job.do("cuStreamCreate", 1)
        if kind == "callback":
            address = job.run("callback", "busy", "host", True, None)
            job.do("cuLaunchHostFunc", self.stream, address, 0)
            end = time.monotonic() + 60
            while not job.run("callback_state", "busy", thread="memory")["entered"] and time.monotonic() < end:
                time.sleep(0.01)
        else:
            self.flag = job.spin(self.stream)
        job.enter("waits")
        self.waits = None
        if kind == "synchronise":
            self.waits = job.start("cuStreamSynchronize", self.stream, thread="waits")
            time.sleep(0.1)

    def end(self) -> None:
        if self.kind == "callback":
            self.job.run("release", "busy", thread="memory")
        else:
            self.job.raise_flag(self.flag)
        assert self.waits is None or self.waits.result() == "SUCCESS"


KINDS = ["kernel", "synchronise", "callback"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_with_a_limit_gives_up(kind: str, job: Job, controller: Controller) -> None:
    busy = Busy(job, kind)
    assert controller.lock(job.pid, 300, limit=60) == "NOT_READY"
    assert controller.state(job.pid) == "RUNNING"
    busy.end()


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_lock_that_gave_up_the_job_goes_on(kind: str, job: Job, controller: Controller) -> None:
    busy = Busy(job, kind)
    assert controller.lock(job.pid, 100, limit=60) == "NOT_READY"
    assert job.says("cuMemAlloc", 4096, limit=60) == "SUCCESS"
    busy.end()
    assert job.says("cuCtxSynchronize") == "SUCCESS"
    assert controller.lock(job.pid) == "SUCCESS"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout_ms", [0, 15000], ids=["no-limit", "long-limit"])
def test_a_lock_waits_and_succeeds_when_the_work_ends(
    timeout_ms: int, kind: str, job: Job, controller: Controller
) -> None:
    busy = Busy(job, kind)
    locking = controller.begin("Lock", job.pid, lock_args(timeout_ms))
    assert locking.result(0.7) == "BLOCKED"
    if busy.waits is not None:
        job.raise_flag(busy.flag)  # a synchronise may itself come back only after the unlock
    else:
        busy.end()
    assert locking.result(60) == "SUCCESS"
    assert controller.state(job.pid) == "LOCKED"


@pytest.mark.parametrize("timeout_ms", [100, 500, 1500])
def test_how_exact_the_limit_is(timeout_ms: int, job: Job, controller: Controller) -> None:
    took = []
    while len(took) < 5 and min(took, default=60) > timeout_ms / 1000 + 0.4:  # who is held up only takes longer
        busy = Busy(job, "kernel")
        answer = controller.asked("Lock", job.pid, lock_args(timeout_ms), limit=60)
        busy.end()
        assert answer.result == "NOT_READY"
        took.append(answer.seconds)
    assert timeout_ms / 1000 - 0.02 <= min(took) <= timeout_ms / 1000 + 0.4, took


def test_a_lock_of_an_idle_job_takes_milliseconds(controller: Controller, job_in: JobIn) -> None:
    job = job_in("running")
    took = []
    while len(took) < 5 and min(took, default=60) >= 0.2:  # who is held up only takes longer
        took.append(controller.asked("Lock", job.pid, lock_args(0)).seconds)
        assert controller.unlock(job.pid) == "SUCCESS"
    assert min(took) < 0.2, took


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuStreamQuery", "cuMemcpyHtoD", "cuStreamCreate"])
def test_other_threads_while_a_lock_waits(call: str, job: Job, controller: Controller) -> None:
    """New calls are held up from the moment that a lock is asked for, as they are once it is there."""
    busy = Busy(job, "kernel")
    memory = job.do("cuMemAlloc", 4096)
    other = job.do("cuStreamCreate", 1)
    locking = controller.begin("Lock", job.pid, lock_args(0))
    time.sleep(0.3)
    args = {"cuMemAlloc": [4096], "cuStreamQuery": [other], "cuMemcpyHtoD": [memory, job.scratch, 64]}.get(call, [1])
    calling = job.start(call, *args)
    answers = call == "cuStreamQuery"
    assert calling.result(60 if answers else 0.5) == ("SUCCESS" if answers else "BLOCKED")
    busy.end()
    assert locking.result(60) == "SUCCESS"
    assert controller.unlock(job.pid) == "SUCCESS"
    assert calling.result(60) == "SUCCESS"


def test_a_state_query_while_a_lock_waits(job: Job, controller: Controller) -> None:
    busy = Busy(job, "kernel")
    locking = controller.begin("Lock", job.pid, lock_args(0))
    time.sleep(0.3)
    asking = controller.begin("GetState", job.pid)
    assert asking.result(0.7) == "BLOCKED"
    busy.end()
    assert locking.result(60) == "SUCCESS"
    assert asking.result(60) == "SUCCESS"


def test_the_restore_thread_is_told_while_a_lock_waits(job: Job, controller: Controller) -> None:
    busy = Busy(job, "kernel")
    locking = controller.begin("Lock", job.pid, lock_args(0))
    time.sleep(0.3)
    assert controller.thread_id(job.pid, limit=60).result == "SUCCESS"
    busy.end()
    assert locking.result(60) == "SUCCESS"


@pytest.mark.parametrize("call", ["Checkpoint", "Unlock"])
def test_another_step_while_a_lock_waits(call: str, job: Job, controller: Controller) -> None:
    busy = Busy(job, "kernel")
    locking = controller.begin("Lock", job.pid, lock_args(0))
    time.sleep(0.3)
    stepping = controller.begin(call, job.pid, None)
    assert stepping.result(0.7) == "BLOCKED"
    busy.end()
    assert locking.result(60) == "SUCCESS"
    assert stepping.result(60) == "SUCCESS"


def test_a_second_lock_while_a_lock_waits(job: Job, controller: Controller, another_controller: Another) -> None:
    other = another_controller()
    busy = Busy(job, "kernel")
    locking = controller.begin("Lock", job.pid, lock_args(0))
    time.sleep(0.3)
    second = other.begin("Lock", job.pid, lock_args(0))
    assert second.result(0.7) == "BLOCKED"
    busy.end()
    assert sorted((locking.result(60), second.result(60))) == ["ILLEGAL_STATE", "SUCCESS"]


def test_the_kernel_that_runs_at_the_lock_ends_before_it(job: Job, controller: Controller) -> None:
    """What the lock let end is in memory after a cycle."""
    stream = job.do("cuStreamCreate", 1)
    memory = job.do("cuMemAlloc", 4096)
    flag = job.spin(stream)
    job.fill(memory, 512, 42, stream=stream)
    locking = controller.begin("Lock", job.pid, lock_args(0))
    time.sleep(0.2)
    job.raise_flag(flag)
    assert locking.result(60) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "SUCCESS"
    controller.resume(job.pid)
    assert job.words(memory, 2) == (42, 42)


# --- calls in flight --------------------------------------------------------------------------------------------------


TRIES = 5
"""On a busy machine a step may be over before anybody has looked."""


def big(start: Callable[..., Job]) -> Job:
    job = start().start_up()
    job.memory = job.do("cuMemAlloc", BIG)
    job.do("cuMemsetD8", job.memory, 0x5A, BIG)
    job.do("cuCtxSynchronize")
    return job


def begun(who: Controller, job: Job, step: str) -> tuple[Pending, bool]:
    """A step that has just begun, and whether it was still in flight a moment later."""
    assert who.lock(job.pid) == "SUCCESS"
    if step == "restore":
        assert who.checkpoint(job.pid) == "SUCCESS"
    pending = who.begin(step.title(), job.pid, None)
    time.sleep(0.02)
    return pending, not pending.done()


def runs_again(who: Controller, job: Job, step: str) -> None:
    """Has a job run again that has such a step behind it."""
    if step == "checkpoint":
        assert who.restore(job.pid) == "SUCCESS"
    assert who.unlock(job.pid) == "SUCCESS"


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
@pytest.mark.parametrize("asks", ["same-controller", "another-controller"])
def test_a_state_query_waits_for_a_step_in_flight(
    step: str, asks: str, start: Callable[..., Job], controller: Controller, another_controller: Another
) -> None:
    job = big(start)
    asking = controller if asks == "same-controller" else another_controller()
    assert asking.state(job.pid) == "RUNNING"
    for _ in range(TRIES):
        pending, in_flight = begun(controller, job, step)
        state = asking.state(job.pid)
        assert state == {"checkpoint": "CHECKPOINTED", "restore": "LOCKED"}[step]
        assert pending.result(60) == "SUCCESS"
        if in_flight:
            return
        runs_again(controller, job, step)
    raise AssertionError(f"the {step} was over before it could be asked about")


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
def test_a_controller_that_dies_in_the_middle_does_not_stop_the_driver(
    step: str, start: Callable[..., Job], controller: Controller, another_controller: Another
) -> None:
    job = big(start)
    for _ in range(TRIES):
        dying = another_controller()
        _, in_flight = begun(dying, job, step)
        dying.kill()
        follows = {"checkpoint": "CHECKPOINTED", "restore": "LOCKED"}[step]
        assert controller.wait_state(job.pid, follows, 60) == follows
        runs_again(controller, job, step)
        assert job.read(job.memory + BIG - 64, 64) == b"\x5a" * 64
        if in_flight:
            return
    raise AssertionError(f"the {step} was over before its controller could be killed")


def test_a_controller_that_dies_while_its_lock_waits(
    job: Job, controller: Controller, another_controller: Another
) -> None:
    """The lock that nobody waits for any more takes no effect."""
    dying = another_controller()
    busy = Busy(job, "kernel")
    dying.begin("Lock", job.pid, lock_args(0))
    time.sleep(0.3)
    dying.kill()
    busy.end()
    assert job.says("cuCtxSynchronize") == "SUCCESS"
    time.sleep(0.3)
    assert controller.state(job.pid) == "RUNNING"


@pytest.mark.parametrize("state", ["locked", "checkpointed", "restored"])
def test_any_controller_goes_on_where_another_left(state: str, job_in: JobIn, another_controller: Another) -> None:
    job = job_in(state)
    other = another_controller()
    if state == "checkpointed":
        assert other.restore(job.pid) == "SUCCESS"
    assert other.unlock(job.pid) == "SUCCESS"
    assert other.state(job.pid) == "RUNNING"


@pytest.mark.parametrize("step", ["Lock", "Checkpoint", "Restore", "Unlock"])
def test_two_controllers_make_the_same_step_at_once(
    step: str, controller: Controller, job_in: JobIn, another_controller: Another
) -> None:
    job = job_in({"Lock": "running", "Restore": "checkpointed"}.get(step, "locked"))
    other = another_controller()
    args = lock_args(0) if step == "Lock" else None
    both = [one.begin(step, job.pid, args) for one in (controller, other)]
    assert sorted(one.result(60) for one in both) == ["ILLEGAL_STATE", "SUCCESS"]


def test_two_jobs_are_checkpointed_and_restored_at_once(controller: Controller, job_in: JobIn) -> None:
    jobs = [job_in("locked"), job_in("locked")]
    for step in ("Checkpoint", "Restore"):
        both = [controller.begin(step, job.pid, None) for job in jobs]
        assert [one.result() for one in both] == ["SUCCESS", "SUCCESS"]
    for job in jobs:
        assert controller.unlock(job.pid) == "SUCCESS"
        job.check_stamps()


@pytest.mark.parametrize("state", ["running", "locked", "checkpointed"])
def test_a_job_that_is_killed_in_state_is_gone(state: str, controller: Controller, start: Callable[..., Job]) -> None:
    job = start().start_up()
    if state != "running":
        assert controller.lock(job.pid) == "SUCCESS"
    if state == "checkpointed":
        assert controller.checkpoint(job.pid) == "SUCCESS"
    job.kill()
    assert controller.bytes_of(job.pid) == {}
    assert not job.alive()


def test_a_job_that_is_killed_while_a_lock_waits_ends_the_lock(
    start: Callable[..., Job], controller: Controller
) -> None:
    job = start().start_up().load()
    Busy(job, "kernel")
    locking = controller.begin("Lock", job.pid, lock_args(0))
    time.sleep(0.3)
    job.kill()
    assert locking.result(60) == "OPERATING_SYSTEM"


def test_a_job_that_is_killed_while_it_is_checkpointed_by_a_call_ends_the_call(
    start: Callable[..., Job], controller: Controller
) -> None:
    for _ in range(TRIES):
        job = big(start)
        assert controller.lock(job.pid) == "SUCCESS"
        pending = controller.begin("Checkpoint", job.pid, None)
        time.sleep(0.02)
        in_flight = not pending.done()
        job.kill()
        if in_flight:
            assert pending.result(60) == "OPERATING_SYSTEM"
            return
        pending.result(60)
    raise AssertionError("the checkpoint was over before the job could be killed")

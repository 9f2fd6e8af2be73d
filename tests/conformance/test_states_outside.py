"""Every checkpoint call about a process that is no running CUDA process."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from conformance.conftest import recording
from conformance.jobs import STATES, WORDS, Controller, Job, lock_args
from conformance.node import Node

CALLS = {
    "state": ("GetState",),
    "thread-id": ("GetRestoreThreadId",),
    "lock": ("Lock", lock_args(200)),
    "checkpoint": ("Checkpoint", None),
    "restore": ("Restore", None),
    "unlock": ("Unlock", None),
}
# The target and what every call about it answers.
TARGETS = {
    "no-such-pid": "OPERATING_SYSTEM",
    "negative-pid": "OPERATING_SYSTEM",
    "pid-zero": "OPERATING_SYSTEM",
    "init": "NOT_INITIALIZED",
    "without-cuda": "NOT_INITIALIZED",
    "library-loaded": "NOT_INITIALIZED",
    "zombie": "NOT_INITIALIZED",
    "killed-and-reaped": "OPERATING_SYSTEM",
    "forked-child": "NOT_INITIALIZED",
    "child-of-a-forked-child": "NOT_INITIALIZED",
}


@pytest.fixture
def plain() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def targets(node: Node) -> Iterator[dict[str, tuple[int, Job | None]]]:
    made: dict[str, tuple[int, Job | None]] = {}
    yield made
    for _, job in made.values():
        if job is not None:
            job.kill()


@pytest.fixture
def target(
    request: pytest.FixtureRequest,
    plain: subprocess.Popen[bytes],
    targets: dict[str, tuple[int, Job | None]],
    controller: Controller,
    node: Node,
) -> int:
    """The pid of a process of the kind that the test names; no call about it succeeds, so that one will do for all."""
    kind = request.param
    if kind == "no-such-pid":
        gone = subprocess.Popen(["true"])
        gone.wait()
        return gone.pid
    fixed = {"negative-pid": -12345678, "pid-zero": 0, "init": 1, "without-cuda": plain.pid}
    if kind in fixed:
        return fixed[kind]
    if kind not in targets:
        job = Job(node.prefix, dict(node.env), kind, recording)
        targets[kind] = (bring_about(kind, job), job)
    return targets[kind][0]


def bring_about(kind: str, job: Job) -> int:
    """Make a process what a test wants; the pid that it is about."""
    if kind == "library-loaded":
        job.do("cuDriverGetVersion")
    else:
        job.start_up()
        if kind in ("forked-child", "child-of-a-forked-child"):
            return int(job.run("fork", [], kind == "child-of-a-forked-child")["pid"])
        job.send("exit", [0])
        end = time.monotonic() + 60
        while job.alive() and time.monotonic() < end:
            time.sleep(0.01)
        if kind == "killed-and-reaped":
            job.kill()
    return job.pid


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_call_about(target: int, call: str, controller: Controller, request: pytest.FixtureRequest) -> None:
    expected = TARGETS[request.node.callspec.params["target"]]
    assert controller.asked(CALLS[call][0], target, *CALLS[call][1:], limit=60).result == expected


FAILED_INIT = {"state": "SUCCESS", "thread-id": "SUCCESS", "lock": "OPERATING_SYSTEM"}


@pytest.mark.parametrize("call", CALLS)
def test_call_about_a_process_whose_cuinit_found_no_gpu(
    call: str, controller: Controller, start: Callable[..., Job]
) -> None:
    """It counts as a CUDA process, is running, and cannot be locked."""
    job = start(CUDA_VISIBLE_DEVICES="")
    assert job.says("cuInit", 0) == "NO_DEVICE"
    name, *args = CALLS[call]
    assert controller.asked(name, job.pid, *args, limit=60).result == FAILED_INIT.get(call, "ILLEGAL_STATE")


# --- a process about itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("state", "SUCCESS"),
        ("thread-id", "SUCCESS"),
        ("checkpoint", "ILLEGAL_STATE"),
        ("restore", "ILLEGAL_STATE"),
        ("unlock", "ILLEGAL_STATE"),
    ],
)
def test_a_running_process_asks_about_itself(job_in: Callable[[str], Job], call: str, expected: str) -> None:
    job = job_in("running")
    name, *args = CALLS[call]
    assert job.says(f"cuCheckpointProcess{name}", job.pid, *args, limit=60) == expected


def test_a_process_locks_and_unlocks_itself(job: Job) -> None:
    assert job.says("cuCheckpointProcessLock", job.pid, lock_args(200), limit=60) == "SUCCESS"
    assert job.says("cuCheckpointProcessUnlock", job.pid, None, limit=60) == "SUCCESS"
    assert job.says("cuCtxSynchronize", limit=60) == "SUCCESS"


@pytest.fixture
def put_aside(job: Job) -> Job:
    """A job with stamped memory that has locked and checkpointed itself."""
    job.memory = job.stamped(job.do("cuMemAlloc", 8 * WORDS), WORDS)
    assert job.says("cuCheckpointProcessLock", job.pid, lock_args(200), limit=60) == "SUCCESS"
    assert job.says("cuCheckpointProcessCheckpoint", job.pid, None) == "SUCCESS"
    return job


def test_a_process_checkpoints_itself(put_aside: Job) -> None:
    assert put_aside.alive()


def test_a_process_that_has_checkpointed_itself_is_seen_so(put_aside: Job, controller: Controller) -> None:
    assert controller.state(put_aside.pid) == "CHECKPOINTED"
    assert controller.bytes_of(put_aside.pid) == {}


@pytest.mark.parametrize("where", ["same", "swapped"])
def test_another_brings_back_a_process_that_has_checkpointed_itself(
    where: str, put_aside: Job, controller: Controller
) -> None:
    controller.resume(put_aside.pid, controller.swap if where == "swapped" else None)
    assert controller.state(put_aside.pid) == "RUNNING"
    put_aside.check_stamps()


def test_a_process_that_has_checkpointed_itself_asks_for_its_state(put_aside: Job) -> None:
    answer = put_aside.ask("cuCheckpointProcessGetState", put_aside.pid)
    assert (answer.result, answer.value) == ("SUCCESS", STATES.index("CHECKPOINTED"))


@pytest.mark.hazard
def test_a_process_brings_itself_back(put_aside: Job) -> None:
    for call in ("Restore", "Unlock"):
        assert put_aside.says(f"cuCheckpointProcess{call}", put_aside.pid, None) == "SUCCESS"
    put_aside.check_stamps()


# --- a thread's id ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["state", "thread-id", "lock", "checkpoint", "restore", "unlock"])
def test_a_thread_id_is_taken_for_its_process(controller: Controller, job_in: Callable[[str], Job], call: str) -> None:
    state = {"checkpoint": "locked", "restore": "checkpointed", "unlock": "locked"}.get(call, "running")
    job = job_in(state)
    thread = job.run("gettid", thread="other")
    assert thread != job.pid
    assert controller.asked(CALLS[call][0], thread, *CALLS[call][1:]).result == "SUCCESS"
    after = {"lock": "LOCKED", "checkpoint": "CHECKPOINTED", "restore": "LOCKED"}.get(call, "RUNNING")
    assert controller.state(job.pid) == after

"""Several jobs by one command, and the driver's worker that one command leaves to the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)
LIMOSA = [sys.executable, "-I", "-m", "limosa"]


def waiting() -> list[int]:
    """The workers that wait for a command: those that are called so, in a session of their own, and are no zombies."""
    mark, found = b"LIMOSA_RUNTIME_DIR=" + os.environ["LIMOSA_RUNTIME_DIR"].encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, environment = (entry / "comm").read_text(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if name == "limosa-worker\n" and mark in environment:
            found.append(int(entry.name))
    return sorted(found)


@pytest.fixture
def node(soft: Callable[..., Any]) -> Iterator[Any]:
    made = soft(gpus=2, memory="256MiB")
    yield made
    made.run([*LIMOSA, "arena", "--end"], rc=None)


def until(true: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def test_the_worker_of_one_command_is_the_next_ones(node: Any) -> None:
    job = node.job()
    node.run([*LIMOSA, "ps"])
    (first,) = waiting()
    for there in ("1", "0"):
        node.run([*LIMOSA, "move", job.pid, "--to", there])
        assert waiting() == [first]
    os.kill(first, signal.SIGKILL)
    node.run([*LIMOSA, "move", job.pid, "--to", "1"])
    (second,) = waiting()
    assert second != first
    node.run([*LIMOSA, "arena", "--end"])
    until(lambda: waiting() == [])
    node.run([*LIMOSA, "ps"], env={"LIMOSA_DRIVER_IDLE": "0"})
    until(lambda: waiting() == [])
    assert not list(Path(os.environ["LIMOSA_RUNTIME_DIR"]).glob("*/driver/*"))
    job.goes_on()


def test_a_command_that_is_killed_is_undone_by_the_worker_that_it_was_left(node: Any) -> None:
    job = node.job()
    node.run([*LIMOSA, "ps"])
    (worker,) = waiting()
    slow = node.switches.add("function=cuCheckpointProcessRestore hang")
    process = node.popen([*LIMOSA, "move", str(job.pid), "--to", "1"], env=None)
    until(lambda: node.switches.count(slow))
    assert waiting() == [worker], "it works for the command that came next"
    process.kill()
    process.wait(60)
    node.switches.remove(slow)
    job.goes_on()
    assert node.state(job) == "running"
    until(lambda: not list(Path(os.environ["LIMOSA_RUNTIME_DIR"]).glob("*/journals/*.jsonl")))
    assert worker not in waiting()


def test_recover_waits_for_a_worker_that_is_still_in_a_call_of_a_dead_command(node: Any) -> None:
    """Else it finds the job as it was, and the call changes it afterwards: it stayed locked, and nobody knew."""
    job = node.job()
    node.run([*LIMOSA, "suspend", job.pid])
    (worker,) = waiting()
    slow = node.switches.add("function=cuCheckpointProcessRestore delay=1")
    process = node.popen([*LIMOSA, "resume", str(job.pid)], env=None)
    node.reaches(process, "restore begin")
    os.kill(worker, signal.SIGSTOP)
    try:
        process.kill()
        process.wait(10)
        node.switches.remove(slow)
        recovering = node.later("recover")
        with pytest.raises(subprocess.TimeoutExpired):
            recovering.communicate(timeout=2)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert node.ends(recovering).rc == 0
    if node.state(job) == "checkpointed":  # undone; else finished, which is right as well
        node.run([*LIMOSA, "resume", job.pid])
    assert node.state(job) == "running"
    job.goes_on()


def test_one_of_several_jobs_ends_in_the_middle_and_the_others_are_moved(node: Any) -> None:
    jobs = [node.job() for _ in range(4)]
    slow = node.switches.add("function=cuCheckpointProcessCheckpoint hang every=1")
    process = node.later("move", "--gpu", "0", "--to", "1")
    until(lambda: node.switches.count(slow))
    os.kill(jobs[2].pid, signal.SIGKILL)
    node.switches.remove(slow)
    answer = node.ends(process)
    results = {one["pid"]: one for one in answer.json["results"]}
    assert answer.rc == results[jobs[2].pid]["error"]["exit_code"]
    for job in (jobs[0], jobs[1], jobs[3]):
        assert results[job.pid]["state"] == "running", results
        assert node.where(job) == [1]
        job.goes_on()


def test_a_ctrl_c_leaves_every_one_of_several_jobs_running(node: Any) -> None:
    jobs = [node.job() for _ in range(4)]
    slow = node.switches.add("function=cuCheckpointProcessCheckpoint hang every=1")
    process = node.later("move", "--gpu", "0", "--to", "1")
    until(lambda: node.switches.count(slow))
    os.kill(process.pid, signal.SIGINT)
    until(lambda: "cannot be broken off" in node.heard(process))
    node.switches.remove(slow)
    answer = node.ends(process)
    assert answer.rc == 22, answer
    assert {one.get("error", {}).get("id", "") for one in answer.json["results"]} <= {"", "cancelled"}
    for job in jobs:
        assert node.state(job) == "running"
        job.goes_on()
    assert not list(Path(os.environ["LIMOSA_RUNTIME_DIR"]).glob("*/journals/*.jsonl"))

"""A job that was moved the parked way, and tools that know nothing of it: nobody loses it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from soft_command import start

SIGN = "/memfd:limosa-imported"
# What NVIDIA's cuda-checkpoint and cuda.core.checkpoint do, by the driver's own calls.
FOREIGN = """
import sys
from cuda.bindings import driver as cu
pid, names = int(sys.argv[1]), sys.argv[2:]
cu.cuInit(0)
print(*[getattr(cu, "cuCheckpointProcess" + name)(pid, None)[0].name.removeprefix("CUDA_") for name in names])
"""
# Limosa's own classes, here and in a worker.
OWN = """
import sys
from limosa.errors import LimosaError
from limosa.gpu import Driver, Process
pid, which = int(sys.argv[1]), sys.argv[2]
one = Process(pid)
try:
    if which == "Process":
        one.suspend()
        one.resume()
    else:
        with Driver() as driver:
            driver.lock(pid)
            try:
                driver.checkpoint(pid)
                driver.restore(pid)
            finally:
                driver.unlock(pid)
    print("done")
except LimosaError as error:
    print(error.id, error.exit_code, one.state)
"""


def foreign(node: Any, job: Any, *names: str) -> list[str]:
    done = node.run([sys.executable, "-c", FOREIGN, job.pid, *names])
    return str(done.stdout).split()


def own(node: Any, job: Any, which: str) -> str:
    return str(node.run([sys.executable, "-c", OWN, job.pid, which]).stdout).strip()


def has_sign(job: Any) -> bool:
    return SIGN in Path(f"/proc/{job.pid}/maps").read_text()


@pytest.mark.parametrize("which", ["Process", "Driver"])
def test_our_own_classes_do_not_touch_a_job_that_was_moved(parked: Any, which: str) -> None:
    job = start(parked, "--mib", 24)
    assert own(parked, job, which) == "done", "by the driver's way it comes back"
    parked.limosa("move", job.pid, "--to", 1)
    assert own(parked, job, which) == "imported-memory 13 running"
    job.goes_on(2)
    parked.limosa("move", job.pid, "--to", 0)
    parked.limosa("suspend", job.pid)
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_another_tools_checkpoint_fails_and_the_job_lives(parked: Any) -> None:
    """The driver checkpoints it no more afterwards: that is said before anything is tried."""
    job = start(parked, "--mib", 24)
    assert not has_sign(job)
    parked.limosa("move", job.pid, "--to", 1)
    assert has_sign(job)
    said = foreign(parked, job, "Lock", "Checkpoint", "Checkpoint", "Unlock")
    assert said == ["SUCCESS", "ERROR_OUT_OF_MEMORY", "ERROR_UNKNOWN", "SUCCESS"]
    job.goes_on(2)
    said = parked.says(13, "given-up", "move", job.pid, "--to", 0)
    assert "another tool has tried to checkpoint" in said["error"]["reasons"][0]["text"]
    shown = parked.limosa("ps", "-o", "json").json["jobs"][0]
    assert (shown["movable"], "given-up" in [r["id"] for r in shown["reasons"]]) == (False, True)
    parked.limosa("suspend", "--release=memory-only", job.pid)
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_before_a_move_and_after_its_memory_was_let_go_of_everybody_may(parked: Any) -> None:
    job = start(parked, "--mib", 24)
    calls = ["Lock", "Checkpoint", "Restore", "Unlock"]
    assert foreign(parked, job, *calls) == ["SUCCESS"] * 4
    parked.limosa("suspend", job.pid)
    assert not has_sign(job), "what is aside is not in the process"
    parked.limosa("resume", job.pid)
    assert has_sign(job)
    job.goes_on(2)
    job.finish()

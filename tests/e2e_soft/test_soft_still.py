"""Jobs under the shim of which nothing is parked are held still all the same: a synchronise would end them.

Their threads wait for the GPU all the time, and a rule of the software GPU ends a process that does so while the driver
has checkpointed it, as real drivers do.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from soft_command import child_of, start

from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

HAZARD = "hazard=synchronise-while-checkpointed-segfaults"
MOST = ["--mib", 1, "--synchronises"]
MIB = 1 << 20


@pytest.fixture
def strict(parked: Any) -> Any:
    """A node where a synchronise while it is checkpointed ends a process."""
    parked.switches.add(HAZARD)
    return parked


def stand(job: Any) -> Stand:
    with Shim(Identity.of(job.pid)) as shim:
        return shim.hello().stand


def is_killed(node: Any, step: str, *command: object) -> None:
    """Limosa is, when it has journalled that; then comes a recover."""
    working = node.later(*command, halts=step)
    node.reaches(working, step)
    node.kill("limosa", working)
    node.limosa("recover")


def goes_its_way(job: Any) -> None:
    """Nobody holds it still any more, and it ends well."""
    assert stand(job) is Stand.OPEN
    job.goes_on(2)
    job.finish()


def test_without_that_the_job_ends(strict: Any) -> None:
    """So the others here would notice."""
    job = strict.job(*MOST)
    strict.limosa("suspend", job.pid, rc=None)
    assert job.reap() == -11


@pytest.mark.parametrize("more", [[], ["--jax"]], ids=["", "jax"])
def test_small_memory_is_moved_suspended_and_resumed(strict: Any, more: list[str]) -> None:
    job = start(strict, *MOST, *more)
    said = strict.says(0, "", "move", job.pid, "--to", 1)
    assert said["way"] == "driver"
    assert stand(job) is Stand.OPEN
    job.goes_on(2)
    strict.limosa("suspend", job.pid)
    assert stand(job) is Stand.CLOSED
    time.sleep(0.3)
    assert strict.limosa("recover", "-o", "json").json["recovered"] == [], "a suspended one waits for a resume"
    assert stand(job) is Stand.CLOSED
    assert strict.says(0, "", "move", job.pid, "--to", 0)["operation"] == "resume"
    assert stand(job) is Stand.OPEN
    job.goes_on(2)
    for state in ("checkpointed", "running"):
        assert strict.says(0, "", "toggle", job.pid)["state"] == state
    job.goes_on(2)
    job.finish()


def test_recover_leaves_one_alone_that_the_driver_says_nothing_of(strict: Any) -> None:
    job = start(strict, *MOST)
    strict.limosa("suspend", job.pid)
    rule = strict.switches.add("function=cuCheckpointProcessGetState every=1 result=CUDA_ERROR_UNKNOWN")
    (told,) = strict.limosa("recover", "-o", "json", rc=40).json["recovered"]
    assert (told["kind"], told["pid"], "whether it is suspended" in told["error"]) == ("gate", job.pid, True)
    strict.switches.remove(rule)
    assert stand(job) is Stand.CLOSED
    strict.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_one_of_two_processes_has_nothing_to_park(strict: Any) -> None:
    job = start(strict, "--mib", 24, "--small-child", "--synchronises")
    for to in (1, 0):
        assert strict.says(0, "", "move", job.pid, "--to", to)["way"] == "parked"
        job.goes_on(2)
    strict.limosa("suspend", job.pid)
    time.sleep(0.3)
    strict.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_what_the_driver_carries_for_want_of_room_is_held_still(strict: Any) -> None:
    job = start(strict, "--mib", 300, "--also", 1, "--synchronises")
    said = strict.says(0, "", "move", job.pid, "--map", "0=1,1=0", limit=120)
    assert (said["way"], {one["id"] for one in said["warnings"]}) == ("driver", {"driver-way"})
    assert said["bytes"] >= 600 * MIB, "all of it counts, for the room as well"
    goes_its_way(job)


@pytest.mark.parametrize(
    "step", ["park begin", "lock done", "checkpoint done", "restore done", "unlock done", "open begin"]
)
def test_a_move_that_was_killed_is_recovered(strict: Any, step: str) -> None:
    job = start(strict, *MOST)
    is_killed(strict, step, "move", job.pid, "--to", 1)
    goes_its_way(job)


@pytest.mark.parametrize("step", ["park begin", "lock done", "checkpoint done"])
def test_a_suspend_that_was_killed_is_recovered(strict: Any, step: str) -> None:
    job = start(strict, *MOST)
    is_killed(strict, step, "suspend", job.pid)
    if strict.state(job) == "checkpointed":
        assert stand(job) is Stand.CLOSED
        strict.limosa("resume", job.pid)
    goes_its_way(job)


@pytest.mark.parametrize("step", ["restore done", "unlock done", "open begin"])
def test_a_resume_that_was_killed_is_recovered(strict: Any, step: str) -> None:
    job = start(strict, *MOST)
    strict.limosa("suspend", job.pid)
    is_killed(strict, step, "resume", job.pid, "--to", 1)
    if strict.state(job) == "checkpointed":
        strict.limosa("resume", job.pid)
    goes_its_way(job)


def test_one_that_stands_still_is_not_taken_for_suspended(strict: Any) -> None:
    """Its parent, whose memory was to be suspended, is killed with limosa and its worker: nothing is away."""
    job = start(strict, "--mib", 24, "--small-child")
    child = child_of(job)
    suspend = strict.later("suspend", job.pid, halts="lock done")
    strict.reaches(suspend, "lock done")
    os.kill(job.pid, signal.SIGKILL)
    strict.kill("limosa-worker")
    strict.kill("limosa", suspend)
    told = strict.limosa("recover", "-o", "json").json["recovered"]
    assert [one["did"] for one in told] == ["undid it"]
    with Shim(Identity.of(child)) as shim:
        assert shim.hello().stand is Stand.OPEN


@pytest.mark.criu
@pytest.mark.parametrize("more", [[], ["--leave-running"]], ids=["ends", "runs on"])
def test_small_memory_goes_to_disk_and_comes_back(strict: Any, more: list[str]) -> None:
    job, image = start(strict, *MOST), strict.place / "image"
    strict.limosa("checkpoint", job.pid, "--output", image, *more)
    if more:
        assert stand(job) is Stand.OPEN
        job.goes_on(2)
        job.kill()
        job.until_gone()
    strict.limosa("restore", image, "--to", 1)
    assert stand(job) is Stand.OPEN
    job.goes_on(2)
    assert strict.where(job) == [1], strict.limosa("gpus").stdout
    job.finish()


@pytest.mark.criu
def test_a_suspended_one_goes_to_disk_and_comes_back(strict: Any) -> None:
    job, image = start(strict, *MOST), strict.place / "image"
    strict.limosa("suspend", job.pid)
    strict.limosa("checkpoint", job.pid, "--output", image)
    strict.limosa("restore", image)
    goes_its_way(job)


@pytest.mark.criu
@pytest.mark.parametrize("step", ["criu-restore done", "restore done", "unlock done", "open begin"])
def test_a_restore_that_was_killed_is_recovered(strict: Any, step: str) -> None:
    job, image = start(strict, *MOST), strict.place / "image"
    strict.limosa("checkpoint", job.pid, "--output", image)
    is_killed(strict, step, "restore", image)
    if not job.alive():
        strict.limosa("restore", image)
    goes_its_way(job)


@pytest.mark.criu
@pytest.mark.parametrize("step", ["park begin", "checkpoint done", "post-dump done"])
def test_a_checkpoint_that_was_killed_is_recovered(strict: Any, step: str) -> None:
    job, image = start(strict, *MOST), strict.place / "image"
    is_killed(strict, step, "checkpoint", job.pid, "--output", image)
    goes_its_way(job)

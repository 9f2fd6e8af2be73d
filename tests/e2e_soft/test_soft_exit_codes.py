"""Every exit code of ``docs/exit-codes.md`` that a node of software GPUs can produce, by the command line, with its id.

A case arranges a node and a job and runs a command by ``says``, which knows the code and the id that it must end with.
What it returns is a job that has to be as it was: it computes on, and all of its memory is what it has written.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from soft_command import Held, waits_for
from soft_ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "exit-codes.md"
UNREACHABLE = {20: "a pid that is reused between two looks of one command: tests/process/test_identity.py"}

Says = Callable[..., dict[str, Any]]


class Case(NamedTuple):
    """What to arrange, and what the command must end with."""

    code: int
    id: str
    arrange: Callable[[Callable[..., Any], Says], Any]


CASES: list[Case] = []


def case(code: int, id_: str) -> Callable[[Any], Any]:
    def add(arrange: Any) -> Any:
        CASES.append(Case(code, id_, arrange))
        return arrange

    return add


# --- 0 … 11 ------------------------------------------------------------------------------------------------------


@case(0, "")
def done(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job("--child")
    said = says(node, "move", job.pid, "--to", 1)
    assert said["state"] == "running"
    assert node.where(job) == [1]
    assert said["bytes"] >= 16 << 20  # of both processes
    assert said["timings"]["pause_seconds"] < said["timings"]["total"]
    return job


@case(0, "")
def would_wait_for_a_worker(soft: Any, says: Says) -> Any:
    """limosa was killed, and its worker is still in a call: a dry run says so."""
    node = soft()
    job = node.job()
    held = Held(node, "cuCheckpointProcessCheckpoint", "suspend", job.pid)
    held.process.kill()
    held.process.wait()
    (told,) = says(node, "recover", "--dry-run")["recovered"]
    assert (told["operation"], "worker" in told["did"]) == ("suspend", True)
    held.let_go()
    node.limosa("recover")
    assert node.state(job) == "running"
    return job


@case(1, "stopped")
def stopped_at_once(soft: Any, says: Says) -> Any:
    """The second Ctrl-C: what is where is said, the undoing is left to those who live on."""
    node = soft()
    job = node.job()
    held = Held(node, "cuCheckpointProcessCheckpoint", "suspend", job.pid)
    held.interrupt()
    held.process.send_signal(signal.SIGINT)
    said = says(node, held.process)
    assert "what is where" in said["error"]["message"]
    held.let_go()
    node.limosa("recover")  # waits for the worker that undoes already
    assert node.state(job) == "running"
    return job


@case(2, "unknown-gpu")
def no_such_gpu(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    says(node, "move", job.pid, "--to", 9)
    return job


@case(2, "invalid-map")
def two_on_one(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job("--also", 1)
    says(node, "move", job.pid, "--map", "0=1,1=1")
    return job


@case(10, "no-such-process")
def nobody(soft: Any, says: Says) -> None:
    says(soft(), "move", 4194301, "--to", 1)


@case(11, "untrusted-image")
def an_image_of_somebody_else(soft: Any, says: Says) -> None:
    node = soft()
    job = node.job()
    image = node.place / "image"
    node.limosa("checkpoint", job.pid, "--output", image)
    os.chown(image, 65534, 65534)
    says(node, "restore", image)
    assert not job.alive()


# --- 12: the GPU or its driver cannot ----------------------------------------------------------------------------


@case(12, "mig")
def mig(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    node.switches.mig(1)
    says(node, "move", job.pid, "--to", 1)
    return job


@case(12, "mps")
def a_client_of_mps(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    node.switches.mps()
    says(node, "suspend", job.pid)
    node.says(13, "cannot-be-moved", "suspend", job.pid, "--force=mps")  # the driver says the same; undone
    node.switches.mps(False)
    return job


@case(12, "chip")
def another_chip(soft: Any, says: Says) -> Any:
    node = soft(chip=["H200", "A100"])
    job = node.job()
    said = says(node, "move", job.pid, "--to", 1)
    assert "Soft GPU H200" in said["error"]["message"]
    return job


@case(12, "chip")
def the_same_chip_with_less_memory(soft: Any, says: Says) -> Any:
    node = soft(memory=["256MiB", "192MiB"])
    job = node.job()
    says(node, "move", job.pid, "--to", 1)
    return job


@case(12, "driver-too-old")
def a_driver_that_cannot_change_gpus(soft: Any, says: Says) -> Any:
    node = soft(driver="570.86.10")
    job = node.job()
    says(node, "move", job.pid, "--to", 1)
    node.limosa("suspend", job.pid)  # that much it can
    node.limosa("resume", job.pid)
    return job


@case(12, "gpu-unavailable")
def a_gpu_that_fell_off_the_bus(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    node.switches.lose(1)
    says(node, "move", job.pid, "--to", 1)
    node.says(12, "gpu-lost", "suspend", job.pid)
    assert "lost: it has fallen off the bus" in node.limosa("gpus").stdout
    node.switches.lose(1, lost=False)
    return job


@case(12, "cannot-be-asked")
def a_driver_that_does_not_come_up(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    rule = node.switches.add("function=cuInit every=1 result=CUDA_ERROR_SYSTEM_NOT_READY")
    says(node, "suspend", job.pid)
    node.switches.remove(rule)
    return job


@case(12, "cannot-be-asked")
def a_driver_that_does_not_tell_the_state(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    rule = node.switches.add("function=cuCheckpointProcessGetState every=1 result=CUDA_ERROR_UNKNOWN")
    says(node, "suspend", job.pid)
    node.switches.remove(rule)
    return job


@case(12, "state")
def a_job_in_a_state_that_nobody_knows(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    rule = node.switches.add("function=cuCheckpointProcessGetState every=1 state=3")
    says(node, "suspend", job.pid)
    node.switches.remove(rule)
    return job


# --- 13: the job -------------------------------------------------------------------------------------------------


@case(13, "managed-memory")
def managed(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job("--managed")
    says(node, "suspend", job.pid)
    return job


@case(13, "cannot-be-moved")
def managed_by_force(soft: Any, says: Says) -> Any:
    """What the driver says where the refusal is overruled; undone."""
    node = soft()
    job = node.job("--managed")
    says(node, "suspend", job.pid, "--force=managed-memory")
    return job


@case(13, "not-suspended")
def not_suspended(soft: Any, says: Says) -> Any:
    """There is nothing to bring back: it is where it was, and goes on there."""
    node = soft()
    job = node.job()
    says(node, "resume", job.pid, "--to", 1)
    assert node.where(job) == [0]
    return job


@case(13, "cuda-ipc")
def ipc(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job("--export")
    says(node, "suspend", job.pid)
    return job


@case(13, "peer-access")
def peer_access(soft: Any, says: Says) -> Any:
    node = soft(memory="2GiB", rates={"context_bytes": 1 << 30})
    job = node.job("--also", 1, "--peer")
    says(node, "suspend", job.pid)
    return job


@case(13, "jax")
def jax_whose_calls_nobody_lets_wait(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job("--jax")
    says(node, "checkpoint", job.pid, "--output", node.place / "image")
    return job


@case(13, "stopped")
def a_stopped_job(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    os.kill(job.pid, signal.SIGSTOP)
    says(node, "suspend", job.pid)
    os.kill(job.pid, signal.SIGCONT)
    return job


@case(13, "no-cuda-state")
def a_cpu_job(soft: Any, says: Says) -> None:
    node = soft()
    process = node.popen(["sleep", "60"], start_new_session=True)
    says(node, "move", process.pid, "--to", 1)
    assert process.poll() is None


# --- 14, 15: room ------------------------------------------------------------------------------------------------


@case(14, "gpu-room")
def a_full_gpu(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job("--mib", 32)
    with node.switches.fill(1, leave=24 << 20):
        said = says(node, "move", job.pid, "--to", 1)
        assert "GPU 1" in said["error"]["message"]
    return job


@case(15, "disk-room")
def a_full_disk(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    disk = node.place / "disk"
    disk.mkdir()
    node.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "none", disk])
    says(node, "checkpoint", job.pid, "--output", disk / "image")
    return job


@case(15, "no-room-on-host")
def no_host_memory_when_the_driver_asks(soft: Any, says: Says) -> Any:
    """There was enough when it was looked at."""
    node = soft()
    job = node.job()
    node.switches.add("function=cuCheckpointProcessCheckpoint memory=host")
    said = says(node, "suspend", job.pid)
    assert said["error"]["job_state"] == "running"
    return job


# --- 16, 17, 23, 24: images --------------------------------------------------------------------------------------


@case(16, "damaged-image")
def a_bent_bit(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    image = node.place / "image"
    node.limosa("checkpoint", job.pid, "--output", image)
    pages = max((image / "criu").iterdir(), key=lambda p: p.stat().st_size)
    with open(pages, "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        says(node, "restore", image)
        file.seek(0)
        file.write(byte)
    node.limosa("restore", image)
    return job


@case(16, "not-an-image")
def no_image(soft: Any, says: Says) -> None:
    says(soft(), "restore", "/etc")


@case(17, "destination-exists")
def a_folder_with_things_in_it(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    said = says(node, "checkpoint", job.pid, "--output", node.place)
    assert "is a folder with things in it" in said["error"]["message"]
    return job


@case(23, "pid-taken")
def the_job_runs(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    node.limosa("checkpoint", job.pid, "--output", node.place / "image", "--leave-running")
    said = says(node, "restore", node.place / "image", "--dry-run")
    assert "it still runs" in said["reasons"][0]["text"]
    return job


@case(24, "no-working-criu")
def no_criu(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    says(node, "checkpoint", job.pid, "--output", node.place / "image", "--criu", "/bin/false")
    return job


# --- 18, 19, 21, 22: begun and undone ----------------------------------------------------------------------------


@case(18, "timed-out")
def a_kernel_that_does_not_end(soft: Any, says: Says) -> None:
    """What a collective looks like whose peer does not come: the lock waits for it."""
    node = soft()
    job = node.job("--spin")
    says(node, "suspend", job.pid, "--timeout", 1.5)
    assert node.state(job) == "running"


@case(18, "timed-out")
def a_slow_driver(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    held = Held(node, "cuCheckpointProcessCheckpoint", "move", job.pid, "--to", 1, "--timeout", 2.5)
    time.sleep(2.5)
    said = says(node, held.let_go())
    assert "longer than 2.5 s" in said["error"]["message"]
    assert node.where(job) == [0]
    return job


@case(18, "pause-too-long")
def a_pause_that_would_be_too_long(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    says(node, "move", job.pid, "--to", 1, "--max-pause", 0.001)
    return job


@case(19, "busy")
def somebody_works_on_it(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    held = Held(node, "cuCheckpointProcessCheckpoint", "suspend", job.pid)
    says(node, "move", job.pid, "--to", 1)
    assert node.ends(held.let_go()).rc == 0
    node.limosa("resume", job.pid)
    return job


@case(21, "failed")
def a_checkpoint_that_fails(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    node.switches.add("function=cuCheckpointProcessCheckpoint result=CUDA_ERROR_UNKNOWN")
    said = says(node, "move", job.pid, "--to", 1)
    assert "CUDA_ERROR_UNKNOWN" in said["error"]["message"]
    assert said["error"]["job_state"] == "running"
    return job


@case(21, "failed")
def a_restore_that_fails(soft: Any, says: Says) -> Any:
    """The way back is a restore too: only the first fails."""
    node = soft()
    job = node.job("--child")
    node.switches.add("function=cuCheckpointProcessRestore result=CUDA_ERROR_INVALID_VALUE")
    says(node, "move", job.pid, "--to", 1)
    assert node.where(job) == [0]
    return job


@case(21, "failed")
def an_unlock_that_fails(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    node.switches.add("function=cuCheckpointProcessUnlock result=CUDA_ERROR_UNKNOWN")
    says(node, "move", job.pid, "--to", 1)
    assert node.where(job) == [0]
    return job


@case(22, "cancelled")
def ctrl_c(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    held = Held(node, "cuCheckpointProcessCheckpoint", "move", job.pid, "--to", 1)
    held.interrupt()
    says(node, held.let_go())
    assert node.where(job) == [0]
    return job


# --- 40, 41, 75 --------------------------------------------------------------------------------------------------


@case(40, "undo-failed")
def every_restore_fails(soft: Any, says: Says) -> Any:
    node = soft()
    job = node.job()
    rule = node.switches.add("function=cuCheckpointProcessRestore every=1 result=CUDA_ERROR_UNKNOWN")
    said = says(node, "move", job.pid, "--to", 1)
    assert said["error"]["hint"] == "limosa recover"
    assert node.state(job) == "checkpointed"  # every copy is where it was
    node.switches.remove(rule)
    node.limosa("recover")
    assert node.where(job) == [0]
    return job


@case(40, "not-finished")
def communicators_cannot_be_made_again(soft: Any, says: Says) -> Any:
    """The job is where it was to go; nobody is told to end it."""
    node = soft(gpus=2)
    job = Ranks(node)
    rule = node.switches.add("function=ncclCommInitRankConfig every=1 result=ncclSystemError")
    said = says(node, "move", job.pid, "--map", "0=1,1=0")
    assert said["error"]["hint"] == "limosa recover"
    assert "making its communicators again: ncclSystemError" in said["error"]["message"]
    tried = node.limosa("recover", rc=40)
    assert "kill" not in tried.stdout + tried.stderr
    node.switches.remove(rule)
    node.limosa("recover")
    job.goes_on()
    return job


@case(41, "left-suspended")
def the_room_went_to_somebody_else(soft: Any, says: Says) -> Any:
    """Both ways: the destination is full, and so is where it came from, before the job is back."""
    node = soft()
    job = node.job("--mib", 32)
    held = Held(node, "step:checkpoint-released", "move", job.pid, "--to", 1)
    fillers = [node.switches.fill(gpu, leave=8 << 20) for gpu in (0, 1)]
    says(node, held.let_go())
    assert node.state(job) == "checkpointed"
    node.says(14, "gpu-room", "resume", job.pid)  # nothing is tried while there is no room
    fillers[1].close()
    said = node.limosa("resume", job.pid, "--to", 1, "-o", "json").json
    assert said["state"] == "running"
    assert node.where(job) == [1]
    fillers[0].close()
    return job


@case(75, "")
def run_ended_by_a_checkpoint(soft: Any, says: Says) -> None:
    node = soft()
    job = Path(__file__).with_name("job.py")
    argv = ["run", "--name", "soft", "--log", "soft.log", "-q", "--", sys.executable, job, node.place / "job"]
    (node.place / "job").mkdir()
    process = node.run_attached(*argv)
    log = node.place / "soft.log"
    waits_for(node, lambda: log.exists() and "tick 3" in log.read_text())
    node.limosa("checkpoint", "soft", "--output", node.place / "image")
    says(node, process)
    said = node.limosa("restore", node.place / "image", "--to", 1, "-o", "json").json
    node.reaper.watch(said["pid"])
    (node.place / "job" / "stop").touch()
    waits_for(node, lambda: "DONE" in (node.place / "soft.log").read_text())


@case(127, "command-not-found")
def run_nothing(soft: Any, says: Says) -> None:
    says(soft(), "run", "--detach", "--", "no-such-command")


# --- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c.code}-{c.arrange.__name__}" for c in CASES])
def test_exit_code(soft: Any, number: int) -> None:
    one = CASES[number]

    def says(node: Any, *command: Any) -> dict[str, Any]:
        first = command[0]
        if isinstance(first, str):
            found: dict[str, Any] = node.says(one.code, one.id, *command)
            return found
        return node.judge(node.ends(first), one.code, one.id)  # type: ignore[no-any-return]

    job = one.arrange(soft, says)
    if job is not None:
        job.goes_on()
        job.finish()


def test_every_code_that_can_be_had_is_here() -> None:
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)}
    assert rows - {c.code for c in CASES} == set(UNREACHABLE)

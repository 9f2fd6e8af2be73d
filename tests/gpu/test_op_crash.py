"""Stopped, killed and timed out in the middle: the job runs on where it was, or is brought back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from op_support import (
    ONE_GPU,
    VICTIMS,
    At,
    driver_workers,
    interrupt,
    journals,
    limits,
    longest_gap,
    on,
    reached,
    wait_until,
)

from limosa import operation
from limosa.errors import UndoFailed

pytestmark = [*limits, pytest.mark.gpu_core]


def in_the_middle(limosa: Any, runtime: Path, step: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a command and returns while that step is under way."""
    process: subprocess.Popen[str] = limosa(*arguments, "-o", "json", wait=False)
    wait_until(lambda: reached(runtime, step) or process.poll() is not None, 40, f"{step} in a journal")
    time.sleep(0.1)  # the journal comes first: from here on the call itself is under way, for a second and more
    if process.poll() is not None:
        raise AssertionError(f"it has ended before {step}: {process.communicate()}")
    return process


def nothing_left(runtime: Path) -> bool:
    return not journals(runtime)


def runs_on(victim: Any, do: Any, gpu: int = 0) -> None:
    """It runs on that GPU, nothing is left to recover, and it can be moved as if nothing had been."""
    assert on(victim.pid) == {gpu}
    victim.goes_on()
    assert do("recover")["recovered"] == []
    if ONE_GPU:
        do("suspend", victim.pid)
        do("resume", victim.pid)
    else:
        do("move", victim.pid, "--to", 1 - gpu)
        assert on(victim.pid) == {1 - gpu}
    victim.goes_on()
    victim.finish()


# --- Ctrl-C, --timeout ------------------------------------------------------------------------------------------------


@pytest.mark.two_gpus
def test_ctrl_c_in_the_drivers_checkpoint_brings_the_job_back(stamping, limosa, do, runtime):
    victim = stamping("--gb", 4)
    process = in_the_middle(limosa, runtime, "checkpoint", "move", victim.pid, "--to", 1)
    interrupt(process)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 22, stdout + stderr
    assert json.loads(stdout)["error"]["exit_code"] == 22
    assert "waiting" in stderr
    runs_on(victim, do)


def test_ctrl_c_in_criu_s_dump_brings_the_job_back(stamping, limosa, do, runtime, images):
    victim = stamping("--gb", 4)
    process = in_the_middle(limosa, runtime, "dump", "checkpoint", victim.pid, "--output", images / "image")
    interrupt(process)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 22, stdout + stderr
    assert list(images.iterdir()) == []
    runs_on(victim, do)


@pytest.mark.two_gpus
def test_a_time_limit_in_the_middle_is_undone(stamping, do):
    victim = stamping("--gb", 10)
    since = time.monotonic()
    error = do("move", victim.pid, "--to", 1, "--timeout", 3, rc=18)["error"]  # 10 GB take longer than that
    assert error["job_state"]
    victim.goes_on()
    assert longest_gap(victim, since) > 1  # it was under way
    assert on(victim.pid) == {0}
    victim.finish()


# --- SIGKILL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["suspend", pytest.param("move", marks=pytest.mark.two_gpus)])
def test_limosa_killed_in_the_drivers_checkpoint_is_undone_by_its_worker(stamping, limosa, do, runtime, verb):
    victim = stamping("--gb", 4)
    where = ["--to", 1] if verb == "move" else []
    process = in_the_middle(limosa, runtime, "checkpoint", verb, victim.pid, *where)
    process.kill()
    process.wait(10)
    wait_until(lambda: nothing_left(runtime), 60, "undo by the worker")
    runs_on(victim, do)


@pytest.mark.two_gpus
def test_limosa_killed_in_the_drivers_restore_is_finished_by_its_worker(stamping, limosa, do, runtime):
    victim = stamping("--gb", 8)
    process = in_the_middle(limosa, runtime, "restore", "move", victim.pid, "--to", 1)
    process.kill()
    process.wait(10)
    wait_until(lambda: nothing_left(runtime), 60, "an end by the worker")
    runs_on(victim, do, gpu=1)


@pytest.mark.two_gpus
def test_limosa_and_its_worker_killed_leave_a_job_that_recover_brings_back(stamping, limosa, do, runtime):
    victim = stamping("--gb", 4)
    process = in_the_middle(limosa, runtime, "checkpoint", "move", victim.pid, "--to", 1)
    workers = driver_workers(process.pid)
    assert workers
    process.kill()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    process.wait(10)
    assert not nothing_left(runtime)
    error = do("move", victim.pid, "--to", 1, rc=19)["error"]  # and who works on that job is told what to do
    assert "recover" in error["hint"] + error["message"]
    (entry,) = do("recover")["recovered"]
    assert (entry["pid"], entry["state"]) == (victim.pid, "running")
    assert nothing_left(runtime)
    runs_on(victim, do)


def test_limosa_killed_in_criu_s_dump_is_undone(stamping, limosa, do, runtime, images):
    victim = stamping("--gb", 2)
    process = in_the_middle(limosa, runtime, "dump", "checkpoint", victim.pid, "--output", images / "image")
    process.kill()
    process.wait(10)
    wait_until(lambda: nothing_left(runtime), 60, "undo by the worker")
    assert list(images.iterdir()) == []
    runs_on(victim, do)


@pytest.mark.two_gpus
@pytest.mark.parametrize("step", ["criu-restore", "restore"])
def test_limosa_killed_while_it_restores_an_image(stamping, limosa, do, runtime, images, step):
    victim = stamping("--gb", 2)
    from op_support import reaped

    reaped(victim)
    do("checkpoint", victim.pid, "--output", images / "image")
    process = in_the_middle(limosa, runtime, step, "restore", images / "image", "--to", 1, "--no-verify")
    process.kill()
    process.wait(10)
    wait_until(lambda: nothing_left(runtime), 60, "an end by the worker")
    if not victim.alive():  # undone: the image is the copy, and the same command succeeds
        do("restore", images / "image", "--to", 1)
    runs_on(victim, do, gpu=1)


# --- 40 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.two_gpus
def test_an_undo_that_fails_is_40_and_recover_brings_the_job_back(start, do, gpus, tmp_path, runtime):
    """The second GPU's node goes while the job is checkpointed: neither the new map nor the old one is accepted."""
    folder = tmp_path / "hidden"
    argv = ["unshare", "-m", sys.executable, str(VICTIMS / "stamping.py"), str(folder)]
    victim = start(argv, folder=folder, limit=80)
    victim.goes_on()
    node = f"/dev/nvidia{gpus.gpus[1].minor}"

    def inside(*command: str) -> None:
        subprocess.run(["nsenter", "-t", str(victim.pid), "-m", *command], check=True, timeout=30)

    with pytest.raises(UndoFailed) as caught:
        operation.move(victim.pid, to="1", progress=At("restore", lambda: inside("mount", "--bind", "/dev/null", node)))
    assert caught.value.exit_code == 40
    assert not nothing_left(runtime)
    inside("umount", node)
    (entry,) = do("recover")["recovered"]
    assert (entry["pid"], entry["state"]) == (victim.pid, "running")
    runs_on(victim, do)

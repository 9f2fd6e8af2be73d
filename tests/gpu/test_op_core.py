"""Jobs on real GPUs through the command line: moved, suspended, written to disk and brought back, every page compared.

Every victim stamps its memory all the time and is asked at the end whether every page is what it wrote (``finish``).
"""

from __future__ import annotations

import time

import pytest
from op_support import GIB, limits, longest_gap, on, pause_is_true, reaped

pytestmark = [*limits, pytest.mark.gpu_core]


@pytest.mark.two_gpus
def test_a_job_moves_to_the_other_gpu_and_back(stamping, do, gpus):
    victim = stamping("--gb", 1, "--graph", "--pinned")
    for here, there in ((0, 1), (1, 0)):
        assert on(victim.pid) == {here}
        since = time.monotonic()
        moved = do("move", victim.pid, "--to", there)
        assert (moved["operation"], moved["pid"], moved["state"]) == ("move", victim.pid, "running")
        uuids = {gpu.index: gpu.uuid for gpu in gpus.gpus}
        assert sorted(moved["map"]) == sorted(moved["map"].values()) == sorted(uuids.values())
        assert moved["map"][uuids[here]] == uuids[there]
        assert moved["bytes"] > GIB
        assert on(victim.pid) == {there}
        victim.goes_on()
        assert abs(moved["timings"]["pause_seconds"] - longest_gap(victim, since)) < 1
    victim.finish()


def test_suspend_frees_the_gpu_and_resume_brings_every_page_back(stamping, do):
    victim = stamping("--gb", 1)
    suspended = do("suspend", victim.pid)
    assert suspended["state"] == "checkpointed"
    assert not suspended["already"]
    assert on(victim.pid) == set()
    (job,) = [job for job in do("ps")["jobs"] if job["pid"] == victim.pid]
    assert job["state"] == "checkpointed"
    assert [gpu["index"] for gpu in job["gpus"]] == [0]
    assert job["gpus"][0]["memory_used"] > GIB
    assert job["suspended"]["by"]
    assert job["suspended"]["since"]
    assert do("suspend", victim.pid)["already"]
    resumed = do("resume", victim.pid)
    assert (resumed["state"], resumed["already"]) == ("running", False)
    assert on(victim.pid) == {0}
    assert do("resume", victim.pid)["already"]
    victim.goes_on()
    victim.finish()


@pytest.mark.two_gpus
def test_a_checkpoint_is_killed_and_restored_on_the_other_gpu(stamping, do, images, gpus):
    victim = stamping("--gb", 1, "--graph", "--pinned")
    reaped(victim)
    image = images / "image"
    steps = len(victim.ticks())
    written = do("checkpoint", victim.pid, "--output", image)
    assert written["image"] == str(image)
    assert not written["left_running"]
    assert written["bytes"] > GIB
    assert not victim.alive()
    assert on(victim.pid) == set()
    assert do("verify", image)["ok"]
    (gpu,) = [gpu for gpu in do("inspect", image)["gpus"] if gpu["bytes"]]
    assert (gpu["index"], gpu["uuid"]) == (0, gpus.gpus[0].uuid)
    restored = do("restore", image, "--to", 1)
    assert (restored["pid"], restored["id"]) == (victim.pid, written["id"])
    assert restored["map"][gpus.gpus[0].uuid] == gpus.gpus[1].uuid
    assert on(victim.pid) == {1}
    victim.goes_on()
    assert len(victim.ticks()) > steps
    do("move", victim.pid, "--to", 0)  # what was restored is a job like any other
    assert on(victim.pid) == {0}
    victim.goes_on()
    victim.finish()


def test_leave_running_writes_an_image_and_the_job_goes_on(stamping, do, images):
    victim = stamping("--gb", 0.5)
    since = time.monotonic()
    written = do("checkpoint", victim.pid, "--output", images / "copy", "--leave-running")
    assert written["left_running"]
    assert on(victim.pid) == {0}
    victim.goes_on()
    pause_is_true(written["timings"]["pause_seconds"], victim, since)
    assert do("verify", images / "copy")["ok"]
    victim.finish()

"""What a job may hold beside plain memory, and several jobs at once."""

from __future__ import annotations

import pytest
from op_support import OTHER, limits, on, reaped

pytestmark = [*limits, pytest.mark.gpu_core]


def test_toggle_suspends_and_resumes(stamping, do):
    victim = stamping()
    assert do("toggle", victim.pid)["operation"] == "suspend"
    assert on(victim.pid) == set()
    assert do("toggle", victim.pid)["operation"] == "resume"
    victim.goes_on()
    victim.finish()


@pytest.mark.two_gpus
def test_a_suspended_job_is_resumed_on_the_other_gpu_by_move(stamping, do):
    victim = stamping("--pinned", "--graph")
    do("suspend", victim.pid)
    assert do("move", victim.pid, "--to", 1)["state"] == "running"
    assert on(victim.pid) == {1}
    victim.goes_on()
    victim.finish()


@pytest.mark.two_gpus
def test_two_jobs_change_places(stamping, do):
    first, second = stamping("--gb", 1), stamping("--gb", 1, "--device", "cuda:1")
    swapped = do("move", first.pid, second.pid, "--swap")
    assert [result["state"] for result in swapped["results"]] == ["running", "running"]
    assert (on(first.pid), on(second.pid)) == ({1}, {0})
    for victim in (first, second):
        victim.goes_on()
        victim.finish()


@pytest.mark.two_gpus
def test_a_job_on_two_gpus_is_turned_round_and_suspended(stamping, do, gpus):
    victim = stamping("--gb", 0.1, "--two-gpus")
    assert do("move", victim.pid, "--to", 1, rc=2)["error"]["message"]  # which of its two?
    assert do("move", victim.pid, "--map", "0=1", rc=2)["error"]["message"]  # it holds memory on both: name both
    turned = do("move", victim.pid, "--map", "0=1,1=0")
    a, b = (gpu.uuid for gpu in gpus.gpus[:2])
    assert (turned["map"][a], turned["map"][b]) == (b, a)
    victim.goes_on()
    here = on(victim.pid)  # where it copies between GPUs, PyTorch has a context on each that it sees
    assert here >= {0, 1}
    do("suspend", victim.pid)
    assert on(victim.pid) == set()
    do("resume", victim.pid)
    assert on(victim.pid) == here
    victim.goes_on()
    victim.finish()


@pytest.mark.two_gpus
def test_a_job_on_two_gpus_is_written_to_disk_and_turned_round_when_restored(stamping, do, images):
    victim = stamping("--gb", 0.05, "--two-gpus", "--pinned")
    reaped(victim)
    here = on(victim.pid)
    assert here >= {0, 1}
    do("checkpoint", victim.pid, "--output", images / "image")
    do("restore", images / "image", "--map", "0=1,1=0")
    assert on(victim.pid) == here
    victim.goes_on()
    victim.finish()


def test_a_suspended_job_is_written_to_disk_as_it_is(stamping, do, images):
    victim = stamping("--gb", 0.5)
    reaped(victim)
    do("suspend", victim.pid)
    copied = do("checkpoint", victim.pid, "--output", images / "copy", "--leave-running")
    assert copied["state"] == "checkpointed"
    assert on(victim.pid) == set()
    do("checkpoint", victim.pid, "--output", images / "image")
    assert not victim.alive()
    do("restore", images / "image", "--to", OTHER)
    assert on(victim.pid) == {OTHER}
    victim.goes_on()
    victim.finish()

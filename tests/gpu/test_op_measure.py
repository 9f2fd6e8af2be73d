"""What Limosa says of the pause, before and after, against the victim's own clock."""

from __future__ import annotations

import time

import pytest
from op_support import limits, pause_is_true

pytestmark = [*limits, pytest.mark.gpu_core, pytest.mark.gpu_alone, pytest.mark.usefixtures("touched")]


@pytest.mark.two_gpus
@pytest.mark.parametrize("gb", [0.05, 4])
def test_the_pause_is_what_the_job_felt_and_about_what_was_estimated(stamping, do, gb):
    victim = stamping("--gb", gb)
    for there in (1, 0):
        estimate = do("plan", "move", victim.pid, "--to", there)["estimate"]["pause_seconds"]
        since = time.monotonic()
        pause = do("move", victim.pid, "--to", there)["timings"]["pause_seconds"]
        victim.goes_on(5)
        pause_is_true(pause, victim, since)
        assert pause / 2 <= estimate <= pause * 2, f"estimated {estimate:.2f} s, it was {pause:.2f} s"
    victim.finish()


@pytest.mark.two_gpus
def test_the_pause_of_a_tree(stamping, do):
    victim = stamping("--children", 2)
    since = time.monotonic()
    pause = do("move", victim.pid, "--to", 1)["timings"]["pause_seconds"]
    victim.goes_on(5)
    pause_is_true(pause, victim, since)
    victim.finish()


def test_the_pause_of_a_copy_to_disk(stamping, do, images):
    victim = stamping("--gb", 1)
    since = time.monotonic()
    written = do("checkpoint", victim.pid, "--output", images / "copy", "--leave-running")
    victim.goes_on(5)
    pause_is_true(written["timings"]["pause_seconds"], victim, since)
    victim.finish()


@pytest.mark.two_gpus
def test_a_pause_that_would_be_too_long_is_refused(stamping, do):
    victim = stamping("--gb", 4)
    since = time.monotonic()
    do("move", victim.pid, "--to", 1, "--max-pause", 0.5, rc=18)
    victim.goes_on()
    assert all(b - a < 1 for a, b in zip(victim.ticks(), victim.ticks()[1:], strict=False) if b > since)
    victim.finish()

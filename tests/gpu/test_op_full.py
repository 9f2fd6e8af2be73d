"""GPUs that others fill: before, and in the middle. The job is refused, brought back, or left suspended; never lost."""

from __future__ import annotations

import pytest
from op_support import GIB, At, limits, on, reaped

from limosa import operation
from limosa.errors import LeftSuspended, NoRoomOnGpu

pytestmark = [*limits, pytest.mark.gpu_core, pytest.mark.gpu_alone, pytest.mark.two_gpus]


def test_a_full_destination_is_refused_and_nothing_is_touched(stamping, filler, do):
    victim, others = stamping("--gb", 2), filler()
    others.fill(1)
    refused = do("move", victim.pid, "--to", 1, rc=14)
    assert "GPU 1" in refused["error"]["message"]
    assert on(victim.pid) == {0}
    victim.goes_on()
    victim.finish()


def test_a_destination_filled_in_the_middle_brings_the_job_back(stamping, filler, do):
    victim, others = stamping("--gb", 2), filler()
    with pytest.raises(NoRoomOnGpu) as caught:
        operation.move(victim.pid, to="1", progress=At("checkpoint", lambda: others.fill(1)))
    assert caught.value.exit_code == 14
    assert on(victim.pid) == {0}
    victim.goes_on()
    others.empty(1)
    do("move", victim.pid, "--to", 1)
    assert on(victim.pid) == {1}
    victim.finish()


def test_both_gpus_filled_in_the_middle_leave_it_suspended_and_it_is_resumed_later(stamping, filler, do):
    victim, others = stamping("--gb", 2), filler()
    with pytest.raises(LeftSuspended) as caught:
        operation.move(victim.pid, to="1", progress=At("restore", lambda: others.fill(0, 1)))
    assert caught.value.exit_code == 41
    assert on(victim.pid) == set()
    (job,) = [job for job in do("ps")["jobs"] if job["pid"] == victim.pid]
    assert job["state"] == "checkpointed"
    assert job["gpus"][0]["memory_used"] > 2 * GIB
    do("resume", victim.pid, rc=14)
    do("move", victim.pid, "--to", 1, rc=14)
    others.empty(0, 1)
    do("resume", victim.pid)
    assert on(victim.pid) == {0}
    victim.goes_on()
    victim.finish()


def test_an_image_is_not_restored_where_there_is_no_room_and_stays_the_copy(stamping, filler, do, images):
    victim, others = stamping("--gb", 2), filler()
    reaped(victim)
    image = images / "image"
    do("checkpoint", victim.pid, "--output", image)
    others.fill(0, 1)
    do("restore", image, rc=14)  # looked at before anything is started
    assert not victim.alive()
    others.empty(1)
    with pytest.raises(NoRoomOnGpu) as caught:  # and once more when CRIU is done
        operation.restore(image, to="1", progress=At("criu", lambda: others.fill(1)))
    assert caught.value.exit_code == 14
    assert not victim.alive()
    assert on(victim.pid) == set()
    others.empty(0, 1)
    do("restore", image, "--to", 1)
    assert on(victim.pid) == {1}
    victim.goes_on()
    victim.finish()


def test_two_jobs_change_places_on_full_gpus(stamping, filler, do):
    first, second = stamping("--gb", 3), stamping("--gb", 3, "--device", "cuda:1")
    others = filler()
    others.fill(0, 1)
    do("move", first.pid, "--to", 1, rc=14)
    do("move", first.pid, second.pid, "--swap")
    assert (on(first.pid), on(second.pid)) == ({1}, {0})
    for victim in (first, second):
        victim.goes_on()
        victim.finish()


def test_all_jobs_of_a_gpu_are_moved(stamping, do):
    victims = [stamping(), stamping()]
    moved = do("move", "--gpu", 0, "--to", 1)
    assert sorted(result["pid"] for result in moved["results"]) == sorted(victim.pid for victim in victims)
    for victim in victims:
        assert on(victim.pid) == {1}
        victim.goes_on()
        victim.finish()

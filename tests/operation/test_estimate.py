"""What a verb costs by either way, by the rates that were measured."""

from __future__ import annotations

import pytest

from limosa.operation import estimate
from limosa.operation.journal import Member
from limosa.process.identity import Identity

GPU = "GPU-00000000-0000-0000-0000-000000000000"


def member(size: float, was: str = "running") -> Member:
    me = Identity.of(1)
    return Member(identity=me, was=was, root=1, held={GPU: int(size + estimate.CONTEXT)})


@pytest.mark.parametrize(("verb", "was"), [("move", "running"), ("suspend", "running"), ("resume", "checkpointed")])
def test_the_other_way_is_told_from_both_sides(verb: str, was: str) -> None:
    jobs = [member(64e9, was)]
    parked, driver = estimate.of(verb, jobs, parked=int(64e9)), estimate.of(verb, jobs)
    slow, fast = estimate.other_way(verb, jobs, parked=int(64e9)), estimate.other_way(verb, jobs)
    assert slow is not None
    assert fast is not None
    assert (slow.way, slow.pause_seconds, slow.seconds) == ("driver", driver.pause_seconds, driver.seconds)
    assert (fast.way, fast.pause_seconds) == ("parked", parked.pause_seconds)
    assert parked.pause_seconds is not None
    assert driver.pause_seconds is not None
    assert parked.pause_seconds * 5 < driver.pause_seconds


@pytest.mark.parametrize("verb", ["checkpoint", "restore"])
def test_images_have_two_ways_as_well(verb: str) -> None:
    jobs = [member(64e9, "running" if verb == "checkpoint" else "checkpointed")]
    slow = estimate.other_way(verb, jobs, int(2e9), True, parked=int(64e9))
    fast = estimate.other_way(verb, jobs, int(2e9), True)
    assert slow is not None
    assert fast is not None
    assert (slow.way, fast.way) == ("driver", "parked")
    assert fast.seconds < slow.seconds
    assert (fast.pause_seconds or 0) < (slow.pause_seconds or 1)


def test_a_job_without_cuda_state_has_no_other_way() -> None:
    assert estimate.other_way("checkpoint", []) is None
    assert estimate.other_way("move", []) is None

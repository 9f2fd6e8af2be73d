"""What a verb costs by either way, by the rates that were measured."""

from __future__ import annotations

from typing import Any

import pytest

from limosa.operation import estimate
from limosa.operation.journal import Member
from limosa.operation.results import Estimate, OtherWay
from limosa.operation.step import Shape
from limosa.operation.verbs import VERBS
from limosa.process.identity import Identity

GPU = "GPU-00000000-0000-0000-0000-000000000000"


def member(size: float, was: str = "running") -> Member:
    me = Identity.of(1)
    return Member(identity=me, was=was, root=1, held={GPU: int(size + estimate.CONTEXT)})


def cost(verb: str, jobs: list[Member], **more: Any) -> Estimate:
    return VERBS[verb].estimate(Shape(members=jobs, **more))


def other_way(verb: str, jobs: list[Member], **more: Any) -> OtherWay | None:
    return VERBS[verb].other_way(Shape(members=jobs, **more))


@pytest.mark.parametrize(("verb", "was"), [("move", "running"), ("suspend", "running"), ("resume", "checkpointed")])
def test_the_other_way_is_told_from_both_sides(verb: str, was: str) -> None:
    jobs = [member(64e9, was)]
    parked, driver = cost(verb, jobs, parked=int(64e9)), cost(verb, jobs)
    slow, fast = other_way(verb, jobs, parked=int(64e9)), other_way(verb, jobs)
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
    slow = other_way(verb, jobs, host_bytes=int(2e9), leave_running=True, parked=int(64e9))
    fast = other_way(verb, jobs, host_bytes=int(2e9), leave_running=True)
    assert slow is not None
    assert fast is not None
    assert (slow.way, fast.way) == ("driver", "parked")
    assert fast.seconds < slow.seconds
    assert (fast.pause_seconds or 0) < (slow.pause_seconds or 1)


def test_a_job_without_cuda_state_has_no_other_way() -> None:
    assert other_way("checkpoint", []) is None
    assert other_way("move", []) is None


def test_a_rate_makes_a_checkpoint_longer_and_its_pause_no_longer() -> None:
    jobs, parked = [member(64e9)], int(64e9)
    free = cost("checkpoint", jobs, host_bytes=int(2e9), leave_running=True, parked=parked)
    slow = cost("checkpoint", jobs, host_bytes=int(2e9), leave_running=True, parked=parked, rate=1e9)
    assert slow.pause_seconds == free.pause_seconds
    assert slow.seconds - free.seconds == pytest.approx(64 - 64e9 / estimate.CHUNKS_OUT_RATE)
    assert cost("checkpoint", jobs, host_bytes=int(2e9), leave_running=True, parked=parked, rate=1e15) == free
    assert cost("checkpoint", jobs, host_bytes=int(2e9), leave_running=True, rate=1e9) == cost(
        "checkpoint", jobs, host_bytes=int(2e9), leave_running=True
    )
    other = other_way("checkpoint", jobs, host_bytes=int(2e9), leave_running=True, rate=1e9)
    assert other is not None
    assert other.seconds > 60


def test_memory_alone_has_no_other_way() -> None:
    away = member(4e9)
    away.away = True
    assert other_way("resume", [away]) is None
    assert other_way("suspend", [away], parked=int(4e9)) is None


def test_what_the_driver_takes_instead() -> None:
    assert VERBS["suspend"].by_the_driver([member(48e9)], int(48e9)) == "about 20.5 s instead of 1.0 s"
    assert "instead" not in VERBS["suspend"].by_the_driver([member(1)], 1), "that is no difference"

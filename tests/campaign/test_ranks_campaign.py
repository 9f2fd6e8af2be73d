"""What CI runs of the campaign of jobs of several ranks: 180 faulted runs, every operation, every kind of fault.

``make faults WAY=ranks`` runs all of it; a failure here names the line that replays it.
"""

from __future__ import annotations

import os

import pytest

from campaign import cases, ranks
from campaign.__main__ import spread
from campaign.twice import part, points_are_known, run_and_replay, run_what_failed_once

RUNS = 180
CHUNKS = 12
SEED = int(os.environ.get("LIMOSA_CAMPAIGN_SEED", "1"))

FOUND = (
    "recover-dumped/ranks/run/none",
    "recover-fetched/ranks/run/none",
    "resume/ranks-four/nccl.step:nccl-init.4/result-ncclInternalError",
    "move/ranks-parked/point.after-map-of-the-shim.0/member-killed",
    "suspend/ranks-parked/point.after-drop-of-the-vault.1/job-killed+kill-both",
    "move/ranks-four/point.after-note-checkpoint-begin.0/fill-there",
    "recover-left/ranks-ring/point.after-forget-of-EndedRecord.0/job-killed+kill-both",
)
"""What failed when more of it was run, one of each cause (docs/reliability.md)."""

pytestmark = [pytest.mark.criu, pytest.mark.slow, pytest.mark.whole]


def sample() -> list[tuple[cases.Case, int]]:
    return spread(cases.chosen(cases.everything(way="ranks"), RUNS, SEED), SEED)


def test_the_sample_has_every_operation_victim_and_fault_of_ranks() -> None:
    everything = cases.everything(way="ranks")
    picked = [case for case, _ in sample()]
    assert cases.once(everything) > 2000
    assert len({case.name for case in picked}) == RUNS
    for field in ("operation", "victim"):
        assert {getattr(c, field) for c in picked} == {getattr(c, field) for c in everything}
    kinds = {cases.kind_of_fault(c.fault) for c in everything}
    assert {cases.kind_of_fault(c.fault) for c in picked} == kinds
    assert {"member-killed", "stop", "kill-both", "store-gone"} <= kinds
    assert all(cases.Case.named(case.name) == case for case in everything)


def test_on_real_gpus_nothing_is_made_to_fail_by_rules() -> None:
    found = cases.everything("real", "ranks")
    assert {case.operation for case in found} == set(ranks.OPERATIONS)
    assert {case.step.partition(".")[0] for case in found} == {"point", "run"}
    assert {"kill-both", "member-killed", "stop", "store-gone"} <= {case.fault for case in found}


@pytest.mark.timeout(600)
def test_the_steps_are_those_that_the_operations_take_now() -> None:
    """A new step is a new row: ``make faults WAY=ranks RECORD=1`` writes them down."""
    only = [f"{operation}/ranks-parked" for operation in ("exchange", "suspend", "resume", "recover-unjoined")]
    points_are_known(ranks.STEPS, only, "ranks")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_all_ranks_are_there_once_and_go_on(chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_and_replay(part(sample(), chunk, CHUNKS), tmp_path_factory)


@pytest.mark.timeout(600)
def test_what_has_failed_once() -> None:
    run_what_failed_once(FOUND)

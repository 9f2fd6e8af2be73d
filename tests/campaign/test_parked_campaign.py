"""What CI runs of the campaign of the parked way: 260 faulted runs, every operation, every kind of fault.

``make faults WAY=parked`` runs all of it; a failure here names the line that replays it.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from campaign import cases, parked
from campaign.__main__ import record, spread
from campaign.twice import part, run_and_replay, run_what_failed_once

RUNS = 260
CHUNKS = 20
SEED = int(os.environ.get("LIMOSA_CAMPAIGN_SEED", "1"))

FOUND = (
    "suspend/parked/job.cuMemRelease.0/result-1",
    "move/parked-two/job.cuMemUnmap.0/hang-for-good",
    "suspend/parked-pair/point.after-take-of-the-mover.0/member-killed",
    "swap/parked-vmm/mover.cuMemUnmap.6/result-1",
    "suspend/parked-blind/mover.cuMemRelease.0/result-999",
    "swap/parked-blind/mover.cuMemcpyDtoDAsync.3/crash-caller",
    "resume-to/parked-blind/mover.cuMemMap.1/after-999",
    "recover-back/parked-pair/point.before-drop-of-the-vault.1/job-killed",
    "suspend-memory/parked-churn/point.after-put-of-the-vault.0/vault-nofile",
    "leave-running/parked/mover.cuStreamSynchronize.3/hang-for-good",
    "restore/parked/mover.cuMemcpyHtoDAsync.0/hang-for-good",
    "leave-running/parked/point.after-export-of-the-shim.0/stop-for-good",
    "restore/parked-pair/job.cuMemSetAccess.0/crash-caller",
    "restore/parked/disk.fsync.6/ENOSPC",
    "recover-open/parked-blind/disk.open.1/ENOSPC-for-good",
    "recover-memory/parked-vmm/run/limosa-nofile.1",
    "recover-there/parked/run/limosa-nofile.0",
    "suspend/parked-pair/point.after-save-of-SuspendRecord.0/kill-limosa",
)
"""What failed when all of it was run, one of each cause (docs/reliability.md); the last is a mutant's."""

pytestmark = [pytest.mark.criu, pytest.mark.slow, pytest.mark.whole]


def sample() -> list[tuple[cases.Case, int]]:
    return spread(cases.chosen(cases.everything(way="parked"), RUNS, SEED), SEED)


def test_the_sample_has_every_operation_victim_and_nearly_every_fault() -> None:
    everything = cases.everything(way="parked")
    picked = [case for case, _ in sample()]
    assert cases.once(everything) > 2000
    assert len({case.name for case in picked}) == RUNS
    for field in ("operation", "victim"):
        assert {getattr(c, field) for c in picked} == {getattr(c, field) for c in everything}
    assert {cases.kind_of_fault(c.fault) for c in picked} == {cases.kind_of_fault(c.fault) for c in everything}
    assert all(cases.Case.named(case.name) == case and case.parked for case in everything)
    assert not [case for case in cases.everything() if case.parked]


def test_everybody_who_holds_memory_is_killed_at_every_point_at_which_he_lives() -> None:
    everything = cases.everything(way="parked")
    for name, row in cases.table(parked.STEPS).items():
        operation, victim = name.split("/")
        faults = {(c.step, c.fault) for c in everything if (c.operation, c.victim) == (operation, victim)}
        for point, n, living in row["points"]:
            step = f"point.{cases.dashed(point)}.{n}"
            for who in ("limosa", "vault", "mover"):
                assert who not in living or (step, f"kill-{who}") in faults, (name, step, who)


@pytest.mark.timeout(600)
def test_the_steps_are_those_that_the_operations_take_now() -> None:
    """A new step is a new row: ``make faults WAY=parked RECORD=1`` writes them down."""
    only = [f"{operation}/parked" for operation in ("move", "suspend", "resume", "recover-there", "resume-memory")]
    late = {"recover-there/parked": {"mover.cuMemUnmap", "mover.cuMemRelease"}}  # of the limosa that was killed before
    known, found = cases.table(parked.STEPS), record(1, "soft", only, "parked")
    assert set(found) == set(only)

    def points(row: dict[str, Any]) -> list[str]:
        return [name for name, _, _ in row["points"]]

    for name, row in found.items():
        assert Counter(points(row)) == Counter(points(known[name])), name
        passing = late.get(name, set())
        assert row[parked.MEASURED].keys() - passing == known[name][parked.MEASURED].keys() - passing, name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_memory_is_there_once_and_nothing_else_is(chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_and_replay(part(sample(), chunk, CHUNKS), tmp_path_factory)


@pytest.mark.timeout(600)
def test_what_has_failed_once() -> None:
    late = list(FOUND)
    for _ in range(4):  # on a busy machine a mover may be done before its n-th call
        late = [r["name"] for r in run_what_failed_once(late) if not r["happened"]] if late else []
    assert late == []

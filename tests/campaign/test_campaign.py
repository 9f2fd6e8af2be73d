"""What CI runs of the campaign: more than 400 faulted runs, every operation, every fault, every class of victim.

``make faults`` runs all of it; a failure here names the line that replays it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from campaign import cases, hazards, ranks
from campaign.__main__ import record, spread
from campaign.summary import Summary, merged, names_in
from campaign.twice import part, run_and_replay, run_what_failed_once
from limosa_softgpu import faults

RUNS = 420
FOUND = (
    "checkpoint/two-gpus/call.state.0/result-3",
    "swap/exits/inside.restore-claimed.0/result-999",
    "toggle-up/threads/call.state.0/result-3",
)
"""What failed last when all of it was run (docs/reliability.md)."""
CHUNKS = 28
SEED = int(os.environ.get("LIMOSA_CAMPAIGN_SEED", "1"))

pytestmark = [pytest.mark.criu, pytest.mark.slow, pytest.mark.whole]


def sample() -> list[tuple[cases.Case, int]]:
    everything = list(cases.enumerate_all(cases.table()))
    return spread(cases.chosen(everything, RUNS, SEED), SEED)


def test_the_sample_has_every_operation_fault_and_victim() -> None:
    everything = list(cases.enumerate_all(cases.table()))
    picked = [case for case, _ in sample()]
    assert len(everything) > 5000
    assert len({case.name for case in picked}) == RUNS
    for field in ("operation", "victim"):
        assert {getattr(c, field) for c in picked} == {getattr(c, field) for c in everything}
    # Every kind of fault in every operation that it can befall.
    kinds = {(c.operation, cases.kind_of_fault(c.fault)) for c in everything}
    assert len(kinds - {(c.operation, cases.kind_of_fault(c.fault)) for c in picked}) <= max(0, len(kinds) - RUNS)
    assert all(cases.Case.named(case.name) == case for case in everything)


def test_every_hazard_and_every_point_inside_the_driver_is_among_the_faults() -> None:
    assert {hazards.name_of(fault) for fault in hazards.HAZARDS} == faults.HAZARDS
    of_nccl = {step for step in (*ranks.MADE, *ranks.COMPUTING) if step.startswith("step:")}
    assert {f"step:{point}" for point in hazards.INSIDE} | of_nccl == faults.STEPS


def test_parts_of_a_campaign_are_one_and_what_fails_only_beside_others_is_told(tmp_path: Path) -> None:
    picked = [case for case, _ in sample()[:3]]
    wrong, later, right = ({"name": c.name, "seed": 1, "rc": 0, "problems": [], "seconds": 1} for c in picked)
    wrong["problems"] = ["late"]
    first = Summary(2, picked, 1, tmp_path / "1.json")
    for result in (wrong, right):
        first.add(result)
    first.write()  # cut off here: what it had run is there
    assert names_in(tmp_path / "1.json") == {picked[0].name, picked[2].name}
    assert [case for case, _ in first.to_replay()] == [picked[0]]
    second = Summary(2, picked, 1, tmp_path / "2.json")
    for result in (wrong, {**later, "problems": ["lost"]}):
        second.add(result)
    second.add_replay({**wrong, "problems": []})
    second.add_replay({**later, "problems": ["lost"]})
    second.end()
    whole = merged([tmp_path / "1.json", tmp_path / "2.json"], picked, tmp_path / "all.json")
    whole.end()
    assert len(whole.runs) == 3
    assert [run["name"] for run in whole.failures] == [picked[1].name]
    assert [run["name"] for run in whole.once] == [picked[0].name]
    told = json.loads((tmp_path / "all.json").read_text())
    assert told["operation, step and fault"] == {"known": 3, "run": 3}
    assert (told["failed"], told["failed once, right when replayed alone"]) == (1, 1)
    assert sum(told["counts"]["victim"].values()) == 3
    assert f"once, right alone: make faults CASE={picked[0].name}" in (tmp_path / "all.md").read_text()


@pytest.mark.timeout(600)
def test_the_steps_are_those_that_the_operations_take_now() -> None:
    """A new step is a new row: ``make faults RECORD=1`` writes them down."""
    only = [f"{operation}/one" for operation in cases.OPERATIONS]
    known, found = cases.table(), record(1, "soft", only)
    assert set(found) == set(only)

    def steps(row: dict[str, Any]) -> list[str]:
        # CRIU asks what it asks; the worker's own calls (its will, an early look at cuInit) come when they come.
        points = [name for name, _, _ in row["points"] if not name.startswith(cases.ASKED)]
        return points + sorted(c for c in row["calls"] if c in cases.CALLS and c != "available")

    for name, row in found.items():
        assert Counter(steps(row)) == Counter(steps(known[name])), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_one_copy_is_left_and_nothing_else(chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_and_replay(part(sample(), chunk, CHUNKS), tmp_path_factory)


@pytest.mark.timeout(600)
def test_what_has_failed_last() -> None:
    run_what_failed_once(FOUND)

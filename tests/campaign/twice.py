"""What CI asks of a part of the campaign: every case is run, and what fails fails no second time alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from campaign.__main__ import run
from campaign.cases import Case
from campaign.summary import replay


def part(picked: Sequence[tuple[Case, int]], chunk: int, chunks: int) -> list[tuple[Case, int]]:
    """One of so many parts of a sample."""
    return list(picked[chunk * len(picked) // chunks : (chunk + 1) * len(picked) // chunks])


def run_and_replay(todo: Sequence[tuple[Case, int]]) -> None:
    """Runs cases in one room, then once more, alone, what has failed; fails where that fails again.

    A run is a race of a dozen processes. What its own replay does not show again is told, and is the full campaign's.
    """
    results = run(todo, rooms=1)
    assert len(results) == len(todo)
    failed = {r["name"]: r for r in results if r["problems"]}
    again = run([(case, seed) for case, seed in todo if case.name in failed], rooms=1) if failed else []
    for name in failed.keys() - {r["name"] for r in again if r["problems"]}:
        warnings.warn(f"once: {replay(failed[name])}: {failed[name]['problems']}", stacklevel=2)
    told = [f"{replay(r)}: {r['problems']}" for r in again if r["problems"]]
    assert not told, "\n".join(told)

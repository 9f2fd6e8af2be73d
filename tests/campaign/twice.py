"""What CI asks of a part of the campaign: every case is run, and what fails fails no second time alone."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from campaign.__main__ import RoomProcess, record, run
from campaign.cases import Case, table
from campaign.summary import replay

ONCE = 2
"""How many of a session's runs may fail once and be right when repeated alone."""


ROOMS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Side by side with other tests one room is enough: there are as many as workers."""


KEPT: list[RoomProcess] = []
"""Rooms between two tests: the next one begins at once. What fails is repeated in a room of its own."""


def part(picked: Sequence[tuple[Case, int]], chunk: int, chunks: int) -> list[tuple[Case, int]]:
    """One of so many parts of a sample."""
    return list(picked[chunk * len(picked) // chunks : (chunk + 1) * len(picked) // chunks])


def run_and_replay(todo: Sequence[tuple[Case, int]], session: pytest.TempPathFactory) -> None:
    """Runs cases, then once more, alone, what has failed; fails where that fails again.

    A run is a race of a dozen processes. What its own replay does not show again is told, and is the full campaign's;
    more than ``ONCE`` of them in a session are no accident.
    """
    results = run(todo, rooms=ROOMS, kept=KEPT)
    assert len(results) == len(todo)
    failed = {r["name"]: r for r in results if r["problems"]}
    again = run([(case, seed) for case, seed in todo if case.name in failed], rooms=1) if failed else []
    twice = [r for r in again if r["problems"]]
    once = [failed[name] for name in sorted(failed.keys() - {r["name"] for r in twice})]
    for result in once:
        warnings.warn(f"once: {replay(result)}: {result['problems']}", stacklevel=2)
    told = [f"{replay(r)}: {r['problems']}" for r in twice]
    assert not told, "\n".join(told)
    all_once = _noted(session, [f"{replay(r)}: {r['problems']}" for r in once])
    assert not once or len(all_once) <= ONCE, "right when repeated alone, but too many:\n" + "\n".join(all_once)


def run_what_failed_once(names: Sequence[str]) -> list[dict[str, Any]]:
    """Runs cases by their names: all of them, and each has to be right. Returns the results."""
    results = run([(Case.named(name), 1) for name in names], rooms=ROOMS, kept=KEPT)
    assert {replay(r): r["problems"] for r in results if r["problems"]} == {}
    assert len(results) == len(names)
    return results


def points_are_known(steps: Path, only: Sequence[str], way: str) -> None:
    """Records the points of some operations anew: they have to be those that stand in the table."""
    known, found = table(steps), record(1, "soft", only, way)
    assert set(found) == set(only)
    for name, row in found.items():
        points, before = (Counter(one for one, _, _ in told["points"]) for told in (row, known[name]))
        assert points == before, name


def _noted(session: pytest.TempPathFactory, lines: list[str]) -> list[str]:
    """Notes what has failed once, with what else has in this session, in whichever process; all of it."""
    base = session.getbasetemp()
    path: Path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "failed-once"
    with open(path, "a+") as file:
        file.write("".join(line.replace("\n", " ") + "\n" for line in lines))
        file.flush()
        file.seek(0)
        return file.read().splitlines()

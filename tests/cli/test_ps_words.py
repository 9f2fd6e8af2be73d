"""What ``limosa ps`` calls the state of a job."""

from __future__ import annotations

import time
from typing import Any

import pytest

from limosa.cli.ps import _ranks, _state
from limosa.operation.jobs import rfc3339
from limosa.operation.results import Ps

SINCE = {"since": rfc3339(time.time() - 5 * 3600), "by": "ann", "release": "all"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "running"),
        ({"state": "checkpointed"}, "suspended"),
        ({"state": "checkpointed", "suspended": SINCE}, "suspended 5 h ago by ann"),
        ({"state": "parked"}, "suspended (memory only)"),
        ({"state": "checkpointed", "under_way": {"operation": "move", "alive": True}}, "move under way"),
        (
            {"state": "checkpointed", "under_way": {"operation": "move", "alive": False}},
            "left in the middle by a move (limosa recover)",
        ),
    ],
)
def test_states(fields: dict[str, Any], words: str) -> None:
    assert _state(Ps(pid=1, **fields)) == words


def rank(of: str, number: int, ranks: int, gpu: int) -> dict[str, Any]:
    return {"communicator": of, "rank": number, "ranks": ranks, "gpu": gpu}


@pytest.mark.parametrize(
    ("ranks", "closed", "words"),
    [
        ([rank("a", 1, 2, 5)], False, "rank 1 of 2 on GPU 5, 1 communicator"),
        ([rank("a", 3, 8, 0), rank("b", 1, 4, 0), rank("c", 0, 2, 0)], False, "rank 3 of 8 on GPU 0, 3 communicators"),
        ([rank("a", 0, 2, 0), rank("a", 1, 2, 1)], False, "ranks 0, 1 of 2 on GPUs 0, 1, 1 communicator"),
        ([rank("a", 1, 2, -1)], True, "rank 1 of 2, 1 communicator, closed"),
    ],
)
def test_ranks(ranks: list[dict[str, Any]], closed: bool, words: str) -> None:
    assert _ranks({"ranks": ranks}, closed=closed) == words

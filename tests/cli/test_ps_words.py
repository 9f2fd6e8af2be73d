"""What ``limosa ps`` calls the state of a job."""

from __future__ import annotations

import time
from typing import Any

import pytest

from limosa.cli.ps import _state
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

"""Movers that nobody needs: who counts as one."""

from __future__ import annotations

from typing import Any

import pytest

from limosa.errors import FailedUndone
from limosa.operation import idle
from limosa.parking.resident import Greeting
from limosa.process.identity import Identity


class Known:
    """A mover on GPU-1."""

    identity = Identity(1 << 30, 1)  # nobody
    uid = 0

    def __init__(self, sessions: int, keys: dict[str, int] | None):
        self.said = Greeting(sessions=sessions, gpus=["GPU-1"])
        self.keys, self.told = keys, False

    def held(self) -> dict[str, int]:
        if self.keys is None:
            raise FailedUndone("the mover has gone")
        return self.keys

    def end(self) -> None:
        self.told = True

    def __enter__(self) -> Known:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("sessions", "keys", "ends"),
    [(0, {}, True), (1, {}, False), (0, {"move-1-a/source/7@8": 1}, False), (0, None, False)],
)
def test_one_that_serves_or_holds_something_is_needed(
    monkeypatch: pytest.MonkeyPatch, sessions: int, keys: Any, ends: bool
) -> None:
    """With limosa killed, and the vault, the mover is the last that has a job's memory: ``recover`` has to find it."""
    mover = Known(sessions, keys)
    monkeypatch.setattr(idle.Mover, "all", lambda: [mover])
    assert not idle.end_idle(["GPU-2"])
    assert idle.end_idle(["GPU-1"]) is ends
    assert mover.told is ends

"""What ``limosa arena`` does not take, and what its refusals say."""

from __future__ import annotations

from typing import Any

import pytest

from limosa.operation import arena
from limosa.operation.room import gib


def test_a_time_without_a_size_is_a_mistake(limosa: Any) -> None:
    """It was taken, and did nothing."""
    answer = limosa("arena", "--keep", "8h", rc=2)
    assert "SIZE" in answer.stderr


def test_what_is_less_than_a_gib_is_told_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gib(5 << 20) == "5 MiB"
    assert gib(3 << 29) == "1.50 GiB"
    assert gib((1 << 30) - 1) == "1.00 GiB"
    monkeypatch.setattr(arena, "memory_levels_of", lambda pid: [])
    monkeypatch.setattr(arena, "tightest", lambda levels: type("Level", (), {"room": None, "path": "/"}))
    monkeypatch.setattr(arena, "host_memory", lambda: (1 << 30, 5 << 20))
    monkeypatch.setattr(arena, "grow_host_memory", lambda fresh: 5 << 20)
    assert "has 5 MiB of host memory available, and the arena needs 48 MiB more" in arena.host_room(48 << 20)

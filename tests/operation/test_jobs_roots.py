"""The topmost processes of jobs: found without asking the driver once more about what was just asked."""

from __future__ import annotations

import os

import pytest

from limosa.operation import jobs


def test_who_was_asked_just_now_is_not_asked_again(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ps`` started two workers, each of which loads the driver."""
    monkeypatch.setattr(jobs, "cuda_states", lambda *_: pytest.fail("asked again"))
    root = start("tree")
    children = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == root.pid]
    assert jobs.roots_of(children, {root.pid, *children}) == [root.pid]


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0

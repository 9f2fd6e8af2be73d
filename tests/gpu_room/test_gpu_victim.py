"""The stamping victim itself, with its pages in host memory: it must notice a page that is not what it wrote."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VICTIM = Path(__file__).parent.parent / "gpu" / "victims" / "stamping.py"


@pytest.fixture
def stamping(start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    def go(*flags: object) -> Any:
        argv = [sys.executable, str(VICTIM), str(tmp_path / "v"), "--device", "cpu", "--gb", "0.01", *map(str, flags)]
        return start(argv, folder=tmp_path / "v")

    return go


def test_one_wrong_word_is_noticed(stamping):
    victim = stamping()
    victim.goes_on()
    os.kill(victim.pid, signal.SIGUSR1)
    assert victim.reap(30) == 3
    assert "MISMATCH cpu: page 81 holds epoch" in victim.text()


def test_children_stamp_too_and_a_dead_one_is_noticed(stamping):
    victim = stamping("--children", 2)
    victim.goes_on()
    children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGUSR1)
    assert victim.reap(30) == 3
    assert "child 1 has ended (3): " in victim.text()
    assert "MISMATCH cpu: page 81" in victim.text()


def test_a_tree_ends_well_together(stamping):
    victim = stamping("--children", 2)
    victim.goes_on()
    victim.finish()
    assert [(victim.folder / f"child-{n}.log").read_text().split()[-1] for n in (0, 1)] == ["DONE", "DONE"]

"""The mover is told to end while its loop is busy with something else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from limosa.parking import mover_holding, mover_main
from limosa.parking.mover_main import Mover


def test_the_end_that_comes_while_it_looks_around_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``a |= call()`` reads ``a`` before the call: what a session or a signal set during it was lost."""
    monkeypatch.setattr(mover_main, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(mover_holding, "look", lambda shared: None)
    mover = Mover(str(tmp_path / "mover"), {})
    rounds: list[bool] = []

    def told_meanwhile() -> float:
        if len(rounds) > 50:
            raise AssertionError("it goes on though it was told to end")
        if not rounds:
            mover.shared.retiring = True
        rounds.append(mover.shared.retiring)
        return 0.0

    monkeypatch.setattr(mover, "idle", told_meanwhile)
    failed: list[Any] = []

    def serve() -> None:
        try:
            mover.serve()
        except AssertionError as error:
            failed.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert not failed
    assert rounds == [True]

"""When the mover ends: told to while its loop is busy with something else, and when nobody has needed it for long."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from limosa.ipc.messages import receive, send
from limosa.ipc.sessions import serve
from limosa.parking import mover_holding, mover_main
from limosa.parking.mover_main import MoverServer
from limosa.parking.mover_session import Session, Shared
from limosa.parking.vault_protocol import Keys, Ping


def test_the_end_that_comes_while_it_looks_around_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``a |= call()`` reads ``a`` before the call: what a session or a signal set during it was lost."""
    monkeypatch.setattr(mover_main, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(mover_holding, "look", lambda shared: None)
    mover = MoverServer(str(tmp_path / "mover"), {})
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
    thread.join(60)
    assert not thread.is_alive()
    assert not failed
    assert rounds == [True]


def test_to_be_looked_at_is_no_reason_to_stay() -> None:
    """``limosa arena`` now and then kept a mover, with a context on each GPU, for ever."""

    def asked(*verbs: str) -> float:
        shared = Shared()
        shared.last = began = time.monotonic() - 100
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        session = Session(shared, dict.fromkeys((Ping, Keys), lambda *given: {}))
        thread = threading.Thread(target=serve, args=(theirs, session), daemon=True)
        thread.start()
        for verb in verbs:
            send(ours, {"verb": verb})
            receive(ours)
        ours.close()
        thread.join(60)
        return shared.last - began

    assert asked("ping") == asked("ping", "ping") == 0
    assert asked("keys") > 99
    assert asked("ping", "keys") > 99

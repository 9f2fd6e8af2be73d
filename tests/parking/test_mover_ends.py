"""When the mover ends: told to while its loop is busy with something else, and when nobody has needed it for long."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.ipc.messages import receive, send
from limosa.ipc.sessions import serve
from limosa.parking import mover_arena, mover_holding, mover_main
from limosa.parking.mover_main import MoverServer
from limosa.parking.mover_protocol import Pinned, Unput
from limosa.parking.mover_session import Session, Shared
from limosa.parking.vault_main import Entry, VaultServer, VaultSession
from limosa.parking.vault_protocol import Arena, AskArena, Drop, Keys, Ping, Request


def test_the_end_that_comes_while_it_looks_around_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``a |= call()`` reads ``a`` before the call: what a session or a signal set during it was lost."""
    monkeypatch.setattr(mover_main, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(mover_holding, "look", lambda shared: None)
    mover = MoverServer(str(tmp_path / "mover"), {})
    rounds: list[bool] = []

    def told_meanwhile() -> bool:
        if len(rounds) > 50:
            raise AssertionError("it goes on though it was told to end")
        if not rounds:
            mover.shared.retiring = True
        rounds.append(mover.shared.retiring)
        return False

    monkeypatch.setattr(mover, "is_over", told_meanwhile)
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
    """``limosa arena`` now and then kept a mover, with a context on each GPU, for ever; and a vault."""

    def asked_mover(*asked: Request) -> float:
        shared = Shared()
        shared.last = began = time.monotonic() - 100
        answers(Session(shared, mover_main.all_verbs()), *asked)
        return shared.last - began

    def asked_vault(*asked: Request) -> float:
        vault = VaultServer()
        vault.last = began = time.monotonic() - 100
        answers(VaultSession(vault), *asked)
        return vault.last - began

    def answers(session: Session | VaultSession, *asked: Request) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        thread = threading.Thread(target=serve, args=(theirs, session), daemon=True)
        thread.start()
        for one in asked:
            send(ours, one)
            assert "error" not in receive(ours).read_as(dict[str, Any])
        ours.close()
        thread.join(60)
        assert not thread.is_alive()

    assert asked_mover(Ping(), Pinned(), Keys()) == 0
    assert asked_mover(Ping(), Unput(key="a")) > 99
    assert asked_vault(Ping(), AskArena(with_free=True), Keys()) == 0
    assert asked_vault(Ping(), Drop(key="a")) > 99


def test_a_mover_says_when_it_ends_also_to_two_who_look_at_the_same_time() -> None:
    class There:
        def __init__(self) -> None:
            self.sessions: list[Session] = []

        def all(self) -> list[Session]:
            return self.sessions

    shared, others = Shared(), There()
    shared.sessions = others  # type: ignore[assignment]
    one, other = (Session(shared, {Ping: mover_main.ping}) for _ in range(2))
    others.sessions += [one, other]

    def ends_in() -> Any:
        said = mover_main.ping(one, Ping(), ())
        assert isinstance(said, dict)
        assert said["sessions"] == 1
        return said["ends_in"]

    assert 500 < ends_in() <= 600
    other.needed = True
    assert ends_in() is None
    other.needed = False
    shared.resident["a"] = Entry()
    assert ends_in() is None, "it does not end while it holds something"


def test_the_ten_minutes_of_the_mover_do_not_begin_when_those_of_the_arena_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends_in(used: int, seconds: float = 0.0) -> Any:
        """As it says 100 seconds after its last controller has gone."""
        shared = Shared()
        shared.last -= 100
        shared.parts["segments"] = SimpleNamespace(any=lambda: True, trim=lambda known, contexts: None)
        there = Arena(used=used, free=64 << 20, reserved=0, seconds=seconds, by={}, inodes=[])
        vault = contextlib.nullcontext(SimpleNamespace(arena=lambda: there))
        monkeypatch.setattr(mover_arena, "look_for", lambda *_: True)
        monkeypatch.setattr(mover_arena, "Vault", lambda found: vault)
        mover_arena.look_after(shared)
        said = mover_main.ping(Session(shared, {Ping: mover_main.ping}), Ping(), ())
        assert isinstance(said, dict)
        return said["ends_in"]

    assert 400 < ends_in(used=0) <= 500
    assert 500 < ends_in(used=64 << 20) <= 600, "a suspended job's memory stays pinned"
    assert 800 < ends_in(used=0, seconds=900.0) <= 900, "an arena that was asked for is kept, and the mover no longer"

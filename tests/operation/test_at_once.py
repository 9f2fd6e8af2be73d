"""Processes of strangers among those that are worked on: one that takes its time keeps no other waiting."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.errors import DriverHung, FailedUndone, NoSuchProcess
from limosa.operation.journal import Member
from limosa.operation.parked.calls import each_at_once
from limosa.process.identity import Identity

recover: Any = importlib.import_module("limosa.operation.recover")  # the package has a function of that name


@pytest.fixture
def member() -> Member:
    """One that lives."""
    return Member(identity=Identity.of(os.getpid()))


def test_a_slow_one_and_one_that_fails_hold_up_nobody(member: Member) -> None:
    done, opened = threading.Event(), []

    def slow() -> None:
        assert done.wait(20), "the others waited for it"
        opened.append("slow")

    def fails() -> None:
        raise FailedUndone("it does not open")

    def last() -> None:
        opened.append("last")
        done.set()

    with pytest.raises(FailedUndone, match="does not open"):
        each_at_once([(member, slow), (member, fails), (member, last)])
    assert sorted(opened) == ["last", "slow"]


def test_one_that_has_ended_needs_nothing(member: Member) -> None:
    def gone() -> None:
        raise NoSuchProcess(pid=1)

    each_at_once([(member, gone)])


def test_a_user_has_few_questions_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves a worker behind that waits for the driver."""
    asked: list[int] = []

    class Silent:
        def state(self, pid: int, timeout: float) -> Any:
            asked.append(pid)
            raise DriverHung(call="state", pid=pid, seconds=timeout)

    @contextmanager
    def using(_: object) -> Iterator[Silent]:
        yield Silent()

    monkeypatch.setattr(recover.drivers, "using", using)
    hung: dict[int, int] = {}
    for _ in range(recover.MOST_HUNG):
        with pytest.raises(DriverHung):
            recover._state_of(os.getpid(), hung)
    begun = time.monotonic()
    with pytest.raises(FailedUndone, match="not asked again"):
        recover._state_of(os.getpid(), hung)
    assert len(asked) == recover.MOST_HUNG
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize(
    ("shims", "waits", "goes_on"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_recover_names_no_job_that_goes_on(
    member: Member, monkeypatch: pytest.MonkeyPatch, shims: bool, waits: bool, goes_on: bool
) -> None:
    """It changed places with one that does not answer: who ends both would lose it."""
    monkeypatch.setattr(recover, "under_shim", lambda _: shims)
    monkeypatch.setattr(recover, "any_waits", lambda _: waits)
    dead = SimpleNamespace(
        header=SimpleNamespace(roots=[member.identity], members=[member]), close=lambda: None, began=lambda *_: False
    )
    monkeypatch.setattr(recover, "entry_of", lambda _, **fields: SimpleNamespace(**fields))
    said = recover._failed(dead, FailedUndone("it does not answer")).error
    assert (f"kill -KILL {member.pid}" in said) is not goes_on

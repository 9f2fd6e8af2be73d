"""What Python programs hand over: what ``run`` gave back is a job, and what cannot be one is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import limosa
from limosa.operation.jobs import job
from limosa.process.identity import Identity


@pytest.fixture(autouse=True)
def _own_records(runtime):
    """No job of others is in sight."""


def test_what_run_gave_back_is_a_job():
    me = Identity.of(os.getpid())
    assert job(SimpleNamespace(pid=me.pid, identity=me)).root == me


@pytest.mark.parametrize("named", [None, 3.5, b"train", True, object()])
def test_what_names_no_job_is_refused_and_not_taken_apart(named: Any):
    for act in (limosa.suspend, limosa.resume, limosa.wait, limosa.stop):
        with pytest.raises(limosa.InvalidArgument, match="is no job"):
            act(named)


def test_one_of_several_that_names_no_job_is_its_own_failure():
    (outcome,) = limosa.suspend([3.5])  # type: ignore[list-item]
    assert outcome.error is not None
    assert outcome.error.id == "invalid-argument"
    assert outcome.pid == 0


@pytest.mark.parametrize("command", ["true", b"true", [], ()])
def test_a_command_is_a_list_of_words(command: Any):
    with pytest.raises(limosa.InvalidArgument, match="is no command"):
        limosa.run(command)


@pytest.mark.parametrize("said", [{"command": ["sleep", 5]}, {"command": ["env"], "env": {"A": 1}}], ids=str)
def test_words_of_a_command_and_of_its_environment_are_texts(said: Any):
    with pytest.raises(limosa.InvalidArgument, match="is not a text"):
        limosa.run(**said)


@pytest.mark.parametrize("seconds", ["x", -1, float("nan"), float("inf"), True], ids=str)
def test_a_time_is_a_number_of_seconds(tmp_path: Path, seconds: Any):
    me: Any = os.getpid()
    for act in (
        lambda: limosa.move(me, to="1", timeout=seconds),
        lambda: limosa.suspend([me], max_pause=seconds),
        lambda: limosa.checkpoint(me, tmp_path / "image", timeout=seconds),
        lambda: limosa.restore(tmp_path / "image", timeout=seconds),
        lambda: limosa.stop(me, grace=seconds),
    ):
        with pytest.raises(limosa.InvalidArgument, match="is not a number of seconds"):
            act()


@pytest.mark.parametrize("verb", ["move", "suspend", "resume", "toggle", "checkpoint", "restore", "plan_restore"])
def test_a_keyword_that_there_is_not_is_told_with_the_functions_name(tmp_path: Path, verb: str):
    words = {"move": (1,), "checkpoint": (1, tmp_path / "image")}.get(verb, (tmp_path / "image",))
    with pytest.raises(TypeError, match=rf"^limosa.{verb}\(\) got an unexpected keyword argument 'foo'$"):
        getattr(limosa, verb)(*words, foo=1)


def test_one_job_that_is_named_twice_is_refused():
    """It was in its own way: one half was moved, the other was busy."""
    me = os.getpid()
    for act in (lambda: limosa.suspend([me, str(me)]), lambda: limosa.move([me, me], swap=True)):
        with pytest.raises(limosa.UsageError, match="the same job is named twice"):
            act()


def test_recover_takes_one_folder_for_one_folder(tmp_path: Path):
    for folder in (tmp_path / "missing", str(tmp_path / "missing")):
        with pytest.raises(limosa.UsageError, match=f"there is no folder {tmp_path / 'missing'}"):
            limosa.recover(folder, dry_run=True)

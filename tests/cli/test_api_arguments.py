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


def test_recover_takes_one_folder_for_one_folder(tmp_path: Path):
    for folder in (tmp_path / "missing", str(tmp_path / "missing")):
        (found,) = limosa.recover(folder, dry_run=True)
        assert str(tmp_path / "missing") in found.error

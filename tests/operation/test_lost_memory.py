"""What ``recover`` says of device memory that nobody has any more, and of records that nobody needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from limosa import operation
from limosa.cli.recover import _text
from limosa.errors import UsageError
from limosa.operation.journal import Header, Journal
from limosa.operation.parked.holders import LostMemory
from limosa.operation.recover import _lost
from limosa.operation.results import Recovered
from limosa.process.identity import Identity
from limosa.process.records import SuspendRecord


def test_lost_memory_is_found_under_what_the_undo_made_of_it() -> None:
    try:
        try:
            raise LostMemory(pid=7)
        except LostMemory as error:
            raise RuntimeError("undo") from error
    except RuntimeError as error:
        found = _lost(error)
    assert found is not None
    assert found.hint == "end it: nothing can bring it back"
    assert _lost(RuntimeError()) is None


def test_an_image_that_is_not_there_is_not_named(tmp_path: Path) -> None:
    gone = Recovered(kind="operation", did="undid it", image=str(tmp_path / "never"))
    kept = Recovered(kind="operation", did="kept it", image=str(tmp_path))
    assert _text([gone]) == "operation: undid it"
    assert _text([kept]).endswith(f"image {tmp_path}")


def test_an_image_that_was_removed_is_not_named_in_json_either(runtime: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as gone:
        who = Identity.of(gone.pid)
        gone.kill()
        gone.wait(60)
    (tmp_path / "whole").mkdir()
    for name in ("never", "whole"):
        header = Header(id=f"restore-{name}", operation="restore", roots=[], controller=who, image=str(tmp_path / name))
        Journal.create(header).close()
    assert sorted(one.image for one in operation.recover()) == ["", str(tmp_path / "whole")]


def test_the_record_of_a_job_that_was_killed_while_suspended_is_removed(runtime: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        path = SuspendRecord(root=Identity.of(job.pid)).save()
        operation.recover()
        assert path.exists(), "it lives"
        os.kill(job.pid, 9)
        job.wait(60)
    operation.recover()
    assert not path.exists()


def test_whoever_names_a_job_is_told_that_recover_takes_none(runtime: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as job:
        path = SuspendRecord(root=Identity.of(job.pid)).save()
        job.kill()
    with pytest.raises(UsageError) as caught:
        operation.recover([tmp_path, tmp_path / "train"])
    assert str(caught.value) == f"there is no folder {tmp_path / 'train'}"
    assert caught.value.hint == "limosa recover names no job: it looks at all"
    assert path.exists(), "nothing was done"
    operation.recover([tmp_path])
    assert not path.exists()

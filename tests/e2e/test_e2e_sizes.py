"""What a checkpoint ends can come back in size, too: many of everything; what could not is refused before.

``bench/sizes.py`` goes on to a thousand processes, ten thousand threads and sixty thousand mappings.
"""

from __future__ import annotations

import resource
from typing import Any

import pytest

from limosa.errors import Refused
from limosa.operation import checkpoint, restore
from limosa.process import sizes

pytestmark = pytest.mark.criu


def test_a_job_with_many_of_everything_comes_back(start, limosa, tmp_path) -> None:
    things = {"shared": 2000, "private": 3000, "files": 3000, "sockets": 3000, "semaphores": 300, "threads": 1000}
    victim = start("many", *(text for pair in things.items() for text in pair), "path", 3900)
    victim.goes_on(1)
    done = limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "-o", "json", rc=0).json
    assert not victim.alive()
    assert [one["id"] for one in done["warnings"] if one["id"] != "image-in-memory"] == []
    assert limosa("inspect", tmp_path / "image", "-o", "json", rc=0).json["descriptors"] > 8000
    limosa("restore", tmp_path / "image", rc=0)
    victim.goes_on(2)
    victim.finish()


@pytest.fixture
def few(monkeypatch) -> Any:
    """A machine where 2,000 files may be open, and nobody may raise that."""
    monkeypatch.setattr(sizes, "limit", lambda: 2000)
    return monkeypatch


def test_more_than_can_come_back_is_refused_before_anything_is_touched(start, few, limosa, tmp_path) -> None:
    victim = start("many", "shared", 2100)
    needed = sizes.descriptors_needed(victim.pid)
    assert 2100 < needed < 2300
    with pytest.raises(Refused) as caught:
        checkpoint(victim.pid, tmp_path / "image")
    assert (caught.value.id, caught.value.exit_code) == ("restore-descriptors", 13)
    assert f"{needed:,} descriptors" in str(caught.value)
    assert not (tmp_path / "image").exists()
    victim.goes_on(1)
    # For another machine; here it is refused as well, before anything is started.
    checkpoint(victim.pid, tmp_path / "image", force=["restore-descriptors"])
    with pytest.raises(Refused) as caught:
        restore(tmp_path / "image")
    assert caught.value.id == "restore-descriptors"
    few.undo()
    limosa("restore", tmp_path / "image", rc=0)
    victim.finish()


def test_a_job_that_has_grown_meanwhile_is_let_go_on(start, monkeypatch, tmp_path) -> None:
    """It was looked at when it had less."""
    victim = start("many", "shared", 1100)
    looks = iter([10**6])
    monkeypatch.setattr(sizes, "limit", lambda: next(looks, 1000))
    with pytest.raises(Exception, match="descriptors to restore") as caught:
        checkpoint(victim.pid, tmp_path / "image")
    assert caught.value.exit_code == 13
    assert not (tmp_path / "image").exists()
    victim.goes_on(1)


def test_a_high_number_counts_as_well(start, limosa, tmp_path) -> None:
    """CRIU's own descriptors go behind the highest number of the job's."""
    most = sizes.limit()
    high = min(most, 100_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]) - 300
    victim = start("many", "high", high)
    assert sizes.descriptors_needed(victim.pid) > high
    limosa("checkpoint", victim.pid, "--output", tmp_path / "image", rc=0)
    limosa("restore", tmp_path / "image", rc=0)
    victim.finish()


def test_more_pipes_than_criu_can_dump_are_refused(start, limosa, tmp_path) -> None:
    victim = start("many", "pipes", 1025)
    error = limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "-o", "json", rc=13).json["error"]
    assert error["id"] == "pipes"
    assert "1,025 pipes" in error["message"]
    victim.goes_on(1)
    limosa("checkpoint", start("many", "pipes", 1024).pid, "--output", tmp_path / "image", rc=0)

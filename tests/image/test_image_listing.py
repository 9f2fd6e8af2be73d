"""``limosa images``: what lies in a folder, told by the manifests, whatever else lies there."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
from image_material import CONTENTS, fill, write_image

import limosa
from limosa.cli.words import age
from limosa.image import Draft, images


def test_whole_damaged_and_unfinished_ones_are_told_apart(tmp_path: Path) -> None:
    write_image(tmp_path / "newer", created="2026-11-21T10:11:12Z").close()
    write_image(tmp_path / "older").close()
    write_image(tmp_path / "broken", created="2026-11-22T00:00:00Z").close()
    (tmp_path / "broken" / "manifest.json").write_bytes(b"{")
    draft = Draft.create(tmp_path / "half")
    fill(draft)
    (tmp_path / "data").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "older")
    os.mkfifo(tmp_path / "pipe")

    found = {Path(one.path).name: one for one in images(tmp_path)}
    assert {name: one.state for name, one in found.items()} == {
        "broken": "damaged",
        "newer": "complete",
        "older": "complete",
        draft.path.name: "writing",
    }
    order = [Path(one.path).name for one in images(tmp_path) if one.state == "complete"]
    assert order == ["older", "newer"]
    older = found["older"]
    assert (older.name, older.pid, older.uid, older.gpus) == ("träining", 41, 1000, ["NVIDIA H200"])
    assert older.bytes >= sum(map(len, CONTENTS.values()))
    assert older.device_bytes == 4 << 30
    assert [one.path for one in images(tmp_path / "older")] == [str(tmp_path / "older")]
    assert limosa.verify(tmp_path / "older").ok
    assert found["broken"].problem


def test_a_hostile_manifest_is_one_that_is_damaged(tmp_path: Path) -> None:
    for name, put in {
        "fifo": os.mkfifo,
        "link": lambda p: p.symlink_to("/etc/passwd"),
        "folder": lambda p: p.mkdir(),
        "endless": lambda p: p.symlink_to("/dev/zero"),
    }.items():
        (tmp_path / name).mkdir()
        put(tmp_path / name / "manifest.json")
    assert {one.state for one in images(tmp_path)} == {"damaged"}


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(limosa.NoSuchImage):
        images(tmp_path / "none")


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "5 s"), (600, "10 min"), (3 * 3600, "3 h"), (9 * 86400, "9 days"), (-5, "0 s")]
)
def test_how_old_it_is(seconds: int, said: str) -> None:
    now = datetime.datetime(2026, 11, 23, tzinfo=datetime.timezone.utc)
    then = now - datetime.timedelta(seconds=seconds)
    assert age(then.strftime("%Y-%m-%dT%H:%M:%SZ"), now) == said
    assert age("", now) == "?"

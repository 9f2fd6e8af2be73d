"""An image that an older Limosa wrote, before images held device memory, is read as ever.

``schema-1.tar.gz`` was made by ``limosa checkpoint`` of commit 41dc234, of a program of 736 bytes that waits;
what the kernel's builder had left in the vDSO's pages was overwritten, and CRIU's logs are left out.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from limosa.image import open_image

OLD = Path(__file__).with_name("schema-1.tar.gz")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(OLD) as packed:
        packed.extractall(tmp_path)
    return tmp_path / "image"


def test_all_that_it_says_is_understood(old: Path, limosa: Callable[..., Any]) -> None:
    raw = json.loads((old / "manifest.json").read_bytes())
    said = limosa("inspect", old, "-o", "json", rc=0).json
    for field in ("created", "criu", "kernel", "hostname", "options", "gpus", "files"):
        assert said[field] == raw[field], field
    assert said["job"] == {**raw["job"], "sees": "", "seen": []}
    assert (said["tree"][0]["pid"], said["tree"][0]["command"]) == (26863, ["./program"])
    assert (said["bytes"], said["device_bytes"], said["chunks"]) == (sum(f["size"] for f in raw["files"]), 0, 0)
    assert [path.rpartition("/")[2] for path in (f["path"] for f in said["open_files"])] == ["log", "log", "program"]
    assert "./program" in limosa("inspect", old, rc=0).stdout


def test_it_is_verified_and_what_a_restore_needs_is_there(old: Path, limosa: Callable[..., Any]) -> None:
    said = limosa("verify", old, "-o", "json", rc=0).json
    assert (said["ok"], said["bytes"], len(said["files"])) == (True, 23557, 12)
    manifest = open_image(old).manifest
    assert manifest.schema == 1
    assert manifest.device == []
    assert [process.pid for process in manifest.tree] == [manifest.job.pid] == [26863]
    pages = old / "criu" / "pages-1.img"
    pages.write_bytes(pages.read_bytes()[:-1] + b"?")
    said = limosa("verify", old, "-o", "json", rc=16).json
    assert [problem["path"] for problem in said["problems"]] == ["criu/pages-1.img"]

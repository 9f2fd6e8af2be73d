"""A runc that was killed while it restored has left the container's root file system mounted in its notes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from limosa.containers import runc_leftovers
from limosa.errors import FailedUndone

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """The folder of a container, in which a root file system is mounted."""
    folder, rootfs = tmp_path / "state" / "one", tmp_path / "rootfs"
    for path in (folder / "criu-root", rootfs):
        path.mkdir(parents=True)
    (rootfs / "file").write_text("words")
    for _ in range(2):
        subprocess.run(["mount", "--bind", rootfs, folder / "criu-root"], check=True)
    yield folder
    while not subprocess.run(
        ["umount", "--lazy", folder / "criu-root"], check=False, stderr=subprocess.DEVNULL
    ).returncode:
        pass
    assert (rootfs / "file").read_text() == "words"


def test_the_folder_goes_and_what_was_mounted_in_it_stays(left: Path) -> None:
    os.mkfifo(left / "exec.fifo")
    assert runc_leftovers.begun(str(left.parent), "one")
    runc_leftovers.take_away(str(left.parent), "one")
    assert not left.exists()
    runc_leftovers.take_away(str(left.parent), "one")


def test_one_with_a_state_is_unmounted_and_not_removed(left: Path) -> None:
    (left / "state.json").write_text("{}")
    assert not runc_leftovers.begun(str(left.parent), "one")
    runc_leftovers.take_away(str(left.parent), "one")
    assert os.listdir(left / "criu-root") == ["file"]
    runc_leftovers.unmount_root(str(left.parent), "one")
    assert os.listdir(left / "criu-root") == []
    assert (left / "state.json").exists()


def test_what_is_not_of_runc_is_not_removed(left: Path) -> None:
    (left / "other").mkdir()
    (left / "other" / "file").write_text("")
    with pytest.raises(FailedUndone, match="not empty"):
        runc_leftovers.take_away(str(left.parent), "one")
    assert (left / "other" / "file").exists()


@pytest.mark.parametrize("name", ["..", "two", "../state/one", "link"])
def test_no_other_folder_is_touched(left: Path, name: str) -> None:
    (left.parent / "link").symlink_to(left)
    runc_leftovers.take_away(str(left.parent), name)
    with contextlib.suppress(FailedUndone):
        runc_leftovers.unmount_root(str(left.parent), name)
    assert os.listdir(left / "criu-root") == ["file"]


def test_nothing_of_somebody_elses_is_touched(left: Path) -> None:
    os.chown(left.parent, 1001, 1001)
    assert not runc_leftovers.begun(str(left.parent), "one")
    with pytest.raises(FailedUndone):
        runc_leftovers.unmount_root(str(left.parent), "one")
    assert os.listdir(left / "criu-root") == ["file"]

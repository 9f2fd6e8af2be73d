"""Removing: images and litter, nothing else, and never through a symlink; whose litter it is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from image_material import CONTENTS, FailingFiles, NotingFiles, fill, manifest, write_image

from limosa.errors import Busy, FailedUndone, NoSuchImage, UsageError
from limosa.image import Draft, open_image, remove, unfinished, verify
from limosa.image.unfinished import this_process
from limosa.operation import recover


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_image(tmp_path / "image").close()
    return tmp_path / "image"


def test_an_image_is_removed_with_its_logs(whole: Path) -> None:
    (whole / "log/dump.log").write_text("x" * 1000)
    assert remove(whole) > sum(map(len, CONTENTS.values())) + 1000
    assert list(whole.parent.iterdir()) == []
    with pytest.raises(NoSuchImage):
        remove(whole)


@pytest.mark.parametrize("damage", ["manifest.json", "manifest.blake3", "criu/pages-1.img", "link", "extra"])
def test_a_damaged_image_is_removed_too(whole: Path, damage: str) -> None:
    if damage == "link":
        (whole / "criu/link").symlink_to("/etc/hostname")
    elif damage == "extra":
        (whole / "criu/extra").touch()
    else:
        (whole / damage).unlink()
    remove(whole)
    assert list(whole.parent.iterdir()) == []
    assert Path("/etc/hostname").exists()


@pytest.mark.parametrize(
    "what", ["file", "symlink", "empty", "other", "image and more", "folder in criu", "criu only", "manifest only"]
)
def test_anything_else_is_refused_and_untouched(whole: Path, tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    if what == "file":
        place.touch()
    elif what == "symlink":
        place.symlink_to(whole)
    elif what == "empty":
        place.mkdir()
    elif what == "other":
        (place / "data").mkdir(parents=True)
    elif what == "image and more":
        place = whole.rename(place)
        (place / "thesis.tex").touch()
    elif what == "folder in criu":
        place = whole.rename(place)
        (place / "criu/thesis").mkdir()
    elif what == "criu only":
        (place / "criu").mkdir(parents=True)
    else:
        place.mkdir()
        (place / "manifest.json").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError):
        remove(place)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_symlink_in_an_image_points_to_survives(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("kept")
    (whole / "log").rmdir()
    (whole / "log").symlink_to(tmp_path / "precious")
    remove(whole)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious/file").read_text() == "kept"


def dead_owner() -> str:
    """The identity of a process that has ended."""
    child = subprocess.Popen(["sleep", "30"])
    start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    child.kill()
    child.wait(timeout=60)
    return f"{child.pid}@{start}"


def change_marker(folder: Path, **fields: str) -> None:
    marker = folder / "unfinished.json"
    marker.write_bytes(msgspec.json.encode(msgspec.json.decode(marker.read_bytes()) | fields))


def test_litter_says_whose_it_is(tmp_path: Path) -> None:
    with Draft.create(tmp_path / "image", operation="op-9") as draft:
        (one,) = unfinished(tmp_path)
        assert (one.path, one.dest, one.operation) == (draft.path, tmp_path / "image", "op-9")
        assert (one.owner, one.state) == (this_process(), "alive")
        for fields, state in [
            ({"owner": dead_owner()}, "dead"),
            ({"owner": f"{one.owner}0"}, "dead"),  # the pid was reused
            ({"owner": "nonsense"}, "dead"),
            ({"owner": one.owner, "boot": "an earlier one"}, "dead"),
            ({"boot": one_boot(), "pid_namespace": "pid:[1]"}, "elsewhere"),
            ({"host": "another"}, "elsewhere"),
        ]:
            change_marker(draft.path, **fields)
            assert unfinished(tmp_path)[0].state == state, fields
        for garbage in (b"", b"{}", b"null", b"\xff", b'{"owner":"1@2","dest":"zz"}', b" " * (1 << 17)):
            (draft.path / "unfinished.json").write_bytes(garbage)
            (one,) = unfinished(tmp_path)
            assert (one.state, one.owner, one.dest) == ("dead", "", None)
    assert unfinished(tmp_path) == []


def one_boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_only_temporary_names_count_as_litter(whole: Path) -> None:
    for name in (
        ".image.limosa-partial-",
        ".image.limosa-partial-xyz12345",
        "image.limosa-partial-01234567",
        ".limosa",
    ):
        (whole.parent / name).mkdir()
    (whole.parent / ".file.limosa-partial-0123456789abcdef").touch()
    (whole.parent / ".link.limosa-partial-0123456789abcdef").symlink_to(whole)
    assert unfinished(whole.parent) == []


def test_litter_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "30"])
    try:
        start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        with Draft.create(tmp_path / "image", owner=f"{child.pid}@{start}") as draft:
            with pytest.raises(Busy, match=str(child.pid)) as e:
                remove(draft.path)
            assert e.value.exit_code == 19
            child.kill()
            child.wait(timeout=60)
            remove(draft.path)
            assert list(tmp_path.iterdir()) == []
    finally:
        child.kill()
        child.wait()


def test_what_was_removed_is_not_committed_by_a_writer_who_lives_after_all(tmp_path: Path) -> None:
    """Taking it away and committing it are both one rename: one of the two wins, never both."""
    with Draft.create(tmp_path / "image") as draft:
        fill(draft)
        draft.prepare(manifest())
        remove(draft.path)  # this process's own, so it is allowed to
        with pytest.raises(FailedUndone, match="removed"):
            draft.publish()
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_leaves_the_image_or_litter(tmp_path: Path) -> None:
    write_image(tmp_path / "image").close()
    noting = NotingFiles()
    remove(tmp_path / "image", files=noting)
    for n in range(len(noting.done)):
        write_image(tmp_path / "image").close()
        with pytest.raises(OSError, match="error"):
            remove(tmp_path / "image", files=FailingFiles(n, errno.EIO))
        if (tmp_path / "image").exists():
            open_image(tmp_path / "image").close()
            remove(tmp_path / "image")
        else:
            (litter,) = unfinished(tmp_path)
            remove(litter.path)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_recover_removes_no_whole_image_that_a_folders_owner_has_renamed(tmp_path: Path) -> None:
    """He could not remove it himself: it is root's."""
    home = tmp_path / "home"
    home.mkdir()
    write_image(home / "image").close()
    litter = home / ".image.limosa-partial-0123456789abcdef"
    (home / "image").rename(litter)
    os.chown(home, 4242, 4242)
    (found,) = recover([home])
    assert found.exit_code == UsageError.exit_code
    assert "whole image" in found.error
    litter.rename(home / "image")
    with open_image(home / "image", trust=False) as image:
        assert verify(image).ok
    (home / "image").rename(litter)
    os.chown(home, 0, 0)  # where nobody else can have done it, a removal has been killed
    (found,) = recover([home])
    assert not found.error
    assert os.listdir(home) == []


@pytest.mark.parametrize("function", ["open_folder", "read_file"])
def test_who_can_open_no_file_more_takes_nobodys_folder_for_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """It may be a living process's, whose marker cannot be read just now."""
    draft = Draft.create(tmp_path / "image")

    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as changed:
        changed.setattr(sys.modules["limosa.image.unfinished"], function, fails)
        with pytest.raises(OSError, match="Too many open files") as raised:
            unfinished(tmp_path)
        assert raised.value.__cause__ is None
        with pytest.raises(OSError, match="Too many open files") as raised:
            remove(draft.path)
        assert raised.value.__cause__ is not raised.value, "who looks for its cause would look for ever"
    assert draft.path.exists()
    draft.discard()
    assert list(tmp_path.iterdir()) == []

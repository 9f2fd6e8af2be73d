"""Files with names that CRIU wants: made again from what is there, and taken away where nothing came of it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from limosa.errors import FailedUndone
from limosa.image import JobRecord, LinkedFile, Manifest, TreeProcess
from limosa.operation.linked_files import Relink, names_to_make, take_away


def image(file: LinkedFile) -> Manifest:
    return Manifest(
        created="2026-11-21T04:05:06Z",
        criu="4.2.1",
        kernel="6.18",
        job=JobRecord(pid=4711),
        tree=[TreeProcess(pid=4711, ppid=1, start_time=1)],
        linked_files=[file],
    )


@pytest.fixture
def criu_fd(tmp_path):
    (tmp_path / "criu").mkdir()
    (tmp_path / "criu" / "linked-0.img").write_bytes(b"content")
    fd = os.open(tmp_path / "criu", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def file(tmp_path) -> LinkedFile:
    """A file with its two names, both there."""
    path = tmp_path / "link_remap.7"
    path.write_bytes(b"content")
    path.chmod(0o640)
    os.link(path, tmp_path / "other")
    info = path.stat()
    return LinkedFile(
        path=str(path),
        names=[str(tmp_path / "other")],
        size=info.st_size,
        mode=info.st_mode,
        uid=info.st_uid,
        gid=info.st_gid,
        inode=info.st_ino,
        copy="criu/linked-0.img",
    )


def the_one(file: LinkedFile) -> Relink:
    reasons, todo = names_to_make(image(file))
    assert reasons == []
    (one,) = todo
    return one


def refused(file: LinkedFile) -> str:
    reasons, todo = names_to_make(image(file))
    assert todo == []
    (reason,) = reasons
    assert reason.exit_code == 23
    return reason.id


def here(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_ino, p.read_bytes()) for p in folder.iterdir() if p.is_file()}


def test_all_of_it_is_there(tmp_path, file, criu_fd):
    before = here(tmp_path)
    relink = the_one(file)
    relink.do(criu_fd)
    assert here(tmp_path) == before
    relink.undo()
    assert here(tmp_path) == before


@pytest.mark.parametrize("gone", ["link_remap.7", "other"])
def test_one_name_is_made_from_the_other(tmp_path, file, criu_fd, gone):
    before = here(tmp_path)
    (tmp_path / gone).unlink()
    relink = the_one(file)
    assert relink.missing == [str(tmp_path / gone)]
    relink.do(criu_fd)
    assert here(tmp_path) == before
    relink.undo()
    assert set(here(tmp_path)) == set(before) - {gone}


def test_a_file_on_disk_keeps_what_is_in_it(tmp_path, file, criu_fd):
    (tmp_path / "link_remap.7").write_bytes(b"CONTENT")
    the_one(file).do(criu_fd)
    assert (tmp_path / "other").read_bytes() == b"CONTENT"


def test_without_any_name_it_is_made_from_the_copy(tmp_path, file, criu_fd):
    for name in (file.path, *file.names):
        os.unlink(name)
    relink = the_one(file)
    relink.do(criu_fd)
    made = here(tmp_path)
    assert made["link_remap.7"] == made["other"]
    assert made["other"][1] == b"content"
    assert os.stat(file.path).st_mode == file.mode
    relink.undo()
    assert here(tmp_path) == {}


def test_who_recovers_takes_away_what_a_dead_restore_made(tmp_path, file, criu_fd):
    for name in (file.path, *file.names):
        os.unlink(name)
    relink = the_one(file)
    noted = msgspec.to_builtins(msgspec.structs.replace(relink, made=relink.missing))
    relink.do(criu_fd)
    msgspec.convert(noted, Relink).undo()
    assert here(tmp_path) == {}


def test_without_any_name_and_without_a_copy_nothing_can_be_made(tmp_path, file):
    for name in (file.path, *file.names):
        os.unlink(name)
    assert refused(msgspec.structs.replace(file, copy="")) == "file-missing"


def test_another_file_under_that_name_stays_what_it_is(tmp_path, file):
    (tmp_path / "link_remap.7").unlink()
    (tmp_path / "link_remap.7").write_bytes(b"another one")
    assert refused(file) == "file-changed"
    take_away([file])
    assert (tmp_path / "link_remap.7").read_bytes() == b"another one"


def test_a_folder_that_leads_elsewhere_is_not_written_to(tmp_path, file):
    folder = tmp_path / "real"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    moved = msgspec.structs.replace(file, path=str(tmp_path / "link" / "link_remap.7"), names=[])
    assert refused(moved) == "file-changed"
    assert refused(msgspec.structs.replace(file, names=["/etc/passwd"])) == "file-changed"


def test_what_cannot_be_made_leaves_nothing(tmp_path, file, criu_fd):
    for name in (file.path, *file.names):
        os.unlink(name)
    relink = the_one(file)
    relink.file.names.append(str(tmp_path / "no folder" / "name"))
    with pytest.raises(FailedUndone):
        relink.do(criu_fd)
    assert here(tmp_path) == {}


def test_the_names_go_with_the_image(tmp_path, file):
    take_away([file])
    assert set(here(tmp_path)) == {"other"}

"""Making, removing and looking at images as root where others own or exchange what leads there.

The users are real: what they own is uid 4242's.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from image_material import fill, write_image

from limosa.errors import FailedUndone, PermissionDenied, UsageError
from limosa.image import Draft, files, images, open_image, remove, trust, unfinished
from limosa.image.files import Files
from limosa.operation import recover_images
from limosa.operation.recover import recover

USER = 4242
verb = importlib.import_module("limosa.operation.remove_image")  # the function has its name

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def no_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder of the user's in /tmp."""
    with tempfile.TemporaryDirectory(prefix="limosa-others-") as name:
        os.chown(name, USER, USER)
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """A folder of root's with an image and what an unfinished one left."""
    folder = tmp_path / "roots"
    folder.mkdir()
    write_image(folder / "image").close()
    litter(folder)
    return folder


def litter(folder: Path) -> Path:
    draft = Draft.create(folder / "other", owner="1@1")
    fill(draft)
    draft.close()
    return draft.path


def link(path: Path, target: Path, owner: int = USER) -> Path:
    path.symlink_to(target)
    os.lchown(path, owner, owner)
    return path


def all_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_root_removes_nothing_behind_a_users_link(theirs: Path, roots: Path) -> None:
    link(theirs / "images", roots)
    before = all_of(roots)
    for name in os.listdir(roots):
        with pytest.raises(PermissionDenied, match="symbolic link of another user's"):
            remove(theirs / "images" / name)
    assert all_of(roots) == before


def test_a_link_is_no_image_and_whose_it_is_is_said(theirs: Path, roots: Path) -> None:
    before = all_of(roots)
    with pytest.raises(UsageError, match=f"symbolic link of uid {USER}'s"):
        remove(link(theirs / "image", roots / "image"))
    assert all_of(roots) == before


def test_roots_own_links_lead_to_what_is_removed(tmp_path: Path, roots: Path) -> None:
    remove(link(tmp_path / "images", roots, 0) / "image")
    assert not (roots / "image").exists()


def test_rm_and_recover_say_so_and_exit_with_11(limosa, theirs: Path, roots: Path) -> None:
    link(theirs / "images", roots)
    before = all_of(roots)
    said = limosa("rm", theirs / "images" / "image", rc=11)
    assert "symbolic link of another user's" in said.stderr
    said = limosa("recover", theirs / "images", rc=11)
    assert said.stderr.startswith("limosa: ")
    assert "symbolic link of another user's" in said.stderr
    assert all_of(roots) == before


def test_recover_looks_for_nothing_behind_a_users_link(theirs: Path, roots: Path) -> None:
    before = all_of(roots)
    with pytest.raises(PermissionDenied):
        recover(link(theirs / "images", roots))
    assert all_of(roots) == before
    with pytest.raises(PermissionDenied):
        unfinished(theirs / "images")


def test_recover_by_root_in_a_users_folder_removes_what_is_there(theirs: Path) -> None:
    path = litter(theirs)
    (one,) = [r for r in recover(theirs) if r.kind == "folder"]
    assert "removed" in one.did
    assert not path.exists()


class Exchanging(Files):
    """At the first renaming the user, whose folder it is, puts another folder of root's in the image's place."""

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        if not Path(f"/proc/self/fd/{dir_fd}/aside").exists():
            os.rename(old, "aside", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.rename("thesis", old, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        super().rename(old, new, dir_fd)


def test_what_takes_an_images_place_while_it_is_removed_stays(theirs: Path) -> None:
    write_image(theirs / "image").close()
    (theirs / "thesis").mkdir()
    (theirs / "thesis" / "file").write_text("root's")
    with pytest.raises(FailedUndone, match="in its place"):
        remove(theirs / "image", files=Exchanging())
    assert sorted(os.listdir(theirs)) == ["aside", "image"]
    assert (theirs / "image" / "file").read_text() == "root's"


def test_rm_removes_no_table_of_a_log_that_stood_there_for_a_moment(
    theirs: Path, roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user has a link to root's image in the way until the table is looked for, and then his own folder."""
    mine, tables = theirs / "image", []
    (roots / "image/log/dump.log").write_text("CRIU run id = 0123456789abcdef\n")
    write_image(theirs / "own").close()
    link(mine, roots / "image")
    monkeypatch.setattr(verb, "tables_of", lambda fd: [os.readlink(f"/proc/self/fd/{fd}")])
    monkeypatch.setattr(verb, "remove_table", tables.append)
    real = verb.remove_folder

    def removed(path: Path, **more: object) -> int:
        mine.unlink()
        (theirs / "own").rename(mine)
        return real(path, **more)

    monkeypatch.setattr(verb, "remove_folder", removed)
    verb.remove_image(mine)
    assert not [table for table in tables if str(roots) in table]


@pytest.mark.parametrize("whose", ["root's", "his"])
def test_recover_takes_the_name_of_a_table_from_no_log_of_a_users(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Root's checkpoint into a user's folder was killed; the user's log names the table of another job."""
    write_image(theirs / "image").close()
    log = theirs / "image/log/dump.log"
    log.write_text("CRIU run id = 0123456789abcdef\n")
    if whose == "his":
        (theirs / "image").rename(theirs / "aside")
        (theirs / "image/log").mkdir(parents=True)
        (theirs / "image/log/dump.log").write_text("CRIU run id = 0123456789abcdef\n")
        for path in (theirs / "image", theirs / "image/log", theirs / "image/log/dump.log"):
            os.chown(path, USER, USER)
    asked: list[bool] = []
    monkeypatch.setattr(recover_images, "release_network", lambda tree, fd, pid: asked.append(fd >= 0))
    header = SimpleNamespace(draft="", image=str(theirs / "image"), tree=[], roots=[SimpleNamespace(pid=1)])
    recover_images._release_network(SimpleNamespace(header=header))
    assert asked == [whose == "root's"]


def test_root_writes_no_image_behind_a_users_link(theirs: Path, roots: Path) -> None:
    link(theirs / "images", roots)
    before = all_of(roots)
    with pytest.raises(PermissionDenied, match="symbolic link of another user's"):
        Draft.create(theirs / "images" / "new")
    assert all_of(roots) == before


def test_a_folder_that_a_user_puts_in_place_of_a_new_one_gets_nothing(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder around it is his: he can exchange the temporary folder before it is opened."""
    real = os.mkdir

    def mkdir(name: str, *more: object, **where: int) -> None:
        real(name, *more, **where)
        if "dir_fd" in where:
            os.rename(name, "aside", src_dir_fd=where["dir_fd"], dst_dir_fd=where["dir_fd"])
            real(name, **where)
            os.chown(name, USER, USER, dir_fd=where["dir_fd"])

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(PermissionDenied, match="another folder"):
        Draft.create(theirs / "image")
    assert not [path for path in theirs.rglob("*") if path.is_file()]


def test_looking_at_somebody_elses_image_says_that_it_would_not_be_restored(limosa, theirs: Path) -> None:
    write_image(theirs / "image").close()
    for verb_ in ("verify", "inspect"):
        said = limosa(verb_, theirs / "image", rc=0)
        assert f"limosa restore would refuse this image: {theirs} belongs to user {USER}" in said.stderr
        warned = limosa(verb_, theirs / "image", "-o", "json", rc=0).json["warnings"]
        assert [w["id"] for w in warned] == ["untrusted-image"]
    (listed,) = images(theirs)
    assert listed.state == "complete"
    assert f"belongs to user {USER}" in listed.problem
    assert "restore would refuse it" in limosa("images", theirs, "-o", "json", rc=0).stdout


def test_nothing_is_said_of_roots_own_in_a_sticky_folder(theirs: Path) -> None:
    os.chown(theirs, 0, 0)
    theirs.chmod(0o1777)
    write_image(theirs / "image").close()
    assert images(theirs)[0].problem == ""
    with open_image(theirs / "image") as image:
        assert trust.doubt(image.fd, theirs / "image") is None
    os.chown(theirs / "image", USER, USER)
    assert "belongs to user" in images(theirs)[0].problem


def test_a_folder_that_took_an_images_place_is_noticed(roots: Path) -> None:
    with open_image(roots / "image", trust=False) as image:
        (roots / "image").rename(roots / "aside")
        write_image(roots / "image").close()
        assert trust.doubt(image.fd, roots / "image") == "another folder has taken its place"


@pytest.fixture
def other_root(tmp_path: Path, theirs: Path) -> Iterator[tuple[Path, Path]]:
    """The /proc/PID/root of a process of root's that has a folder of its own mounted over one of ours; that folder."""
    place = tmp_path / "place"
    place.mkdir()
    script = 'mount -t tmpfs none "$1" && echo ready && read -r _'
    argv = ["unshare", "-m", "--propagation", "private", "sh", "-ec", script, "sh", str(place)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield Path(f"/proc/{process.pid}/root"), place


def test_the_root_of_another_process_is_not_this_machines(other_root: tuple[Path, Path]) -> None:
    """What such a link says is "/": root removed the image of that name here, and wrote to the folder here."""
    root, place = other_root
    inner = Path(f"{root}{place}")
    write_image(place / "image").close()
    write_image(inner / "image").close()
    draft = Draft.create(inner / "new", owner="1@1")
    draft.close()
    assert [draft.path.name] == [path.name for path in inner.iterdir() if path.name != "image"]
    with open_image(inner / "image") as image:
        assert os.path.samestat(os.fstat(image.fd), os.stat(inner / "image"))
    remove(inner / "image")
    assert not (inner / "image").exists()
    assert [path.name for path in place.iterdir()] == ["image"]


def test_a_users_file_system_says_of_no_link_that_it_is_roots(
    theirs: Path, roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE: it can claim any owner."""
    link(theirs / "images", roots, 0)
    os.close(trust.open_named(theirs / "images"))
    monkeypatch.setattr(trust, "server_of", lambda fd: USER)
    with pytest.raises(PermissionDenied, match=f"a file system that user {USER} serves"):
        trust.open_named(theirs / "images")


def test_where_new_files_are_called_anothers_a_new_folder_may_be_as_well(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS calls what root makes nobody's; nobody has exchanged anything."""
    real = os.fstat
    nobodys = SimpleNamespace(st_uid=65534)
    monkeypatch.setattr(files.os, "fstat", lambda fd: nobodys)
    fd = os.open(theirs, os.O_RDONLY)
    try:
        assert files._owner_of_new(fd) == 65534
        os.close(Files().mkdir("new", fd))
    finally:
        monkeypatch.setattr(files.os, "fstat", real)
        os.close(fd)


def test_an_image_is_not_written_to_a_file_system_that_another_user_serves(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE: it can say of any folder whose it is, and he reads along."""
    monkeypatch.setattr(trust, "server_of", lambda fd: USER)
    with pytest.raises(PermissionDenied, match=f"file system that user {USER} serves"):
        Draft.create(theirs / "image")


def test_what_took_an_images_place_goes_back_over_nobodys_file(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third user took the name while root had the wrong thing under another."""
    write_image(theirs / "image").close()
    real = Files.rename

    def rename(self: Files, old: str, new: str, dir_fd: int) -> None:
        if old == "image":
            (theirs / "image").rename(theirs / "aside")
            (theirs / "image").write_text("a decoy")
            real(self, old, new, dir_fd)
            (theirs / "image").write_text("another's")
        else:
            real(self, old, new, dir_fd)

    monkeypatch.setattr(Files, "rename", rename)
    with pytest.raises(FailedUndone, match="something else in its place, which is") as raised:
        remove(theirs / "image")
    assert (theirs / "image").read_text() == "another's"
    assert Path(str(raised.value).split("which is ")[1].split(" now")[0]).read_text() == "a decoy"


def test_an_image_whose_name_is_no_text_is_removed(tmp_path: Path, runtime: Path) -> None:
    """Nothing can be noted of it, so nobody else has it either."""
    write_image(tmp_path / "image").close()
    strange = os.path.join(os.fsencode(tmp_path), b"\xed\xb2")
    os.rename(tmp_path / "image", strange)
    assert verb.remove_image(os.fsdecode(strange)) > 0
    assert not os.path.exists(strange)

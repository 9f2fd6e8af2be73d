"""Writing: modes, the destination, cancelling, and a disk that fails at every change there is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_material import CONTENTS, FailingFiles, NotingFiles, fill, manifest, write_image

from limosa.errors import (
    CancelledUndone,
    DestinationExists,
    FailedUndone,
    LimosaError,
    NoRoomOnHost,
    PermissionDenied,
    UsageError,
)
from limosa.image import Draft, free_bytes, open_image, remove, unfinished, verify
from limosa.progress import Progress


def is_whole(path: Path) -> bool:
    with open_image(path) as image:
        return verify(image).ok


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    dest = tmp_path / "image"
    with Draft.create(dest) as draft:
        assert {oct(p.stat().st_mode) for p in (draft.path, draft.path / "criu", draft.path / "log")} == {"0o40700"}
        fill(draft)
        (draft.path / "log" / "dump.log").write_text("written by CRIU")
        draft.commit(manifest()).close()
        (dest / "log" / "stats-dump").write_bytes(b"written after the commit")
        draft.secure_log()
    for path in [dest, *dest.rglob("*")]:
        assert oct(path.stat().st_mode & 0o7777) == ("0o700" if path.is_dir() else "0o600"), path
    assert {p.name for p in dest.iterdir()} == {"manifest.json", "manifest.blake3", "criu", "log"}


def test_a_folder_whose_children_inherit_a_group_changes_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    write_image(tmp_path / "image").close()
    assert oct((tmp_path / "image").stat().st_mode) == "0o40700"


def test_what_is_committed_is_what_is_opened(tmp_path: Path) -> None:
    steps: list[Progress] = []
    with Draft.create(tmp_path / "image", operation="op-7") as draft:
        fill(draft)
        image = draft.commit(manifest(), steps.append)
        timings = draft.timings
    with image, open_image(tmp_path / "image") as again:
        assert (again.id, again.manifest) == (image.id, image.manifest)
        assert again.id == (tmp_path / "image/manifest.blake3").read_text().strip()
        assert {f.path: f.size for f in again.manifest.files} == {f"criu/{n}": len(c) for n, c in CONTENTS.items()}
        assert os.listdir(image.criu_fd) == os.listdir(again.criu_fd)
        total = sum(map(len, CONTENTS.values()))
        assert (steps[-1].step, steps[-1].done, steps[-1].total) == ("hash", total, total)
        assert timings.bytes == again.manifest.bytes == total
        assert 0 < timings.hash < timings.total
        assert 0 < timings.sync < timings.total


def test_discarding_what_is_committed_changes_nothing(tmp_path: Path) -> None:
    with Draft.create(tmp_path / "image") as draft:
        fill(draft)
        draft.commit(manifest()).close()
        assert draft.discard() == 0
    assert is_whole(tmp_path / "image")


def test_hashes_are_those_of_b3sum(tmp_path: Path) -> None:
    """Known answers (BLAKE3's test vectors), below and above the size from which several threads hash."""
    vector = bytes(i % 251 for i in range(102400))
    with Draft.create(tmp_path / "image") as draft:
        fill(draft, {"empty": b"", "long": vector, "large": vector * 100})
        with draft.commit(manifest(), threads=4) as image:
            found = {f.path: f.blake3 for f in image.manifest.files}
            assert verify(image, threads=1).ok  # one thread finds what four did
    assert found["criu/empty"] == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert found["criu/long"].startswith("bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085")


def test_a_destination_that_is_not_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    write_image(tmp_path / "image").close()
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "full", "link", "dangling", "image", "image/"):
        with pytest.raises(DestinationExists) as e:
            Draft.create(f"{tmp_path}/{name}")
        assert e.value.exit_code == 17
    with pytest.raises(DestinationExists):
        Draft.create("/")
    for name in ("nowhere/image", "file/image"):
        with pytest.raises(UsageError):
            Draft.create(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir(mode=0o755)
    write_image(tmp_path / "image").close()
    assert is_whole(tmp_path / "image")
    assert oct((tmp_path / "image").stat().st_mode) == "0o40700"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_an_empty_folder_that_is_a_mount_point_is_refused_beforehand(tmp_path: Path) -> None:
    """rename(2) would say EBUSY, after the job had stood still for the dump. Bind mounts of the same disk too."""
    (tmp_path / "image").mkdir()
    (tmp_path / "other").mkdir()
    bind = f"mount --bind {tmp_path}/other {tmp_path}/image"
    script = f"{bind} && exec {sys.executable} -c '{MOUNT_TEST}' {tmp_path}/image"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


MOUNT_TEST = """
import sys
from limosa.errors import UsageError
from limosa.image import Draft
try:
    Draft.create(sys.argv[1])
except UsageError as e:
    assert "mount point" in str(e)
    print("refused")
"""


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("file", "is a file already", "another folder"),
        ("full", "is a folder with things in it", "full/image"),
        ("link", "is a symbolic link", "another folder"),
        ("dangling", "is a symbolic link", "another folder"),
        ("image", "is an image already", "limosa rm"),
        ("nowhere/image", "there is no folder", "mkdir -p"),
        ("file/image", "is no folder to put the image in", "another place"),
    ],
)
def test_what_stands_at_the_destination_is_said(tmp_path: Path, name: str, what: str, hint: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to("full")
    (tmp_path / "dangling").symlink_to("nowhere")
    write_image(tmp_path / "image").close()
    with pytest.raises((DestinationExists, UsageError)) as caught:
        Draft.create(tmp_path / name)
    assert what in caught.value.message
    assert hint in caught.value.hint


def test_what_appears_at_the_destination_meanwhile_is_never_replaced(tmp_path: Path) -> None:
    dest = tmp_path / "image"
    with Draft.create(dest) as draft:
        fill(draft)
        dest.mkdir()
        (dest / "precious").touch()
        with pytest.raises(DestinationExists):
            draft.commit(manifest())
    assert [p.name for p in tmp_path.rglob("*")] == ["image", "precious"]
    (dest / "precious").unlink()
    dest.rmdir()
    with Draft.create(dest) as draft:
        fill(draft)
        dest.write_text("a file")
        with pytest.raises(DestinationExists):
            draft.commit(manifest())
    assert [p.name for p in tmp_path.iterdir()] == ["image"]
    assert dest.read_text() == "a file"


def test_two_at_once_to_one_destination_leave_one_whole_image(tmp_path: Path) -> None:
    dest = tmp_path / "image"
    with Draft.create(dest) as first, Draft.create(dest) as second:
        fill(first)
        fill(second, {"a.img": b"other"})
        second.commit(manifest()).close()
        with pytest.raises(DestinationExists):
            first.commit(manifest())
    assert is_whole(dest)
    assert [p.name for p in (dest / "criu").iterdir()] == ["a.img"]
    assert [p.name for p in tmp_path.iterdir()] == ["image"]


def test_a_name_of_255_bytes_is_possible(tmp_path: Path) -> None:
    for name in ("x" * 255, "ä" * 127, "\udcff" * 255):
        write_image(tmp_path / name).close()
        assert is_whole(tmp_path / name)
        remove(tmp_path / name)


def test_relative_destinations_and_symlinked_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    write_image(Path("link/image")).close()
    assert is_whole(tmp_path / "real" / "image")


def test_the_log_may_be_open_and_written_to_all_along(tmp_path: Path) -> None:
    """CRIU works in log/, has its log open during the commit (its post-dump action), and writes stats-dump later."""
    with Draft.create(tmp_path / "image") as draft:
        fill(draft)
        script = "exec >dump.log; echo before; echo ready >&2; read go; echo after; echo stats >stats-dump"
        criu = subprocess.Popen(
            ["sh", "-c", f"cd /proc/self/fd/{draft.log_fd} && {script}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[draft.log_fd],
        )
        try:
            assert criu.stderr is not None
            assert criu.stderr.readline() == b"ready\n"
            draft.commit(manifest()).close()
            criu.communicate(b"go\n", timeout=120)
        finally:
            criu.kill()
            criu.wait()
        draft.secure_log()
    assert (tmp_path / "image/log/dump.log").read_text() == "before\nafter\n"
    assert (tmp_path / "image/log/stats-dump").read_text() == "stats\n"
    assert is_whole(tmp_path / "image")


def test_cancelled_before_the_commit_point_leaves_nothing(tmp_path: Path) -> None:
    for when in ("before", "while hashing"):
        cancel = threading.Event()
        if when == "before":
            cancel.set()
        with Draft.create(tmp_path / "image") as draft:
            fill(draft)
            with pytest.raises(CancelledUndone):
                draft.commit(manifest(), lambda _, c=cancel: c.set(), cancel=cancel)
        assert list(tmp_path.iterdir()) == []
    write_image(tmp_path / "image").close()


@pytest.mark.parametrize("kind", ["nothing", "folder", "symlink", "name"])
def test_what_criu_would_not_have_written_is_not_committed(tmp_path: Path, kind: str) -> None:
    with Draft.create(tmp_path / "image") as draft:
        criu = draft.path / "criu"
        if kind == "folder":
            (criu / "folder").mkdir()
        elif kind == "symlink":
            (criu / "link").symlink_to("/etc/passwd")
        elif kind == "name":
            (criu / "ä").touch()
        with pytest.raises(FailedUndone):
            draft.commit(manifest())
    assert list(tmp_path.iterdir()) == []
    assert Path("/etc/passwd").exists()


def test_a_manifest_that_could_not_be_read_again_is_not_committed(tmp_path: Path) -> None:
    with pytest.raises(FailedUndone, match="created"):
        write_image(tmp_path / "image", created="yesterday")
    assert list(tmp_path.iterdir()) == []


DISK_ERRORS = [(errno.EIO, OSError), (errno.ENOSPC, NoRoomOnHost), (errno.EROFS, PermissionDenied)]


def test_the_disk_fails_at_every_change(tmp_path: Path) -> None:
    """Operation 1 fails, then 2, then 3 … until it runs through untouched; each time the next try succeeds."""
    dest = tmp_path / "image"
    noting = NotingFiles()
    write_image(dest, noting).close()
    remove(dest)
    past_the_commit_point = []
    descriptors = os.listdir("/proc/self/fd")
    for n in range(len(noting.done)):
        number, error = DISK_ERRORS[n % 3]
        files = FailingFiles(n, number)
        failure: Exception | None = None
        try:
            write_image(dest, files).close()
        except (LimosaError, OSError) as e:
            failure = e
        if dest.exists():
            past_the_commit_point.append(files.failed)
            if failure is not None:  # it is there, but perhaps not on disk
                assert isinstance(failure, FailedUndone)
                assert failure.fields["image"] == str(dest)
        else:
            assert isinstance(failure, error), files.failed
            assert list(tmp_path.iterdir()) == [], files.failed
            write_image(dest).close()
        assert is_whole(dest)
        remove(dest)
        assert list(tmp_path.iterdir()) == []
        assert os.listdir("/proc/self/fd") == descriptors, files.failed
    # Removing the marker may fail unnoticed: it means nothing any more.
    assert past_the_commit_point == [f"fsync:{tmp_path}", "unlink:unfinished.json"]
    untouched = FailingFiles(len(noting.done))
    write_image(dest, untouched).close()
    assert not untouched.failed


def test_a_folder_whose_mode_cannot_be_set_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, mode: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(OSError, match="Input/output"):
        Draft.create(tmp_path / "image")
    assert os.listdir("/proc/self/fd") == before


def test_without_a_descriptor_left_nothing_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's own descriptors are made before the rename: behind it nothing fails for want of one."""

    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "dup", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        write_image(tmp_path / "image")
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == before


def test_a_draft_that_cannot_be_discarded_is_recognised(tmp_path: Path) -> None:
    class Stuck(NotingFiles):
        def unlink(self, name: str, dir_fd: int) -> None:
            raise OSError(errno.EIO, "input/output error")

    with pytest.raises(OSError, match="input/output"), Draft.create(tmp_path / "image", files=Stuck()):
        raise CancelledUndone(what="this")
    (litter,) = unfinished(tmp_path)
    remove(litter.path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_put_in_the_drafts_place_is_not_committed(tmp_path: Path) -> None:
    """In a folder that others may write to, somebody could rename the draft away and put his own there."""
    with Draft.create(tmp_path / "image") as draft:
        fill(draft)
        draft.prepare(manifest())
        draft.path.rename(tmp_path / "stolen")
        draft.path.mkdir()
        (draft.path / "evil").touch()
        with pytest.raises(FailedUndone, match="replaced"):
            draft.publish()
        assert not draft.committed


def test_free_bytes_is_what_the_file_system_says(tmp_path: Path) -> None:
    info = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path / "image") - info.f_bavail * info.f_frsize) < 1 << 30

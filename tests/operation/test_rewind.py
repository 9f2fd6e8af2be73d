"""Files that a restored job goes on with: what is refused, what is cut back, and that an undo gives every byte back.

The files are real ones; only the manifest is made.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from limosa.errors import FailedUndone
from limosa.image import JobRecord, Manifest, OpenFile, TreeProcess
from limosa.operation.rewind import Rewind, changed_files

APPENDING = os.O_WRONLY | os.O_APPEND
BEFORE, SINCE = b"written before the checkpoint\n" * 7, b"and since\n" * 5


def opened(path: Path, size: int, *, flags: int = os.O_WRONLY, deleted: bool = False) -> OpenFile:
    """The file as a job has it that has it open."""
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    return OpenFile(
        path=str(path), size=size, pid=4711, fd=5, flags=flags, position=size if writes else None, deleted=deleted
    )


def mapped(path: Path, size: int) -> OpenFile:
    """The file as a job has it that has it mapped only: a library."""
    return OpenFile(path=str(path), size=size, pid=4711, mapped=True)


def image(*files: OpenFile) -> Manifest:
    """An image of a job that had these files."""
    return Manifest(
        created="2026-11-21T04:05:06Z",
        criu="4.2.1",
        kernel="6.18.0",
        job=JobRecord(pid=4711),
        tree=[TreeProcess(pid=4711, ppid=1, start_time=1)],
        open_files=list(files),
    )


def ids(*files: OpenFile, rewind: bool = False) -> list[tuple[str, int]]:
    """(id, exit code) of each reason; nothing may be planned to be cut where there is one."""
    reasons, todo = changed_files(image(*files), rewind)
    assert not (reasons and todo)
    return [(r.id, r.exit_code) for r in reasons]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file that has the size that it had."""
    path = tmp_path / "train.log"
    path.write_bytes(BEFORE)
    return path


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(SINCE)


CHANGED, MISSING = ("file-changed", 23), ("file-missing", 23)


# --- what is looked at ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewind", [False, True])
def test_a_file_of_a_process_is_there_once_the_process_is(rewind: bool) -> None:
    """Images of earlier versions name them; their size is 0 whatever is in them."""
    names = ["statm", "mountinfo", "mem", "task/4711/stat"]
    assert ids(*(opened(Path(f"/proc/4711/{name}"), 0, flags=os.O_RDONLY) for name in names), rewind=rewind) == []
    assert ids(opened(Path("/proc/gone"), 0, flags=os.O_RDONLY)) == [MISSING]


@pytest.mark.parametrize("rewind", [False, True])
def test_a_file_of_the_size_that_it_had_is_right_whoever_has_it(log: Path, rewind: bool) -> None:
    size = len(BEFORE)
    files = [opened(log, size), opened(log, size, flags=os.O_RDONLY), mapped(log, size)]
    assert changed_files(image(*files), rewind) == ([], [])


@pytest.mark.parametrize("rewind", [False, True])
def test_a_missing_file_is_named_with_who_had_it(tmp_path: Path, rewind: bool) -> None:
    gone = tmp_path / "gone"
    reasons, todo = changed_files(image(opened(gone, 5)), rewind)
    assert [(r.id, r.exit_code, r.pid) for r in reasons] == [("file-missing", 23, 4711)]
    assert all(word in reasons[0].text for word in (str(gone), "4711", "descriptor 5"))
    assert todo == []


def test_a_missing_library_is_named_as_mapped(tmp_path: Path) -> None:
    (reason,), _ = changed_files(image(mapped(tmp_path / "libgone.so", 5)), False)
    assert reason.id == "file-missing"
    assert "mapped" in reason.text


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_regular_file_any_more_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "was-a-file"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert ids(opened(path, path.stat().st_size), rewind=True) == [CHANGED]


@pytest.mark.parametrize("rewind", [False, True])
def test_another_mode_is_told_before_criu_finds_it(log: Path, rewind: bool) -> None:
    log.chmod(0o640)
    file = msgspec.structs.replace(opened(log, len(BEFORE)), mode=log.stat().st_mode)
    assert changed_files(image(file), rewind) == ([], [])
    log.chmod(0o600)
    (reason,), _ = changed_files(image(file), rewind)
    assert (reason.id, reason.exit_code, reason.hint) == (*CHANGED, f"chmod 640 {log}")


@pytest.mark.parametrize("rewind", [False, True])
def test_a_file_that_has_shrunk_is_refused(log: Path, rewind: bool) -> None:
    os.truncate(log, len(BEFORE) - 1)
    assert ids(opened(log, len(BEFORE)), rewind=rewind) == [CHANGED]


def test_a_file_that_has_grown_is_refused_by_name_with_the_way_out(log: Path) -> None:
    grow(log)
    (reason,), todo = changed_files(image(opened(log, len(BEFORE))), False)
    assert (reason.id, reason.exit_code, reason.forceable) == (*CHANGED, False)
    assert all(str(word) in reason.text for word in (log, len(BEFORE), len(BEFORE + SINCE)))
    assert "--rewind-files" in reason.hint
    assert todo == []


def test_a_file_that_has_grown_is_cut_back_where_that_is_wanted(log: Path) -> None:
    grow(log)
    reasons, (todo,) = changed_files(image(opened(log, len(BEFORE))), True)
    assert reasons == []
    assert (todo.path, todo.size, todo.grown) == (str(log), len(BEFORE), len(BEFORE + SINCE))
    assert Path(todo.kept).parent == log.parent
    assert not os.path.lexists(todo.kept)
    assert log.read_bytes() == BEFORE + SINCE, "looking has changed it"


@pytest.mark.parametrize("rewind", [False, True])
def test_a_library_that_has_grown_is_never_cut(log: Path, rewind: bool) -> None:
    grow(log)
    assert ids(mapped(log, len(BEFORE)), rewind=rewind) == [CHANGED]
    assert ids(opened(log, len(BEFORE), flags=os.O_RDONLY), rewind=rewind) == [CHANGED]


@pytest.mark.parametrize("change", [len(SINCE), -1])
def test_a_log_open_for_appending_only_may_have_any_size(log: Path, change: int) -> None:
    grow(log) if change > 0 else os.truncate(log, len(BEFORE) + change)
    assert ids(opened(log, len(BEFORE), flags=APPENDING)) == []


def test_appending_and_reading_is_not_appending_only(log: Path) -> None:
    grow(log)
    assert ids(opened(log, len(BEFORE), flags=os.O_RDWR | os.O_APPEND)) == [CHANGED]


def test_a_log_that_one_appends_to_and_another_writes_is_looked_at(log: Path) -> None:
    grow(log)
    both = [opened(log, len(BEFORE), flags=APPENDING), opened(log, len(BEFORE))]
    assert ids(*both) == [CHANGED]
    assert len(changed_files(image(*both), True)[1]) == 1, "cut once, however many have it open"


def test_a_file_without_a_name_is_in_the_image_and_not_looked_for(tmp_path: Path) -> None:
    assert ids(opened(tmp_path / "unlinked", 5, deleted=True)) == []


@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_path_that_leads_through_a_link_now_is_refused(tmp_path: Path, which: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "log").write_bytes(BEFORE + SINCE)
    if which == "file":
        path = tmp_path / "log"
        path.symlink_to(elsewhere / "log")
    else:
        (tmp_path / "folder").symlink_to(elsewhere)
        path = tmp_path / "folder" / "log"
    assert ids(opened(path, len(BEFORE)), rewind=True) == [CHANGED]
    assert (elsewhere / "log").read_bytes() == BEFORE + SINCE


def test_every_file_is_told_not_only_the_first(tmp_path: Path, log: Path) -> None:
    grow(log)
    assert ids(opened(tmp_path / "gone", 1), opened(log, len(BEFORE))) == [MISSING, CHANGED]


# --- cutting and undoing --------------------------------------------------------------------------------------


def planned(path: Path) -> Rewind:
    """The one cut that is planned for a grown file."""
    reasons, (todo,) = changed_files(image(opened(path, len(BEFORE))), True)
    assert reasons == []
    return todo


def test_cut_back_the_tail_lies_beside_it_with_the_same_mode(log: Path) -> None:
    grow(log)
    log.chmod(0o640)
    todo = planned(log)
    todo.do()
    assert log.read_bytes() == BEFORE
    assert Path(todo.kept).read_bytes() == SINCE
    assert stat.S_IMODE(os.stat(todo.kept).st_mode) & 0o007 == 0, "whoever could not read the file reads its tail"
    assert ids(opened(log, len(BEFORE))) == []


def test_undone_every_byte_is_back_in_the_same_file(log: Path) -> None:
    grow(log)
    inode = log.stat().st_ino
    todo = planned(log)
    todo.do()
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE
    assert log.stat().st_ino == inode
    assert os.listdir(log.parent) == [log.name]


@pytest.mark.parametrize("length", [100, 127])
def test_a_name_as_long_as_one_may_be_leaves_room_for_its_tails(tmp_path: Path, length: int) -> None:
    log = tmp_path / ("é" * length + "x")
    log.write_bytes(BEFORE)
    grow(log)
    todo = planned(log)
    todo.do()
    assert Path(todo.kept).read_bytes() == SINCE
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE
    todo.kept += "é" * 128
    todo.undo()  # no such file was made


@pytest.mark.parametrize("gone", ["folder", "file", "link"])
def test_what_its_owner_has_taken_away_since_is_told_as_such(tmp_path: Path, gone: str) -> None:
    """recover tells it once: as an error of the system it would try again for ever, and never succeed."""
    folder = tmp_path / "his"
    folder.mkdir()
    log = folder / "log"
    log.write_bytes(BEFORE)
    grow(log)
    todo = planned(log)
    todo.do()
    if gone == "file":
        log.unlink()
    else:
        folder.rename(tmp_path / "away")
        if gone == "link":
            folder.symlink_to("away")
    with pytest.raises(FailedUndone):
        todo.undo()


def test_what_is_a_hole_of_many_gigabytes_stays_one(log: Path) -> None:
    """Root's copy of it would have filled the disk."""
    with open(log, "r+b") as file:
        file.truncate(1 << 38)
        file.seek(1 << 37)
        file.write(SINCE)
    todo = planned(log)
    todo.do()
    assert log.read_bytes() == BEFORE
    kept = Path(todo.kept)
    assert kept.stat().st_size == (1 << 38) - len(BEFORE)
    assert kept.stat().st_blocks * 512 < 1 << 20
    todo.undo()
    assert (log.stat().st_size, log.stat().st_blocks * 512 < 1 << 20) == (1 << 38, True)
    with open(log, "rb") as file:
        assert file.read(len(BEFORE) + 2) == BEFORE + b"\0\0"
        file.seek(1 << 37)
        assert file.read(len(SINCE) + 1) == SINCE + b"\0"


def test_a_tail_for_which_there_is_no_room_is_not_begun(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(log)
    todo = planned(log)
    real = os.fstatvfs
    full = lambda fd: os.statvfs_result([*real(fd)[:4], 0, *real(fd)[5:]])  # noqa: E731 - f_bavail
    monkeypatch.setattr(os, "fstatvfs", full)
    with pytest.raises(OSError, match="No space left"):
        todo.do()
    assert os.listdir(log.parent) == [log.name]
    assert log.read_bytes() == BEFORE + SINCE


def test_what_a_restored_job_wrote_after_the_cut_goes_with_the_undo(log: Path) -> None:
    grow(log)
    todo = planned(log)
    todo.do()
    with open(log, "ab") as file:
        file.write(b"by a job that was then ended")
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE


def test_undone_twice_or_before_anything_was_done_nothing_happens(log: Path) -> None:
    grow(log)
    todo = planned(log)
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE
    todo.do()
    todo.undo()
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE


def test_a_file_that_has_grown_again_since_it_was_looked_at_is_left_alone(log: Path) -> None:
    grow(log)
    todo = planned(log)
    grow(log)
    with pytest.raises(FailedUndone, match="is being written to"):
        todo.do()
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE + SINCE
    assert os.listdir(log.parent) == [log.name]


def test_a_crash_before_the_cut_leaves_a_copy_that_the_undo_removes(log: Path) -> None:
    grow(log)
    todo = planned(log)
    Path(todo.kept).write_bytes(SINCE[:4])  # it died while it was copying
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE
    assert os.listdir(log.parent) == [log.name]


def test_a_second_rewind_keeps_the_first_ones_tail(log: Path) -> None:
    grow(log)
    first = planned(log)
    first.do()
    grow(log)
    second = planned(log)
    assert second.kept != first.kept
    second.do()
    assert log.read_bytes() == BEFORE
    assert Path(first.kept).read_bytes() == Path(second.kept).read_bytes() == SINCE


def test_a_tail_is_never_written_through_a_link_or_over_a_file(log: Path, tmp_path: Path) -> None:
    grow(log)
    todo = planned(log)
    victim = tmp_path / "victim"
    Path(todo.kept).symlink_to(victim)
    with pytest.raises(FileExistsError):
        todo.do()
    assert not victim.exists()
    assert log.read_bytes() == BEFORE + SINCE


def test_a_restored_job_that_wrote_as_much_as_was_cut_off_changes_nothing(log: Path) -> None:
    grow(log)
    todo = planned(log)
    todo.do()
    with open(log, "ab") as file:
        file.write(b"x" * len(SINCE))
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE


def test_half_a_tail_is_never_put_back(log: Path) -> None:
    grow(log)
    todo = planned(log)
    Path(todo.kept).write_bytes(SINCE[:4])  # it died while it was copying, and somebody writes to the file still
    grow(log)
    todo.undo()
    assert log.read_bytes() == BEFORE + SINCE + SINCE
    assert os.listdir(log.parent) == [log.name]


@pytest.mark.parametrize("rest", ["root/etc/passwd", "cwd/x", "fd/0", "exe", "map_files/1-2", "task/1/root/etc/passwd"])
def test_a_name_through_the_links_of_a_process_is_no_file_of_the_jobs(rest: str) -> None:
    """The kernel gives no file such a name; whether those links may be read is another question."""
    assert ids(OpenFile(path=f"/proc/1/{rest}", size=1, pid=4711, fd=5)) in ([CHANGED], [MISSING])


# --- another user's folder --------------------------------------------------------------------------------------

USER = 4242
_EXCHANGES = """
import os, sys
folder, away, target = sys.argv[1:]
os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
print("ready", flush=True)
while True:
    os.rename(folder, away)
    os.symlink(target, folder)
    os.unlink(folder)
    os.rename(away, folder)
    for _ in range(os.urandom(1)[0]): pass
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can get into; pytest's own is root's alone."""
    path = Path(tempfile.mkdtemp(prefix="limosa-rewind-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.root
@pytest.mark.slow
def test_root_makes_and_cuts_nothing_where_a_user_exchanges_his_folder_for_roots(public: Path) -> None:
    """The folder is a link to root's half of the time; all that root writes is in the user's."""
    home, target = public / "home", public / "roots"
    for folder in (home, home / "job", target):
        folder.mkdir()
        folder.chmod(0o755)
    log, secret = home / "job" / "log", target / "log"
    for path in (log, secret):
        path.write_bytes(BEFORE + SINCE)
    for path in (home, home / "job", log):
        os.chown(path, USER, USER)
    cut = Rewind(
        path=str(log),
        size=len(BEFORE),
        grown=len(BEFORE + SINCE),
        kept=f"{log}.after-x",
        inode=log.stat().st_ino,
    )
    argv = [sys.executable, "-c", _EXCHANGES, str(home / "job"), str(home / "away"), str(target)]
    done = undone = 0
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end = time.monotonic() + 60
        while (done < 8 or undone < 8) and time.monotonic() < end:
            try:
                cut.do()
                done += 1
            except FileExistsError:
                pass
            except (FailedUndone, OSError):
                assert os.listdir(target) == ["log"]
            try:
                cut.undo()
                undone += 1
            except (FailedUndone, OSError):
                pass
            assert os.listdir(target) == ["log"]
            assert secret.read_bytes() == BEFORE + SINCE
        process.kill()
    assert min(done, undone) >= 2, (done, undone)
    here = home / ("job" if (home / "job").is_dir() and not (home / "job").is_symlink() else "away")
    for path in here.iterdir():
        assert path.stat().st_uid == USER, "what is kept is his"
    assert here.joinpath("log").stat().st_ino == cut.inode


@pytest.mark.root
def test_what_is_kept_is_the_files_owners(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(BEFORE + SINCE)
    log.chmod(0o640)
    os.chown(log, USER, USER + 1)
    reasons, (cut,) = changed_files(image(opened(log, len(BEFORE))), True)
    assert (reasons, cut.inode) == ([], log.stat().st_ino)
    cut.do()
    info = os.stat(cut.kept)
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (USER, USER + 1, 0o640)
    cut.undo()
    assert log.read_bytes() == BEFORE + SINCE
    assert os.listdir(tmp_path) == ["log"]


def test_a_tail_is_kept_nowhere_but_beside_its_file(log: Path, tmp_path: Path) -> None:
    grow(log)
    (tmp_path / "other").mkdir()
    cut = Rewind(path=str(log), size=len(BEFORE), grown=log.stat().st_size, kept=str(tmp_path / "other" / "x"))
    for act in (cut.do, cut.undo):
        with pytest.raises(FailedUndone, match="not beside"):
            act()
    assert log.read_bytes() == BEFORE + SINCE

"""Records: whole or not there, believed only from those who may speak for the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest

from limosa.errors import LimosaError, NoSuchProcess, PermissionDenied, UsageError
from limosa.process import places, records
from limosa.process import runtime as runtime_module
from limosa.process.identity import Identity
from limosa.process.records import EndedRecord, RunRecord, SuspendRecord

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to write other users' folders")
SELF = Identity.of(os.getpid())


def job(name="train", root=SELF):
    return RunRecord(root=root, name=name, command=["train", "x"], log="/tmp/log", cwd="/", supervisor=SELF)


def put(runtime: Path, uid: int, kind: str, record: records.Record, owner: int | None = None) -> Path:
    """Writes a record as another user would."""
    folder = (runtime / "users" / f"limosa-{uid}" if uid else runtime / "0") / kind
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.root.pid}-{record.root.start_time}.json"
    path.write_bytes(msgspec.json.encode(record))
    for place in (folder.parent, folder, path):
        os.chown(place, uid if owner is None else owner, -1)
    return path


def test_what_is_saved_is_found_and_forgotten(runtime):
    record = job()
    path = record.save()
    assert path.parent == places.own_place() / "jobs"
    assert path.stat().st_mode & 0o777 == 0o644
    assert RunRecord.all() == [record]
    assert RunRecord.of(SELF) == record
    assert SuspendRecord.of(SELF) is None
    record.forget()
    assert RunRecord.all() == []
    assert RunRecord.of(SELF) is None


def test_suspended_and_ended_records_keep_what_they_are_given():
    suspended = SuspendRecord(root=SELF, by="ada", bytes={"GPU-1": 7}, members=[SELF])
    suspended.save()
    assert SuspendRecord.of(SELF) == suspended
    ended = EndedRecord(root=Identity(1 << 22, 1), image="/images/a", image_id="abc")
    ended.save()
    assert EndedRecord.of(ended.root) == ended


def test_a_record_of_a_dead_process_or_another_boot_is_stale_and_removed():
    dead = job(root=Identity(SELF.pid, SELF.start_time - 1))
    path = dead.save()
    other_boot = job()
    other_boot.boot = "another"
    other = other_boot.save()
    assert RunRecord.of(dead.root) is None
    assert RunRecord.of(SELF) is None
    assert RunRecord.all() == []
    assert not path.exists()
    assert not other.exists()


def test_an_ended_record_goes_stale_after_an_hour():
    old = EndedRecord(root=Identity(1 << 22, 1), image="/images/a", since=time.time() - 3601)
    path = old.save()
    assert EndedRecord.all() == []
    assert not path.exists()


@root_only
def test_only_the_owner_of_a_process_and_root_speak_for_it(runtime, start):
    places.own_place()
    forged = job("forged")
    put(runtime, 4242, "jobs", forged)
    assert RunRecord.all() == []  # a stranger's word about root's process
    mine = job("mine")
    mine.save()
    assert [r.name for r in RunRecord.all()] == ["mine"]
    assert RunRecord.of(SELF).name == "mine"


@root_only
def test_of_the_members_in_a_users_record_only_his_own_are_believed(runtime, start):
    """``limosa suspend --gpu`` by root takes them for jobs."""
    places.own_place()
    his, others = (start(["setpriv", f"--reuid={uid}", "sleep", "60"], ready=None) for uid in (4242, 4243))
    for victim, uid in ((his, 4242), (others, 4243)):
        victim.until(lambda uid=uid, pid=victim.pid: Path(f"/proc/{pid}").stat().st_uid == uid)
    root, other = Identity.of(his.pid), Identity.of(others.pid)
    put(runtime, 4242, "suspended", SuspendRecord(root=root, bytes={"GPU-1": 7}, members=[root, other, SELF]))
    assert SuspendRecord.of(root).members == [root]
    (record,) = SuspendRecord.all()
    assert record.members == [root]
    SuspendRecord(root=root, members=[root, other]).save()
    assert SuspendRecord.of(root).members == [root, other], "root speaks for all"


@root_only
def test_folders_that_are_not_their_users_own_do_not_count(runtime):
    places.own_place()
    path = put(runtime, 4242, "jobs", job("stranger"), owner=4243)
    with places.folders("jobs") as found:
        assert all(folder.uid != 4242 for folder in found)
    path.unlink()
    mine = runtime / "0"
    mine.chmod(0o777)  # anybody could have written there
    with pytest.raises(PermissionDenied, match="only uid 0"):
        places.own_place()
    assert RunRecord.all() == []


@root_only
def test_a_link_in_place_of_our_folder_is_not_followed(runtime, tmp_path):
    places.own_place()
    (runtime / "0").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (runtime / "0").symlink_to(tmp_path / "elsewhere")
    job().save()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_links_pipes_and_rubbish_among_the_records_are_passed_over(runtime, tmp_path):
    folder = places.own_folder("jobs")
    real = tmp_path / "real.json"
    real.write_bytes(msgspec.json.encode(job("linked")))
    (folder / "1-1.json").symlink_to(real)
    os.mkfifo(folder / "2-2.json")
    (folder / "3-3.json").write_bytes(b"\xff{")
    (folder / "4-4.json").write_bytes(b'{"root": 3}')
    assert RunRecord.all() == []


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "record"
    runtime_module.write_atomic(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no"):
        runtime_module.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_whose_folder_cannot_be_synced_was_never_written(tmp_path, monkeypatch):
    """Its writer is told that it failed and does not come back for it; an older one stays, as something has to."""
    sync = os.fsync

    def no_folder(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_dir():
            raise OSError(5, "Input/output error")
        sync(fd)

    path = tmp_path / "file"
    monkeypatch.setattr(os, "fsync", no_folder)
    with pytest.raises(OSError, match="Input/output"):
        runtime_module.write_atomic(path, b"new")
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="Input/output"):
        runtime_module.write_atomic(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not(runtime, monkeypatch):
    folder = places.own_folder("jobs")

    def nobody_finishes(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if not pid:
        monkeypatch.setattr(os, "rename", nobody_finishes)
        with contextlib.suppress(BaseException):
            runtime_module.write_atomic(folder / "record", b"half")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    rename = os.rename
    sizes = []

    def looked_at(*names: object) -> None:
        sizes.append(len(list(folder.iterdir())))
        runtime_module.remove_half_written()
        sizes.append(len(list(folder.iterdir())))
        rename(*names)

    monkeypatch.setattr(os, "rename", looked_at)
    runtime_module.write_atomic(folder / "record", b"whole")
    assert sizes == [2, 1]
    assert [p.read_bytes() for p in folder.iterdir()] == [b"whole"]


def test_a_writer_that_was_taken_for_a_dead_one_writes_again(runtime, monkeypatch):
    folder = places.own_folder("jobs")
    lock, times = fcntl.flock, []

    def before_that(fd: int, how: int) -> None:
        times.append(fd)
        if len(times) == 1:
            runtime_module.remove_half_written()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", before_that)
    runtime_module.write_atomic(folder / "record", b"whole")
    assert [p.read_bytes() for p in folder.iterdir()] == [b"whole"]


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 15), (errno.EROFS, 11), (errno.EIO, 21)])
def test_a_runtime_folder_that_cannot_be_made_has_its_exit_code(runtime, monkeypatch, number, code):
    def broken(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    places.own_place()
    monkeypatch.setattr(os, "mkdir", broken)
    with pytest.raises(LimosaError) as failed:
        places.own_folder("claims")
    assert failed.value.exit_code == code


def test_a_record_that_cannot_be_removed_says_nothing_any_more(runtime, monkeypatch):
    record = job()
    path = record.save()

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "unlink", broken)
    record.forget()
    monkeypatch.undo()
    assert path.exists()
    assert RunRecord.of(SELF) is None


def test_names_are_checked_and_found(start):
    for bad in ("4711", "-x", "a/b", "", "a b", "ü"):
        with pytest.raises(UsageError):
            records.check_name(bad)
    records.check_name("train")
    job("train").save()
    with pytest.raises(UsageError, match=str(SELF.pid)):
        records.check_name("train")
    assert records.job_named("train").root == SELF
    with pytest.raises(NoSuchProcess, match="other"):
        records.job_named("other")


@root_only
def test_a_name_that_two_users_have_is_refused_unless_one_is_ours(runtime, start):
    victims = [start(["setpriv", f"--reuid={uid}", "sleep", "60"], ready=None) for uid in (4242, 4243)]
    for uid, victim in zip((4242, 4243), victims, strict=True):
        victim.until(lambda uid=uid, pid=victim.pid: Path(f"/proc/{pid}").stat().st_uid == uid)
        places.own_place()
        put(runtime, uid, "jobs", job("train", Identity.of(victim.pid)))
    with pytest.raises(UsageError, match="several"):
        records.job_named("train")
    job("train").save()
    assert records.job_named("train").root == SELF


def test_a_lock_lets_one_in_at_a_time():
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with runtime_module.lock("jobs"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1

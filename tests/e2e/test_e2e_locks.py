"""Locks on files come back with a job, whether or not it has the file mapped; and what people keep in such files.

Without the plugin CRIU loses the POSIX locks on files that are mapped as well. A second process then takes SQLite's
-shm file for nobody's, truncates it, and the job dies by SIGBUS.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import VICTIMS

from limosa.errors import FailedUndone, Refused
from limosa.image import JobRecord, LockedFile, Manifest, TreeProcess, now
from limosa.operation import checkpoint, locks, restore
from limosa.process.criu.find import find
from limosa.process.identity import Identity, read_stat
from limosa.process.tree import job_tree

pytestmark = pytest.mark.criu

KINDS = ["posix", "plain", "twice", "ofd", "flock", "lease", "child", "forbidden"]


def held(victim: Any) -> list[tuple[int, int, list[str]]]:
    """Every lock of a job: pid, descriptor, what it is."""
    found = locks.read(i.pid for i in job_tree(Identity.of(victim.pid)))
    return sorted((entry.pid, entry.fd, entry.locks) for entry in found)


@pytest.fixture
def ended(start, limosa, tmp_path) -> Any:
    """``ended(kind …)``: a job with locks of these kinds, written to disk and ended; its locks."""

    def go(*kinds: str) -> tuple[Any, Path, list[Any]]:
        victim = start("locks", *kinds)
        victim.goes_on(2)
        before = held(victim)
        assert before
        limosa("checkpoint", victim.pid, "--file-locks", "--output", tmp_path / "image", rc=0)
        return victim, tmp_path / "image", before

    return go


def test_a_job_has_all_its_locks_again_and_again(ended, limosa) -> None:
    victim, image, before = ended(*KINDS)
    assert len(before) >= len(KINDS)
    limosa("restore", image, rc=0)
    assert held(victim) == before
    victim.goes_on()
    limosa("checkpoint", victim.pid, "--file-locks", "--output", image.with_name("again"), rc=0)
    limosa("restore", image.with_name("again"), rc=0)
    assert held(victim) == before
    victim.finish()


@pytest.fixture
def no_plugin(monkeypatch) -> None:
    """A Limosa whose plugin could not be compiled."""
    program = msgspec.structs.replace(find(), plugin_dir=None)
    for name in ("checkpoint", "restore_plan"):
        monkeypatch.setattr(importlib.import_module(f"limosa.operation.{name}"), "find_criu", lambda *_: program)


def test_a_job_whose_locks_are_lost_is_ended_before_it_runs(ended, limosa, no_plugin) -> None:
    victim, image, before = ended("posix")
    ticks = len(victim.ticks())
    with pytest.raises(FailedUndone, match=r"locks that the job held could not be taken again: .*/posix"):
        restore(image)
    assert not victim.alive()
    assert len(victim.ticks()) == ticks
    limosa("restore", image, rc=0)
    assert held(victim) == before
    victim.goes_on()


def test_where_locks_are_lost_all_are_ended_also_if_one_has_ended_by_itself(start, monkeypatch) -> None:
    first, second = (start(["sleep", "60"], ready=None) for _ in range(2))
    me = Identity.of(os.getpid())

    def tracer(pid: int) -> int:
        if pid == first.pid:
            raise FileNotFoundError(2, "No such file or directory", f"/proc/{pid}/status")
        return me.pid

    monkeypatch.setattr(locks, "tracer_of", tracer)
    manifest = Manifest(
        created=now(),
        criu="4.2",
        kernel="6.1",
        job=JobRecord(pid=first.pid),
        tree=[TreeProcess(pid=v.pid, ppid=1, start_time=1) for v in (first, second)],
        locks=[LockedFile(pid=first.pid, fd=0, path="/lost", locks=["POSIX WRITE 0 EOF"])],
    )
    with pytest.raises(FailedUndone, match="could not be taken again"):
        locks.see_all_there(manifest, me)
    second.until(lambda: not second.alive())


def test_without_the_plugin_locks_on_mapped_files_are_refused(start, no_plugin, tmp_path) -> None:
    victim = start("locks", "posix")
    with pytest.raises(Refused) as caught:
        checkpoint(victim.pid, tmp_path / "image", file_locks=True)
    assert (caught.value.id, caught.value.exit_code) == ("mapped-locks", 13)
    victim.goes_on()


def test_a_lock_that_somebody_has_taken_is_told_and_waited_for_by_nobody(ended, limosa) -> None:
    victim, image, before = ended("posix")
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 130); "
        "print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, victim.folder / "posix"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline()
        error = limosa("restore", image, "-o", "json", rc=23).json["error"]
        assert error["id"] == "file-locked"
        assert f"{victim.folder / 'posix'} is locked by process {other.pid}" in error["message"]
        other.stdin.close()
    limosa("restore", image, rc=0)
    assert held(victim) == before
    victim.goes_on()


def test_a_locked_file_that_was_written_to_meanwhile_is_refused_unless_forced(ended, limosa) -> None:
    victim, image, before = ended("posix")
    with open(victim.folder / "posix", "r+b") as file:
        file.write(b"somebody else")
    error = limosa("restore", image, "-o", "json", rc=23).json["error"]
    assert error["id"] == "locked-file-changed"
    assert "was written to after the job was checkpointed" in error["message"]
    done = limosa("restore", image, "--force=locked-file-changed", "-o", "json", rc=0).json
    assert [w["id"] for w in done["warnings"]] == ["locked-file-changed"]
    assert held(victim) == before
    victim.goes_on()


def test_a_locked_file_may_be_older_than_the_epoch(start, limosa, tmp_path) -> None:
    victim = start("locks", "posix")
    victim.goes_on(2)
    os.utime(victim.folder / "posix", ns=(0, -5_000_000_001))
    limosa("checkpoint", victim.pid, "--file-locks", "--output", tmp_path / "image", rc=0)
    limosa("restore", tmp_path / "image", rc=0)
    victim.goes_on()


def test_which_locks_keep_each_other_out() -> None:
    conflict = locks._conflict
    assert conflict("POSIX WRITE 0 9", "POSIX READ 9 EOF")
    assert conflict("POSIX READ 0 EOF", "OFDLCK WRITE 5 5")
    assert conflict("FLOCK WRITE 0 EOF", "FLOCK READ 0 EOF")
    assert not conflict("POSIX READ 0 9", "POSIX READ 0 9")
    assert not conflict("POSIX WRITE 0 9", "POSIX WRITE 10 EOF")
    assert not conflict("FLOCK WRITE 0 EOF", "POSIX WRITE 0 EOF")


# --- what people keep -------------------------------------------------------------------------------------------------


def visit(victim: Any, kind: str, rows: int) -> tuple[int, int]:
    """A second process reads all of the job's rows and adds its own; how many there are of both."""
    argv = [sys.executable, VICTIMS / "databases.py", victim.folder, kind, "visit", str(rows)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + victim.text()[-1000:]
    _, own, others = done.stdout.split()
    return int(own), int(others)


@pytest.mark.parametrize("kind", ["wal", "journal", "lmdb", "hdf5", "filelock", "events"])
def test_what_is_kept_in_files_goes_on_and_others_may_read_and_write_it(start, limosa, tmp_path, kind) -> None:
    victim = start("databases", kind)
    victim.goes_on(5)
    writers = 1 if kind in ("wal", "journal", "lmdb", "filelock") else 0
    assert visit(victim, kind, 3)[1] == 3 * writers
    limosa("checkpoint", victim.pid, "--file-locks", "--output", tmp_path / "image", rc=0)
    committed = len(victim.ticks())
    limosa("restore", tmp_path / "image", rc=0)
    own, others = visit(victim, kind, 3)
    assert own >= committed
    assert others == 6 * writers
    victim.goes_on(5)
    committed = len(victim.ticks())
    assert visit(victim, kind, 0)[0] >= committed
    victim.finish()


def test_a_database_that_somebody_opened_while_the_job_was_away_is_told(start, limosa, tmp_path) -> None:
    """In between nobody's lock held: who opens SQLite's database in WAL mode is its first user, and makes -shm anew."""
    victim = start("databases", "wal")
    victim.goes_on(5)
    limosa("checkpoint", victim.pid, "--file-locks", "--output", tmp_path / "image", rc=0)
    code = (
        "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); print(*d.execute('SELECT count(*) FROM rows'), "
        "flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, victim.folder / "wal"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline()
        error = limosa("restore", tmp_path / "image", "-o", "json", rc=23).json["error"]
        assert error["id"] == "locked-file-changed"
        assert "wal-shm was written to after" in error["message"]
        other.stdin.close()
    assert "wal-wal is missing" in limosa("restore", tmp_path / "image", "-o", "json", rc=23).json["error"]["message"]
    assert not victim.alive()


def test_a_stopped_job_takes_its_locks_again_and_stays_stopped(start, limosa, tmp_path) -> None:
    victim = start("locks", "posix")
    before = held(victim)
    os.kill(victim.pid, signal.SIGSTOP)
    victim.until(lambda: read_stat(victim.pid).stopped, what="until it has stopped")
    image = tmp_path / "image"
    limosa("checkpoint", victim.pid, "--file-locks", "--output", image, rc=0)
    limosa("restore", image, rc=0)
    assert held(victim) == before
    victim.until(lambda: read_stat(victim.pid).stopped, what="until it has stopped")
    os.kill(victim.pid, signal.SIGCONT)
    victim.goes_on()

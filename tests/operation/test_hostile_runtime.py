"""What another user writes into his runtime folder: root neither obeys it nor stumbles over it.

The folders are real and belong to uid 65534 (nobody); the tests run as root.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from driver_double import GB, DriverDouble, failure

from limosa import operation
from limosa.errors import Busy, FailedUndone, LimosaError, Refused
from limosa.operation import claims, journal, orphan, recover_users
from limosa.operation.journal import Header, Journal, Member
from limosa.operation.remove_image import remove_image
from limosa.process.identity import Identity
from limosa.process.places import folders, own_folder
from limosa.process.records import RunRecord, SuspendRecord

GpuLike = Callable[..., int]
NOBODY = 65534
GONE = Identity(1, 999)  # never alive: process 1 has another start time
DEEP = b"[" * 200_000 + b"]" * 200_000


def folder_of_nobody(runtime: Path, kind: str) -> Path:
    """A runtime folder as that user would have made it."""
    own_folder(kind)  # makes the place of users, too
    path = runtime / "users" / f"limosa-{NOBODY}" / kind
    path.mkdir(parents=True, exist_ok=True)
    for each in (path.parent, path):
        os.chown(each, NOBODY, NOBODY)
        os.chmod(each, 0o755)
    return path


def put(path: Path, data: bytes) -> Path:
    """A file of that user's."""
    path.write_bytes(data)
    os.chown(path, NOBODY, NOBODY)
    return path


def claim_of_nobody(runtime: Path, claim: claims.Claim) -> None:
    put(folder_of_nobody(runtime, "claims") / f"{claim.id}.json", msgspec.json.encode(claim))


def journal_of_nobody(runtime: Path, header: Header, *notes: tuple[str, str, dict[str, object]]) -> Path:
    """A journal that another user has made up, of an operation that has died."""
    made = Journal.create(header)
    for step, phase, data in notes:
        made.note(step, phase, **data)  # type: ignore[arg-type]
    made.close()
    theirs = put(folder_of_nobody(runtime, "journals") / made.path.name, made.path.read_bytes())
    made.finish()
    os.chmod(theirs, 0o644)
    return theirs


def header(operation_name: str, **fields: object) -> Header:
    return Header(id=f"{operation_name}-x", operation=operation_name, controller=GONE, **{"roots": [], **fields})  # type: ignore[arg-type]


# --- journals -------------------------------------------------------------------------------------------------


def test_recover_by_root_cuts_no_file_that_another_users_journal_names(
    tmp_path: Path, own_runtime: Path, double: DriverDouble
) -> None:
    target, kept = tmp_path / "passwd", tmp_path / "kept"
    target.write_text("root")
    put(kept, b"evil")
    data = {"path": str(target), "size": 0, "grown": 99, "kept": str(kept)}
    theirs = journal_of_nobody(own_runtime, header("restore"), ("rewind", "begin", data))
    (entry,) = operation.recover()
    assert target.read_text() == "root"
    assert kept.exists()
    assert (entry.id, entry.exit_code, entry.user) == (theirs.stem, 40, "nobody")
    assert theirs.exists()


@pytest.mark.parametrize("verb", ["move", "checkpoint", "restore"])
def test_recover_by_root_touches_no_process_that_another_users_journal_names(
    gpu_like: GpuLike, double: DriverDouble, own_runtime: Path, verb: str
) -> None:
    pid = gpu_like(on=0)
    root = Identity.of(pid)
    forged = Member(identity=root, was="checkpointed", root=pid)
    fake = header(verb, roots=[root], members=[forged], tree=[root], image=str(own_runtime / "image"))
    journal_of_nobody(own_runtime, fake, ("lock", "done", {}))
    operation.recover()
    assert double.calls == []
    assert double.states[pid] == "running"
    assert root.alive()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can get to and write to (pytest's own are root's alone)."""
    path = Path(tempfile.mkdtemp(prefix="limosa-test-"))
    os.chmod(path, 0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def public_runtime(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder that users can get at."""
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(open_folder / "run"))
    return open_folder / "run"


@pytest.fixture
def users_python(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What runs, as a shell script, where root has a user recover."""

    def go(script: str) -> None:
        program = open_folder / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return go


def test_recover_by_root_has_the_user_finish_his_own_without_roots_environment(
    open_folder: Path,
    public_runtime: Path,
    double: DriverDouble,
    users_python: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = journal_of_nobody(public_runtime, header("move"))
    told = open_folder / "told"
    asked = 'id -u; id -G; echo "$*"; readlink /proc/self/fd/0; ps -o sid= -p $$; echo $$; pwd; env'
    users_python(f"({asked}) > {told}; rm {left}")
    monkeypatch.setenv("A_SECRET_OF_ROOTS", "hunter2")
    (planned,) = operation.recover(dry_run=True)
    assert not told.exists()
    assert f"uid {NOBODY}" in planned.did
    (entry,) = operation.recover()
    assert (entry.exit_code, entry.user) == (0, "nobody")
    uid, _, command, stdin, session, own, folder, *environment = told.read_text().splitlines()
    assert (uid, stdin, folder) == ("0", "/dev/null", "/"), "the user could stop it while root waits for the program"
    assert command.startswith("-I ")
    assert command.endswith(f"limosa.operation.orphan --as {NOBODY}")
    assert session.strip() == own, "it can write to root's terminal"
    assert f"LIMOSA_RUNTIME_DIR={public_runtime}" in environment
    assert not any("hunter2" in line for line in environment)


def test_it_has_the_users_rights_before_it_reads_a_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()

    def recover() -> list[object]:
        os.write(writing, repr((os.getresuid(), os.getresgid())).encode())
        return []

    monkeypatch.setattr(orphan, "recover", recover)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = orphan.main(["--as", str(NOBODY)])
        finally:
            os._exit(code)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with open(reading) as told:
        users, groups = ast.literal_eval(told.read())
    assert (set(users), 0 in groups) == ({NOBODY}, False)


@pytest.mark.parametrize("how", ["stopped", "endless"])
def test_a_user_does_not_hold_up_roots_recover(
    public_runtime: Path,
    open_folder: Path,
    double: DriverDouble,
    users_python: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """He owns the process that root starts for him. It is told of, and is not in root's exit code."""
    for number in range(100):
        journal_of_nobody(public_runtime, msgspec.structs.replace(header("move"), id=f"move-{number}"))
    pid = open_folder / "pid"
    users_python(f"echo $$ > {pid}; " + ("kill -STOP $$" if how == "stopped" else "exec sleep 60"))
    monkeypatch.setattr(recover_users, "SECONDS", 1.5)
    begun = time.monotonic()
    try:
        found = operation.recover()
    finally:
        took, end = time.monotonic() - begun, time.monotonic() + 60
        while not (pid.exists() and pid.read_text().endswith("\n")):  # on a busy machine it may have only begun
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert took < 20, "as long for each of those that are told of were 30 s"
    assert len(found) == 20
    assert {(one.user, one.exit_code) for one in found} == {("nobody", 19)}
    assert all(pid.read_text().strip() in one.error for one in found)


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_a_pipe_among_the_journals_stops_nothing(own_runtime: Path, double: DriverDouble, whose: str) -> None:
    folder = own_folder("journals") if whose == "own" else folder_of_nobody(own_runtime, "journals")
    os.mkfifo(folder / "x.jsonl")
    os.chown(folder / "x.jsonl", folder.stat().st_uid, -1)
    begun = time.monotonic()
    assert operation.recover() == []
    assert journal.under_way() == []
    assert time.monotonic() - begun < 60


def test_a_journal_that_cannot_be_read_is_not_waited_for(
    own_runtime: Path, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no file can be opened any more: it was taken for one that somebody else works through."""
    Journal.create(header("move")).close()

    def unreadable(*_: object) -> Journal:
        raise FailedUndone("Too many open files")

    monkeypatch.setattr(Journal, "take", unreadable)
    begun = time.monotonic()
    (entry,) = operation.recover()
    assert (entry.exit_code, "run it again" in entry.error) == (40, True)
    assert time.monotonic() - begun < 60, "who works through one is waited for for a quarter of an hour"


def test_a_journal_that_is_not_called_what_it_says_is_none(own_runtime: Path, double: DriverDouble) -> None:
    made = Journal.create(header("move"))
    made.close()
    made.path.rename(made.path.with_name("another.jsonl"))
    assert list(journal.dead()) == []
    assert journal.under_way() == []


def test_a_link_to_a_file_of_roots_is_no_journal_of_another_users(own_runtime: Path, double: DriverDouble) -> None:
    made = Journal.create(header("move"))
    made.close()
    (folder_of_nobody(own_runtime, "journals") / "move-x.jsonl").symlink_to(made.path)
    assert [s.owner for s in journal.under_way()] == [0]


# --- claims ---------------------------------------------------------------------------------------------------


def test_a_claim_whose_id_is_a_path_is_ignored(tmp_path: Path, own_runtime: Path, double: DriverDouble) -> None:
    victim = tmp_path / "victim.json"
    victim.write_text("{}")
    bad = msgspec.json.encode(claims.Claim(id=str(tmp_path / "victim"), operation="move", holder=GONE))
    (own_folder("claims") / "zz.json").write_bytes(bad)
    put(folder_of_nobody(own_runtime, "claims") / "zz.json", bad)
    assert operation.recover() == []
    assert victim.exists()
    assert claims.everybodys() == []


BAD_CLAIMS = {
    "negative": b'{"id":"evil","operation":"move","holder":{"pid":1,"start_time":1},"gpus":{"GPU":-99999999999}}',
    "not UTF-8": b'{"id":"\xff","operation":"move","holder":{"pid":1,"start_time":1}}',
    "deep": b'{"zz":' + DEEP + b',"id":"evil","operation":"move","holder":{"pid":1,"start_time":1}}',
    "not JSON": b"{",
    "empty": b"",
    "huge pid": b'{"id":"evil","operation":"move","holder":{"pid":99999999999999999999999999,"start_time":1}}',
}


@pytest.mark.parametrize("data", BAD_CLAIMS.values(), ids=BAD_CLAIMS)
def test_a_bad_claim_stops_nobody_even_in_the_middle_of_an_undo(
    gpu_like: GpuLike, double: DriverDouble, own_runtime: Path, data: bytes
) -> None:
    pid = gpu_like(on=0)
    folder = folder_of_nobody(own_runtime, "claims")
    double.after_checkpoint = lambda: void(put(folder / "evil.json", data))
    operation.move(pid, to="1")
    assert (double.states[pid], double.where(pid)) == ("running", [1])
    double.faults["unlock", 1] = failure("unlock", pid)
    with pytest.raises(LimosaError) as caught:
        operation.move(pid, to="0")
    assert caught.value.exit_code == 21
    assert (double.states[pid], double.where(pid)) == ("running", [1])
    assert [c for c in claims.everybodys() if c.pids or c.gpus or c.alive] == []


def void(_: object) -> None:
    """For callbacks that give nothing back."""


def test_a_user_claims_gpus_and_folders_only_by_a_process_of_his(
    own_runtime: Path, start: Callable[..., object], open_folder: Path
) -> None:
    """Of folders: only those that are his, or that he could make himself."""
    (open_folder / "roots").mkdir()
    theirs = start(["setpriv", f"--reuid={NOBODY}", "--clear-groups", "sleep", "60"], ready=None)
    pid: int = theirs.pid  # type: ignore[attr-defined]
    theirs.until(lambda: os.stat(f"/proc/{pid}").st_uid == NOBODY)  # type: ignore[attr-defined]
    for name, holder in (("roots", Identity.of(1)), ("dead", GONE), ("his", Identity.of(pid))):
        claim = claims.Claim(
            id=name, operation="move", holder=holder, gpus={name: 5}, paths=[f"/{name}", str(open_folder / name)]
        )
        claim_of_nobody(own_runtime, claim)
    assert [claims.reserved(name) for name in ("roots", "dead", "his")] == [0, 0, 5]
    myself = Identity.of(os.getpid())
    free = ["/roots", "/dead", "/his", *(str(open_folder / name) for name in ("roots", "dead"))]
    claims.make(claims.Claim(id="a", operation="restore", holder=myself, paths=free))
    with pytest.raises(Busy):
        claims.make(claims.Claim(id="b", operation="restore", holder=myself, paths=[str(open_folder / "his")]))
    (open_folder / "his").mkdir()
    claims.make(claims.Claim(id="b", operation="restore", holder=myself, paths=[str(open_folder / "his")]))
    os.chown(open_folder / "his", NOBODY, NOBODY)
    with pytest.raises(Busy):
        claims.make(claims.Claim(id="c", operation="restore", holder=myself, paths=[str(open_folder / "his")]))


def test_a_claim_on_what_cannot_be_a_path_keeps_nobody_from_removing_an_image(
    own_runtime: Path, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    (image / "criu").mkdir(parents=True)
    (image / "manifest.json").write_text("{}")
    claims.Claim(id="odd", operation="restore", holder=Identity.of(1), paths=["a\0b", ""]).save()
    remove_image(image)
    assert not image.exists()


def test_a_user_cannot_keep_root_from_his_jobs_by_claiming_them(
    gpu_like: GpuLike, double: DriverDouble, own_runtime: Path
) -> None:
    pid = gpu_like(on=0)
    for name, holder in (("living", Identity.of(1)), ("dead", GONE)):
        claim = claims.Claim(id=name, operation="move", holder=holder, pids=[Identity.of(pid)])
        claim_of_nobody(own_runtime, claim)
    operation.move(pid, to="1")
    assert double.where(pid) == [1]


def test_room_that_a_living_operation_of_roots_claims_counts(
    gpu_like: GpuLike, double: DriverDouble, own_runtime: Path
) -> None:
    pid = gpu_like(on=0, size=6 * GB)
    gpus = {double.uuids[1]: 5 * GB}
    claim_of_nobody(own_runtime, claims.Claim(id="forged", operation="move", holder=Identity.of(1), gpus=gpus))
    operation.move(pid, to="1", dry_run=True)
    claims.Claim(id="own", operation="move", holder=Identity.of(1), gpus={double.uuids[0]: 9 * GB}).save()
    operation.move(pid, to="1")
    with pytest.raises(Refused):
        operation.move(pid, to="0")


# --- records --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b'{"zz":' + DEEP + b"}", b'{"by":"\xff"}', b"[]"], ids=["deep", "not UTF-8", "other"])
def test_a_bad_record_of_another_users_stops_nobody(
    gpu_like: GpuLike, double: DriverDouble, own_runtime: Path, data: bytes
) -> None:
    pid = gpu_like(on=0)
    identity = Identity.of(pid)
    for kind in ("suspended", "jobs", "ended"):
        put(folder_of_nobody(own_runtime, kind) / f"{pid}-{identity.start_time}.json", data)
    assert [job.pid for job in operation.ps()] == [pid]
    operation.suspend(pid)
    operation.resume(pid)
    assert double.states[pid] == "running"
    assert RunRecord.all() == []
    assert SuspendRecord.all() == []


def test_the_folders_of_these_tests_count_as_that_users(own_runtime: Path) -> None:
    folder = folder_of_nobody(own_runtime, "claims")
    with folders("claims") as found:
        assert (NOBODY, folder) in [(f.uid, f.path) for f in found]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755

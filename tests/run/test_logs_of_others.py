"""``limosa logs`` by root: where a user's log is is the user's word, and root shows no file of its own for it.

The users are real: a process runs with uid 4242, and its record lies in that uid's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest

from limosa.process import job_log
from limosa.process.follow import Tail
from limosa.process.identity import Identity
from limosa.process.places import own_folder
from limosa.process.records import RunRecord

pytestmark = pytest.mark.root

USER = 4242
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
SECRET = "root's own secret"


@pytest.fixture
def theirs():
    """A folder of the user's where he can get at it."""
    path = Path(tempfile.mkdtemp(prefix="limosa-test-"))
    os.chown(path, USER, USER)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def job(start):
    """A process of the user's."""
    victim = start([*AS_USER, "sleep", "60"], ready=None)
    victim.until(lambda: os.stat(f"/proc/{victim.pid}").st_uid == USER)
    return victim.pid


def says(runtime: Path, pid: int, log: str) -> None:
    """The user's record of his job, as he may write it."""
    own_folder("jobs")  # makes the place of users, too
    record = RunRecord(root=Identity.of(pid), name="his", command=["x"], log=log)
    folder = runtime / "users" / f"limosa-{USER}" / "jobs"
    folder.mkdir(parents=True)
    (folder / f"{pid}-{record.root.start_time}.json").write_bytes(msgspec.json.encode(record))
    for path in (folder.parent, folder, *folder.iterdir()):
        os.chown(path, USER, USER)
        path.chmod(0o755 if path.is_dir() else 0o644)


def his(path: Path, text: str = "step 1\n") -> Path:
    path.write_text(text)
    os.chown(path, USER, USER)
    path.chmod(0o600)
    return path


def test_roots_logs_shows_a_users_own_file(limosa, runtime, job, theirs):
    says(runtime, job, str(his(theirs / "log")))
    assert limosa("logs", "his", rc=0).stdout == "step 1\n"
    assert limosa("logs", "his", "-o", "json", rc=0).json["bytes"] == 7


def refused(limosa, pid: int) -> None:
    """Neither shown nor measured, and nothing waits."""
    said = limosa("logs", pid, "-n", "1", "-f")
    # 11: it is, or may be, a file of somebody else's.
    assert said.rc == (11 if "it is not a file of" in said.stderr or "may be of" in said.stderr else 2)
    assert "cannot be read" in said.stderr
    assert SECRET not in said.stdout + said.stderr
    assert limosa("logs", pid, "-o", "json", rc=0).json["bytes"] == 0


@pytest.mark.parametrize(
    "form", ["path", "link", "hard link", "folder's link", "proc", "pipe", "folder", "device", "socket", "nul", "gone"]
)
def test_roots_logs_opens_nothing_else_for_a_users_record(limosa, runtime, job, theirs, secret, form):
    log = theirs / "log"
    if form == "link":
        log.symlink_to(secret)
    elif form == "hard link":
        os.link(secret, log)
    elif form == "folder's link":
        (theirs / "folder").symlink_to(secret.parent)
        log = theirs / "folder" / "secret"
    elif form == "pipe":
        os.mkfifo(log)
        os.chown(log, USER, USER)
    elif form == "folder":
        log.mkdir()
        os.chown(log, USER, USER)
    elif form == "socket":
        import socket

        socket.socket(socket.AF_UNIX).bind(str(log))
        os.chown(log, USER, USER)
    says(
        runtime,
        job,
        {"path": str(secret), "proc": f"/proc/self/../{os.getpid()}/root{secret}", "device": "/dev/zero", "nul": "a\0b"}
        .get(form, str(log)),
    )  # fmt: skip
    refused(limosa, job)


def test_a_record_of_roots_about_a_users_process_may_repeat_what_the_user_said(limosa, job, secret):
    """As after a restore by root: the path in the image was in the user's record."""
    RunRecord(root=Identity.of(job), name="his", command=["x"], log=str(secret)).save()
    refused(limosa, job)


def test_what_a_process_could_only_look_at_is_not_its_output(limosa, start, secret, theirs):
    """A descriptor of root's file that a user may have: one that can neither be read nor written."""
    shutil.move(secret, theirs / "secret")
    code = "import os, time; os.dup2(os.open('secret', os.O_PATH), 1); os.mkdir('ready'); time.sleep(60)"
    victim = start([*AS_USER, "/usr/bin/python3", "-c", f"import os; os.chdir('{theirs}'); {code}"], ready=None)
    victim.until((theirs / "ready").exists)
    RunRecord(root=Identity.of(victim.pid), name="his", command=["x"], log=str(theirs / "secret")).save()
    refused(limosa, victim.pid)


def test_a_process_that_exchanges_its_output_has_roots_file_opened_at_no_moment(start, secret, theirs):
    """What it was and whether it was to write were asked one after the other: 178 times of 3,991 root opened it."""
    shutil.move(secret, theirs / "secret")
    code = (
        "import os; root = os.open('secret', os.O_PATH); own = os.open('own', os.O_WRONLY | os.O_CREAT)\n"
        "os.mkdir('ready')\n"
        "while True: os.dup2(root, 1); os.dup2(own, 1)"
    )
    victim = start([*AS_USER, "/usr/bin/python3", "-c", f"import os; os.chdir('{theirs}')\n{code}"], ready=None)
    victim.until((theirs / "ready").exists)
    opened = 0
    for _ in range(3_000):
        with contextlib.suppress(PermissionError):
            os.close(job_log.open_said(str(theirs / "secret"), victim.pid))
            opened += 1
    assert opened == 0


def test_roots_own_log_of_a_job_that_has_become_a_users(limosa, tmp_path):
    job = [*AS_USER, "sh", "-c", "echo as $(id -u); exec sleep 60"]
    pid = int(limosa("run", "-d", "-q", "--name", "became", "--", *job, rc=0).stdout)
    while os.stat(f"/proc/{pid}").st_uid != USER or not (tmp_path / "became.limosa.log").read_text():
        assert Path(f"/proc/{pid}").exists()
    assert limosa("logs", "became", rc=0).stdout == f"as {USER}\n"


def test_roots_job_in_a_users_folder_whose_log_the_user_has_exchanged_for_a_link(limosa, theirs, secret):
    pid = int(limosa("run", "-d", "-q", "--", "sleep", "60", cwd=theirs, rc=0).stdout)
    log = theirs / "sleep.limosa.log"
    log.rename(theirs / "aside")
    log.symlink_to(secret)
    os.lchown(log, USER, USER)
    refused(limosa, pid)


def test_an_attached_run_of_roots_does_not_follow_a_link_either(limosa, theirs, secret):
    """The log is made by limosa itself; between that and reading it the user may exchange it."""
    (theirs / "log").symlink_to(secret)
    os.lchown(theirs / "log", USER, USER)
    with pytest.raises(OSError, match=r"link|regular"):
        job_log.open_own(str(theirs / "log"))


def test_a_link_that_leads_nowhere_beside_ended_logs_is_no_error_of_ours(limosa, tmp_path):
    (tmp_path / "ended.limosa.log").symlink_to("nowhere")
    assert json.loads(limosa("logs", "ended", "-o", "json", rc=10).stdout)["error"]["id"] == "no-such-process"


def test_a_log_that_grows_without_end_comes_to_one(tmp_path):
    """Whoever still has it open may go on writing when the job has ended, as quickly as we read."""
    path, said = tmp_path / "log", []
    path.write_bytes(b"x" * 200_000)

    def write(data: bytes) -> None:
        said.append(data)
        if len(said) < 100:
            with open(path, "ab") as file:
                file.write(b"y" * 200_000)

    tail = Tail(os.open(path, os.O_RDONLY), 0, write)
    tail.copy_rest()
    tail.close()
    assert len(said) < 10
    assert b"".join(said).startswith(b"x" * 200_000)

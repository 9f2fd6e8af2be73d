"""``limosa run`` by root where others can make, exchange and remove names: its log, its folder, what it takes back.

The users are real: what they do is done by a process with uid 4242.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from limosa.errors import RunFailed
from limosa.process import launch as launching
from limosa.process.launch import launch, open_log

pytestmark = pytest.mark.root

USER = 4242


@pytest.fixture(autouse=True)
def no_sudo(monkeypatch):
    monkeypatch.delenv("SUDO_UID", raising=False)


@pytest.fixture
def common():
    """A folder as /tmp is."""
    with tempfile.TemporaryDirectory(prefix="limosa-test-") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


@pytest.fixture
def theirs():
    """A folder in /tmp that is the user's."""
    with tempfile.TemporaryDirectory(prefix="limosa-test-") as name:
        os.chown(name, USER, USER)
        os.chmod(name, 0o755)
        yield Path(name)


def as_user(script: str, folder: Path) -> None:
    command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "sh", "-ec", script]
    subprocess.run(command, cwd=folder, check=True, timeout=60)


@pytest.mark.parametrize("place", ["common", "theirs"])
def test_root_appends_to_no_log_that_somebody_else_has_put_there(place, request):
    """He would read what root's job writes, and cut it off."""
    folder = request.getfixturevalue(place)
    as_user("umask 0; : > job.log", folder)
    with pytest.raises(RunFailed, match=rf"file of uid {USER}'s"):
        launch(["echo", "secret"], folder / "job.log")
    assert not (folder / "job.log").read_bytes()


def test_root_goes_on_with_its_own_log_there(common):
    for _ in range(2):
        os.waitpid(launch(["echo", "line"], common / "job.log").identity.pid, 0)
    assert (common / "job.log").read_text() == "line\n" * 2
    assert (common / "job.log").stat().st_mode & 0o777 == 0o600


def test_a_log_of_who_called_sudo_is_his_own(common, monkeypatch):
    as_user(": > job.log", common)
    monkeypatch.setenv("SUDO_UID", str(USER))
    os.waitpid(launch(["echo", "line"], common / "job.log").identity.pid, 0)
    assert (common / "job.log").read_text() == "line\n"


@pytest.mark.parametrize("reader", [False, True])
def test_a_fifo_holds_nothing_up(common, reader):
    as_user("mkfifo job.log", common)
    fd = os.open(common / "job.log", os.O_RDONLY | os.O_NONBLOCK) if reader else -1
    begin = time.monotonic()
    with pytest.raises(RunFailed, match=r"regular file|No such device"):
        launch(["true"], common / "job.log")
    assert time.monotonic() - begin < 60
    if reader:
        os.close(fd)


def test_a_second_name_that_goes_while_it_is_opened_is_noticed(common, tmp_path, monkeypatch):
    """Where the kernel lets users make such names (fs.protected_hardlinks=0), he makes one of root's file."""
    (tmp_path / "file").write_text("root's")
    os.link(tmp_path / "file", common / "job.log")
    real = os.open

    def opened(path, flags, *more, **where):
        fd = real(path, flags, *more, **where)
        if path == "job.log":
            os.unlink(common / "job.log")
        return fd

    monkeypatch.setattr(launching.os, "open", opened)
    with pytest.raises(RunFailed, match="another name"):
        open_log(common / "job.log")
    assert (tmp_path / "file").read_text() == "root's"


def test_what_is_taken_back_is_the_log_that_was_made(theirs, tmp_path, monkeypatch):
    """The command is not there, so its log goes again; meanwhile the user has a link to root's folder in the way."""
    (theirs / "logs").mkdir()
    os.chown(theirs / "logs", USER, USER)
    (tmp_path / "job.log").write_text("root's")
    real = launching._spawn

    def spawn(*arguments):
        as_user(f"mv logs aside; ln -s {tmp_path} logs", theirs)
        return real(*arguments)

    monkeypatch.setattr(launching, "_spawn", spawn)
    with pytest.raises(RunFailed):
        launch(["no-such-command"], theirs / "logs" / "job.log")
    assert (tmp_path / "job.log").read_text() == "root's"


@pytest.mark.parametrize("named", [False, True])
def test_the_job_works_in_the_folder_that_root_was_in(theirs, tmp_path, monkeypatch, named):
    """The user exchanges his folder for a link to root's while the job is started."""
    (theirs / "work").mkdir()
    os.chown(theirs / "work", USER, USER)
    (tmp_path / "mine").mkdir()
    real = launching._spawn

    def spawn(*arguments):
        as_user(f"mv work aside; ln -s {tmp_path}/mine work", theirs)
        return real(*arguments)

    monkeypatch.setattr(launching, "_spawn", spawn)
    monkeypatch.chdir(theirs / "work")
    launched = launch(["touch", "here"], None, cwd=theirs / "work" if named else None)
    assert os.waitpid(launched.identity.pid, 0)[1] == 0
    assert not os.listdir(tmp_path / "mine")
    assert sorted(os.listdir(theirs / "aside")) == ["here", "job.limosa.log"]


def test_a_folder_behind_a_users_link_is_not_worked_in(theirs, tmp_path):
    as_user(f"ln -s {tmp_path} work", theirs)
    with pytest.raises(RunFailed, match="another user's"):
        launch(["touch", "here"], tmp_path / "log", cwd=theirs / "work")
    assert not os.listdir(tmp_path)


def test_run_says_whose_log_it_is(limosa, common):
    as_user(": > job.log", common)
    said = limosa("run", "-q", "--log", common / "job.log", "--", "echo", "secret")
    assert said.rc == 125
    assert f"uid {USER}'s" in said.stderr


def test_root_writes_where_its_own_link_leads(common, tmp_path, monkeypatch):
    """Or that of who called sudo."""
    for owner in (0, USER):
        (common / f"link{owner}").symlink_to(tmp_path / f"log{owner}")
        os.lchown(common / f"link{owner}", owner, owner)
    os.waitpid(launch(["echo", "line"], common / "link0").identity.pid, 0)
    with pytest.raises(RunFailed, match="symbolic link of another user's"):
        open_log(common / f"link{USER}")
    monkeypatch.setenv("SUDO_UID", str(USER))
    os.close(open_log(common / f"link{USER}").fd)
    assert (tmp_path / "log0").read_text() == "line\n"
    assert (tmp_path / f"log{USER}").exists()

"""What root gives up with its user id: nothing of it is left to the process that a user owns then."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import traceback
from pathlib import Path

import pytest

from limosa import rights, start
from limosa.errors import NoWorkingCriu, RunFailed
from limosa.process.criu import find
from limosa.process.launch import launch, open_log

pytestmark = pytest.mark.root

USER = 4242
ADD_KEY = {"x86_64": 248, "aarch64": 217}
SESSION, SEARCH = -3, 10
libc = ctypes.CDLL(None, use_errno=True)


def in_a_child(test):
    """Runs it in a process of its own, which may become somebody else."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            test()
            code = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(code)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    with open(reading) as said:
        assert os.waitstatus_to_exitcode(status) == 0, said.read()


def secret_found() -> bool:
    number = rights._KEYCTL[platform.machine()]
    return libc.syscall(number, SEARCH, SESSION, b"user", b"limosa-test", 0) > 0


def with_a_secret() -> None:
    """A session keyring of root's with a key in it; where the machine forbids keyrings there is none to be kept."""
    number = rights._KEYCTL[platform.machine()]
    if libc.syscall(number, 1, None) < 0:
        os._exit(0)
    assert libc.syscall(ADD_KEY[platform.machine()], b"user", b"limosa-test", b"x", 1, SESSION) > 0
    assert secret_found()


def test_the_session_keyring_stays_roots():
    def test():
        with_a_secret()
        rights.become(USER)
        assert not secret_found()

    in_a_child(test)


def test_nothing_else_is_kept():
    def test():
        os.umask(0)
        resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))
        audit = Path("/proc/self/loginuid")
        before = audit.read_text() if audit.exists() else ""
        rights.become(USER)
        status = dict(
            line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
        )
        assert status["Uid"].split() == [str(USER)] * 4
        assert status["Gid"].split() == [str(USER)] * 4
        assert status["Groups"].split() == []
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(status[name], 16) == 0, name
        assert status["Umask"].strip() == "0077"
        assert int(Path("/proc/self/oom_score_adj").read_text()) >= 0
        if before:
            assert audit.read_text() in (str(USER), before)  # an admin may have made it immutable
        for limit in (resource.RLIMIT_CORE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
            assert resource.getrlimit(limit) == (0, 0)
        with pytest.raises(PermissionError):
            os.setuid(0)

    in_a_child(test)


def test_capabilities_that_securebits_would_keep_are_given_up():
    def test():
        no_fixup = 1 << 2  # SECBIT_NO_SETUID_FIXUP
        if libc.prctl(28, no_fixup, 0, 0, 0) != 0:
            os._exit(0)  # not this root's to set
        rights.become(USER)
        with pytest.raises(PermissionError):
            os.setuid(0)

    in_a_child(test)


# --- programs and logs in another user's folder ----------------------------------------------------------------


@pytest.fixture
def users(tmp_path):
    """A folder of another user's in a tree that he can get into."""
    folder = tmp_path / "users"
    folder.mkdir()
    os.chown(folder, USER, USER)
    return folder


@pytest.mark.parametrize("how", ["owner", "folder above", "writable", "library"])
def test_a_criu_of_another_users_is_not_even_asked_for_its_version(tmp_path, users, monkeypatch, how):
    place = {
        "owner": tmp_path,
        "folder above": users / "inner",
        "writable": tmp_path / "open",
        "library": tmp_path / "f",
    }[how]
    place.mkdir(exist_ok=True)
    program = place / "criu"
    program.write_text(f"#!/bin/sh\n: > {tmp_path}/sprung\necho 'Version: 4.2.1'\n")
    program.chmod(0o755)
    if how == "owner":
        os.chown(program, USER, USER)
    elif how == "writable":
        place.chmod(0o777)
    elif how == "library":
        for name in ("usr/sbin/criu", f"usr/lib/{os.uname().machine}-linux-gnu/ld-linux-x.so.2"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            program.rename(place / name) if not (place / "usr/sbin/criu").exists() else (place / name).write_text("")
        os.chown(place / name, USER, USER)
        program = place
    with pytest.raises(NoWorkingCriu, match="may be written to by others"):
        find.find(str(program))
    assert not (tmp_path / "sprung").exists()


def test_root_opens_no_log_through_a_users_link(tmp_path, users, monkeypatch):
    roots = tmp_path / "roots"
    roots.mkdir()
    (roots / "file").write_text("root's")
    for name, target in {"log": roots / "file", "new": roots / "made", "folder": roots}.items():
        (users / name).symlink_to(target)
        os.lchown(users / name, USER, USER)
    os.link(roots / "file", users / "hard")
    for path in (users / "log", users / "new", users / "folder" / "made", users / "folder" / "file", users / "hard"):
        with pytest.raises(RunFailed):
            open_log(path)
    with pytest.raises(RunFailed):
        launch(["true"], None, cwd=users / "folder")
    assert os.listdir(roots) == ["file"]
    assert (roots / "file").read_text() == "root's"


def test_a_users_link_is_not_taken_for_what_lies_in_its_place_a_moment_later(tmp_path, users, monkeypatch):
    """He may exchange it for something of root's that lies in his folder: a log of an earlier job, say."""
    (tmp_path / "secret").write_text("root's")
    (users / "log").symlink_to(tmp_path / "secret")
    os.lchown(users / "log", USER, USER)
    (users / "old").write_text("root's, too")
    read = os.readlink

    def exchanged(path, *, dir_fd=None):
        said = read(path, dir_fd=dir_fd)
        if said.endswith("secret") and (users / "old").exists():
            (users / "log").rename(users / "link")
            (users / "old").rename(users / "log")
        return said

    monkeypatch.setattr(os, "readlink", exchanged)
    assert start.real_path(users / "log") is None
    assert not (users / "old").exists(), "nothing was exchanged"


def test_roots_own_links_lead_to_a_log(tmp_path, users):
    (tmp_path / "logs").symlink_to(users)
    log = open_log(tmp_path / "logs" / "log")
    os.close(log.fd)
    assert log.new
    assert (users / "log").exists()

"""A runtime's program begins once it is noted, and not without: whoever notes it may be killed before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from limosa import start
from limosa.containers import calls
from limosa.process.criu import lent
from limosa.process.criu.program import Criu
from limosa.process.identity import Identity
from limosa.process.places import own_folder


def works_on(path: Path) -> bool:
    """Whether a process has that path among its words."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.fsencode(path) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def test_a_program_that_could_not_be_noted_does_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    child = os.fork()
    if child == 0:
        calls.call(["/bin/touch", str(made)], {}, on_start=lambda _: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    end = time.monotonic() + 60
    while works_on(made):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not made.exists()


def test_where_noting_fails_it_does_not_begin(tmp_path: Path) -> None:
    def fails(_: Identity) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        calls.call(["/bin/touch", str(tmp_path / "made")], {}, on_start=fails)
    assert not (tmp_path / "made").exists()


def test_who_was_noted_is_the_program(tmp_path: Path) -> None:
    told: list[Identity] = []
    said = calls.call(["/bin/sh", "-c", "echo $$; cat; echo $0 >&2", "a b"], {}, on_start=told.append)
    assert (said.rc, said.out.decode().split(), said.err) == (0, [str(told[0].pid)], "a b\n")


def test_a_session_whose_leaders_pid_is_anothers_has_ended() -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pause()
    who = Identity.of(child)
    try:
        while os.getsid(child) != child:
            time.sleep(0.001)
        assert not calls.settle(who, 0.1)
        assert calls.settle(Identity(child, who.start_time - 1), 0.1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert calls.settle(who, 1.0)


def test_what_was_lent_is_forgotten_with_its_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(lent, "_KEPT", tmp_path / "var")
    (tmp_path / "var/lent").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    own = own_folder("lent")
    left = [own / "criu-0abc-xy", tmp_path / "var/lent/criu-0abc-xy"]
    others = [own / "criu-0abd-xy", tmp_path / "var/lent/criu-0abc-link"]
    for folder in (*left, others[0]):
        folder.mkdir(parents=True)
        (folder / "criu").touch()
    others[1].symlink_to(tmp_path / "kept")
    lent.forget("0abc")
    assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in others)
    assert (tmp_path / "kept/file").exists()


@pytest.mark.parametrize("own_may", [True, False])
def test_what_is_lent_lies_where_only_root_can_make_another(
    own_may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A monitor keeps its name on root's PATH when it is gone; where /run starts no program it was once in /var/tmp."""
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(lent, "_KEPT", tmp_path / "var")
    monkeypatch.setattr(lent, "_may_start_from", lambda folder: own_may or "run" not in str(folder))
    criu = Criu(argv=["/bin/true"], version="4.2", network_lock="skip")
    with lent.lent(criu, operation="0abc") as folder:
        above = Path(folder).parent
        assert above == (own_folder("lent") if own_may else tmp_path / "var/lent")
        assert not above.stat().st_mode & 0o022
        assert start.trusted(above)


# A runtime that waits for its CRIU, which was killed while it had a child stopped: the child has CRIU's connection.
WAITS = """
import os, subprocess, sys
here, there = os.pipe()
child = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
criu = "import subprocess, sys, os; subprocess.Popen(sys.argv[1:], close_fds=False); os._exit(0)"
stopped = [sys.executable, "-I", "-S", "-c", child, "/opt/criu", "swrk"]
os.set_inheritable(there, True)
subprocess.run([sys.executable, "-I", "-S", "-c", criu, *stopped], close_fds=False)
os.close(there)
os.read(here, 1)
print("goes on", flush=True)
"""


def test_a_runtime_does_not_wait_for_a_stopped_child_of_a_criu_that_was_killed(tmp_path: Path) -> None:
    """Seen with runc, whose container stayed frozen. What is stopped beside it is left alone."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "/opt/criu"], stdin=-1) as other:
        os.kill(other.pid, signal.SIGSTOP)
        said = calls.call([sys.executable, "-c", WAITS], {}, criu_folder=str(tmp_path / "criu-0abc-xy"))
        assert (said.rc, said.out) == (0, b"goes on\n")
        os.kill(other.pid, signal.SIGCONT)
        other.communicate(timeout=60)
        assert other.returncode == 0

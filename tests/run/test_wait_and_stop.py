"""``wait``, ``stop`` and ``logs``: jobs that have been started, from another shell."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import Terminal

import limosa as api
from limosa import operation
from limosa.cli.logs import _follow
from limosa.cli.output import Report
from limosa.operation import ending
from limosa.operation.claims import Claim
from limosa.operation.journal import Header, Journal
from limosa.process import exit_code
from limosa.process.follow import Tail
from limosa.process.identity import Identity
from limosa.process.records import SuspendRecord

KNOWN = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)  # since then the kernel keeps exit codes


def gone(pid: int, limit: float = 60) -> bool:
    end = time.monotonic() + limit
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


GO = "while [ ! -e go ]; do sleep 0.05; done; "


def until_it_waits(process):
    """Until a limosa holds a pidfd: it has found the job and waits for its end."""
    end = time.monotonic() + 90
    while True:
        with contextlib.suppress(OSError):
            links = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
            if any("pidfd" in link for link in links):
                return
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("ends", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("exit 0", 0)])
def test_wait_exits_as_the_job_does(limosa, tmp_path, ends, code):
    limosa("run", "-d", "--name", "short", "--", "sh", "-c", GO + ends, rc=0)
    waiting = limosa("wait", "short", "-o", "json", wait=False)
    until_it_waits(waiting)
    (tmp_path / "go").touch()
    said = json.loads(waiting.communicate(timeout=60)[0])
    assert waiting.returncode == (code if KNOWN else 125)
    assert (said["name"], said["exit_code"]) == ("short", code if KNOWN else None)


def test_wait_for_what_is_not_there_is_not_the_jobs_exit_code(limosa):
    assert limosa("wait", "nobody", "-o", "json", rc=125).json["error"]["id"] == "no-such-process"


def test_a_wait_that_is_given_up_leaves_the_job_alone(limosa):
    pid = int(limosa("run", "-d", "-q", "--", "sleep", "60", rc=0).stdout)
    try:
        waiting = limosa("wait", pid, "-o", "json", wait=False)
        until_it_waits(waiting)
        waiting.send_signal(signal.SIGINT)
        out, said = waiting.communicate(timeout=60)
        assert json.loads(out)["error"]["job_state"] == ""  # it may be suspended: nobody has asked
        assert waiting.returncode == 125
        assert said.split("\n") == ["", f"limosa: no longer waiting for process {pid}", ""]
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_stop_lets_the_job_end_by_itself(limosa, tmp_path):
    """It saves what it has, and its child is told once it has ended."""
    job = "trap 'echo saved > saved; exit 3' TERM; sleep 60 & echo $! > child; while :; do sleep 0.05; done"
    pid = int(limosa("run", "-d", "-q", "--", "sh", "-c", job, rc=0).stdout)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    done = limosa("stop", pid, "--grace", "60", "-o", "json", rc=0).json
    assert done["killed"] == []
    assert done["exit_code"] == (3 if KNOWN else None)
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert gone(int((tmp_path / "child").read_text()))


def test_stop_kills_what_is_left_after_the_grace_also_where_it_is_stopped(limosa, tmp_path):
    job = "trap '' TERM; echo ready > ready; while :; do sleep 0.05; done"
    pid = int(limosa("run", "-d", "-q", "--", "sh", "-c", job, rc=0).stdout)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    done = limosa("stop", pid, "--grace", "0.5", "-o", "json", rc=0).json
    assert pid in done["killed"]
    assert gone(pid)


def test_a_stopped_process_gets_its_signal(limosa):
    pid = int(limosa("run", "-d", "-q", "--", "sleep", "60", rc=0).stdout)
    os.kill(pid, signal.SIGSTOP)
    assert limosa("stop", pid, "-o", "json", rc=0).json["killed"] == []
    assert gone(pid)


def test_a_suspended_job_is_not_stopped_unless_asked_for(limosa):
    pid = int(limosa("run", "-d", "-q", "--name", "away", "--", "sleep", "60", rc=0).stdout)
    SuspendRecord(root=Identity.of(pid), release="memory-only").save()
    said = limosa("stop", "away", rc=13)
    assert "limosa resume away" in said.stderr
    assert "--kill" in said.stderr
    assert Path(f"/proc/{pid}").exists()
    assert limosa("stop", "away", "--kill", "-o", "json", rc=0).json["killed"] == [pid]
    assert gone(pid)


def test_a_job_that_a_dead_operation_has_left_is_recovered_first(limosa, runtime):
    """It may stand at its gate: it would not hear SIGTERM, and be killed after the grace."""
    pid = int(limosa("run", "-d", "-q", "--name", "left", "--", "sleep", "60", rc=0).stdout)
    job, dead = Identity.of(pid), Identity(2**22 - 1, 1)
    header = Header(id="move-left", operation="move", roots=[job], tree=[job], controller=dead)
    Journal.create(header).close()
    Claim(id="move-left", operation="move", holder=dead, pids=[job]).save()
    error = limosa("stop", "left", "-o", "json", rc=19).json["error"]
    assert "is in the middle of a" in error["message"]
    assert "limosa recover" in error["hint"]
    assert limosa("stop", "left", "--kill", "-o", "json", rc=0).json["killed"] == [pid]
    assert gone(pid)


def test_stop_does_not_stop_what_limosa_was_started_from(limosa):
    assert limosa("stop", os.getpid(), "-o", "json", rc=2).json["error"]["id"] == "own-ancestor"


def test_logs_shows_the_last_lines_and_follows_to_the_end(limosa, tmp_path):
    job = "for i in 1 2 3; do echo line $i; done; " + GO + "echo last"
    limosa("run", "-d", "-q", "--name", "talks", "--", "sh", "-c", job, rc=0)
    log = Path(limosa("logs", "talks", "-o", "json", rc=0).json["log"])
    assert log == tmp_path / "talks.limosa.log"
    assert limosa("logs", "talks", "-n", "1", rc=0).stdout == "line 3\n"
    following = limosa("logs", "talks", "-n", "2", "-f", wait=False)
    until_it_waits(following)
    (tmp_path / "go").touch()
    assert following.communicate(timeout=60)[0] == "line 2\nline 3\nlast\n"
    assert following.returncode == 0
    assert str(log) in limosa("logs", "talks", rc=10).stderr  # it has ended: where its output is


def test_logs_of_a_job_that_ends_while_it_is_looked_for(limosa, tmp_path):
    """What it has written is shown all the same."""
    limosa("run", "-d", "-q", "--name", "brief", "--", "sh", "-c", "echo all; " + GO, rc=0)
    (found,) = operation.resolve(["brief"])
    (tmp_path / "go").touch()
    assert gone(found.root.pid)
    shown: list[bytes] = []
    tail = Tail(os.open(tmp_path / "brief.limosa.log", os.O_RDONLY), 0, shown.append)
    _follow(Report("logs"), found, tail)
    tail.close()
    assert shown == [b"all\n"]


def test_logs_of_a_job_that_limosa_did_not_start(limosa, start):
    other = start(["sleep", "60"], ready=None)
    assert "not started by limosa run" in limosa("logs", other.pid, rc=2).stderr


@pytest.mark.parametrize(("text", "lines", "begin"), [("", 3, 0), ("a\nb\nc", 1, 4), ("a\nb\n", 1, 2), ("a\n", 5, 0)])
def test_where_the_last_lines_begin(tmp_path, text, lines, begin):
    from limosa.process.follow import last_lines

    (tmp_path / "log").write_text(text)
    with open(tmp_path / "log") as log:
        assert last_lines(log.fileno(), lines) == begin


def test_the_same_from_python(tmp_path, runtime):
    job = api.run(["sh", "-c", f"echo here; {GO} exit 4"], name="api", cwd=tmp_path, shim=False)
    assert job.log == str(tmp_path / "api.limosa.log")
    ended = api.wait("api", while_waiting=lambda: bool((tmp_path / "go").touch()))
    assert ended.exit_code == (4 if KNOWN else None)
    assert Path(job.log).read_text() == "here\n"
    with pytest.raises(api.NoSuchProcess):
        api.stop(job.identity)
    with pytest.raises(api.CommandNotFound):
        api.run(["no-such-program"], cwd=tmp_path)


def completed(limosa, shell, line):
    """What limosa answers to what each shell's completion asks it; the shell itself need not be there."""
    word = line.split()[-1] if shell == "fish" else "2"
    said = limosa(env={"_LIMOSA_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": word})
    assert said.stderr == ""
    lines = said.stdout.splitlines()
    return " ".join(lines[1::3] if shell == "zsh" else [one.split("\t")[0].partition(",")[2] for one in lines])


def test_names_of_jobs_are_completed_from_records_alone(limosa):
    pid = int(limosa("run", "-d", "-q", "--name", "trainer", "--", "sleep", "60", rc=0).stdout)
    try:
        for line in ("limosa move tr", "limosa wait tr"):
            assert {completed(limosa, shell, line) for shell in ("bash", "zsh", "fish")} == {"trainer"}
        assert {completed(limosa, shell, "limosa move x") for shell in ("bash", "zsh", "fish")} == {""}
        code = "import sys; from limosa.cli.options import names; names(None, None, ''); print(*sys.modules)"
        modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert not {"limosa.operation", "limosa.gpu", "cuda"} & set(modules.split())
    finally:
        os.kill(pid, signal.SIGKILL)


def test_ps_watch_draws_again_and_ends_with_ctrl_c(limosa, tmp_path):
    pid = int(limosa("run", "-d", "-q", "--name", "seen", "--", "sleep", "60", rc=0).stdout)
    try:
        command = [sys.executable, "-m", "limosa", "ps", "--watch"]
        with Terminal(command, env=os.environ, cwd=str(tmp_path)) as terminal:
            terminal.read(90, lambda seen: seen.count("seen") >= 2)
            os.kill(terminal.process.pid, signal.SIGINT)
            assert terminal.end() == 0, terminal.seen
        assert terminal.seen.count("\x1b[H") >= 2
        assert "Traceback" not in terminal.seen
    finally:
        os.kill(pid, signal.SIGKILL)
    assert json.loads(limosa("ps", "--watch", "-o", "json", rc=2).stdout)["error"]["id"] == "usage"


@pytest.mark.criu
def test_wait_for_a_job_that_a_checkpoint_ends_is_75_with_its_image(limosa, tmp_path):
    pid = int(limosa("run", "-d", "-q", "--", "sleep", "60", rc=0).stdout)
    waiting = limosa("wait", pid, "-o", "json", wait=False)
    until_it_waits(waiting)
    limosa("checkpoint", pid, "--output", tmp_path / "image", rc=0)
    said = json.loads(waiting.communicate(timeout=60)[0])
    assert (waiting.returncode, said["exit_code"], said["image"]) == (75, None, str(tmp_path / "image"))
    (listed,) = json.loads(limosa("images", tmp_path, "-o", "json", rc=0).stdout)["images"]
    assert (listed["pid"], listed["state"]) == (pid, "complete")
    assert "image" in limosa("images", tmp_path, rc=0).stdout


def test_a_job_that_was_quicker_than_its_starter_has_an_exit_code(runtime, tmp_path):
    """It was NoSuchProcess, or Zombie, or the exit code: whoever was faster."""
    quick = api.run(["sh", "-c", "exit 3"], cwd=tmp_path)
    assert gone(quick.pid)
    for _ in range(2):
        assert api.wait(quick).exit_code == (3 if KNOWN else None)
    with pytest.raises(api.NoSuchProcess):
        api.wait(quick.pid)


def test_how_long_a_stop_took_does_not_depend_on_when_its_parent_reaps_it(start, monkeypatch):
    late = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr(ending, "time", clock)
    monkeypatch.setattr(ending, "exit_code", lambda _: late.__setitem__(0, 1000.0))
    assert api.stop(start(["sleep", "60"], ready=None).pid).seconds < 1000
    assert late == [1000.0]


def test_no_more_descriptors_are_kept_than_a_program_can_spare(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(exit_code, "_kept", {})
    for start in range(3 * exit_code._MOST_KEPT):
        exit_code.keep(Identity(os.getpid(), start))
    assert len(os.listdir("/proc/self/fd")) == before + exit_code._MOST_KEPT
    for fd in exit_code._kept.values():
        os.close(fd)

"""What a launched job looks like from inside and outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import end_session

from limosa.errors import CommandNotExecutable, CommandNotFound, RunFailed
from limosa.process.launch import launch

LOOK = """
import json, os, signal
print(json.dumps({
    "fds": sorted(int(f) for f in os.listdir("/proc/self/fd")), "sid": os.getsid(0), "pgid": os.getpgid(0),
    "targets": [os.readlink(f"/proc/self/fd/{f}") for f in (0, 1, 2)],
    "flags": [open(f"/proc/self/fdinfo/{f}").read().split()[3] for f in (0, 1, 2)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "ignored": [s for s in range(1, 32) if s not in (9, 13, 19, 25) and signal.getsignal(s) == signal.SIG_IGN],
    "env": dict(os.environ), "cwd": os.getcwd(), "ppid": os.getppid(),
}))
"""


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def look(tmp_path: Path, **options: object) -> dict[str, object]:
    import json

    launched = launch([sys.executable, "-c", LOOK], tmp_path / "log", **options)
    assert os.waitpid(launched.identity.pid, 0)[1] == 0
    return {"pid": launched.identity.pid, **json.loads((tmp_path / "log").read_text().splitlines()[-1])}


def test_the_job_has_its_own_session_and_only_standard_streams(tmp_path):
    extra = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(extra, True)
    try:
        seen = look(tmp_path)
    finally:
        os.close(extra)
    assert seen["sid"] == seen["pgid"] == seen["pid"]
    assert seen["ppid"] == os.getpid()
    assert seen["targets"] == ["/dev/null", str(tmp_path / "log"), str(tmp_path / "log")]
    assert seen["fds"] == [0, 1, 2, 3]  # 3 is the listing itself
    assert all(
        int(flags, 8) & os.O_APPEND and int(flags, 8) & os.O_ACCMODE == os.O_WRONLY for flags in seen["flags"][1:]
    )
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_signals_that_the_caller_blocks_or_ignores_are_the_jobs_again(tmp_path):
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGUSR1, signal.SIGPIPE)}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        seen = look(tmp_path)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert seen["blocked"] == []
    assert not {signal.SIGUSR1, signal.SIGPIPE} & set(seen["ignored"])


@pytest.mark.parametrize("ignored", [[signal.SIGINT, signal.SIGQUIT], [signal.SIGHUP], []])
def test_what_nohup_or_a_script_ignores_for_a_command_the_job_ignores_too(tmp_path, ignored):
    kept = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {n: signal.signal(n, signal.SIG_IGN if n in ignored else signal.SIG_DFL) for n in kept}
    try:
        seen = look(tmp_path)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen["ignored"] == sorted(ignored)
    assert seen["blocked"] == []


def test_environment_folder_and_unbuffered_output(tmp_path):
    (tmp_path / "there").mkdir()
    seen = look(tmp_path, cwd=tmp_path / "there", env={"PATH": os.environ["PATH"], "ODD": "\udcff ü"})
    assert seen["cwd"] == str(tmp_path / "there")
    assert seen["env"]["PYTHONUNBUFFERED"] == "1"
    assert seen["env"]["ODD"] == "\udcff ü"
    assert "HOME" not in seen["env"]


def test_a_second_job_appends_to_the_log_and_is_told_where_it_begins(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    launched = launch(["sh", "-c", "echo after; echo error >&2"], log)
    os.waitpid(launched.identity.pid, 0)
    assert launched.log_start == len("before\n")
    assert log.read_text() == "before\nafter\nerror\n"


@pytest.mark.parametrize(
    ("command", "error", "code"),
    [
        (["no-such-command"], CommandNotFound, 127),
        (["/no/such/command"], CommandNotFound, 127),
        (["/etc/passwd"], CommandNotExecutable, 126),
        (["/"], CommandNotExecutable, 126),
    ],
)
def test_a_command_that_cannot_be_executed(tmp_path, command, error, code):
    before = children()
    with pytest.raises(error) as caught:
        launch(command, tmp_path / "log")
    assert caught.value.exit_code == code
    assert not (tmp_path / "log").exists()
    assert children() == before


def test_a_folder_or_log_that_is_not_there(tmp_path):
    with pytest.raises(RunFailed, match="chdir"):
        launch(["true"], tmp_path / "log", cwd=tmp_path / "missing")
    with pytest.raises(RunFailed, match="log"):
        launch(["true"], tmp_path / "missing" / "log")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RunFailed, match="log"):
        launch(["true"], tmp_path / "fifo")


DETACH = """
import os, sys
from pathlib import Path
from limosa.process.launch import launch
launched = launch(["sleep", "60"], sys.argv[1], detach=True)
parent = Path(f"/proc/{launched.identity.pid}/stat").read_text().rpartition(")")[2].split()[1]
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
print(launched.identity.pid, launched.identity.alive(), int(parent) == os.getpid(), children)
"""


def test_a_detached_job_has_another_parent_and_leaves_no_zombie(tmp_path):
    command = [sys.executable, "-c", DETACH, str(tmp_path / "log")]
    pid, *rest = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    end_session(int(pid))
    assert rest == ["True", "False", "[]"]


def test_launching_from_many_threads_at_once(tmp_path):
    found: list[int] = []

    def one(number: int) -> None:
        launched = launch(["sh", "-c", f"echo {number}; exit {number}"], tmp_path / f"log{number}")
        found.append(os.waitstatus_to_exitcode(os.waitpid(launched.identity.pid, 0)[1]))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(8))
    assert all((tmp_path / f"log{n}").read_text() == f"{n}\n" for n in range(8))


def test_a_job_that_has_ended_before_we_look_still_has_an_identity(tmp_path):
    launched = launch(["true"], tmp_path / "log")
    os.waitid(os.P_PID, launched.identity.pid, os.WEXITED | os.WNOWAIT)
    assert not launched.identity.alive()
    assert os.waitpid(launched.identity.pid, 0)[0] == launched.identity.pid

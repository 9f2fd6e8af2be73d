"""``limosa run``: output, exit codes, signals, names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import VICTIMS

from limosa.job import default_name
from limosa.process.identity import Identity
from limosa.process.records import EndedRecord, RunRecord


def wait_record(limit: float = 60) -> RunRecord:
    """The record of the one job that ``limosa run`` has started."""
    end = time.monotonic() + limit
    while not (found := RunRecord.all()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found[0]


def wait_text(path: Path, text: str, limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, path.read_text() if path.exists() else f"{path} is not there"
        time.sleep(0.01)


def test_output_goes_to_the_log_and_to_stdout_and_the_exit_code_is_passed_on(limosa, tmp_path):
    result = limosa("run", "--log", "out", "--", "sh", "-c", "echo one; echo two >&2; exit 7", rc=7)
    assert result.stdout == "one\ntwo\n"
    assert (tmp_path / "out").read_text() == "one\ntwo\n"
    assert "out" in result.stderr
    assert RunRecord.all() == []


def test_output_that_cannot_be_shown_is_said_and_kept(runtime, tmp_path):
    words = [sys.executable, "-m", "limosa", "run", "--name", "two", "--", "sh", "-c", "echo one; exit 7"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            words, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert ran.returncode == 7
    assert "the job's output can no longer be shown (No space left on device); its log has all of it" in ran.stderr
    assert (tmp_path / "two.limosa.log").read_text() == "one\n"


def test_logs_that_cannot_be_written_is_no_internal_error(limosa, tmp_path):
    limosa("run", "-d", "--name", "two", "--", "sh", "-c", "echo one; sleep 60", rc=0)
    wait_text(tmp_path / "two.limosa.log", "one")
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "limosa", "logs", "two"]
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (1, "limosa: the output could not be written (No space left on device)\n")


@pytest.mark.root
def test_a_log_on_a_full_disk_is_said(limosa, tmp_path):
    (disk := tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=True, timeout=60)
    try:
        ran = limosa("run", "--log", disk / "log", "--", "sh", "-c", "head -c 100000 /dev/zero")
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=60)
    assert ran.rc != 0
    assert f"the disk of {disk}/log is full: some of the job's output may be missing" in ran.stderr


def test_a_long_output_comes_through_whole_and_in_order(limosa):
    result = limosa("run", "-q", "--", "seq", "200000", rc=0)
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 200001))
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("command", "code"),
    [(["no-such-command"], 127), (["/etc/passwd"], 126), (["sh", "-c", "kill -9 $$"], 137), (["true"], 0)],
)
def test_exit_codes(limosa, command, code):
    limosa("run", "--", *command, rc=code)


@pytest.mark.parametrize("how", ['"$@"', '"$@" & wait $!', 'nohup "$@"', 'trap "" QUIT; "$@"'])
def test_the_job_ignores_what_the_bare_command_would(how, tmp_path):
    """A script's & protects it from the Ctrl-C that ends the script, nohup from the end of the terminal; a job too."""
    show = ["sh", "-c", "grep SigIgn /proc/self/status"]  # grep: what a shell has been given, unchanged

    def told(*command: str) -> int:
        # From a shell that ignores nothing, whatever this test was started from.
        plain = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)}
        try:
            ran = subprocess.run(
                ["sh", "-c", how, "sh", *command], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True
            )
        finally:
            for number, handler in plain.items():
                signal.signal(number, handler)
        mask = int(next(line for line in ran.stdout.splitlines() if "SigIgn" in line).split()[1], 16)
        return mask & 0x7FFFFFFF  # without libc's own two, which its posix_spawn leaves ignored

    assert told(sys.executable, "-m", "limosa", "run", "-q", "--", *show) == told(*show)


def test_options_of_the_command_are_the_commands(limosa):
    result = limosa("run", "-q", "echo", "--name", "x", "-o", "json", rc=0)
    assert result.stdout == "--name x -o json\n"


@pytest.mark.parametrize(
    ("options", "preloaded", "without"),
    [
        ([], True, ""),
        (["--without", "bulk"], True, "bulk"),
        (["--without", "bulk", "--without", "stack"], True, "bulk,stack"),
        (["--no-shim"], False, ""),
    ],
)
def test_what_the_job_runs_under(limosa, options, preloaded, without):
    words = 'echo "$LD_PRELOAD|$LIMOSA_SHIM_WITHOUT"'
    said = limosa("run", "-q", *options, "--", "sh", "-c", words, rc=0).stdout.strip().split("|")
    assert ("liblimosa_shim" in said[0], said[1]) == (preloaded, without)


def test_detached_prints_the_pid_and_leaves_the_job_running(limosa, tmp_path):
    result = limosa(
        "run",
        "--detach",
        "--name",
        "counter",
        "-o",
        "json",
        "--",
        sys.executable,
        VICTIMS / "counter.py",
        tmp_path,
        rc=0,
    )
    found = result.json
    assert found == {
        "schema": 1,
        "pid": found["pid"],
        "name": "counter",
        "log": str(tmp_path / "counter.limosa.log"),
        "warnings": [],
    }
    record = wait_record()
    assert (record.root, record.name, record.supervisor) == (Identity.of(found["pid"]), "counter", None)
    assert record.cwd == str(tmp_path)
    wait_text(tmp_path / "counter.limosa.log", "tick 3")
    again = limosa("run", "-d", "--name", "counter", "--", "true", rc=125)
    assert str(found["pid"]) in again.stderr
    taken = limosa("run", "-d", "--name", "counter", "-o", "json", "--", "true", rc=125).json
    assert taken["error"]["exit_code"] == 125
    other = limosa("run", "-d", "-q", "--", "sh", "-c", "sleep 0.1", rc=0)
    assert int(other.stdout)


def test_a_file_that_limosa_did_not_make_is_never_its_log(limosa, tmp_path):
    """A script called train.py may well write train.log itself; each run has a log of its own."""
    script = tmp_path / "train.py"
    script.write_text("print('said')\nopen('train.log', 'a').write('kept\\n')\n")
    (tmp_path / "train.log").write_text("an hour of work\n")
    (tmp_path / "train.limosa.2.log").symlink_to(tmp_path / "train.log")
    limosa("run", "-q", "--", sys.executable, "train.py", rc=0)
    limosa("run", "-q", "--", sys.executable, "train.py", rc=0)
    assert (tmp_path / "train.log").read_text() == "an hour of work\nkept\nkept\n"
    assert (tmp_path / "train.limosa.log").read_text() == "said\n"
    assert (tmp_path / "train.limosa.3.log").read_text() == "said\n"
    assert (tmp_path / "train.limosa.log").stat().st_mode & 0o777 == 0o600
    limosa("run", "-q", "--log", "train.log", "--", "sh", "-c", "echo asked for", rc=0)
    assert (tmp_path / "train.log").read_text().endswith("kept\nasked for\n")


def test_no_log_is_left_of_a_job_that_could_not_start(limosa, tmp_path):
    limosa("run", "--name", "none", "--", "no-such-program", rc=127)
    assert not list(tmp_path.glob("none*"))


def test_json_needs_detach(limosa):
    assert limosa("run", "-o", "json", "--", "true", rc=125).json["error"]["id"] == "run-failed"


def test_no_command_is_a_failure_of_its_own(limosa):
    assert limosa("run").rc == 125


TRAP = """
import os, signal, sys, time
who = "root"
def heard(number, frame):
    os.write(1, f"{who} heard {signal.Signals(number).name}\\n".encode())  # print is not for handlers
    if number in (signal.SIGTERM, signal.SIGINT): os._exit(9)
for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
    signal.signal(s, heard)
root = os.getpid()
if os.fork() == 0:
    who = "child"
    os.write(1, b"child READY\\n")
    while os.getppid() == root: time.sleep(0.01)
    os._exit(0)
os.write(1, b"root READY\\n")
while True: time.sleep(0.01)
"""


@pytest.fixture
def trapped(limosa, tmp_path):
    """An attached run of a process and its child that say which signals they hear; and their log."""
    process = limosa("run", "--log", "log", "--", sys.executable, "-c", TRAP, wait=False)
    wait_text(tmp_path / "log", "root READY")
    wait_text(tmp_path / "log", "child READY")
    return process, tmp_path / "log"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_what_kill_sends_is_for_the_root_alone(trapped, number):
    process, log = trapped
    process.send_signal(number)
    wait_text(log, f"root heard {number.name}")
    if number != signal.SIGTERM:  # which it has not ended from
        process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 9
    assert "child heard" not in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_what_a_terminal_sends_is_for_the_whole_group(trapped, number):
    process, log = trapped
    process.send_signal(number)
    wait_text(log, f"root heard {number.name}")
    wait_text(log, f"child heard {number.name}")
    if number != signal.SIGINT:
        process.terminate()
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 9
    assert f"heard {number.name}" in stdout


def test_the_job_outlives_a_killed_run(limosa, tmp_path):
    process = limosa("run", "--log", "log", "--", sys.executable, VICTIMS / "counter.py", tmp_path, wait=False)
    wait_text(tmp_path / "log", "READY")
    record = wait_record()
    process.kill()
    process.wait(60)
    ticks = (tmp_path / "log").read_text().count("tick")
    wait_text(tmp_path / "log", f"tick {ticks + 5} ")
    assert record.root.alive()


def test_a_reader_that_goes_away_does_not_end_the_job(limosa, tmp_path):
    process = limosa("run", "--log", "log", "--", sys.executable, VICTIMS / "counter.py", tmp_path, wait=False)
    wait_text(tmp_path / "log", "READY")
    os.close(os.dup(process.stdout.fileno()))
    process.stdout.close()
    wait_text(tmp_path / "log", "tick 40 ")
    assert process.poll() is None
    (tmp_path / "stop").touch()
    assert process.wait(60) == 0
    process.stdout = None


def test_a_job_ended_by_a_checkpoint_names_the_image_and_exits_75(limosa, tmp_path):
    process = limosa("run", "--log", "log", "--", "sleep", "60", wait=False)
    root = wait_record().root
    (tmp_path / "image").mkdir()
    EndedRecord(root=root, image=str(tmp_path / "image"), image_id="x").save()
    os.kill(root.pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75
    assert str(tmp_path / "image") in stderr
    assert EndedRecord.of(root) is None


def test_a_job_killed_by_somebody_else_is_not_taken_for_a_checkpoint(limosa, tmp_path):
    process = limosa("run", "--log", "log", "--", "sleep", "60", wait=False)
    root = wait_record().root
    EndedRecord(root=root, image=str(tmp_path / "not-there")).save()
    os.kill(root.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 137


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py"], "train"),
        (["/usr/bin/python3.12", "-u", "-X", "dev", "-m", "pkg.mod"], "pkg.mod"),
        (["python3", "-c", "pass"], "python3"),
        (["torchrun", "x.py"], "torchrun"),
        (["./7z"], "job-7z"),
        (["/"], "job"),
    ],
)
def test_a_job_without_a_name_gets_its_programs(command, name):
    assert default_name(command) == name


def test_default_names_are_numbered_where_taken():
    RunRecord(root=Identity.of(os.getpid()), name="train", command=[]).save()
    assert default_name(["python", "train.py"]) == "train-2"
    assert json.loads(json.dumps(default_name(["python", "other.py"]))) == "other"

"""stdout is the result and nothing else; colours and progress only on a terminal; a reader may go away."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from terminal import Terminal, lines

from limosa.cli import output
from limosa.cli.output import Format, Report, error_object, plain, reporting
from limosa.errors import FailedUndone, LeftSuspended, LimosaError, NoSuchProcess, Reason, Refused, UndoFailed, worst

REASON = Reason(id="memory-cgroup", text="too little", exit_code=15, hint="more", pid=7, forceable=True)
WARNING = Reason(id="unknown", text="cannot be known")


def run_on_terminal(script: str, env: dict[str, str], *, stdout_too: bool = False) -> str:
    """Runs a script with stderr (and stdout) on a terminal of 100 columns; returns what came there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**env, "TERM": "xterm-256color", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=theirs if stdout_too else subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    try:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # EIO: the other side has closed
                break
            if not data:
                break
            seen += data
        assert process.wait(timeout=60) == 0
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    return seen.decode()


TABLE = """
from limosa.cli.output import console
from limosa.cli.table import table
table(console(), ("PID", "COMMAND"), [(1, "x" * 300)], right=("PID",), text=("COMMAND",))
"""


def test_a_pipe_gets_no_colours_and_nothing_is_cut(environment):
    ran = subprocess.run([sys.executable, "-c", TABLE], env=environment, capture_output=True, text=True, check=True)
    assert "\x1b" not in ran.stdout
    assert "x" * 300 in ran.stdout


def test_a_terminal_gets_colours_unless_no_color(environment):
    assert "\x1b[1m" in run_on_terminal(TABLE, environment, stdout_too=True)
    plain_text = run_on_terminal(TABLE.replace("300", "20"), {**environment, "NO_COLOR": "1"}, stdout_too=True)
    assert not [code for code in ("\x1b[3", "\x1b[9", "\x1b[4") if code in plain_text]


PROGRESS = """
import time
from limosa.cli.output import Report, Format
from limosa.progress import Progress
report = Report("checkpoint", Format.text, quiet={quiet})
for done in range(0, 11):
    report.progress(Progress("dump", done * 500_000_000, 5_000_000_000))
    time.sleep(0.5 if done == 5 else 0.03)  # in the middle it is drawn, however busy the machine
report.progress(Progress("unlock"))
report.close()
"""


def test_progress_on_a_terminal_has_bytes_rate_and_time_left(environment):
    seen = run_on_terminal(PROGRESS.format(quiet=False), environment)
    assert "dump" in seen
    assert "GiB/s" in seen
    assert "s left" in seen
    assert "4.66 GiB" in seen


def test_quiet_is_quiet(environment):
    assert run_on_terminal(PROGRESS.format(quiet=True), environment) == ""


def test_no_progress_where_stderr_is_no_terminal(environment):
    script = PROGRESS.format(quiet=False)
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


@pytest.mark.parametrize("args", [["--help"], ["doctor"], ["doctor", "-o", "json"]], ids=" ".join)
def test_a_reader_that_goes_away_is_no_error(environment, args):
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        argv = [sys.executable, "-m", "limosa", *args]
        ran = subprocess.run(
            argv, env=environment, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(theirs)
    assert "Traceback" not in ran.stderr
    assert "BrokenPipe" not in ran.stderr
    assert ran.returncode in (0, 11, 12, 24)


def test_json_has_schema_first_and_warnings_always(capsys):
    report = Report("x", Format.json, quiet=True)
    report.warn(WARNING)
    report.result({"ok": True, "warnings": [plain(WARNING)]}, "")
    out = capsys.readouterr().out
    assert out.startswith('{"schema":1,')
    assert out.count("\n") == 1
    assert json.loads(out) == {"schema": 1, "ok": True, "warnings": [plain(WARNING)]}


def test_warnings_are_said_once_on_stderr(capsys):
    report = Report("x")
    report.warn(WARNING, WARNING)
    report.result({}, "done")
    seen = capsys.readouterr()
    assert seen.out == "done\n"
    assert seen.err == "limosa: warning: cannot be known\n"


def code_of(error: BaseException, capsys, fmt: Format = Format.json) -> tuple[int, dict]:
    import click

    with pytest.raises(click.exceptions.Exit) as left, reporting("move", fmt):
        raise error
    out = capsys.readouterr().out
    return left.value.exit_code, json.loads(out) if out else {}


def test_an_error_is_its_exit_code_and_object(capsys):
    code, said = code_of(NoSuchProcess(pid=4711), capsys)
    assert code == 10
    assert said["error"] == {
        "id": "no-such-process",
        "exit_code": 10,
        "message": "there is no process 4711",
        "hint": "limosa ps lists the jobs",
        "job_state": "",
    }


def test_an_error_with_an_image_names_it(capsys):
    error = FailedUndone(what="checkpoint", detail="CRIU died", image="/data/x", job_state="running")
    code, said = code_of(error, capsys)
    assert code == 21
    assert said["error"]["image"] == "/data/x"
    assert said["error"]["job_state"] == "running"


def test_a_refusal_gives_every_reason_and_keeps_warnings(capsys):
    other = Reason(id="mig", text="is MIG", exit_code=12)
    code, said = code_of(Refused([REASON, WARNING, other]), capsys)
    assert code == 15
    assert said["error"]["id"] == "memory-cgroup"
    assert [r["id"] for r in said["error"]["reasons"]] == ["memory-cgroup", "mig"]
    assert [w["id"] for w in said["warnings"]] == ["unknown"]


def test_what_nobody_foresaw_is_exit_1_and_tells_the_state(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(tmp_path / "r"))
    code, said = code_of(ZeroDivisionError("oh"), capsys)
    assert (code, said["error"]["id"], said["error"]["exit_code"]) == (1, "internal", 1)
    assert "ZeroDivisionError: oh" in said["error"]["message"]
    assert "no job was touched" in said["error"]["message"]


def test_the_state_comes_from_the_journal(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(tmp_path / "r"))
    from limosa.operation.journal import Header, Journal
    from limosa.process.identity import Identity

    me = Identity.of(os.getpid())
    journal = Journal.create(Header(id="suspend-1", operation="suspend", roots=[Identity.of(1)], controller=me))
    try:
        journal.note("lock", "done", 1)
        journal.note("checkpoint", "done", 1)
        _, said = code_of(ZeroDivisionError("oh"), capsys)
        assert said["error"]["job_state"] == "checkpointed"
        assert "suspend of 1: last step checkpoint done" in said["error"]["message"]
        journal.note("restore", "begin", 1)
        _, said = code_of(ZeroDivisionError("oh"), capsys)
        assert said["error"]["job_state"] == "unknown"
    finally:
        journal.finish()


def test_a_state_is_called_as_ps_calls_it_and_limosa_is_said_once(capsys):
    report = Report("limosa")
    report.problem(FailedUndone(what="move", detail="x", job_state="parked"))
    assert "the job's state now: suspended (memory only)" in capsys.readouterr().err
    report.interrupted()
    assert capsys.readouterr().err.startswith("limosa: limosa was interrupted; ")


def test_the_trace_comes_with_v_only(capsys):
    import click

    for verbose in (0, 1):
        with pytest.raises(click.exceptions.Exit), reporting("move", Format.text, verbose=verbose):
            raise ZeroDivisionError
        assert ("Traceback" in capsys.readouterr().err) is bool(verbose)


def test_the_worst_exit_code_of_several():
    assert worst([0, 0]) == 0
    assert worst([0, 13, 10]) == 13
    assert worst([13, 1, 10]) == 1
    assert worst([13, 1, 41]) == 41
    assert worst([41, 10, 40]) == 40


def test_several_jobs_have_results_and_the_worst_error(capsys):
    from limosa.cli.on_jobs import tell
    from limosa.operation.results import JobResult, Outcome

    good = Outcome(pid=1, result=JobResult(operation="move", pid=1, timings={"pause_seconds": 0.5}, warnings=[WARNING]))
    bad = Outcome(pid=2, error=NoSuchProcess(pid=2))
    worse = Outcome(pid=3, error=LeftSuspended(detail="full", pid=3, job_state="suspended"))
    report = Report("move", Format.json, quiet=True)
    tell(report, "move", [good, bad, worse])
    said = json.loads(capsys.readouterr().out)
    assert report.exit_code == 41
    assert [r["pid"] for r in said["results"]] == [1, 2, 3]
    assert said["error"]["id"] == "left-suspended"
    assert said["results"][1]["error"]["exit_code"] == 10
    assert [w["id"] for w in said["warnings"]] == ["unknown"]


def test_one_job_is_itself_and_in_results(capsys):
    from limosa.cli.on_jobs import tell
    from limosa.operation.results import JobResult, Outcome

    report = Report("suspend", Format.json)
    tell(report, "suspend", [Outcome(pid=1, result=JobResult(operation="suspend", pid=1, state="checkpointed"))])
    said = json.loads(capsys.readouterr().out)
    assert (said["pid"], said["state"]) == (1, "checkpointed")
    assert said["results"][0]["pid"] == 1


def test_one_jobs_error_is_the_commands(capsys):
    from limosa.cli.on_jobs import tell
    from limosa.operation.results import Outcome

    error = UndoFailed(what="move", detail="a", undo_detail="b")
    with pytest.raises(UndoFailed):
        tell(Report("move"), "move", [Outcome(pid=1, error=error)])


def test_text_that_is_not_unicode_becomes_json_all_the_same(capsys):
    Report("x", Format.json).result({"path": os.fsdecode(b"/tmp/\xff")}, "")
    assert json.loads(capsys.readouterr().out)["path"] == "/tmp/\ufffd"


def test_text_from_elsewhere_cannot_drive_the_terminal():
    from limosa.cli.words import clean

    assert clean("a\x1b[2Jb\n\x07\u202e") == "a\\x1b[2Jb\\n\\x07\\u202e"
    assert clean(os.fsdecode(b"\xff")) == "\\xff"
    assert clean("Größe – 漢字") == "Größe – 漢字"


def test_error_object_has_the_contracts_keys():
    assert set(error_object(LimosaError(detail="x"))) == {"id", "exit_code", "message", "hint", "job_state"}


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_result_that_cannot_be_written_is_said_and_is_no_success(form: str) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "limosa", "arena", "-o", form],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ran.returncode == 1
    assert "the result of limosa arena could not be written (No space left on device): it was done" in ran.stderr
    assert "no job was touched" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["plan", "move", "nobody", "--to", "0"],
            "the plan of limosa move could not be written ({}): nothing was touched",
        ),
        (["recover", "--dry-run"], "the plan of limosa recover could not be written ({}): nothing was touched"),
        (["--help"], "the output could not be written ({})"),
        (["plan", "move", "--help"], "the output could not be written ({})"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_plan_or_help_that_cannot_be_written_is_neither_done_nor_an_internal_error(environment, words, said) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "limosa", *words],
            env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ran.stderr.startswith(f"limosa: {said.format('No space left on device')}\n")
    assert "hint: limosa recover" not in ran.stderr
    assert ran.returncode != 0


@pytest.mark.parametrize("closed", [">&- <&-", ">&- 2>&-"])
def test_closed_outputs_are_as_if_thrown_away(closed: str) -> None:
    """And the next file that is opened does not get what was to be printed."""
    shell = f"exec {sys.executable} -m limosa arena {closed}"
    ran = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


SEVERAL_THREADS = """
import threading
from limosa.cli.output import Report, Format
from limosa.progress import Progress
report = Report("restore", Format.text)
begin = threading.Barrier(8)
def work():
    begin.wait()
    report.progress(Progress("verify", 1, 2))
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
report.close()
report.progress(Progress("verify", 2, 2))
others = [t for t in threading.enumerate() if t is not threading.main_thread()]
[t.join(60) for t in others]
print("left:", [t.name for t in others if t.is_alive()], flush=True)
"""


def test_one_display_whoever_reports_first_and_none_after_the_end(environment):
    seen = run_on_terminal(SEVERAL_THREADS, environment, stdout_too=True)
    assert "left: []" in seen
    assert "verify" not in seen.split("left:")[1]


NARROW = """
import time
from limosa.cli.output import Report, Format
from limosa.progress import Progress
report = Report("checkpoint", Format.text)
for done in range(0, 5):
    text = "what takes long, in a good many words " * 3
    report.progress(Progress("dump", done << 30, 100 << 30, text))
    time.sleep(0.3)
report.close()
"""


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_step_is_one_line_however_narrow_the_terminal(environment, columns):
    with Terminal([sys.executable, "-c", NARROW], columns=columns, env=environment) as terminal:
        assert terminal.end() == 0
        drawn = [line for line in lines(terminal.seen) if line.strip()]
    assert len(drawn) >= 3
    assert all("dump – wh" in line and "of 100 GiB" in line and len(line) <= columns for line in drawn), drawn


HOSTILE = """
import sys, time
from limosa.cli.output import Format, Report, reporting
from limosa.errors import FailedUndone, Reason
from limosa.progress import Progress
evil = "\\x1b]0;EVIL\\x07\\x9b31m\\u2028\\nlimosa: forged\\r"
report = Report("x", Format.text, verbose=1)
report.warn(Reason(id="a", text=evil, hint=evil))
report.tell(evil)
report.progress(Progress("dump", 1, 2, evil))
time.sleep(0.3)
report.warn(Reason(id="b", text=evil))
report.failure(FailedUndone(what="x", detail=evil, hint=evil))
report.crash(ValueError(evil))
report.result({}, "one\\ntwo" + evil.replace("\\n", ""))
Report("x", Format.json).result({"name": evil}, "")
"""


def test_whatever_a_job_is_called_a_line_stays_one_line_and_drives_no_terminal(environment):
    seen = run_on_terminal(HOSTILE, environment, stdout_too=True)
    assert seen.count("forged") >= 9
    assert not [line for line in seen.splitlines() if line.startswith("limosa: forged")]
    for character in ("\x1b]", "\x07", "\x9b", "\u2028"):
        assert character not in seen
    assert "one\r\ntwo" in seen
    assert json.loads(seen[seen.rindex("\n{") :])["name"].endswith("forged\r")


def test_ctrl_c_comes_after_stdout_is_as_it_has_to_be(monkeypatch):
    done = []

    class Stream:
        def reconfigure(self, errors):
            signal.raise_signal(signal.SIGINT)
            done.append(errors)

    monkeypatch.setattr(sys, "stdout", Stream())
    monkeypatch.setattr(sys, "stderr", Stream())
    with pytest.raises(KeyboardInterrupt):
        output._print_any_path()
    assert done == ["backslashreplace"] * 2

"""The first signal cancels, a second Ctrl-C stops at once and says what is where. Real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SCRIPT = """
import os, signal, sys, time
{before}
from limosa.cli.output import Format, Report
from limosa.cli.signals import cancelling
from limosa.operation.journal import Header, Journal
from limosa.process.identity import Identity
me = Identity.of(os.getpid())
journal = Journal.create(Header(id="move-1", operation="move", roots=[me], controller=me))
journal.note("lock", "done", me.pid)
with cancelling(Report("move", Format({fmt!r}))) as cancel:
    print("ready", file=sys.stderr, flush=True)
    while not cancel.is_set():
        time.sleep(0.01)
    print("undoing", file=sys.stderr, flush=True)
    end = time.monotonic() + {undo}
    while time.monotonic() < end:
        time.sleep(0.01)
journal.finish()
sys.exit(22)
"""


@contextmanager
def started(environment, fmt="text", undo=0.0, before="") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(fmt=fmt, undo=undo, before=before)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_and_says_that_it_waits(environment, number):
    with started(environment) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 22
    assert out == ""
    assert number.name in err
    assert "waiting for it" in err


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_a_second_ctrl_c_stops_now_and_says_what_is_where(environment, fmt):
    with started(environment, fmt=fmt, undo=250) as process:
        process.send_signal(signal.SIGTERM)
        lines = iter(process.stderr.readline, "")
        assert any(line == "undoing\n" for line in lines)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 60
    assert process.returncode == 1
    assert f"move of {process.pid}: last step lock done" in err
    assert "limosa recover" in err
    if fmt == "json":
        error = json.loads(out)["error"]
        assert (error["id"], error["exit_code"], error["job_state"]) == ("stopped", 1, "locked")
    else:
        assert out == ""


def test_sighup_and_sigterm_after_the_first_do_not_stop_the_undo(environment):
    with started(environment, undo=0.5) as process:
        process.send_signal(signal.SIGHUP)
        lines = iter(process.stderr.readline, "")
        assert any(line == "undoing\n" for line in lines)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
    assert process.returncode == 22


def test_a_signal_that_is_ignored_stays_ignored(environment):
    with started(environment, before="signal.signal(signal.SIGHUP, signal.SIG_IGN)") as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 22


def test_handlers_are_put_back_but_ctrl_c_comes_too_late():
    """It was 22, "no job was touched", where the operation was done and its result was being written."""
    from limosa.cli.output import Report
    from limosa.cli.signals import SIGNALS, cancelling

    before = {n: signal.getsignal(n) for n in SIGNALS}
    try:
        with cancelling(Report("move")):
            assert not [n for n in SIGNALS if signal.getsignal(n) == before[n]]
        assert {n: signal.getsignal(n) for n in SIGNALS} == {**before, signal.SIGINT: signal.SIG_IGN}
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])


ATTACHED = """
import os, signal, sys
from pathlib import Path
from limosa import operation
from limosa.cli import restore
from limosa.cli.output import Report
from limosa.operation.results import RestoreResult

class Attached(Report):
    def tell(self, text):
        os.kill(os.getpid(), signal.SIGINT)

def restored(*_, **__):
    return RestoreResult(pid=os.posix_spawnp("sleep", ["sleep", "60"], os.environ, setsid=True), id="x")

operation.restore, restore._end_of_log = restored, lambda _: 0
report = Attached("restore")
restore._attached(report, Path("x"), {}, None)
sys.exit(report.exit_code)
"""


def test_ctrl_c_reaches_the_job_of_an_attached_restore(environment):
    """It was ignored: nothing but another terminal could end the job."""
    done = subprocess.run([sys.executable, "-c", ATTACHED], env=environment, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGINT


SAID = "limosa: interrupted before it had begun; no job was touched\n"
EARLY = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "limosa.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["limosa", *sys.argv[1:]]
from limosa.__main__ import main
main()
"""


@pytest.mark.parametrize("arguments", [["ps"], ["move", "1", "-o", "json", "--to", "1"]])
def test_ctrl_c_while_limosa_is_loaded_is_a_cancel(environment, arguments):
    """It was the interpreter's own end by the signal: a trace, and 130."""
    words = [sys.executable, "-c", EARLY, *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (22, SAID)
    if "json" in arguments:
        error = json.loads(done.stdout)["error"]
        assert (error["id"], error["exit_code"], error["job_state"]) == ("cancelled", 22, "")

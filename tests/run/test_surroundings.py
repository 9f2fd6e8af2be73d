"""Tests, and ``limosa`` itself, under whatever starts them: nohup, a script's ``&``, cron, a shell with odd habits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ODD = """
import os, resource, signal, sys
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
os.umask(0o777)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.close(0)
os.chdir("/")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Becomes a Python program as nobody starts one: all signals ignored and blocked, nothing permitted, no stdin."""

MOVED = """
import os, signal, sys, threading
import limosa.cli.main
from limosa.cli.output import Format, Report
from limosa.cli.signals import cancelling
def entry():
    import subprocess
    code = subprocess.run(["/bin/sh", "-c", "exit 7"]).returncode
    with cancelling(Report("move", Format.text)) as cancel:
        os.kill(os.getpid(), signal.{number})
        print(code, cancel.wait({wait}), len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
limosa.cli.main.entry = entry
from limosa.__main__ import main
main()
"""
"""``limosa`` with a verb that has a program's exit code read and is sent a signal while it works."""


def oddly(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", ODD, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, **options)


@pytest.mark.slow
def test_tests_show_the_same_whoever_starts_them(tmp_path):
    """``nohup make test`` had twelve red tests."""
    chosen = [
        "run/test_launch.py::test_what_nohup_or_a_script_ignores_for_a_command_the_job_ignores_too",
        "run/test_launch.py::test_environment_folder_and_unbuffered_output",
        "run/test_limosa_run.py::test_exit_codes",
        "run/test_limosa_run.py::test_what_a_terminal_sends_is_for_the_whole_group",
        "run/test_victims.py::test_victim_runs_to_a_good_end[tree]",
        "cli/test_signals.py::test_a_signal_cancels_and_says_that_it_waits",
        "cli/test_signals.py::test_a_second_ctrl_c_stops_now_and_says_what_is_where",
    ]
    odd = tmp_path / "a folder – of ours"
    odd.mkdir()
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")}
    env = {**kept, "LC_ALL": "C", "TMPDIR": str(odd), "LIMOSA_TRACE": "1", "COLUMNS": "20"}  # no HOME, no TERM
    words = ["-q", "-p", "no:randomly", "-n", "2", *(TESTS / one for one in chosen)]
    done = oddly("-m", "pytest", *words, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 15


@pytest.mark.parametrize(
    ("number", "ignored", "cancelled"),
    [
        (signal.SIGINT, [], True),
        (signal.SIGHUP, [], True),
        (signal.SIGHUP, [signal.SIGHUP], False),  # nohup: whoever hangs up does not end it
        (signal.SIGINT, [signal.SIGHUP], True),  # and Ctrl-C is at work
        (signal.SIGINT, [signal.SIGINT, signal.SIGQUIT], False),  # a script's &: a Ctrl-C is not for it
        (signal.SIGTERM, [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP], True),
    ],
)
def test_limosa_keeps_what_is_ignored_on_purpose_and_nothing_else(runtime, number, ignored, cancelled):
    """Blocked signals, and an ignored SIGCHLD, are nobody's wish: no Ctrl-C came through, every exit code was 0."""
    script = f"""
import os, signal, sys
for number in {[int(n) for n in ignored]} + [signal.SIGCHLD]:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
os.execv(sys.executable, [sys.executable, "-c", {MOVED.format(number=number.name, wait=60 if cancelled else 0.3)!r}])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["7", str(cancelled), "0"], done.stderr

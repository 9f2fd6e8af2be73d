"""A restore that waits for processes of which none is left: noticed, and nothing else is taken for one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from limosa.errors import CriuFailed
from limosa.process.criu.leftovers import Standstill
from limosa.process.criu.program import Criu
from limosa.process.criu.run import dump
from limosa.process.identity import read_stat


def stands_still(standstill: Standstill, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if standstill():
            return True
        time.sleep(0.05)
    return False


def test_a_restore_whose_processes_are_gone_stands_still() -> None:
    script = "sleep 300 & echo; read said; kill $!; wait; exec sleep 300"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as criu:
        try:
            assert criu.stdout is not None
            assert criu.stdout.readline() == b"\n"
            found = Standstill(criu.pid, patience=0.5)
            assert not stands_still(found, 1.0)  # it has a process
            assert criu.stdin is not None
            criu.stdin.write(b"end it\n")
            criu.stdin.flush()
            assert stands_still(found, 60.0)
        finally:
            criu.kill()


def test_a_restore_that_has_not_made_a_process_yet_does_not() -> None:
    with subprocess.Popen(["sleep", "60"]) as criu:
        try:
            assert not stands_still(Standstill(criu.pid, patience=0.3), 1.5)
            assert stands_still(Standstill(criu.pid, began=True, patience=0.3), 60.0)
        finally:
            criu.kill()


STOPS = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


def test_a_child_that_a_killed_criu_leaves_stopped_is_ended(tmp_path: Path) -> None:
    """CRIU tries ptrace on one when it begins. What is stopped elsewhere is left alone."""
    program = tmp_path / "criu"
    child = f"{sys.executable} -I -S -c '{STOPS}' {program}"
    program.write_text(f'#!/bin/sh\n{child} & echo $! > "{tmp_path}/pid"; sleep 1; kill -9 $$\n')
    program.chmod(0o755)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", STOPS, program]) as other:
        try:
            with pytest.raises(CriuFailed):
                dump(Criu(argv=[str(program)], version="4.2", network_lock="skip"), 1, folder, folder)
            pid = int((tmp_path / "pid").read_text())
            end = time.monotonic() + 60
            while Path(f"/proc/{pid}").exists() and not read_stat(pid).ended:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert read_stat(other.pid).stopped
        finally:
            other.kill()
            os.close(folder)

"""A restore that waits for processes of which none is left: noticed, and nothing else is taken for one."""

from __future__ import annotations

import subprocess
import time

from limosa.process.criu.leftovers import Standstill


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

"""What the tests rely on to leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support import end_marked, stat_of

LOSE = """
import os, sys, time
os.setsid()
if os.fork(): os._exit(0)   # what is left has neither its parent nor its session
os.setsid()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
"""


def test_what_has_left_its_session_and_its_parent_is_ended_too(tmp_path, runtime):
    found = tmp_path / "pid"
    subprocess.run([sys.executable, "-c", LOSE, str(found)], check=True, timeout=60)
    while not (found.exists() and found.read_text()):
        pass
    pid = int(found.read_text())
    assert stat_of(pid)[1] == pid
    end_marked(f"LIMOSA_RUNTIME_DIR={runtime}")
    left = stat_of(pid)
    assert left is None or left[2] == "Z"
    assert Path(f"/proc/{os.getpid()}").exists()


def test_no_two_modules_of_tests_that_one_run_reads_have_one_name():
    """Such a run is red before its first test; `make check` leaves out what needs a node or a GPU."""
    tests = Path(__file__).parents[1]
    apart = {"campaign", "conformance", "e2e_soft", "gpu", "softgpu"}
    together = {folder.name for folder in tests.iterdir()} - apart
    for folders in (together, apart - {"conformance", "gpu"}, {"conformance"}, {"gpu"}):
        names = Counter(found.name for folder in folders for found in (tests / folder).rglob("test_*.py"))
        assert [name for name, count in names.items() if count > 1] == []

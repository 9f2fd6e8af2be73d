"""``limosa restore`` on a terminal: once the job runs, nobody draws there any more."""

from __future__ import annotations

import os
import sys
import time

import pytest
from terminal import Terminal, lines

pytestmark = pytest.mark.criu

JOB = """
import os, time
held = bytearray(64 << 20)
print("begins", flush=True)
while not os.path.exists("job-goes-on"):
    time.sleep(0.01)
time.sleep(2)
for n in range(20):
    print(f"step {n}", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("attach", [[], ["--attach"]], ids=["", "attach"])
def test_a_restore_leaves_no_display_behind(limosa, adopt, tmp_path, attach):
    log, image = tmp_path / "log", tmp_path / "image"
    (tmp_path / "job.py").write_text(JOB)
    pid = int(limosa("run", "-d", "--log", log, "--", sys.executable, tmp_path / "job.py", rc=0).stdout)
    adopt(pid, tmp_path)
    end = time.monotonic() + 60
    while "begins" not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    limosa("checkpoint", pid, "--output", image, rc=0)
    (tmp_path / "job-goes-on").touch()
    command = [sys.executable, "-m", "limosa", "restore", str(image), *attach]
    with Terminal(command, env=os.environ, cwd=str(tmp_path)) as terminal:
        assert terminal.end() == 0, terminal.seen
        before, mark, after = terminal.seen.partition(f"(process {pid}) runs")
    assert mark, terminal.seen
    assert before.count("\x1b[?25l") == before.count("\x1b[?25h") == 1  # the cursor is hidden, and is back
    assert "\x1b" not in after
    if attach:
        assert [line for line in lines(after) if line.startswith("step")] == [f"step {n}" for n in range(20)]

"""A job that runs on when its image is there, by a limosa that was killed: what lives on of it is nobody's to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import KILLED_AS_IT_WAS_COMMITTED, KILLED_AT_THE_END, has_ended

pytestmark = [pytest.mark.criu, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("program", "options"), [(KILLED_AT_THE_END, ["--leave-running"]), (KILLED_AS_IT_WAS_COMMITTED, [])]
)
def test_its_children_live_on_where_its_first_process_has_ended_since(
    start: Any, limosa: Any, tmp_path: Path, program: str, options: list[str]
) -> None:
    job = start(["/bin/sh", "-c", "sleep 300 & echo $! READY; wait"])
    child = int(job.text().split()[0])
    words = ["checkpoint", job.pid, *options, "--output", tmp_path / "image"]
    killed = subprocess.run([sys.executable, "-c", program, *map(str, words)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while tracer_of(job.pid):  # CRIU lets go of it
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not has_ended(job.pid)
    os.kill(job.pid, signal.SIGKILL)
    while "nothing" not in limosa("recover").stdout:
        assert time.monotonic() < end
    assert not has_ended(child)
    limosa("verify", tmp_path / "image", rc=0)


def tracer_of(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("TracerPid")]
    return int(line.split()[1])

"""A job that was only copied, by a limosa that was killed: what lives on of it is nobody's to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import KILLED_AT_THE_END, has_ended

pytestmark = [pytest.mark.criu, pytest.mark.timeout(120)]


def test_its_children_live_on_where_its_first_process_has_ended_since(start: Any, limosa: Any, tmp_path: Path) -> None:
    job = start(["/bin/sh", "-c", "sleep 300 & echo $! READY; wait"])
    child = int(job.text().split()[0])
    words = ["checkpoint", job.pid, "--leave-running", "--output", tmp_path / "image"]
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_THE_END, *map(str, words)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    os.kill(job.pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while "nothing" not in limosa("recover").stdout:
        assert time.monotonic() < end
    assert not has_ended(child)
    limosa("verify", tmp_path / "image", rc=0)

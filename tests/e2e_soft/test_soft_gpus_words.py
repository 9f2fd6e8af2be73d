"""``limosa gpus`` says whose the memory on a GPU is: a job's by its name, or Limosa's own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from soft_command import waits_for

JOB = Path(__file__).with_name("job.py")


def test_jobs_are_named_and_the_mover_is_limosas_own(soft):
    node = soft()
    (node.place / "job").mkdir()
    argv = [
        "run",
        "-d",
        "--name",
        "train",
        "--log",
        node.place / "log",
        "-q",
        "-o",
        "json",
        "--",
        sys.executable,
        JOB,
        node.place / "job",
    ]
    pid = node.limosa(*argv).json["pid"]
    try:
        node.reaper.watch(pid)
        waits_for(node, lambda: "tick 3" in (node.place / "log").read_text())
        assert node.limosa("suspend", "train").rc == 0
        assert node.limosa("resume", "train").rc == 0
        found = node.limosa("gpus", "-o", "json").json
        held = {p["pid"]: p for gpu in found["gpus"] for p in gpu["processes"]}
        assert (held[pid]["name"], held[pid]["job"], held[pid]["limosa"]) == ("train", pid, False)
        own = [p for p in held.values() if p["limosa"]]
        assert own
        assert not any(p["name"] for p in own)
        said = node.limosa("gpus").stdout
        assert f"{pid}    train: python" in said
        assert "Limosa's own, for root" in said
    finally:
        os.kill(pid, signal.SIGKILL)

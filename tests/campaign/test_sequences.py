"""A Hypothesis state machine on a node: random sequences of verbs over several jobs, some of them disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = int(os.environ.get("LIMOSA_CAMPAIGN_SEQUENCES", "6"))
SEED = os.environ.get("LIMOSA_CAMPAIGN_SEED", "1")


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(2))
def test_whatever_the_sequence_every_job_is_there_once_and_whole(part: int) -> None:
    room = [sys.executable, "-m", "campaign.sequences", str(EXAMPLES), "12", str(int(SEED) * 10 + part)]
    node = [sys.executable, "-m", "limosa", "softgpu", "--gpus", "4", "--memory", "1GiB", "--", *room]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *node],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]

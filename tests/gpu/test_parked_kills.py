"""SIGKILL in the middle of a parked move, to whoever has a part in it: after one recover the job computes as ever."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from op_support import journals, reached, wait_until
from proofs import VICTIMS, Prover
from test_parked_loop import helpers

from limosa import operation
from limosa.gpu import Inventory

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_parked, pytest.mark.two_gpus, pytest.mark.timeout(300, method="signal")]
GB = 1 << 30
TRAINING = [sys.executable, str(VICTIMS / "proof_torch.py"), "FOLDER", "--kind", "adamw", "--gb", "2"]


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
@pytest.mark.parametrize("who", ["limosa", "limosa-mover", "limosa-vault"])
def test_killed_while_a_job_is_moved(
    limosa: Callable[..., Any],
    tmp_path: Path,
    runtime: Path,
    gpus: Inventory,
    request: pytest.FixtureRequest,
    who: str,
    step: str,
) -> None:
    prover = Prover(limosa, tmp_path, [gpu.uuid for gpu in gpus.gpus[:2]], request.node.name)
    job = prover.start(TRAINING)

    def killed() -> Any:
        moving = limosa("move", job.pid, "--to", 1, "-o", "json", wait=False)
        wait_until(lambda: reached(runtime, step) or moving.poll() is not None, 60, f"{step} in a journal")
        assert moving.poll() is None, f"it has ended before {step}: {moving.communicate()}"
        pid = moving.pid if who == "limosa" else helpers(runtime)[who]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        stdout, stderr = moving.communicate(timeout=60)
        assert (moving.returncode == -signal.SIGKILL) is (who == "limosa"), stdout + stderr
        recovered = limosa("recover", "-o", "json", limit=60)
        wait_until(lambda: not journals(runtime), 10, "end of all journals")
        return recovered

    prover.acts(job, killed, None, 2 * GB)
    (here,) = {gpu for one in job.shims().values() for gpu in one["gpus"]}
    assert here in prover.gpus
    for _ in range(2):  # there and back, as if nothing had been
        there = prover.gpus[1 - prover.gpus.index(here)]
        moved = prover.acts(job, lambda to=there: operation.move(job.pid, to=to, timeout=60)[0].result, [there], 2 * GB)
        assert moved.way == "parked"
        prover.record["moves"] += 1
        here = there
        time.sleep(0.1)
    prover.twins_agree(job)

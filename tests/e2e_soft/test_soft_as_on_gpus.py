"""What ``scripts/test-gpu.sh nccl`` runs on machines with GPUs without any framework runs on software GPUs, too."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ALONE = Path(__file__).parents[1] / "gpu" / "test_nccl_alone.py"


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_rank_that_is_alone(soft: Callable[..., Any], gpus: int) -> None:
    node = soft(gpus=gpus, memory="512MiB")
    env = {
        "LIMOSA_VAULT_IDLE": "2",
        "LIMOSA_PROOF_TURNS": "2",
        "LIMOSA_SHARE": "",
        **({"LIMOSA_ONE_GPU": "1"} if gpus == 1 else {}),
    }
    # A short path: the mover's socket lies below it (107 bytes).
    with tempfile.TemporaryDirectory(prefix="limosa-", ignore_cleanup_errors=True) as short:
        words = ["-q", "--basetemp", Path(short) / "inner", "-m", "gpu_nccl", "-k", "one_rank_computes", ALONE]
        said = node.run([sys.executable, "-m", "pytest", *words], limit=200, cwd=ALONE.parents[2], env=env, rc=None)
    assert "7 passed" in said.stdout, said

"""The hash that tells what has changed is the same on a real GPU as on the host."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from op_support import VICTIMS

from limosa.gpu import Inventory
from limosa.native.build import build_hash

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_parked, pytest.mark.timeout(90, method="signal")]


def test_each_gpus_hash_is_the_hosts(gpus: Inventory) -> None:
    """Sizes, offsets and chunks of all kinds, and single bits that are turned; by a process of its own."""
    assert build_hash() is None
    argv = [sys.executable, str(VICTIMS / "chunk_hashes.py"), "72"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads(ran.stdout)
    assert said["wrong"] == []
    assert said["compared"] > 50 * len(gpus.gpus), said

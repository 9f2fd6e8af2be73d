"""What is run on machines with GPUs (``scripts/test-gpu.sh containers``) runs on a node of software GPUs, too.

There it has a PyTorch and a language model; here the jobs that need no framework.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
from containers.engines import ROOT, Engines
from containers.runtimes import cgroup_layouts, own_folders
from soft_node import Node

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
@pytest.mark.parametrize("what", ["training", "server", "ranks"])
def test_the_proofs_on_gpus_run_here(node: Node, cgroups: str, engines: Engines, tmp_path: Path, what: str) -> None:
    own_folders(node, "/etc", "/usr/local/lib")
    env = {"LIMOSA_RUNC": engines["runc"], "LIMOSA_PROOF_TURNS": "4", "LIMOSA_PROOFS": str(tmp_path / "proofs")}
    # A short path: the mover's socket lies below it (107 bytes).
    with tempfile.TemporaryDirectory(prefix="limosa-", ignore_cleanup_errors=True) as short:
        words = ["-q", "-s", "--basetemp", Path(short) / "inner", "-m", "gpu_containers", "-k", f"{what} and plain"]
        argv = [sys.executable, "-m", "pytest", *words, *(ROOT / "tests" / "gpu").glob("test_containers_*.py")]
        said = node.run(argv, limit=200, cwd=ROOT, env=env)
    assert "1 passed" in said.stdout, said
    (proof,) = map(json.loads, (tmp_path / "proofs").read_text().splitlines())
    assert all(way["pause"] > 0 for way in proof.get("ways", [])), "also of the one that came from an image"

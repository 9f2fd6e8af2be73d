"""What the driver cannot move is refused on evidence, before anything is touched, and runs on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
from op_support import limits, longest_gap, on

pytestmark = [*limits, pytest.mark.gpu_core]


def children(pid: int) -> set[int]:
    """All descendants of a process."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def refused(do: Any, victim: Any, reason: str, where: Sequence[object] = ("--to", 1)) -> None:
    """All verbs refuse with 13 and this reason, and the victim is not held up for a moment."""
    since = time.monotonic()
    plan = do("plan", "move", victim.pid, *where, rc=13)
    assert plan["verdict"] == "refused"
    found = {r["id"]: r for r in plan["reasons"] if r["exit_code"]}
    assert found[reason]["exit_code"] == 13
    assert found[reason]["hint"]
    assert do("move", victim.pid, *where, rc=13)["error"]["id"] in found
    assert reason in [r["id"] for r in do("suspend", victim.pid, rc=13)["error"]["reasons"]]
    # Where only children hold CUDA state, each of them is a job of its own to ps.
    family = {p["pid"] for p in do("ps")["jobs"]} & {victim.pid, *children(victim.pid)}
    jobs = [job for job in do("ps")["jobs"] if job["pid"] in family]
    assert jobs
    for job in jobs:
        assert not job["movable"]
        assert reason in [r["id"] for r in job["reasons"]]
    victim.goes_on()
    assert longest_gap(victim, since) < 1.0


@pytest.mark.two_gpus
def test_managed_memory_is_refused_and_forced_it_is_undone(stamping, do):
    victim = stamping("--managed")
    refused(do, victim, "managed-memory")
    forced = do("move", victim.pid, "--to", 1, "--force", "managed-memory", rc=13)
    assert "801" in forced["error"]["message"] or "NOT_SUPPORTED" in forced["error"]["message"]
    assert forced["error"]["job_state"]
    assert on(victim.pid) == {0}
    victim.goes_on()
    victim.finish()


@pytest.mark.two_gpus
def test_cuda_ipc_is_refused(stamping, do):
    victim = stamping("--ipc")
    refused(do, victim, "cuda-ipc")
    assert do("move", victim.pid, "--to", 1, "--force", "cuda-ipc", rc=2)["error"]["message"]  # it would be lost
    victim.goes_on()
    victim.finish()


@pytest.mark.two_gpus
def test_large_memory_on_two_gpus_with_peer_access_is_refused(stamping, do):
    victim = stamping("--gb", 0.6, "--two-gpus")
    refused(do, victim, "peer-access", ("--map", "0=1,1=0"))
    victim.finish()


@pytest.mark.two_gpus
def test_two_nccl_ranks_are_refused(stamping, do):
    victim = stamping("--nccl", limit=80)
    refused(do, victim, "nccl-ranks", ("--map", "0=1,1=0"))
    victim.finish()


@pytest.mark.two_gpus
@pytest.mark.parametrize("gpus", ["0", "0,1"])
def test_jax_is_refused_where_its_calls_do_not_wait(stamping, do, images, gpus):
    """It would be ended by the driver while it is checkpointed; on the way of ``limosa run`` it is not (proofs)."""
    env = {"CUDA_VISIBLE_DEVICES": gpus, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    victim = stamping("--jax", "--gb", 0.05, env=env, limit=80)
    refused(do, victim, "jax", ("--to", 1) if gpus == "0" else ("--map", "0=1,1=0"))
    assert do("checkpoint", victim.pid, "--output", images / "image", rc=13)["error"]["id"] == "jax"
    victim.goes_on()
    victim.finish()

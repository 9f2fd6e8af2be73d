"""Jobs of several processes: children with contexts of their own, a training with DataLoader workers, torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from op_support import OTHER, VICTIMS, as_victim, children, limits, on, reaped

pytestmark = [*limits, pytest.mark.gpu_core]
TRAINING = VICTIMS.parents[1] / "victims" / "train_torch.py"
STEPS = 500


def members(victim: Any) -> list[int]:
    """The parent and its two children."""
    found = [victim.pid, *children(victim.pid)]
    assert len(found) == 3
    return found


@pytest.mark.two_gpus
def test_a_tree_moves_is_suspended_and_resumed_as_one(stamping, do):
    victim = stamping("--children", 2)
    family = members(victim)
    moved = do("move", victim.pid, "--to", 1)
    assert [on(pid) for pid in family] == [{1}, {1}, {1}]
    assert moved["bytes"] > 3 * (256 << 20)
    victim.goes_on()
    do("suspend", victim.pid)
    assert [on(pid) for pid in family] == [set(), set(), set()]
    (job,) = [job for job in do("ps")["jobs"] if job["pid"] == victim.pid]
    assert job["state"] == "checkpointed"
    assert {process["state"] for process in job["processes"] if process["pid"] in family} == {"checkpointed"}
    do("resume", victim.pid)
    assert [on(pid) for pid in family] == [{1}, {1}, {1}]
    victim.goes_on()
    victim.finish()


def test_a_tree_of_which_a_part_is_suspended_is_suspended_by_toggle(stamping, do):
    victim = stamping("--children", 2)
    family = members(victim)
    do("suspend", family[1])
    assert on(family[1]) == set()
    assert do("toggle", victim.pid)["operation"] == "suspend"
    assert [on(pid) for pid in family] == [set(), set(), set()]
    do("resume", victim.pid)
    assert [on(pid) for pid in family] == [{0}, {0}, {0}]
    victim.goes_on()
    victim.finish()


def test_a_tree_is_killed_and_restored_on_the_other_gpu(stamping, do, images):
    victim = stamping("--children", 2)
    family = members(victim)
    reaped(victim)
    do("checkpoint", victim.pid, "--output", images / "image")
    assert not victim.alive()
    do("restore", images / "image", "--to", OTHER)
    assert members(victim) == family
    assert [on(pid) for pid in family] == [{OTHER}, {OTHER}, {OTHER}]
    victim.goes_on()
    victim.finish()


def disturb(victim: Any, do: Any, images: Path) -> None:
    """Move, suspend and resume, checkpoint, kill and restore a training, each in its middle."""

    def losses() -> int:
        return len(victim.losses(0))

    def further(limit: float = 30) -> None:
        before = losses()
        assert before < STEPS - 50
        victim.until(lambda: losses() >= before + 5, limit, "for losses")

    further()
    if OTHER:
        do("move", victim.pid, "--to", OTHER)
        further()
    do("suspend", victim.pid)
    do("resume", victim.pid)
    further()
    do("checkpoint", victim.pid, "--output", images / "image")
    assert not victim.alive()
    do("restore", images / "image", "--map", f"{OTHER}=0")
    further()


def test_a_training_with_dataloader_workers_ends_with_the_bits_of_its_twin(start, do, images):
    flags = ["--steps", STEPS, "--pace", 0.04, "--device", "cuda", "--workers", 2, "--pin"]
    twin = start("train_torch", *flags, ready=None)
    victim = start("train_torch", *flags)
    reaped(victim)
    assert len(children(victim.pid)) >= 2  # its workers, forked when it had its context
    disturb(victim, do, images)
    victim.ended_well(80)
    twin.ended_well(80)
    assert len(twin.losses(0)) == STEPS
    assert victim.losses(0) == twin.losses(0)


def test_a_training_under_torchrun_ends_with_the_bits_of_its_twin(start, do, limosa, images, tmp_path):
    flags = ["--steps", STEPS, "--pace", 0.04, "--device", "cuda", "--workers", 2, "--pin"]
    twin = start("train_torch", *flags, ready=None)
    folder = tmp_path / "torchrun"
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    name, log = "training", folder / "log"
    started = limosa(
        "run", "--detach", "--name", name, "--log", log, "-o", "json", "--", *torchrun, TRAINING, folder, *flags, rc=0
    )
    victim = as_victim(twin, started.json["pid"], folder, log)
    victim.wait_for("READY", 60)
    disturb(victim, do, images)
    victim.ended_well(80)
    twin.ended_well(80)
    assert victim.losses(0) == twin.losses(0)
    assert len(victim.losses(0)) == STEPS

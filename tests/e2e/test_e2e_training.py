"""A training that was checkpointed, killed and restored in the middle ends with the same bits as one left alone.

First two undisturbed twins have to agree, or the comparison would say nothing; and a comparison that a changed number
does not fail would say nothing either.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support import VICTIMS

pytestmark = [pytest.mark.criu, pytest.mark.slow]

STEPS = 30
PACE = 1.0  # seconds a step, for those that are to be met in the middle, until they are; it changes no number


def same_bits(one: list[str], other: list[str]) -> bool:
    """Whether two trainings lost exactly the same, step by step (losses as hex floats, so bit by bit)."""
    return len(one) == len(other) == STEPS and all(a == b for a, b in zip(one, other, strict=True))


def test_the_comparison_fails_for_one_changed_bit_and_one_missing_step() -> None:
    losses = [(1.0 / (n + 1)).hex() for n in range(STEPS)]
    assert same_bits(losses, list(losses))
    number = float.fromhex(losses[7])
    for changed in (number * (1 + 2**-52), -number, float("nan")):
        assert not same_bits(losses, [*losses[:7], changed.hex(), *losses[8:]])
    assert not same_bits(losses, losses[:-1])
    assert not same_bits(losses[:-1], losses[:-1])


def disturbed_once(limosa: Any, victim: Any, image: Path, rank: int | None) -> None:
    """Checkpoint → killed → restore in the middle of a training."""
    victim.until(lambda: len(victim.losses(rank)) > 3, what="for steps")
    limosa("checkpoint", victim.pid, "--output", image, "-o", "json", rc=0)
    assert not victim.alive()
    done = len(victim.losses(rank))
    assert done < STEPS, "it was over before it was disturbed"
    (victim.folder / "hurry").touch()
    limosa("restore", image, "-o", "json", rc=0)
    victim.ended_well(100)
    assert len(victim.losses(rank)) == STEPS


@pytest.mark.parametrize(
    ("program", "arguments", "rank"),
    [
        ("train_numpy", [STEPS], None),
        ("train_torch", ["--steps", STEPS, "--pace"], 0),
    ],
    ids=["numpy", "torch with DataLoader workers"],
)
def test_a_disturbed_training_ends_with_the_same_bits(start, limosa, tmp_path, program, arguments, rank) -> None:
    if program == "train_torch":
        assert importlib.util.find_spec("torch"), "PyTorch is part of what the tests need"
    twins = [start(program, *arguments, 0, ready=None) for _ in range(2)]
    for twin in twins:
        twin.ended_well(100)
    expected = twins[0].losses(rank)
    assert same_bits(expected, twins[1].losses(rank)), "two undisturbed twins differ: nothing can be compared"
    assert len(set(expected)) > STEPS // 2  # they do change
    victim = start(program, *arguments, PACE)
    disturbed_once(limosa, victim, tmp_path / "image", rank)
    assert same_bits(victim.losses(rank), expected)
    altered = [*expected[:-1], (float.fromhex(expected[-1]) + 2**-40).hex()]
    assert not same_bits(victim.losses(rank), altered)


def test_two_ranks_under_torchrun_end_with_the_same_bits(start, limosa, adopt, torchrun, tmp_path) -> None:
    """gloo over TCP inside the tree; the agent's io_uring is hidden by `limosa run`."""
    arguments = ["--steps", STEPS, "--workers", 1, "--pace"]
    twins = [start("train_torch", *arguments, 0, via=torchrun, ready=None) for _ in range(2)]
    for twin in twins:
        twin.ended_well(100)
    for rank in (0, 1):
        assert same_bits(twins[0].losses(rank), twins[1].losses(rank)), f"two undisturbed twins differ, rank {rank}"
    assert not same_bits(twins[0].losses(0), twins[0].losses(1))
    folder = tmp_path / "run"
    folder.mkdir()
    log = folder / "log"
    command = [*torchrun, VICTIMS / "train_torch.py", folder, *arguments, PACE]
    job = limosa("run", "--detach", "--name", "ranks", "--log", log, "-o", "json", "--", *command, rc=0).json
    victim = adopt(job["pid"], folder)
    victim.wait_for("READY", 60)
    disturbed_once(limosa, victim, tmp_path / "image", 0)
    for rank in (0, 1):
        assert same_bits(victim.losses(rank), twins[0].losses(rank)), f"rank {rank}"

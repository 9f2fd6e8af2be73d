"""Jobs that fill their GPU: what has fitted there comes back, and what has no room is told in figures that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soft_command import start

SIZE, IDLE, CONTEXT = 256, 4, 8  # MiB of a GPU, of what it shows when it is empty, of a context
FULL = SIZE - IDLE - CONTEXT


@pytest.fixture
def small(soft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    return soft(gpus=2, memory=f"{SIZE}MiB")


@pytest.mark.criu
@pytest.mark.parametrize("way", ["driver", "parked"])
def test_a_job_that_leaves_nothing_free_comes_back_from_host_memory_and_from_disk(small: Any, way: str) -> None:
    """The mover has a context beside a job that is parked; by the driver's way the job has all there is."""
    parked = way == "parked"
    job = start(small, "--mib", FULL - CONTEXT) if parked else small.job("--mib", FULL)
    assert small.says(0, "", "suspend", job.pid)["way"] == way
    assert small.says(0, "", "resume", job.pid)["way"] == way
    small.limosa("suspend", job.pid)
    image: Path = small.place / "image"
    small.limosa("checkpoint", job.pid, "--output", image)
    small.limosa("restore", image)
    job.goes_on(2)
    job.finish()


def test_jobs_that_fill_a_gpu_together_come_back_in_any_order(small: Any) -> None:
    jobs = [small.job("--mib", 56), small.job("--mib", SIZE - IDLE - 64 - CONTEXT - 4)]
    small.limosa("suspend", *[job.pid for job in jobs])
    small.limosa("resume", *[job.pid for job in reversed(jobs)])
    small.limosa("suspend", jobs[1].pid)
    small.limosa("resume", jobs[1].pid)
    for job in jobs:
        job.goes_on(2)
        job.finish()


def test_the_spare_on_another_gpu_is_once_a_gpu(small: Any) -> None:
    """Three that need 168 MiB on a GPU with 252 free; a spare for each would not fit."""
    jobs = [small.job("--mib", 48) for _ in range(3)]
    small.limosa("suspend", *[job.pid for job in jobs])
    small.limosa("resume", *[job.pid for job in jobs], "--to", 1)
    for job in jobs:
        job.goes_on(2)
        job.finish()


def test_what_is_missing_is_told_in_figures_that_differ(small: Any) -> None:
    job = small.job("--mib", FULL - 56)
    small.limosa("suspend", job.pid)
    refused = small.limosa("resume", job.pid, "--to", 1, rc=14)
    assert "GPU 1 has 252 MiB free and 260 MiB are needed (64 MiB of it to stay free)" in refused.stderr
    small.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()

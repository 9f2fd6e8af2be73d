"""One job moved two hundred times: nothing is left behind, on the GPUs, in the job, or in the processes that helped."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from leaks import grown, note_of, seen, too_much
from op_support import ONE_GPU
from proofs import VICTIMS, Job, note

from limosa import operation
from limosa.gpu import Inventory, inventory

TIMES = int(os.environ.get("LIMOSA_LOOP", "200"))
BESIDE = bool(os.environ.get("LIMOSA_LOOP_BESIDE"))
"""Others use the GPUs: what they hold says nothing then, and a memory that is kept shows as a descriptor."""
pytestmark = [pytest.mark.gpu, pytest.mark.gpu_parked, pytest.mark.gpu_alone, pytest.mark.timeout(540, method="signal")]


def helpers(runtime: Path) -> dict[str, int]:
    """The vault and the mover that live on between operations, by name."""
    mark, found = f"LIMOSA_RUNTIME_DIR={runtime}".encode(), {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                comm = Path(f"/proc/{name}/comm").read_text().strip()
                if comm in ("limosa-vault", "limosa-mover") and mark in Path(f"/proc/{name}/environ").read_bytes():
                    found[comm] = int(name)
    return found


def test_two_hundred_moves_leave_nothing(
    limosa: Callable[..., Any], tmp_path: Path, runtime: Path, gpus: Inventory
) -> None:
    argv = [sys.executable, str(VICTIMS / "proof_torch.py"), str(tmp_path / "job"), "--kind", "adamw", "--gb", "0.5"]
    job = Job(limosa, tmp_path / "job", argv, {}, shim=True)
    job.until(lambda: job.steps() > 20, 60, "steps")
    samples: list[dict[str, Any]] = []
    pauses: list[float] = []
    begin = time.monotonic()
    limit = float(os.environ.get("LIMOSA_LOOP_SECONDS", "480"))
    for turn in range(TIMES):
        if time.monotonic() - begin > limit:
            break
        if ONE_GPU:
            operation.suspend(job.pid, timeout=60)
            (outcome,) = operation.resume(job.pid, timeout=60)
        else:
            (outcome,) = operation.move(job.pid, to=str(1 - turn % 2), timeout=60)
        assert outcome.result is not None
        assert outcome.result.way == "parked"
        pauses.append(outcome.result.timings["pause_seconds"])
        job.goes_on(3)
        if turn % 2:  # always on the same GPU
            sample: dict[str, Any] = {"job": seen(job.pid), "limosa": seen(os.getpid())}
            if not BESIDE:
                sample["gpus"] = {f"gpu {gpu.index}": gpu.memory_used for gpu in inventory().gpus}
            for name, pid in helpers(runtime).items():
                with contextlib.suppress(OSError):
                    sample[name] = seen(pid)
            samples.append(sample)
    job.stop_at(job.steps() + 50)
    job.ends()
    found = grown(samples)
    record = {
        "name": "loop",
        "moves": len(pauses),
        "seconds": time.monotonic() - begin,
        "grown": found,
        "samples": note_of(samples),
    }
    record["said"] = {"median": statistics.median(pauses), "most": max(pauses)}
    note(record)
    print({name: value for name, value in found.items() if value})
    bad = too_much(found)
    assert len(pauses) == TIMES, f"only {len(pauses)} moves within {limit:.0f} s"
    assert not bad, f"after {TIMES} moves there is more than at first: {bad}; all: {found}"

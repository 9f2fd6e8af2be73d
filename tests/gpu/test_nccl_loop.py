"""One job of two ranks swapped a hundred times: nothing is left on the GPUs, in the job, in those who helped."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from leaks import grown, note_of, seen, too_much
from nccl_proofs import KINDS, Pair, gap
from proofs import Job, note
from test_parked_loop import BESIDE, helpers

from limosa import operation
from limosa.gpu import Inventory, inventory

TIMES = int(os.environ.get("LIMOSA_LOOP", "100"))
pytestmark = [
    *(pytest.mark.gpu, pytest.mark.gpu_nccl, pytest.mark.gpu_alone, pytest.mark.two_gpus),
    pytest.mark.timeout(540, method="signal"),
]


def test_a_hundred_swaps_leave_nothing(
    limosa: Callable[..., Any], tmp_path: Path, runtime: Path, gpus: Inventory
) -> None:
    kind, pair = KINDS["accumulate"], Pair.mine(gpus.gpus)
    argv = [word.replace("FOLDER", str(tmp_path / "job")) for word in kind.argv()]
    job = Job(limosa, tmp_path / "job", argv, pair.env, shim=True)
    job.until(lambda: job.steps() > 20, 90, "steps")
    family = job.family()
    samples: list[dict[str, Any]] = []
    pauses: list[float] = []
    gaps: list[float] = []
    begin = time.monotonic()
    limit = float(os.environ.get("LIMOSA_LOOP_SECONDS", "480"))
    for turn in range(TIMES):
        if time.monotonic() - begin > limit:
            break
        since = time.monotonic()
        (outcome,) = operation.move(job.pid, gpu_map=pair.swap, timeout=60)
        assert outcome.result is not None
        pauses.append(outcome.result.timings["pause_seconds"])
        job.goes_on(5)
        gaps.append(gap(job, kind.traces, since))
        if turn % 2:  # always on the same GPUs
            sample: dict[str, Any] = {"limosa": seen(os.getpid())}
            sample.update({f"process {n}": seen(pid) for n, pid in enumerate(family)})
            if not BESIDE:
                sample["gpus"] = {
                    f"gpu {gpu.index}": gpu.memory_used for gpu in inventory().gpus if gpu.index in pair.indices
                }
            for name, pid in helpers(runtime).items():
                with contextlib.suppress(OSError):
                    sample[name] = seen(pid)
            samples.append(sample)
    assert job.family() == family
    job.stop_at(job.steps() + 100)
    job.ends()
    found = grown(samples)
    record = {
        "name": "nccl loop",
        "moves": len(pauses),
        "seconds": time.monotonic() - begin,
        "grown": found,
        "samples": note_of(samples),
        "said": {"median": statistics.median(pauses), "most": max(pauses)},
        "pause": {"median": statistics.median(gaps), "most": max(gaps)},
    }
    note(record)
    print({name: value for name, value in found.items() if value})
    bad = too_much(found)
    assert len(pauses) == TIMES, f"only {len(pauses)} swaps within {limit:.0f} s"
    assert not bad, f"after {TIMES} swaps there is more than at first: {bad}; all: {found}"

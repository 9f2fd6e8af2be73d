"""Jobs with CUDA_VISIBLE_DEVICES under the shim: the driver sees the other GPUs as well, and the job does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from soft_command import pieces, start, used

MIB = 1 << 20


def imported(job: Any) -> bool:
    """Whether its memory came by import: nothing was made in the pause."""
    return all(m.imported for m in pieces(job) if m.plain)


@pytest.mark.parametrize("visible", ["0", "0,1", "1,0"])
def test_it_is_moved_and_makes_nothing_in_the_pause(parked: Any, visible: str) -> None:
    job = start(parked, "--mib", 64, CUDA_VISIBLE_DEVICES=visible)
    first = int(visible[0])
    fault = parked.switches.add("function=cuMemCreate caller=job.py result=OUT_OF_MEMORY every=1")
    for to in (1 - first, first, 1 - first):
        assert parked.says(0, "", "move", job.pid, "--to", to)["way"] == "parked"
        job.goes_on(2)
        assert imported(job)
        assert used(parked)[to] > 64 * MIB
    for to in (first, 1 - first):
        parked.limosa("suspend", job.pid)
        assert parked.says(0, "", "resume", job.pid, "--to", to)["way"] == "parked"
        job.goes_on(2)
        assert imported(job)
    parked.switches.remove(fault)
    job.finish()


def test_it_is_restored_elsewhere_from_an_image(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 32, CUDA_VISIBLE_DEVICES="0")
    for n, to in enumerate((1, 0)):
        parked.limosa("checkpoint", job.pid, "--output", tmp_path / f"image{n}")
        job.until_gone()
        assert parked.says(0, "", "restore", tmp_path / f"image{n}", "--to", to)["way"] == "parked"
        assert parked.where(job) == [to]
        assert imported(job)
        job.goes_on(2)
    job.finish()

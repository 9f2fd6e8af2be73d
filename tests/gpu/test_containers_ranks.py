"""A training of two ranks in one container: GPUs swapped in place, then written to disk and brought back swapped.

``plain`` needs no framework: two processes with libcuda and libnccl alone.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from boxes import ROOT, Box, Boxes
from nccl_proofs import RANKS, TORCHRUN, TRACES
from op_support import on
from proofs import first_difference
from test_containers_work import TURNS, A, B, Told, boxes, each, single, timed

from limosa import operation

__all__ = ["boxes"]
pytestmark = [pytest.mark.gpu, pytest.mark.gpu_containers, pytest.mark.two_gpus]
AGENT = ROOT / "tests" / "softgpu" / "nccl_agent.py"
SWAP = f"{A}={B},{B}={A}"
MORE = 100
"""Steps after those that were made: no rank is there when it hears that this is the last one."""


class Kind(NamedTuple):
    """How it is started, FOLDER its own; what each rank writes; which words of a line a twin's must be like.

    And which one is the time.
    """

    argv: Sequence[str]
    files: Sequence[str]
    words: slice
    time: int

    def _all(self, folder: Path, name: str) -> list[list[str]]:
        path = folder / name
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text.rpartition("\n")[0].splitlines()]

    def lines(self, folder: Path, name: str) -> list[str]:
        return [" ".join(words[self.words]) for words in self._all(folder, name)]

    def gap(self, folder: Path, since: float) -> float:
        """Seconds of the longest time between two steps of any rank, the later one after that."""
        found = [0.0]
        for name in self.files:
            times = [float(words[self.time]) for words in self._all(folder, name)]
            found += [later - earlier for earlier, later in itertools.pairwise(times) if later > since]
        return max(found)

    def steps(self, folder: Path) -> int:
        return min(len(self.lines(folder, name)) for name in self.files)

    def command(self, folder: str) -> list[str]:
        return [word.replace("FOLDER", folder) for word in self.argv]


AGENTS = [sys.executable, str(AGENT), "FOLDER", "--ranks", "2", "--steps", "1000000", "--until", "FOLDER/until"]
KINDS = {
    "plain": Kind([*AGENTS, "--pause", "2", "--p2p", "--elements", "65536"], ("rank-0", "rank-1"), slice(0, 2), 2),
    # The name of such a container is in no hosts file, and torchrun would look it up for a minute.
    "torch": Kind(
        [*TORCHRUN, "--local-addr=127.0.0.1", str(RANKS / "ddp.py"), "--record", "FOLDER/trace"],
        TRACES,
        slice(2, None),
        1,
    ),
}


def twin(kind: Kind, folder: Path, steps: int, limit: float) -> None:
    """Has the same job, outside of any container and without the shim, make so many steps."""
    folder.mkdir()
    (folder / "until").write_text(str(steps))
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            kind.command(str(folder)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": f"{A},{B}"},
        )  # fmt: skip
    try:
        assert process.wait(limit) == 0, (folder / "log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def places(box: Box) -> dict[int, set[int]]:
    """Where its processes hold memory, by NVML."""
    return {pid: where for pid in box.family() if (where := on(pid))}


@pytest.fixture
def goes_on(kind: str) -> Callable[[Box], None]:
    """Waits until all ranks have made some more steps."""

    def more(box: Box) -> None:
        goal = KINDS[kind].steps(box.folder) + 10
        box.until(lambda: KINDS[kind].steps(box.folder) >= goal, 100, f"step {goal} of all ranks")

    return more


@each(KINDS)
def test_what_the_ranks_of_a_container_compute(
    boxes: Boxes, tmp_path: Path, kind: str, goes_on: Callable[[Box], None]
) -> None:
    told, job = Told(f"container of ranks, {kind}"), KINDS[kind]
    box = boxes.start("ranks", job.command("/job"), gpus=[A, B])
    goes_on(box)
    assert box.nodes() == {f"nvidia{A}", f"nvidia{B}"}
    for _ in range(TURNS // 2):
        before, since = places(box), time.monotonic()
        outcome = timed(told, "swap", lambda: single(operation.move(box.called, gpu_map=SWAP, timeout=60)))
        after = places(box)
        assert len(before) == len(after) == 2, (before, after)
        assert all(before[pid] != after[pid] for pid in before), (before, after)
        wall = time.monotonic() - since
        goes_on(box)
        way = {"pause": job.gap(box.folder, since), "said": outcome.timings["pause_seconds"], "wall": wall}
        told.ways.append({**way, "bytes": outcome.bytes, "way": outcome.way})
        told(**way)
        told.record["moves"] += 1
    timed(told, "suspend", lambda: single(operation.suspend(box.called, timeout=60)))
    assert not places(box), "a suspended job holds nothing on any GPU"
    timed(told, "resume", lambda: single(operation.resume(box.called, timeout=60)))
    goes_on(box)
    image = boxes.images / "ranks"
    written = timed(told, "checkpoint", lambda: operation.checkpoint(box.called, image, timeout=90))
    assert written.state == "ended", written
    assert not box.alive()
    timed(told, "restore", lambda: operation.restore(image, gpu_map=SWAP, timeout=90))
    box = boxes.back("ranks", box)
    goes_on(box)
    last = job.steps(box.folder) + MORE
    box.stop_at(last)
    box.until(lambda: not box.alive(), 60, "end")
    twin(job, tmp_path / "twin", last, 100)
    for name in job.files:
        mine, twins = job.lines(box.folder, name), job.lines(tmp_path / "twin", name)
        assert len(mine) == len(twins), f"{name}: {len(mine)} steps, and its twin's {len(twins)}"
        different = first_difference(mine, twins)
        assert different is None, f"{name} differs from its twin: {different}"
    told.save(steps=last, restores=1, left={}, parked=max(way["bytes"] for way in told.ways))

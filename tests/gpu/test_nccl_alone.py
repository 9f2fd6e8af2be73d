"""A rank that is alone with NCCL, on one GPU: communicators that come late, and those that hang on another.

NCCL writes the handle of a split after the call, where that does not block or is in a group; PyTorch looks at nothing
but that handle. Here NCCL is the real one, and a machine with one GPU is enough.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from nccl_proofs import RANKS, TORCHRUN, Pair, Turn
from op_support import ONE_GPU, on
from proofs import first_difference

from limosa.gpu import Inventory
from limosa.process.identity import Identity
from limosa.process.tree import job_tree

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_nccl, pytest.mark.timeout(150, method="signal")]
AGENT = Path(__file__).parents[1] / "softgpu" / "nccl_agent.py"
TURNS = int(os.environ.get("LIMOSA_PROOF_TURNS", "5"))
LIMIT = 60.0
ANEW = ["--anew"]
"""A split each step: half a second with the real NCCL."""
KINDS = {
    "blocking": [],
    "non-blocking": ["--nonblocking", "--watchdog"],
    "group": ["--split-in-group", *ANEW],
    "non-blocking-group": ["--split-in-group", *ANEW, "--nonblocking", "--watchdog"],
    "threads": ["--nonblocking", "--groups", "--threads", "--watchdog", *ANEW],
    "by-pointer": ["--by-pointer", "--nonblocking", *ANEW],
    "registered": ["--register", "--operators"],
}
TORCH = {"torch": {}, "torch-non-blocking": {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}}
"""PyTorch's process groups, all kinds of them, of one rank; what is in the environment."""
WITH_VERDICT = (
    'if "$@" >"$0/torch.out" 2>&1; then echo right; else echo wrong; fi >"$0/said"; mv "$0/said" "$0/verdict"'
)


def libraries() -> dict[str, str]:
    """The environment in which a program without a framework finds libnccl: the system's, else PyTorch's."""
    with_ours = os.environ.get("LD_LIBRARY_PATH", "")
    try:
        ctypes.CDLL("libnccl.so.2")
    except OSError:
        folder = Path(next(iter(importlib.import_module("nvidia.nccl").__path__))) / "lib"
        with_ours = os.pathsep.join(filter(None, (str(folder), with_ours)))
    return {"LD_LIBRARY_PATH": with_ours}


class Alone:
    """The job, or its twin."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.steps, self.more = folder, 10, 100  # none is made yet that is named as the last one
        if kind in TORCH:
            run = [*TORCHRUN[:-1], "--nproc-per-node=1", str(RANKS / "groups.py"), "--record", str(folder / "trace")]
            self.argv = ["sh", "-c", WITH_VERDICT, str(folder), *run]
            self.file, self.words = folder / "trace", slice(2, None)
        else:
            more = ["--steps", "1000000", "--pause", "2", "--elements", "65536", "--until", str(folder / "until")]
            self.argv = [sys.executable, str(AGENT), str(folder), "--ranks", "1", *more, *KINDS[kind]]
            self.file, self.words = folder / "rank-0", slice(2)
            if "--anew" in KINDS[kind]:
                self.steps, self.more = 3, 30
        folder.mkdir()

    def lines(self) -> list[str]:
        text = self.file.read_text() if self.file.exists() else ""
        return [" ".join(line.split()[self.words]) for line in text.rpartition("\n")[0].splitlines()]

    def said(self) -> str:
        return "".join(path.read_text()[-2000:] for path in self.folder.glob("*.out"))

    def verdict(self) -> str:
        path = self.folder / "verdict"
        return path.read_text().strip() if path.exists() else ""

    def until(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT
        while not true():
            assert time.monotonic() < end, f"no {what} within {LIMIT} s, {len(self.lines())} steps: {self.said()}"
            assert not self.verdict() or true(), f"it has ended, waiting for {what}: {self.verdict()} {self.said()}"
            time.sleep(0.01)

    def goes_on(self) -> None:
        goal = len(self.lines()) + self.steps
        self.until(lambda: len(self.lines()) >= goal, f"step {goal}")


@pytest.fixture
def own(gpus: Inventory) -> Iterator[tuple[int, ...]]:
    """The GPUs that it has to itself, while no other proof's ranks are moved there; the first one without a choice."""
    if ONE_GPU:
        yield (gpus.gpus[0].index,)
        return
    pair, turn = Pair.mine(gpus.gpus), Turn()
    turn.take(pair)
    yield pair.indices
    turn.pass_on()


def places(pid: int) -> set[int]:
    """The GPUs on which a job holds memory, by NVML."""
    return {gpu for one in job_tree(Identity.of(pid)) for gpu in on(one.pid)}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_computes_what_its_twin_does(
    limosa: Callable[..., Any], own: tuple[int, ...], tmp_path: Path, kind: str
) -> None:
    """It is moved while it computes; on a machine of one GPU it is suspended and resumed."""
    goes_its_way(limosa, own, tmp_path, kind, libraries())


@pytest.mark.parametrize("kind", TORCH)
def test_pytorchs_groups_of_one_rank(
    limosa: Callable[..., Any], own: tuple[int, ...], tmp_path: Path, kind: str
) -> None:
    """Likewise."""
    goes_its_way(limosa, own, tmp_path, kind, TORCH[kind])


def goes_its_way(
    limosa: Callable[..., Any], own: tuple[int, ...], folder: Path, kind: str, env: Mapping[str, str]
) -> None:
    job, env = Alone(folder / "job", kind), {**env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
    pid: int = limosa("run", "--detach", "-o", "json", "--", *job.argv, env=env, cwd=folder, rc=0, limit=30).json["pid"]
    try:
        job.goes_on()
        for turn in range(TURNS):
            if ONE_GPU:
                limosa("suspend", pid, rc=0, limit=LIMIT)
                assert not places(pid)
                limosa("resume", pid, rc=0, limit=LIMIT)
            else:
                to = own[(turn + 1) % 2]
                limosa("move", pid, "--to", to, "--force=nccl-beside", rc=0, limit=LIMIT)
                assert places(pid) == {to}
            job.goes_on()
        last = len(job.lines()) + job.more
        (job.folder / "until.new").write_text(str(last))
        (job.folder / "until.new").rename(job.folder / "until")
        job.until(lambda: job.verdict() != "", "end")
        assert job.verdict() == "right", job.said()
    finally:
        if not job.verdict():
            os.killpg(pid, signal.SIGKILL)
    twin = Alone(folder / "twin", kind)
    (twin.folder / "until").write_text(str(last))
    subprocess.run(twin.argv, env={**os.environ, **env}, cwd=folder, timeout=LIMIT, check=True)
    assert len(job.lines()) == len(twin.lines()) == last, twin.said()
    different = first_difference(job.lines(), twin.lines())
    assert different is None, f"it differs from its twin: {different}"

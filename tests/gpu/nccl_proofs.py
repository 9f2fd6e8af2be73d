"""What the proofs of jobs of several ranks share: how each is started, GPUs swapped, jobs ended and brought back."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from op_support import on
from proofs import VICTIMS, Job, Prover

from limosa import operation
from limosa.gpu import Gpu

RANKS = VICTIMS / "nccl"
TRACES = ("trace", "trace-1")
READY = 20
"""Steps after which a job waits for its turn."""
BESIDE = ("nccl-beside",)
"""What is forced: the others' jobs that are there are twins, which nobody moves."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FOUR = [*TORCHRUN[:-1], "--nproc-per-node=4"]
ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
]


class Kind(NamedTuple):
    """How a job is started: by what, which program, its options, how many ranks write a trace; which way it goes."""

    program: str
    options: Sequence[str] = ()
    via: Sequence[str] = TORCHRUN
    traces: Sequence[str] = TRACES
    needs: str = ""
    limit: float = 150
    env: Mapping[str, str] = {}
    way: str = "parked"

    def argv(self, *more: str) -> list[str]:
        """The command line; FOLDER is the job's own."""
        return [*self.via, str(RANKS / self.program), "--record", "FOLDER/trace", *self.options, *more]


PYTHON = [sys.executable]
KINDS = {
    "ddp": Kind("ddp.py", ["--kind", "conv"]),
    "accumulate": Kind("ddp.py", ["--kind", "accumulate"]),
    "amp": Kind("ddp.py", ["--kind", "amp"]),
    "workers": Kind("ddp.py", ["--kind", "workers"]),
    "non-blocking": Kind("ddp.py", ["--kind", "accumulate"], env={"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}),
    "compile": Kind("ddp.py", ["--kind", "compile"], limit=240),
    "fsdp2": Kind("fsdp.py"),
    "fsdp2-mixed": Kind("fsdp.py", ["--kind", "mixed"]),
    "tensor": Kind("tensor_parallel.py"),
    "pipeline": Kind("pipeline.py", ["--kind", "hand"]),
    "pipeline-batched": Kind("pipeline.py", ["--kind", "batched"]),
    "pipeline-schedule": Kind("pipeline.py", ["--kind", "schedule"]),
    "groups": Kind("groups.py"),
    "groups-threads": Kind("groups.py", ["--kind", "threads"]),
    # PyTorch looks at nothing but the variable of a split that goes on behind the call.
    "groups-non-blocking": Kind("groups.py", env={"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}),
    "trainer": Kind("trainer.py", via=ACCELERATE, needs="transformers accelerate"),
    "lightning": Kind("fit_lightning.py", via=PYTHON, needs="pytorch_lightning"),
    "jax-pmap": Kind("jax_two.py", ["--kind", "pmap"], PYTHON, ["trace"], "jax"),
    "jax-shard-map": Kind("jax_two.py", ["--kind", "shard_map"], PYTHON, ["trace"], "jax"),
}


class Pair(NamedTuple):
    """The GPUs that a job has to itself: whoever proves beside another one has others, where there are enough."""

    indices: tuple[int, ...]
    uuids: tuple[str, ...]

    @classmethod
    def mine(cls, gpus: Sequence[Gpu]) -> Pair:
        """By $LIMOSA_PROOF_PAIR, or else the number of the worker (pytest-xdist's)."""
        pair = os.environ.get("LIMOSA_PROOF_PAIR") or os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]
        at = 2 * int(pair) % (len(gpus) // 2 * 2)
        one, other = gpus[at], gpus[at + 1]
        return cls((one.index, other.index), (one.uuid, other.uuid))

    @property
    def swap(self) -> str:
        """The map that has each go to the next one's place: two change places."""
        return ",".join(
            f"{one}={other}" for one, other in zip(self.indices, (*self.indices[1:], self.indices[0]), strict=True)
        )

    @property
    def env(self) -> dict[str, str]:
        """With which a job sees no others."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.uuids)}


class Turn:
    """Of all proofs on the same two GPUs, one at a time has a job that is restored: two could wait for each other.

    It is a lock, of a file that all workers find.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []

    def take(self, pair: Pair) -> None:
        """Waits until no other proof's job on these GPUs is moved."""
        for each in sorted({index // 2 for index in pair.indices}):
            fd = os.open(sorted(RANKS.glob("*.py"))[each], os.O_RDONLY)
            self.fds.append(fd)
            fcntl.flock(fd, fcntl.LOCK_EX)

    def pass_on(self) -> None:
        """That job has ended."""
        while self.fds:
            os.close(self.fds.pop())


def running(pids: Sequence[int]) -> list[int]:
    """Those that are there and are no zombies."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                found.append(pid)
    return found


def gap(job: Job, traces: Sequence[str], since: float) -> float:
    """Seconds of the longest time between two stamps of any rank, the later one after ``since``."""
    worst = 0.0
    for name in traces:
        times = [at for at, _ in job.trace(name)]
        worst = max([worst, *(b - a for a, b in itertools.pairwise(times) if b > since)])
    return worst


class Ranks(Prover):
    """Proves a job of several ranks."""

    def __init__(self, limosa: Callable[..., Any], folder: Path, pair: Pair, name: str, kind: Kind, turn: Turn):
        super().__init__(limosa, folder, pair.uuids, name)
        self.turn, self.ended = turn, turn.pass_on
        self.kind, self.pair = kind, pair
        # So much lies on each rank's GPU at least, whatever it computes.
        self.least = 2 * int(0.25 * 10**9)

    def begin(self, *more: str, env: dict[str, str] | None = None) -> Job:
        """Starts the job; it computes when it is its turn. Its two undisturbed twins follow when it has ended."""
        argv = self.kind.argv("--hold", str(READY), *more)
        job = self.start(argv, {**self.pair.env, **self.kind.env, **(env or {})}, self.kind.limit, alone=True)
        self.turn.take(self.pair)
        (job.folder / "go").touch()
        job.goes_on()  # the wait is no pause of a swap
        return job

    def swaps(self, job: Job, times: int) -> None:
        """Has the ranks change their GPUs, again and again, while they compute."""
        before = self.places(job)
        for turn in range(times):
            since = time.monotonic()
            to: dict[str, Any] = {"gpu_map": self.pair.swap, "force": BESIDE, "timeout": 60}
            move = lambda to=to: operation.move(job.pid, **to)[0].result  # noqa: E731
            outcome = self.acts(job, move, self.gpus, self.least)
            self.ways[-1]["pause"] = gap(job, self.kind.traces, since)  # the worst of all ranks
            assert outcome.bytes >= self.least, f"swap {turn + 1}: {outcome}"
            assert outcome.way == self.kind.way, f"swap {turn + 1}: {outcome}"
            after = self.places(job)
            for pid in before:
                if len(before[pid]) == len(after.get(pid, ())) == 1:
                    assert before[pid] != after[pid], f"swap {turn + 1}: process {pid} is on GPU {after[pid]} still"
            before = after
            self.record["moves"] += 1
            time.sleep(0.1)
        self.record["ways_gone"] = sorted({way["way"] for way in self.ways})

    def places(self, job: Job) -> dict[int, set[int]]:
        """Where its processes hold memory, by NVML, which knows nothing of Limosa."""
        return {pid: where for pid in job.family() if (where := on(pid))}

    def returns(self, job: Job, images: Path, times: int, **options: Any) -> None:
        """Has it written to disk and ended, nothing of it running any more, and brought back onto swapped GPUs."""
        for turn in range(times):
            family, image = job.family(), images / f"image-{turn}"
            before = self.places(job)
            begun = time.monotonic()
            operation.checkpoint(job.pid, image, timeout=120, **options)
            ended = time.monotonic()
            assert not running(family), f"checkpoint {turn + 1} has left processes of {family} running"
            stood = {name: len(job.trace(name)) for name in self.kind.traces}
            to: dict[str, Any] = {"gpu_map": self.pair.swap, "force": BESIDE, "timeout": 120, **options}
            back = lambda image=image, to=to: operation.restore(image, **to)  # noqa: E731
            self.acts(job, back, self.gpus, self.least)
            self.ways[-1].update(pause=None, out=ended - begun)  # its clock stood still while it was on disk
            assert job.family() == family, f"restore {turn + 1}: {family} came back as {job.family()}"
            job.until(
                lambda stood=stood: all(len(job.trace(name)) > stood[name] + 5 for name in stood),
                60,
                f"steps of all ranks after restore {turn + 1}",
            )
            after = self.places(job)
            for pid in before:
                if len(before[pid]) == len(after.get(pid, ())) == 1:
                    assert before[pid] != after[pid], f"restore {turn + 1}: {pid} is on GPU {after[pid]} again"
            self.record["restores"] = self.record.get("restores", 0) + 1

    def agree(self, job: Job) -> None:
        """Every step of every rank is the undisturbed twins'."""
        self.twins_agree(job, self.kind.traces)


def median(values: Sequence[float]) -> float:
    """Or 0.0 where there are none."""
    return statistics.median(values) if values else 0.0


TURNS = int(os.environ.get("LIMOSA_PROOF_TURNS", "10"))

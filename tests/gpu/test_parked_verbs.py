"""A training that is put aside, brought back elsewhere, copied to disk and restored, all by the parked way."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from op_support import OTHER
from proofs import VICTIMS, Job, Prover, first_difference

from limosa import operation
from limosa.errors import HeldByImport, Refused
from limosa.gpu import Process

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_parked, pytest.mark.timeout(300, method="signal")]
GB = 1 << 30
TRAINING = [sys.executable, str(VICTIMS / "proof_torch.py"), "FOLDER", "--kind", "adamw", "--gb", "2"]


def test_suspended_and_resumed_here_and_there(prover: Prover) -> None:
    job = prover.start(TRAINING)
    for to in (None, str(OTHER), None, "0"):
        (aside,) = operation.suspend(job.pid, timeout=90)
        assert aside.result is not None
        assert aside.result.way == "parked"
        stood = job.steps()
        time.sleep(0.3)
        assert job.steps() == stood
        where = [prover.gpus[int(to)]] if to else None
        back = prover.acts(job, lambda to=to: operation.resume(job.pid, to=to, timeout=90)[0].result, where, 2 * GB)
        assert back.way == "parked"
        prover.record["moves"] += 1
    prover.twins_agree(job)


def test_toggled_down_and_up(prover: Prover) -> None:
    job = prover.start(TRAINING)
    for _ in range(3):
        (down,) = operation.toggle(job.pid, timeout=90)
        assert down.result is not None
        assert down.result.way == "parked"
        stood = job.steps()
        time.sleep(0.3)
        assert job.steps() == stood
        up = prover.acts(job, lambda: operation.toggle(job.pid, timeout=90)[0].result, [prover.gpus[0]], 2 * GB)
        assert up.way == "parked"
        prover.record["moves"] += 1
    prover.twins_agree(job)


def test_its_memory_alone_is_suspended_and_resumed(prover: Prover) -> None:
    """The memory is given back while the context stays; the job stands meanwhile. Afterwards it can be moved."""
    job = prover.start(TRAINING)
    for _ in range(3):
        (aside,) = operation.suspend(job.pid, release="memory-only", timeout=90)
        assert aside.result is not None
        assert aside.result.bytes >= 2 * GB
        stood = job.steps()
        assert all(one["away"] >= 2 * GB for one in job.shims().values())
        time.sleep(0.3)
        assert job.steps() == stood
        prover.acts(job, lambda: operation.resume(job.pid, timeout=90)[0].result, [prover.gpus[0]], 2 * GB)
        assert all(one["away"] == 0 for one in job.shims().values())
        prover.record["moves"] += 1
    prover.moves(job, 1, 2 * GB)
    prover.twins_agree(job)


# What NVIDIA's cuda-checkpoint does, by the driver's own calls, in a process of its own.
FOREIGN = """
import sys
from cuda.bindings import driver as cu
pid, names = int(sys.argv[1]), sys.argv[2:]
cu.cuInit(0)
print(*[getattr(cu, "cuCheckpointProcess" + name)(pid, None)[0].name.removeprefix("CUDA_") for name in names])
"""


def foreign(job: Job, *names: str) -> list[str]:
    argv = [sys.executable, "-c", FOREIGN, str(job.pid), *names]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.split()


@pytest.mark.two_gpus
def test_a_job_that_was_moved_outlives_another_tools_checkpoint(prover: Prover) -> None:
    """Our own classes refuse before they try. The others' checkpoint fails; the driver checkpoints the job no more."""
    job = prover.start(TRAINING)
    prover.moves(job, 2, 2 * GB)  # it is on GPU 0 again
    with pytest.raises(HeldByImport):
        Process(job.pid).suspend()
    assert Process(job.pid).is_running
    said = foreign(job, "Lock", "Checkpoint", "Checkpoint", "Unlock")
    assert said == ["SUCCESS", "ERROR_OUT_OF_MEMORY", "ERROR_UNKNOWN", "SUCCESS"]
    job.goes_on(20)
    with pytest.raises(Refused, match="another tool has tried"):
        operation.move(job.pid, to="1", timeout=60)
    (aside,) = operation.suspend(job.pid, release="memory-only", timeout=90)
    assert aside.result is not None
    operation.resume(job.pid, timeout=90)
    job.goes_on(20)
    prover.twins_agree(job)


@pytest.mark.two_gpus
def test_two_jobs_change_places(prover: Prover) -> None:
    """Both compute the same: the undisturbed twins of one are the other's, too."""
    job = prover.start(TRAINING)
    other = prover.beside(TRAINING)
    operation.move(other.pid, to="1", timeout=60)
    here = 0
    for _ in range(5):
        both: list[Any] = []

        def swap() -> Any:
            both[:] = operation.move([job.pid, other.pid], swap=True, timeout=90)  # noqa: B023
            return both[0].result  # noqa: B023

        here = 1 - here
        prover.acts(job, swap, [prover.gpus[here]], 2 * GB)
        assert [one.result and one.result.way for one in both] == ["parked", "parked"], both
        other.goes_on()
        assert {gpu for one in other.shims().values() for gpu in one["gpus"]} == {prover.gpus[1 - here]}
        prover.record["moves"] += 2
    other.stop_at(other.steps() + 20)
    other.ends()
    prover.twins_agree(job)
    results, twin = other.results(), prover.jobs[1].results()
    assert min(len(results), len(twin)) > 100
    assert first_difference(results, twin) is None


@pytest.mark.parametrize("options", [[], ["--gpus", "0"]], ids=["", "hidden"])
def test_copied_to_disk_while_it_runs_and_brought_back(prover: Prover, images: Path, options: list[str]) -> None:
    """The job goes on from an image that ended it; afterwards, the copy that was made on the way goes on as well."""
    job = prover.start(TRAINING, options=options)
    if OTHER:
        operation.move(job.pid, to="1", timeout=60)
        job.goes_on()
    copied = prover.acts(job, lambda: operation.checkpoint(job.pid, images / "copy", leave_running=True), None, 2 * GB)
    assert copied.left_running
    job.goes_on(20)
    operation.checkpoint(job.pid, images / "last")
    prover.acts(job, lambda: operation.restore(images / "last", to="0"), [prover.gpus[0]], 2 * GB)
    if OTHER:
        operation.move(job.pid, to="1", timeout=60)
    job.goes_on(20)
    prover.twins_agree(job)
    whole = job.results()
    (job.folder / "trace").write_text("")
    job.log.write_text("")
    operation.restore(images / "copy", to=str(OTHER))
    job.ends()
    again = [line.split(" ", 2) for line in (job.folder / "trace").read_text().splitlines()]
    assert [line[2] for line in again] == whole[int(again[0][0]) :]


def test_shared_tensors_copied_to_disk_and_brought_back(prover: Prover, images: Path) -> None:
    """Two processes at one memory (torch.multiprocessing) come back at one memory."""
    job = prover.start([sys.executable, str(VICTIMS / "proof_shared.py"), "FOLDER"])
    copied = prover.acts(job, lambda: operation.checkpoint(job.pid, images / "copy", leave_running=True), None, GB // 2)
    assert copied.left_running
    job.goes_on(20)
    for to in (OTHER, 0):
        image = images / f"last{len(prover.ways)}"
        operation.checkpoint(job.pid, image)
        back = lambda image=image, to=to: operation.restore(image, to=str(to))  # noqa: E731
        prover.acts(job, back, [prover.gpus[to]], GB // 2)
    prover.moves(job, 1, GB // 2)
    prover.twins_agree(job)


@pytest.mark.two_gpus
def test_nccl_inside_one_process_goes_to_disk_and_comes_back(prover: Prover, images: Path) -> None:
    """NCCL's bootstrap leaves closed connections on ports that it goes on listening on: nobody has these."""
    argv = [sys.executable, str(VICTIMS / "proof_torch.py"), "FOLDER", "--kind", "parallel"]
    job = prover.start(argv, alone=True)  # beside other ranks its restore is refused
    for name in ("first", "second"):
        operation.checkpoint(job.pid, images / name)
        back = lambda name=name: operation.restore(images / name)  # noqa: E731
        prover.acts(job, back, prover.gpus, GB // 4)
    prover.twins_agree(job)


@pytest.mark.parametrize("kind", ["one", "vmm", pytest.param("two", marks=pytest.mark.two_gpus)])
def test_jax_put_aside_and_on_disk_and_brought_back(prover: Prover, images: Path, kind: str) -> None:
    """By the driver's way it ends there: it goes on asking the driver while it is checkpointed (caveats)."""
    argv = [sys.executable, str(VICTIMS / "proof_jax.py"), "FOLDER"]
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    if kind == "vmm":
        env["XLA_PYTHON_CLIENT_ALLOCATOR"] = "vmm"
    job = prover.start([*argv, "--gpus", "2"] if kind == "two" else argv, {} if kind == "two" else env)
    operation.suspend(job.pid, timeout=90)
    time.sleep(4)
    prover.acts(job, lambda: operation.resume(job.pid, timeout=90)[0].result, None, GB // 4)
    copied = prover.acts(job, lambda: operation.checkpoint(job.pid, images / "copy", leave_running=True), None, GB // 4)
    assert copied.left_running
    job.goes_on(20)
    for to in (OTHER, 0):
        where: dict[str, Any] = {"gpu_map": "0=1,1=0"} if kind == "two" else {"to": str(to)}
        image = images / f"last{len(prover.ways)}"
        operation.checkpoint(job.pid, image)
        back = lambda image=image, where=where: operation.restore(image, **where)  # noqa: E731
        prover.acts(job, back, prover.gpus if kind == "two" else [prover.gpus[to]], GB // 4)
    prover.moves(job, 1, GB // 4, gpu_map="0=1,1=0" if kind == "two" else None)
    prover.twins_agree(job)

"""What people run, moved by the parked way while it computes: every result is its undisturbed twins', bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from proofs import VICTIMS, Prover

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_parked, pytest.mark.timeout(500, method="signal")]
GB = 1 << 30
TURNS = int(os.environ.get("LIMOSA_PROOF_TURNS", "20"))
TORCH = [sys.executable, str(VICTIMS / "proof_torch.py"), "FOLDER"]


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *TORCH[1:]]


@pytest.mark.parametrize("kind", ["compile", "graphs", "workers", "adamw", "amp", "inference", "cudnn"])
def test_pytorch(prover: Prover, kind: str) -> None:
    """Moved there and back for as long as there is time: twenty times, or $LIMOSA_PROOF_TURNS."""
    job = prover.start([*TORCH, "--kind", kind], limit=200)
    prover.moves(job, TURNS, GB)
    prover.twins_agree(job)


def test_expandable_segments(prover: Prover) -> None:
    """The application's own virtual memory."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    job = prover.start([*TORCH, "--kind", "adamw"], env)
    prover.moves(job, TURNS, GB)
    prover.twins_agree(job)


def test_pytorch_that_sees_one_gpu(prover: Prover) -> None:
    """With CUDA_VISIBLE_DEVICES it goes to a GPU that it does not see by that name."""
    job = prover.start([*TORCH, "--kind", "adamw"], {"CUDA_VISIBLE_DEVICES": "0"})
    prover.moves(job, 5, GB)
    prover.twins_agree(job)


@pytest.mark.two_gpus
def test_pytorch_from_which_a_gpu_is_hidden(prover: Prover) -> None:
    """It cannot open the node of the GPU that it goes to, until it is there."""
    job = prover.start([*TORCH, "--kind", "adamw"], options=["--gpus", "0"])
    prover.moves(job, 5, GB)
    prover.twins_agree(job)


def test_torchrun(prover: Prover) -> None:
    """An agent and two ranks on one GPU, moved as one."""
    job = prover.start([*torchrun(), "--kind", "torchrun"])
    prover.moves(job, TURNS, 2 * GB)
    prover.twins_agree(job, ("trace", "trace-1"))


def test_jax(prover: Prover) -> None:
    job = prover.start([sys.executable, str(VICTIMS / "proof_jax.py"), "FOLDER"], {"CUDA_VISIBLE_DEVICES": "0"})
    prover.moves(job, 5, GB)
    prover.twins_agree(job)


def test_jax_with_virtual_memory_of_its_own(prover: Prover) -> None:
    """XLA's vmm allocator."""
    env = {"CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}
    job = prover.start([sys.executable, str(VICTIMS / "proof_jax.py"), "FOLDER"], env)
    prover.moves(job, 5, GB // 4)
    prover.twins_agree(job)


@pytest.mark.two_gpus
def test_jax_with_two_gpus(prover: Prover) -> None:
    """What is on one GPU goes to the other, and the other way round."""
    job = prover.start([sys.executable, str(VICTIMS / "proof_jax.py"), "FOLDER", "--gpus", "2"])
    prover.moves(job, 5, GB, gpu_map="0=1,1=0")
    prover.twins_agree(job)


def test_cupy(prover: Prover) -> None:
    job = prover.start([sys.executable, str(VICTIMS / "proof_cupy.py"), "FOLDER"])
    prover.moves(job, 5, GB // 2)
    prover.twins_agree(job)


@pytest.mark.parametrize("stack", [[], ["--stack", "8192", "--depth", "40"]], ids=["usual", "own"])
def test_local_memory(prover: Prover, stack: list[str]) -> None:
    """The stack limit is lower while the job is checkpointed, where the program has set none of its own."""
    job = prover.start([sys.executable, str(VICTIMS / "proof_local.py"), "FOLDER", *stack])
    prover.moves(job, 5, GB // 2)
    prover.twins_agree(job)


def test_numba(prover: Prover) -> None:
    job = prover.start([sys.executable, str(VICTIMS / "proof_numba.py"), "FOLDER"])
    prover.moves(job, 5, GB // 2)
    prover.twins_agree(job)


def test_a_program_with_the_static_runtime(prover: Prover, tmp_path: Path) -> None:
    """CUDA C++, built here: nothing of it is dynamically linked to the runtime."""
    program = tmp_path / "proof_native"
    command = ["nvcc", "-O2", "-cudart", "static", "-arch=native", str(VICTIMS / "proof_native.cu"), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    job = prover.start([str(program), "FOLDER", "512", "HOLD"])
    prover.moves(job, 5, GB // 2)
    prover.twins_agree(job)


def test_tensors_shared_by_two_processes(prover: Prover) -> None:
    """torch.multiprocessing hands device memory to a child; both are moved, and both go on with the one memory."""
    job = prover.start([sys.executable, str(VICTIMS / "proof_shared.py"), "FOLDER"])
    prover.moves(job, 3, GB // 2)
    prover.twins_agree(job)

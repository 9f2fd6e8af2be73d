"""What the CUDA runtime gives out as the driver's functions are the shim's.

On real GPUs only: the runtime asks a driver for private tables and for proof that it is NVIDIA's own, which a software
GPU has not.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import sysconfig
from typing import Any

import pytest
from op_support import VICTIMS

from limosa.gpu import Inventory
from limosa.native.build import SHIM_LIBRARY, build_shim
from limosa.parking import LIBRARY
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_parked, pytest.mark.timeout(120, method="signal")]
PLACES = ("nvidia/*/lib", "torch/lib")


def runtimes() -> list[str]:
    """Every libcudart.so of this machine: of Python's packages, and of the toolkit."""
    folders = [f"{root}/{place}" for root in {sysconfig.get_path("purelib"), *sys.path} for place in PLACES]
    found = [
        path for folder in [*folders, "/usr/local/cuda*/lib64"] for path in glob.glob(f"{folder}/libcudart*.so.1*")
    ]
    return sorted({os.path.realpath(path) for path in found})


def test_what_the_runtime_gives_out_is_the_shims(gpus: Inventory) -> None:
    assert build_shim() is None
    assert runtimes(), "there is no libcudart.so here: install nvidia-cuda-runtime"
    used = 0
    for runtime in runtimes():
        for shim in (False, True):
            seen, memories = asked(runtime, shim)
            if "newer" in seen:  # than the driver is
                continue
            used += shim
            assert len(seen["found"]) >= 18, seen
            assert {result for result, _ in seen["found"].values()} == {0}, seen
            files = {file for _, file in seen["found"].values()}
            if shim:
                assert files == {SHIM_LIBRARY}, seen
                assert (seen["at"], 8 << 20) in memories, "what was allocated by it is looked after"
            else:
                assert all(file.startswith("libcuda.so") for file in files), seen
            assert seen["alloc"] == 0
    assert used, "none of them is of this driver"


def asked(runtime: str, shim: bool) -> tuple[Any, list[tuple[int, int]]]:
    """What the runtime answers, and what the shim then looks after."""
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    env |= {"LD_PRELOAD": str(LIBRARY)} if shim else {}
    argv = [sys.executable, str(VICTIMS / "entry_points.py"), runtime]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout
            said = json.loads(job.stdout.readline())
            memories: list[tuple[int, int]] = []
            if shim and "newer" not in said:
                with Shim(Identity.of(job.pid)) as seen:
                    memories = [(memory.at, memory.bytes) for memory in seen.memories()]
            job.communicate("\n", timeout=20)
        finally:
            job.kill()
    return said, memories

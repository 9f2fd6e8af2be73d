"""Many small jobs in one command: room and spare are counted for all of them together."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from limosa.native.build import compilers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SOURCE = Path(__file__).with_name("small_job.c")
MIB = 1 << 20


def started(node: Any, program: Path, gpu: int, mib: int) -> Any:
    process = node.popen([program, str(gpu), str(mib)], stdin=subprocess.DEVNULL, stdout=-1, text=True)
    assert process.stdout.readline() == "READY\n"
    return process


def test_thirty_two_jobs_come_back_in_one_go(soft: Callable[..., Any], tmp_path: Path) -> None:
    """Sixteen of them to a GPU with 800 MiB free: three were told that it had none, and came back the next time.

    A spare for each of them would be more than the whole GPU.
    """
    node = soft(gpus=2, memory=["4GiB", "1GiB"])
    program = tmp_path / "small_job"
    argv = [*compilers()[0], "-std=gnu11", "-O1", "-w", "-o", str(program), str(SOURCE), "-ldl"]
    subprocess.run(argv, check=True, timeout=60)
    jobs = [started(node, program, number % 2, 8) for number in range(32)]
    node.limosa("suspend", "--all", limit=120)
    empty = node.says(0, "", "gpus")["gpus"][1]
    filler = started(node, program, 1, (empty["memory_free"] - 800 * MIB) // MIB - 8)
    free = node.says(0, "", "gpus")["gpus"][1]["memory_free"]
    assert 790 * MIB <= free <= 810 * MIB
    said = node.says(0, "", "resume", "--all", limit=120)
    pids = {job.pid for job in jobs}
    back = {one["pid"] for one in said["results"] if one["state"] == "running" and not one["already"]}
    assert back >= pids
    held = {p["pid"] for p in node.says(0, "", "gpus")["gpus"][1]["processes"]}
    assert held >= {job.pid for job in jobs[1::2]} | {filler.pid}
    for job in (*jobs, filler):
        job.send_signal(signal.SIGTERM)
    assert [job.wait(20) for job in (*jobs, filler)] == [0] * 33

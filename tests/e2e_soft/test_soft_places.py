"""Where a job believes that it is once it was moved: the driver keeps the old PCI bus id, the shim says the new one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from soft_command import Held, start


def told(job: Any) -> dict[str, list[Any]]:
    """What it is answered by each way to the driver."""
    answer = job.folder / "there"
    answer.unlink(missing_ok=True)
    (job.folder / "where").touch()
    job.until(answer.exists, what="an answer")
    found: dict[str, list[Any]] = json.loads(answer.read_text())
    assert len(found) == 4
    return found


def gpus(node: Any) -> list[list[Any]]:
    """The same of each GPU, by NVML."""
    found = []
    for gpu in node.limosa("gpus", "-o", "json").json["gpus"]:
        domain, bus, rest = gpu["pci_bus_id"].split(":")
        text = f"{int(domain, 16):04X}:{bus.upper()}:{rest}"
        found.append([gpu["uuid"].removeprefix("GPU-").replace("-", ""), text, int(bus, 16)])
    return found


def is_on(node: Any, job: Any, gpu: int) -> None:
    expected = gpus(node)[gpu]
    assert told(job) == dict.fromkeys(("direct", "dlsym", "cuGetProcAddress", "bindings"), expected)


@pytest.mark.parametrize("way", ["parked", "driver"])
def test_there_and_back(parked: Any, way: str) -> None:
    job = start(parked, "--mib", 16)
    if way == "driver":
        parked.switches.add("function=cuMemCreate caller=limosa-mover result=UNKNOWN every=1")
    is_on(parked, job, 0)
    for to in (1, 0, 1):
        assert parked.says(0, "", "move", job.pid, "--to", to)["way"] == way
        is_on(parked, job, to)
    job.finish()


def test_without_the_shim_it_is_the_old_bus_id(parked: Any) -> None:
    """So does the real driver, measured: it says the new UUID."""
    job = parked.job("--mib", 16)
    parked.says(0, "", "move", job.pid, "--to", 1)
    here, there = gpus(parked)
    assert told(job)["bindings"] == [there[0], *here[1:]]
    job.finish()


def test_resumed_elsewhere(parked: Any) -> None:
    job = start(parked, "--mib", 16)
    for to in (1, 1, 0):
        parked.says(0, "", "suspend", job.pid)
        parked.says(0, "", "resume", job.pid, "--to", to)
        is_on(parked, job, to)
    job.finish()


def test_a_job_that_sees_one_gpu(parked: Any) -> None:
    job = start(parked, "--mib", 16, CUDA_VISIBLE_DEVICES="0")
    for to in (1, 0):
        parked.says(0, "", "move", job.pid, "--to", to)
        is_on(parked, job, to)
    job.finish()


def test_jobs_that_change_places(parked: Any) -> None:
    one, other = start(parked, "--mib", 16), start(parked, "--mib", 16, "--gpu", 1)
    for first in (1, 0):
        parked.limosa("move", one.pid, other.pid, "--swap")
        is_on(parked, one, first)
        is_on(parked, other, 1 - first)
    one.finish()
    other.finish()


@pytest.mark.parametrize("function", ["cuCheckpointProcessUnlock", "cuMemMap"])
def test_what_is_undone_is_where_it_was(parked: Any, function: str) -> None:
    job = start(parked, "--mib", 16)
    parked.says(0, "", "move", job.pid, "--to", 1)
    who = "limosa-worker" if function.startswith("cuCheckpoint") else "job.py"
    parked.switches.add(f"function={function} caller={who} result=UNKNOWN")
    parked.says(21, "", "move", job.pid, "--to", 0)
    is_on(parked, job, 1)
    parked.says(0, "", "move", job.pid, "--to", 0)
    is_on(parked, job, 0)
    job.finish()


@pytest.mark.parametrize("shim", [True, False])
def test_what_was_left_half_done_is_where_recover_leads_it(parked: Any, shim: bool) -> None:
    job = start(parked, "--mib", 16)
    if not shim:  # the driver carries everything: then recover goes on
        parked.switches.add("function=cuMemCreate caller=limosa-mover result=UNKNOWN every=1")
    held = Held(parked, "cuCheckpointProcessUnlock", "move", job.pid, "--to", 1)
    parked.kill("limosa", held.process)
    held.let_go()
    held.process.wait(10)
    parked.limosa("recover")
    job.goes_on(2)
    is_on(parked, job, parked.where(job)[0])
    job.finish()


@pytest.mark.criu
def test_restored_elsewhere(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 16)
    parked.says(0, "", "move", job.pid, "--to", 1)
    for number, to in enumerate((0, 1)):
        parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / str(number))
        parked.says(0, "", "restore", tmp_path / str(number), "--to", to)
        is_on(parked, job, to)
    parked.says(0, "", "move", job.pid, "--to", 0)
    is_on(parked, job, 0)
    job.finish()


def test_what_the_measuring_program_finds_here(parked: Any) -> None:
    """It is for real GPUs; here it has no runtime, and without the shim the driver says what was measured."""
    program = Path(__file__).parents[1] / "gpu" / "experiments" / "where_it_is.py"
    job = parked.popen(
        [sys.executable, program, "--without-nccl", "--libcudart", "/nowhere"], stdout=subprocess.PIPE, text=True
    )
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 0
    lines = [json.loads(line) for line in said.splitlines()]
    found = {line["way"]: line["verdict"]["not_where_it_is"] for line in lines if "verdict" in line}
    old = ["driver attributes", "driver bus_id", "driver_by_address attributes", "driver_by_address bus_id"]
    assert found == {"native": {what: ["after"] for what in [*old, "driver_by_bus_id"]}, "shim": {}}

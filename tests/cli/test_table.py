"""Tables at the width of the terminal: numbers are whole or not there, text has an ellipsis, a pipe gets all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from terminal import Terminal, lines

from limosa.cli.table import widths_of

SCRIPT = """
from limosa.cli import ps, gpus
from limosa.cli.output import console
from limosa.gpu import Gpu, GpuProcess, Inventory
from limosa.operation.jobs import Holder
from limosa.operation.results import Ps
long = "a-name-that-is-as-long-as-names-may-be-" + "x" * 25
since = {"since": "2026-11-22T09:00:00Z", "by": "somebody-with-a-long-name", "release": "all"}
held = [{"index": n, "uuid": f"GPU-{n}", "memory_used": 137 << 30} for n in range(4)]
jobs = [
    Ps(pid=4194303, name=long, user="somebody-with-a-long-name", state="checkpointed", suspended=since, gpus=held,
       movable=True, way="parked", command=["/usr/bin/python3", "/home/somebody/a/long/way/train.py"] + ["--x"] * 50),
    Ps(pid=7, name="", user="root", state="running", gpus=held[:1], movable=False, way="driver", command=["sh"]),
]
card = dict(
    memory_total=143771 << 20, memory_free=0, name="NVIDIA H200 with a long name", pci_bus_id="00000000:1b:00.0"
)
there = Inventory(driver_version="580", cuda_version="13.0", gpus=[
    Gpu(index=n, uuid="GPU-6e3f1b1c-0000-4000-8000-00000000000" + str(n), memory_used=31960 << 20,
        processes=[GpuProcess(4194303, 31960 << 20)], **card) for n in range(2)])
whose = {4194303: Holder(pid=4194303, job=4194303, name=long, command=["/usr/bin/python3", "train.py"])}
ps._draw(console(), jobs, 0)
gpus._draw(console(), there, whose)
"""


def shown(environment, columns):
    with Terminal([sys.executable, "-c", SCRIPT], columns=columns, env=environment) as terminal:
        assert terminal.end() == 0, terminal.seen
        return [line for line in lines(terminal.seen) if line.strip()]


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_numbers_are_whole_and_lines_fit(environment, columns):
    ps_head, suspended, running, gpus_head, first, process, *_ = shown(environment, columns)
    assert all(len(line) <= columns for line in (ps_head, suspended, running, gpus_head, first, process))
    for word in ("0,1,2,3", "548 GiB", "suspend"):
        assert word in suspended, word
    assert suspended.split()[0] == "4194303"
    assert running.split()[0] == "7"
    assert "137 GiB" in running
    assert first.split()[:3] == ["0", "31", "GiB"]
    assert process.split()[:3] == ["31", "GiB", "4194303"]
    assert "…" in suspended  # the name at least is longer than any of these


def test_identifiers_are_whole_or_not_there(environment):
    for columns in (60, 80, 120, 200):
        text = "\n".join(shown(environment, columns))
        assert ("UUID" in text) == ("GPU-6e3f1b1c-0000-4000-8000-000000000001" in text)
        assert ("BUS" in text) == ("00000000:1b:00.0" in text)
        assert "UUID" in text or columns < 120


def test_what_a_program_reads_is_never_cut(environment):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**environment, "COLUMNS": "60"}, capture_output=True, text=True, check=True
    )
    assert "…" not in ran.stdout
    assert " ".join(["--x"] * 50) in ran.stdout
    assert "GPU-6e3f1b1c-0000-4000-8000-000000000001" in ran.stdout


@pytest.mark.parametrize("room", range(1, 120))
def test_no_number_is_narrower_than_it_is_long(room):
    headers, natural = ("PID", "NAME", "MEMORY", "COMMAND"), (7, 40, 8, 90)
    widths = widths_of(headers, natural, room, text=("NAME", "COMMAND"), least=("COMMAND", "NAME"))
    assert widths[0] == 7
    assert widths[2] == 8
    assert sum(widths.values()) + 2 * (len(widths) - 1) <= max(room, 17)

"""Jobs with several ranks in a process, made by ``ncclCommInitAll``, by a group, or each by its thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soft_command import waits_for
from support import has_ended

PROGRAM = Path(__file__).parents[1] / "softgpu" / "nccl_inside.py"
SMALL, LARGE = 512, 1 << 19
SWAP = ("--map", "0=1,1=0")


class Job:
    """As many ranks in each of its processes; ``under``: by ``limosa run``."""

    def __init__(self, node: Any, *words: object, under: bool = True):
        self.node, self.folder = node, node.place / "inside"
        self.folder.mkdir()
        argv = [sys.executable, PROGRAM, self.folder, *words]
        if under:
            started = node.limosa("run", "-d", "--name", "inside", "--", *argv, cwd=node.place)
            self.pid = int(started.stdout.split()[0])
        else:
            self.pid = node.popen(argv, start_new_session=True).pid
        node.reaper.watch(self.pid)
        self.goes_on()

    def steps(self) -> int:
        path = self.folder / "steps"
        return path.read_text().count("\n") if path.exists() else 0

    def goes_on(self) -> None:
        """Waits for some more steps, whose sums were right."""
        before = self.steps()
        waits_for(self.node, lambda: self.steps() > before + 3 or has_ended(self.pid))
        assert not has_ended(self.pid), "a sum was wrong"

    def gpus(self) -> list[int]:
        on = self.node.limosa("gpus", "-o", "json").json["gpus"]
        return [gpu["index"] for gpu in on if any(process["pid"] == self.pid for process in gpu["processes"])]

    def end(self) -> None:
        (self.folder / "end").touch()
        waits_for(self.node, lambda: has_ended(self.pid))
        assert (self.folder / "ended").exists()


@pytest.mark.parametrize("options", [["--ring"], ["--threads", "--ring"]], ids=["group", "threads"])
@pytest.mark.parametrize("elements", [SMALL, LARGE], ids=["driver", "parked"])
def test_ranks_of_one_process_change_gpus_and_their_sums_stay_right(
    soft: Callable[..., Any], elements: int, options: list[str]
) -> None:
    """They use each other's memory as it is. Nothing is closed, but they stop at the same sum.

    Without that the gate closes between two launches, and one GPU waits for the other one until the time is up.
    """
    node = soft(gpus=2, memory="512MiB")
    job = Job(node, 2, 1, elements, *options)
    for _ in range(3):
        assert "nccl-meet" in node.says(0, "", "move", job.pid, *SWAP)["timings"]
        assert job.gpus() == [0, 1]
        job.goes_on()
    assert "bring its ranks to the same call" in node.limosa("plan", "suspend", job.pid).stdout
    node.says(0, "", "suspend", job.pid)
    assert job.gpus() == []
    node.says(0, "", "resume", job.pid, *SWAP)
    job.goes_on()
    node.says(0, "", "checkpoint", job.pid, "--output", node.place / "image")
    waits_for(node, lambda: has_ended(job.pid))
    assert node.says(0, "", "restore", node.place / "image", *SWAP)["pid"] == job.pid
    job.goes_on()
    job.end()


def test_ranks_that_the_shim_does_not_look_after_are_moved_by_the_driver(soft: Callable[..., Any]) -> None:
    node = soft(gpus=2, memory="512MiB")
    job = Job(node, 2, 1, SMALL, under=False)
    assert node.says(0, "", "move", job.pid, *SWAP)["way"] == "driver"
    job.goes_on()
    job.end()


@pytest.mark.parametrize("step", ["communicators begin", "lock done", "unlock done"])
def test_limosa_is_killed_while_they_stand_still(soft: Callable[..., Any], step: str) -> None:
    """``recover`` has them go on, or its worker has by then."""
    node = soft(gpus=2, memory="512MiB")
    job = Job(node, 2, 1, SMALL, "--threads")
    limosa = node.later("move", job.pid, *SWAP, halts=step)
    node.reaches(limosa, step)
    node.kill("limosa", limosa)
    assert {one["exit_code"] for one in node.limosa("recover", "-o", "json").json["recovered"]} <= {0}
    assert node.limosa("recover", "-o", "json").json["recovered"] == []
    job.goes_on()
    node.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.end()


@pytest.mark.parametrize(
    "options", [["--ring"], ["--threads"], ["--threads", "--ring"]], ids=["group", "threads", "ring"]
)
def test_two_processes_of_two_ranks_change_gpus(soft: Callable[..., Any], options: list[str]) -> None:
    """What is between them is closed. The ranks of a process are made again together."""
    node = soft(gpus=4, memory="256MiB")
    job = Job(node, 4, 2, SMALL, *options)
    for gpus in ([2, 3], [0, 1]):
        node.says(0, "", "move", job.pid, "--map", "0=2,2=0,1=3,3=1")
        assert job.gpus() == gpus
        job.goes_on()
    node.says(0, "", "suspend", job.pid)
    node.says(0, "", "resume", job.pid, "--map", "0=1,1=2,2=3,3=0")
    assert job.gpus() == [1, 2]
    job.goes_on()
    job.end()

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

    def does(self, *words: object) -> dict[str, Any]:
        """Does a verb, whose gate may close between the launches of a group: then all go on, and it is done again."""
        for _ in range(3):
            answer = self.node.limosa(words[0], self.pid, *words[1:], "-o", "json", rc=None)
            if answer.rc != 18:
                break
            self.goes_on()
        return self.node.judge(answer, 0, "")


@pytest.mark.parametrize("way", ["driver", "parked"])
def test_ranks_of_one_process_change_gpus_and_their_sums_stay_right(soft: Callable[..., Any], way: str) -> None:
    """They use each other's memory as it is, so nothing is imported; nothing is closed, and nothing is made again."""
    node = soft(gpus=2, memory="512MiB")
    job = Job(node, 2, 1, SMALL if way == "driver" else LARGE, under=way == "parked")
    for _ in range(2):
        assert job.does("move", *SWAP)["way"] == way
        assert job.gpus() == [0, 1]
        job.goes_on()
    assert job.does("suspend")["way"] == way
    assert job.gpus() == []
    job.does("resume", *SWAP)
    job.goes_on()
    job.end()


@pytest.mark.parametrize("options", [[], ["--threads"]], ids=["group", "threads"])
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

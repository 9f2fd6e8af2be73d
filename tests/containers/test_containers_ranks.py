"""A training of several ranks in one container, by every verb from outside: its bits are an undisturbed twin's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers.engines import ROOT
from soft_node import Node
from softgpu import nccl_agent
from test_containers_to_disk import Desk, desk, desk_of, each, nodes

from limosa_softgpu.build import SOFTGPU

__all__ = ["desk", "desk_of"]
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(300)]
SWAP = ("--map", "0=1,1=0")
AHEAD = 200
"""Steps after those that were made: no rank is there when it hears that this is the last one."""


def bound(desk: Desk, folders: dict[Path, str]) -> dict[str, Any]:
    """What has a runtime bind folders of the machine into a container, each "ro" or "rw"."""
    if desk.runtime.name == "podman":
        return {"options": [word for path, how in folders.items() for word in ("--volume", f"{path}:{path}:{how}")]}
    if desk.runtime.name == "containerd":
        word = "type=bind,src={0},dst={0},options=rbind:{1}"
        return {"options": [w for path, how in folders.items() for w in ("--mount", word.format(path, how))]}
    return {
        "binds": [
            {"destination": str(path), "source": str(path), "type": "bind", "options": ["rbind", how]}
            for path, how in folders.items()
        ]
    }


@pytest.fixture
def node(new_node: Callable[..., Node]) -> Node:
    return new_node(gpus=3, memory="256MiB")


class Training:
    """Two ranks in a container, with the machine's own Python."""

    def __init__(self, desk: Desk, elements: int):
        self.desk, self.folder = desk, desk.place / "out"
        self.folder.mkdir()
        self.twin_folder = desk.place / "twin"
        self.words = [sys.executable, nccl_agent.__file__]
        self.options = ["--ranks", "2", "--elements", str(elements), "--p2p", "--watchdog"]
        until = ["--steps", "1000000", "--pause", "2", "--until", str(self.folder / "until")]
        folders = {Path("/usr"): "ro", Path(sys.base_prefix): "ro", ROOT: "ro", self.folder: "rw"}
        self.one = desk.with_shim(
            *self.words, self.folder, *self.options, *until,
            gpus=(0, 1), env=[f"LD_LIBRARY_PATH={SOFTGPU}"], **bound(desk, folders),
        )  # fmt: skip
        self.until((self.folder / "ranks").exists)
        self.goes_on()

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not true():
            said = "".join(path.read_text() for path in self.folder.glob("*.out"))
            assert time.monotonic() < end, f"{self.steps()} {said}"
            time.sleep(0.01)

    def files(self, folder: Path) -> list[Path]:
        return [folder / f"rank-{rank}" for rank in range(2)]

    def steps(self) -> list[int]:
        return [path.read_text().count("\n") if path.exists() else 0 for path in self.files(self.folder)]

    def goes_on(self) -> None:
        before = self.steps()
        self.until(lambda: all(now >= was + 5 for now, was in zip(self.steps(), before, strict=True)))

    def on(self) -> list[int]:
        """On which GPU each rank has memory."""
        gpus = self.desk.limosa("gpus", "-o", "json").json["gpus"]
        found = {inside(p["pid"]): gpu["index"] for gpu in gpus for p in gpu["processes"]}
        return [found[int(pid)] for pid in (self.folder / "ranks").read_text().split()]

    def verb(self, verb: str, *words: object) -> Any:
        return self.desk.says(0, verb, self.desk.called(self.one), *words)

    def finish(self) -> None:
        new = self.folder / "until.new"
        new.write_text(str(max(self.steps()) + AHEAD))
        new.rename(self.folder / "until")
        self.until((self.folder / "verdict").exists)
        assert (self.folder / "verdict").read_text() == "right"
        self.twin_folder.mkdir()
        made = self.steps()
        assert made[0] == made[1]
        self.desk.node.run([*self.words, self.twin_folder, *self.options, "--steps", str(made[0])], limit=200)
        for mine, twins in zip(self.files(self.folder), self.files(self.twin_folder), strict=True):
            assert nccl_agent.numbers(mine) == nccl_agent.numbers(twins)


def inside(pid: int) -> int:
    """What a process is called in its own pid namespace."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])


@each("podman-512", "podman-262144", "runc-512", "containerd-512")
def test_ranks_in_a_container_are_one_job(desk: Desk, word: str) -> None:
    """Numbers are elements: few go the driver's way, many the parked one."""
    job = Training(desk, int(word))
    (seen,) = desk.says(0, "ps")["jobs"]
    assert (seen["pid"], [gpu["index"] for gpu in seen["gpus"]]) == (job.one.pid, [0, 1])
    assert job.on() == [0, 1]
    job.verb("move", *SWAP)
    assert job.on() == [1, 0]
    assert nodes(job.one) == {"nvidia0", "nvidia1"}
    job.goes_on()
    job.verb("suspend")
    job.verb("resume", *SWAP)
    assert job.on() == [0, 1]
    job.goes_on()
    desk.checkpoint(job.one)
    assert not desk.runtime.has(job.one.name)
    desk.restore(*SWAP)
    job.one = desk.back()
    assert job.on() == [1, 0]
    job.goes_on()
    job.finish()


@each("podman-512", "runc-512")
def test_one_rank_goes_elsewhere_with_its_node(desk: Desk, word: str) -> None:
    job = Training(desk, int(word))
    job.verb("move", "--from", "1", "--to", "2")
    assert job.on() == [0, 2]
    assert nodes(job.one) == {"nvidia0", "nvidia2"}
    job.goes_on()
    desk.checkpoint(job.one)
    desk.restore("--map", "0=2,2=1")
    job.one = desk.back()
    assert job.on() == [2, 1]
    assert nodes(job.one) == {"nvidia1", "nvidia2"}
    job.goes_on()
    job.finish()


@each("podman-512")
def test_a_rank_that_is_killed_ends_the_training_as_ever(desk: Desk, word: str) -> None:
    job = Training(desk, int(word))
    job.verb("move", *SWAP)
    job.one.run("kill", "-9", (job.folder / "ranks").read_text().split()[0])
    job.until((job.folder / "verdict").exists)
    assert (job.folder / "verdict").read_text() == "rank 0 ended with -9"

"""Jobs of several ranks as ``ps`` shows them; one rank moved; and jobs that have only some of the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soft_command import start, waits_for

PROGRAMS = Path(__file__).parents[1] / "softgpu"
MANY, AHEAD = 1_000_000, 200  # no rank has done so many steps more when it hears which is the last one


def lines(folder: Path, rank: int) -> list[list[str]]:
    path = folder / f"rank-{rank}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def goes_on(node: Any, folder: Path) -> None:
    """Waits until both ranks have computed some steps more."""
    begin = [len(lines(folder, rank)) for rank in (0, 1)]
    waits_for(node, lambda: all(len(lines(folder, rank)) > begin[rank] + 2 for rank in (0, 1)), 30)


def run(node: Any, name: str, *arguments: object) -> int:
    """Starts a job by ``limosa run``; its pid."""
    pid = int(node.limosa("run", "-q", "--name", name, "-d", "--", sys.executable, *arguments, cwd=node.place).stdout)
    node.reaper.watch(pid)
    return pid


class Ranks:
    """A job of two ranks under an agent."""

    def __init__(self, node: Any, name: str):
        self.node, self.folder = node, node.place / name
        self.folder.mkdir()
        options = ["--ranks", 2, "--steps", MANY, "--pause", 10, "--elements", 1 << 16]
        options += ["--until", self.folder / "until"]
        self.pid = run(node, name, PROGRAMS / "nccl_agent.py", self.folder, *options)
        goes_on(node, self.folder)
        self.ranks = [int(pid) for pid in (self.folder / "ranks").read_text().split()]

    def steps(self) -> int:
        """How far it has come."""
        return max(len(lines(self.folder, rank)) for rank in (0, 1))

    def end(self, steps: int = 0) -> list[list[str]]:
        """Has it end, after that many steps or soon, and that well: what each rank computed."""
        new = self.folder / "until.new"
        new.write_text(str(steps or self.steps() + AHEAD))
        new.rename(self.folder / "until")
        verdict = self.folder / "verdict"
        waits_for(self.node, verdict.exists, 60)
        assert verdict.read_text() == "right"
        return [[crc for _, crc, _ in lines(self.folder, rank)] for rank in (0, 1)]


@pytest.fixture
def three(soft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node of three GPUs."""
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    return soft(gpus=3, memory="512MiB")


def shown(node: Any) -> dict[int, dict[str, Any]]:
    return {job["pid"]: job for job in node.limosa("ps", "-o", "json").json["jobs"]}


def ranks_of(job: dict[str, Any], pid: int) -> list[tuple[int, int, int]]:
    """Rank, ranks, GPU of each rank of a process; those of the largest communicator are first."""
    found = next(process for process in job["processes"] if process["pid"] == pid)["ranks"]
    return [(one["rank"], one["ranks"], one["gpu"]) for one in found]


@pytest.mark.timeout(600)
def test_one_rank_moves_and_ps_tells_where_each_is(three: Any) -> None:
    """The other stays. What comes out is what comes out of a job that nobody touched."""
    job = Ranks(three, "job")
    first, second = job.ranks
    for way, there in ((["--from", 1, "--to", 2], 2), (["--map", "2=1"], 1)):
        three.limosa("move", job.pid, *way)
        goes_on(three, job.folder)
        (pid,) = found = shown(three)
        assert pid == job.pid
        assert found[pid]["communicators"] == {"between": 1, "closed": False}
        assert ranks_of(found[pid], first) == [(0, 2, 0), (0, 1, 0)]
        assert ranks_of(found[pid], second) == [(1, 2, there), (0, 1, there)]
        assert [gpu["index"] for gpu in found[pid]["gpus"]] == [0, there]
    assert "rank 1 of 2 on GPU 1, 2 communicators" in three.limosa("ps", "-v").stdout
    three.limosa("suspend", job.pid)
    away = shown(three)[job.pid]
    three.limosa("resume", job.pid)
    assert away["communicators"] == {"between": 1, "closed": True}
    assert ranks_of(away, second) == [(1, 2, -1), (0, 1, -1)]
    found = job.end()
    assert found == Ranks(three, "twin").end(len(found[0]))


@pytest.mark.timeout(600)
def test_one_ranks_process_alone_is_refused_and_the_agent_named(three: Any) -> None:
    job = Ranks(three, "job")
    first, second = job.ranks
    refused(
        three, second, f": process {first} of the job job", f"name process {job.pid}, from which all of them descend"
    )
    goes_on(three, job.folder)


@pytest.mark.timeout(600)
def test_two_jobs_that_share_a_communicator_are_refused_and_named(three: Any) -> None:
    folder = three.place / "apart"
    folder.mkdir()
    first, second = (run(three, f"half{r}", PROGRAMS / "nccl_apart.py", folder, r, 2, "--also") for r in (0, 1))
    goes_on(three, folder)
    refused(three, second, f": process {first} of the job half0", "start all ranks by one limosa run on one machine")
    found = shown(three)
    assert [found[pid]["movable"] for pid in (first, second)] == [False, False]
    assert ranks_of(found[second], second) == [(1, 2, 1), (0, 1, 1)]
    goes_on(three, folder)
    assert {said for rank in (0, 1) for _, said in lines(folder, rank)} == {"3"}
    (folder / "end").touch()


@pytest.mark.timeout(180)
def test_ranks_that_nobody_finds_are_said_to_be_on_another_machine_perhaps(three: Any) -> None:
    """One that no shim tells of is as far away as one on another node."""
    folder = three.place / "apart"
    folder.mkdir()
    three.popen([sys.executable, PROGRAMS / "nccl_apart.py", folder, "0", "2"], start_new_session=True)
    pid = run(three, "here", PROGRAMS / "nccl_apart.py", folder, 1, 2)
    goes_on(three, folder)
    one_run = "start all ranks by one limosa run on one machine, and they are one job: limosa run -- torchrun …"
    refused(three, pid, "", f"{one_run}; a job whose ranks are on several machines cannot be moved yet")
    found = shown(three)[pid]
    assert found["movable"] is False
    assert ranks_of(found, pid) == [(1, 2, 1)]
    goes_on(three, folder)
    (folder / "end").touch()


def refused(node: Any, pid: int, who: str, way_out: str) -> None:
    """Each verb refuses it by name before anything is touched, once, and says whose the other ranks are."""
    verbs = (
        ("move", pid, "--to", 2),
        ("suspend", pid),
        ("suspend", "--release=memory-only", pid),
        ("checkpoint", pid, "--output", node.place / "image"),
        ("checkpoint", "--leave-running", pid, "--output", node.place / "image"),
    )
    for verb in verbs:
        reasons = node.says(13, "", *verb)["error"]["reasons"]
        (reason,) = [reason for reason in reasons if reason["id"] == "nccl-ranks"]
        assert reason["text"].endswith(f"talks over NCCL to ranks that are not of this job{who}"), verb
        assert reason["hint"].startswith(way_out), verb
    assert node.says(13, "", "plan", "move", pid, "--to", 2)["reasons"][0]["id"] == "nccl-ranks"
    assert not (node.place / "image").exists()


def test_where_the_shim_leaves_ranks_alone_nothing_is_touched(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's calls are passed on, such a job is refused as one without the shim, and runs on."""
    monkeypatch.setenv("LIMOSA_SHIM_WITHOUT", "ranks")
    job = Ranks(three, "plain")
    assert all(not process.get("ranks") for process in shown(three)[job.pid]["processes"])
    for verb in (["move", job.pid, "--map", "0=1,1=0,2=2"], ["suspend", job.pid]):
        refused = three.limosa(*verb, "-o", "json", rc=13).json["error"]
        assert refused["id"] in ("imported-memory", "nccl-ranks")
        assert "started by limosa run" in refused["hint"]
    goes_on(three, job.folder)
    job.end()


def test_two_processes_whose_shims_leave_ranks_alone(parked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose shims look after no communicators is moved, suspended and resumed the parked way as ever."""
    monkeypatch.setenv("LIMOSA_SHIM_WITHOUT", "ranks")
    job = start(parked, "--mib", 16, "--child")
    for to in (1, 0):
        assert parked.says(0, "", "move", job.pid, "--to", to)["way"] == "parked"
    parked.says(0, "", "suspend", job.pid)
    parked.says(0, "", "resume", job.pid, "--to", 1)
    job.finish()


def test_two_jobs_of_ranks_on_the_same_gpus_are_not_both_moved(soft: Callable[..., Any]) -> None:
    """Restored ranks are not interrupted in a kernel: two such jobs could wait for each other for ever."""
    node = soft(gpus=4, memory="512MiB")
    one, other = Ranks(node, "one"), Ranks(node, "other")
    for verb in (["move", one.pid, "--map", "0=1,1=0"], ["move", other.pid, "--map", "0=1,1=0"]):
        refused = node.says(13, "", *verb)["error"]
        assert refused["id"] == "nccl-beside"
        assert "on GPUs 0, 1 too" in refused["message"]
    node.says(0, "", "suspend", other.pid)  # it goes out of the way
    node.says(0, "", "move", one.pid, "--map", "0=1,1=0")
    assert node.says(13, "", "resume", other.pid)["error"]["id"] == "nccl-beside"
    node.says(0, "", "resume", other.pid, "--map", "0=2,1=3")
    node.says(0, "", "move", one.pid, "--map", "0=1,1=0", "--force", "nccl-beside")
    for job in (one, other):
        goes_on(node, job.folder)
    last = max(one.steps(), other.steps()) + 2 * AHEAD
    assert one.end(last) == other.end(last)

"""Jobs of several ranks over NCCL, swapped, and ended and brought back, in the middle: all bits are their twins'."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nccl_proofs import BESIDE, FOUR, KINDS, RANKS, TRACES, TURNS, Kind, Pair, Ranks, Turn
from op_support import Filler
from proofs import Job, first_difference, note

from limosa import operation
from limosa.errors import Refused
from limosa.gpu import Inventory

RAS = 28028
TIME_OUT = 15  # seconds, of the process group, its store and the heartbeat; ranks come up within it
pytestmark = [
    *(pytest.mark.gpu, pytest.mark.gpu_nccl, pytest.mark.two_gpus),
    pytest.mark.timeout(420, method="signal"),
]


@pytest.fixture(autouse=True)
def turn() -> Iterator[Turn]:
    """First of all fixtures, and so the last one to end: by then the job that was moved is gone."""
    made = Turn()
    yield made
    made.pass_on()


@pytest.fixture
def ranks(
    limosa: Callable[..., Any], tmp_path: Path, gpus: Inventory, request: pytest.FixtureRequest, turn: Turn
) -> Callable[[Kind], Ranks]:
    """``ranks(kind)``: proves one job; named by the test."""

    def go(kind: Kind) -> Ranks:
        missing = [name for name in kind.needs.split() if importlib.util.find_spec(name) is None]
        assert not missing, f"this proof needs {', '.join(missing)}"
        return Ranks(limosa, tmp_path, Pair.mine(gpus.gpus), request.node.name, kind, turn)

    return go


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_and_brought_back(ranks: Callable[[Kind], Ranks], images: Path, kind: str) -> None:
    """Its ranks change their GPUs while it computes, ten times or $LIMOSA_PROOF_TURNS.

    Then the whole tree goes to disk and comes back onto swapped GPUs, twice, and is swapped once more.
    """
    prover = ranks(KINDS[kind])
    job = prover.begin()
    prover.swaps(job, TURNS)
    prover.returns(job, images, 2)
    prover.swaps(job, 1)
    prover.agree(job)


@pytest.mark.four_gpus
def test_four_ranks_are_rotated(
    limosa: Callable[..., Any],
    tmp_path: Path,
    gpus: Inventory,
    images: Path,
    request: pytest.FixtureRequest,
    turn: Turn,
) -> None:
    """Four ranks on four GPUs, each of which goes to the next one."""
    four = gpus.gpus[:4]
    kind = Kind("ddp.py", ["--kind", "accumulate"], FOUR, [*TRACES, "trace-2", "trace-3"])
    all_of_them = Pair(tuple(gpu.index for gpu in four), tuple(gpu.uuid for gpu in four))
    prover = Ranks(limosa, tmp_path, all_of_them, request.node.name, kind, turn)
    job = prover.begin()
    prover.swaps(job, TURNS)
    prover.returns(job, images, 1)
    prover.agree(job)


@pytest.mark.four_gpus
def test_one_rank_goes_to_a_free_gpu_and_back(
    limosa: Callable[..., Any], tmp_path: Path, gpus: Inventory, request: pytest.FixtureRequest, turn: Turn
) -> None:
    """The other one stays where it is."""
    one, other, free = gpus.gpus[:3]
    pair = Pair((one.index, other.index), (one.uuid, other.uuid))
    prover = Ranks(limosa, tmp_path, pair, request.node.name, KINDS["ddp"], turn)
    job = prover.begin(env={"CUDA_VISIBLE_DEVICES": ",".join((*pair.uuids, free.uuid))})
    for lap in range(TURNS):
        source, to = (other, free) if lap % 2 == 0 else (free, other)
        to_there = {"source": source.uuid, "to": to.uuid, "force": BESIDE, "timeout": 60}
        go = lambda to_there=to_there: operation.move(job.pid, **to_there)[0].result  # noqa: E731
        prover.acts(job, go, [one.uuid, to.uuid], prover.least)
        prover.record["moves"] += 1
    prover.agree(job)


def test_what_has_no_room_beside_itself_is_swapped_by_the_driver(
    ranks: Callable[[Kind], Ranks], filler: Callable[..., Filler]
) -> None:
    """Others have taken the rest of both GPUs, and the parked way needs room for both copies."""
    prover = ranks(Kind("ddp.py", ["--kind", "accumulate"], way="driver"))
    others = filler(leave=1 << 30)
    job = prover.begin()
    others.fill(*prover.pair.indices)
    prover.swaps(job, TURNS)
    others.empty(*prover.pair.indices)
    prover.agree(job)


def test_put_aside_and_brought_back(ranks: Callable[[Kind], Ranks]) -> None:
    """Suspended, nobody makes a step; resumed, also onto swapped GPUs."""
    prover = ranks(KINDS["fsdp2"])
    job = prover.begin()
    for gpu_map in (None, prover.pair.swap, prover.pair.swap):
        operation.suspend(job.pid, timeout=90)
        stood = [len(job.trace(name)) for name in prover.kind.traces]
        time.sleep(0.5)
        assert [len(job.trace(name)) for name in prover.kind.traces] == stood
        back = lambda gpu_map=gpu_map: operation.resume(job.pid, gpu_map=gpu_map, force=BESIDE, timeout=90)[0].result  # noqa: E731
        prover.acts(job, back, prover.gpus, prover.least)
        prover.record["moves"] += 1
    prover.agree(job)


def test_put_aside_for_longer_than_every_time_out(ranks: Callable[[Kind], Ranks]) -> None:
    """PyTorch's watchdog looks at the clock: work that it has not seen end before is older than the time-out after."""
    prover = ranks(KINDS["ddp"])
    job = prover.begin(env={"PROOF_TIME_OUT": str(TIME_OUT), "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(TIME_OUT)})
    for gpu_map in (prover.pair.swap, None, prover.pair.swap):
        operation.suspend(job.pid, timeout=90)
        time.sleep(1.5 * TIME_OUT)
        back = lambda gpu_map=gpu_map: operation.resume(job.pid, gpu_map=gpu_map, force=BESIDE, timeout=90)[0].result  # noqa: E731
        prover.acts(job, back, prover.gpus, prover.least)
        prover.record["moves"] += 1
    prover.agree(job)


def test_the_port_of_nccls_ras_service_may_be_anothers_when_it_comes_back(
    ranks: Callable[[Kind], Ranks], images: Path
) -> None:
    """NCCL would listen there, in the first process that gets the port: the job would need it to come back."""
    prover = ranks(KINDS["accumulate"])
    job = prover.begin()
    assert not listens(RAS)
    image = images / "image"
    operation.checkpoint(job.pid, image, timeout=120)
    with socket.create_server(("127.0.0.1", RAS)):
        to: dict[str, Any] = {"gpu_map": prover.pair.swap, "force": BESIDE, "timeout": 120}
        prover.acts(job, lambda: operation.restore(image, **to), prover.gpus, prover.least)
        prover.ways[-1]["pause"] = None
        prover.record["restores"] = 1
        prover.swaps(job, 1)
    prover.swaps(job, 1)
    prover.agree(job)


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def test_a_captured_collective_is_refused_and_the_job_goes_on(ranks: Callable[[Kind], Ranks]) -> None:
    """A CUDA graph holds the old connections: nothing is touched, or the move is right."""
    prover = ranks(Kind("groups.py", ["--kind", "graph"]))
    job = prover.begin()
    with contextlib.suppress(Refused):
        prover.swaps(job, 1)
        prover.record["graph"] = "moved"
    if "graph" not in prover.record:
        with pytest.raises(Refused, match="graph") as refused:
            operation.move(job.pid, force=BESIDE, gpu_map=prover.pair.swap, timeout=60)
        prover.record["graph"] = str(refused.value)
    job.goes_on(20)
    prover.agree(job)


# --- a server under load ----------------------------------------------------------------------------------------------


class Served:
    """A server with clients outside it, which ask all the time."""

    def __init__(self, limosa: Callable[..., Any], folder: Path, kind: str, pair: Pair):
        argv = [*Kind("server.py", ["--kind", kind]).argv()]
        self.folder, self.pair = folder, pair
        self.job = Job(limosa, folder, [word.replace("FOLDER", str(folder)) for word in argv], pair.env, shim=True)
        self.clients: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        """Has the clients ask as soon as it listens."""
        self.job.until((self.folder / "port").exists, 150, "port")
        argv = [sys.executable, str(RANKS / "client.py"), str(self.folder)]
        self.clients = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.job.until(lambda: self.job.steps() > 30, 120, "answers")

    def end(self) -> tuple[int, int, int]:
        """Asked, answered, wrong."""
        assert self.clients is not None
        (self.folder / "enough").touch()
        said = self.clients.communicate(timeout=90)[0].split()
        self.job.stop_at(0)
        self.job.ends()
        return int(said[1]), int(said[3]), int(said[5])

    def answers(self) -> dict[str, str]:
        """Prompt → answer; fails where one prompt got two or a request failed."""
        found: dict[str, str] = {}
        for path in self.folder.glob("answers-*"):
            for line in path.read_text().splitlines():
                _, prompt, answer = line.split(" ", 2)
                assert not answer.startswith("FAILED"), f"{path.name}: {line}"
                assert found.setdefault(prompt, answer) == answer, f"prompt {prompt}: {found[prompt]} and {answer}"
        return found

    def kill(self) -> None:
        """Ends the clients whatever they do; the job is ended with the test's other processes."""
        if self.clients is not None:
            self.clients.kill()
            self.clients.communicate()


@pytest.fixture
def served(limosa: Callable[..., Any], tmp_path: Path, gpus: Inventory) -> Iterator[Callable[[str, str], Served]]:
    """``served(name, kind)``: a server with its clients."""
    made: list[Served] = []

    def go(name: str, kind: str) -> Served:
        assert importlib.util.find_spec("transformers") is not None, "this proof needs transformers"
        made.append(Served(limosa, tmp_path / name, kind, Pair.mine(gpus.gpus)))
        return made[-1]

    yield go
    for one in made:
        one.kill()


@pytest.mark.parametrize("kind", ["auto", "hand"])
@pytest.mark.parametrize("how", ["swapped", "brought back"])
def test_a_server_loses_no_request(
    served: Callable[[str, str], Served], images: Path, how: str, kind: str, request: pytest.FixtureRequest, turn: Turn
) -> None:
    """Connections live on, also through an end and a return; every answer is what an undisturbed server says."""
    twin = served("twin", kind)  # it ends first
    twin.begin()
    twin.job.goes_on(90, limit=150)
    assert twin.end()[2] == 0
    moved = served("moved", kind)
    turn.take(moved.pair)
    moved.begin()
    for lap in range(TURNS if how == "swapped" else 2):
        if how == "swapped":
            operation.move(moved.job.pid, force=BESIDE, gpu_map=moved.pair.swap, timeout=60)
        else:
            image = images / f"image-{lap}"
            operation.checkpoint(moved.job.pid, image, timeout=120, tcp_established=True)
            operation.restore(image, gpu_map=moved.pair.swap, force=BESIDE, timeout=120, tcp_established=True)
        moved.job.goes_on(8)
    moved.job.goes_on(60)
    asked, answered, wrong = moved.end()
    assert (answered, wrong) == (asked, 0)
    mine, other = moved.answers(), twin.answers()
    both = sorted(mine.keys() & other.keys(), key=int)
    assert len(both) > 30
    different = first_difference([mine[prompt] for prompt in both], [other[prompt] for prompt in both])
    assert different is None, f"the moved server differs from its twin: {different}"
    note({"name": request.node.name, "asked": asked, "answered": answered, "wrong": wrong, "pid": os.getpid()})

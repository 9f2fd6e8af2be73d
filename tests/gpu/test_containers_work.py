"""Jobs in containers that have the nodes of one GPU: moved in place, suspended, written to disk, brought back, cloned.

``plain`` jobs need no framework: they are up in a second, and show within seconds whether containers work here at all.
``scripts/test-gpu.sh containers`` runs all of it, in five minutes at most.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boxes import Box, Boxes
from op_support import on
from proofs import VICTIMS, first_difference, known_only, note

from limosa import operation
from limosa.gpu import Inventory

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_containers, pytest.mark.two_gpus]
TURNS = int(os.environ.get("LIMOSA_PROOF_TURNS", "20"))
A = 2 * int(os.environ.get("LIMOSA_PROOF_PAIR", "0"))
B = A + 1
"""The two GPUs that are used, by their indices."""
LLM_GB = float(os.environ.get("LIMOSA_LLM_GB", "30"))
LIMIT = {"plain": 60, "torch": 150, "llm": 180}
TRAININGS = {
    "plain": ["proof_plain.py", "/job"],
    "torch": ["proof_torch.py", "/job", "--kind", "adamw"],
}
SERVERS = {
    "plain": ["serve.py", "/job", "--kind", "plain", "--gb", "0.064"],
    "llm": ["serve.py", "/job", "--kind", "llm", "--gb", str(LLM_GB)],
}


def each(kinds: dict[str, Any]) -> Any:
    marks = {kind: pytest.mark.timeout(LIMIT[kind], method="signal") for kind in kinds}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks[kind]) for kind in kinds])


@pytest.fixture
def boxes(runtime: Path, gpus: Inventory) -> Iterator[Boxes]:
    """Containers, which end with the test."""
    with Boxes() as made:
        yield made


@pytest.fixture
def uuids(gpus: Inventory) -> list[str]:
    return [gpu.uuid for gpu in gpus.gpus]


class Told:
    """What is noted of a proof, and printed as it comes: a run that is cut off has said what it has seen."""

    def __init__(self, name: str):
        self.record: dict[str, Any] = {"name": name, "moves": 0}
        self.ways: list[dict[str, Any]] = []

    def __call__(self, **figures: Any) -> None:
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
        print(f"  {self.record['name']}: {shown}", flush=True)

    def move(self, box: Box, to: int, uuids: list[str]) -> None:
        """Moves it in place; then it has that GPU's node alone, and its memory there."""
        since = time.monotonic()
        (outcome,) = operation.move(box.called, to=str(to), timeout=60)
        wall = time.monotonic() - since
        found = outcome.result
        assert found is not None
        assert found.way == "parked", " | ".join(one.text for one in found.warnings)
        assert found.bytes > 0
        assert len(found.map) == 1, f"the map is of the one GPU that it can open: {found.map}"
        box.goes_on()
        assert box.nodes() == {f"nvidia{to}"}
        shims = box.shims()
        assert {gpu for one in shims.values() for gpu in one["gpus"]} == {uuids[to]}, shims
        way = {"pause": box.pause(since), "said": found.timings["pause_seconds"], "wall": wall, "bytes": found.bytes}
        self.ways.append({**way, "way": found.way})
        self.record["moves"] += 1
        self(move=to, **way)

    def save(self, **more: Any) -> None:
        for what in ("pause", "said", "wall"):
            values = [way[what] for way in self.ways]
            if values:
                self.record[what] = {"median": statistics.median(values), "most": max(values)}
        self.record |= {"ways": self.ways, **more}
        note(self.record)


def timed(told: Told, what: str, call: Any) -> Any:
    since = time.monotonic()
    found = call()
    told(**{what: time.monotonic() - since}, timings={k: round(v, 3) for k, v in found.timings.items()})
    return found


def single(outcomes: list[Any]) -> Any:
    (outcome,) = outcomes
    assert outcome.result is not None
    return outcome.result


# --- a training -------------------------------------------------------------------------------------------------------


class Twin:
    """The same job outside of any container, which nobody disturbs."""

    def __init__(self, argv: list[str], folder: Path):
        folder.mkdir()
        self.folder = folder
        self.argv = [word if word != "/job" else str(folder) for word in argv]
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(B)},
            )  # fmt: skip

    def results(self, steps: int, limit: float) -> list[str]:
        """Its first results, when it has made so many steps."""
        (self.folder / "until.new").write_text(str(steps))
        os.replace(self.folder / "until.new", self.folder / "until")
        try:
            assert self.process.wait(limit) == 0, (self.folder / "log").read_text()[-3000:]
        except subprocess.TimeoutExpired:
            made = len((self.folder / "trace").read_text().splitlines())
            raise AssertionError(f"the twin has made {made} of {steps} steps") from None
        lines = (self.folder / "trace").read_text().splitlines()
        return [line.split(" ", 2)[2] for line in lines[:steps]]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@each(TRAININGS)
def test_a_training(boxes: Boxes, uuids: list[str], tmp_path: Path, kind: str) -> None:
    """Moved in place again and again, suspended, ended and brought back on the other GPU: bit for bit its twin's."""
    told = Told(f"container, {kind}")
    program, *words = TRAININGS[kind]
    argv = [sys.executable, str(VICTIMS / program), *words]
    twin = Twin(argv, tmp_path / "twin")
    try:
        box = boxes.start("train", argv, gpus=[A])
        box.until(lambda: box.steps() > 10, 100, "steps")
        assert box.nodes() == {f"nvidia{A}"}
        shims = box.shims()
        assert any(one["parked"] for one in shims.values()), shims
        for turn in range(TURNS if kind == "torch" else min(TURNS, 4)):
            told.move(box, B if turn % 2 == 0 else A, uuids)
        here, listed = box.nodes(), box.listed()
        told(node=sorted(here), nvml_lists=listed)
        assert listed == [uuids[A if here == {f"nvidia{A}"} else B]]
        timed(told, "suspend", lambda: single(operation.suspend(box.called, timeout=60)))
        assert not on(box.pid), "a suspended job holds nothing on any GPU"
        timed(told, "resume", lambda: single(operation.resume(box.called, timeout=60)))
        box.goes_on()
        assert box.nodes() == here
        functions, parked = known_only(box.shims()), sum(one["parked"] for one in box.shims().values())
        there = A if here == {f"nvidia{B}"} else B
        image = boxes.images / "train"
        written = timed(told, "checkpoint", lambda: operation.checkpoint(box.called, image, timeout=90))
        assert (written.state, written.way) == ("ended", "parked"), written
        assert not box.alive()
        came = timed(told, "restore", lambda: operation.restore(image, to=str(there), timeout=90))
        again = boxes.back("train", box)
        assert came.pid == again.pid != box.pid
        again.goes_on()
        assert again.nodes() == {f"nvidia{there}"}
        assert on(again.pid) == {there}
        told.move(again, A if there == B else B, uuids)
        again.stop_at(again.steps() + 50)
        again.ends()
        results = again.results()
        same = twin.results(len(results), limit=60)
        assert len(same) == len(results)
        different = first_difference(results, same)
        assert different is None, f"it differs from its twin: {different}"
        told.save(steps=len(results), parked=parked, functions=functions, left={}, restores=1, processes=1)
    finally:
        twin.kill()


# --- a server ---------------------------------------------------------------------------------------------------------


class Load:
    """Clients of a server in a container; they run outside of it."""

    def __init__(self, box: Box, path: Path):
        self.path = path
        argv = [sys.executable, str(VICTIMS / "serve.py"), "--load", str(box.pid), str(path)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE)
        self.answered(3)

    def seen(self) -> dict[str, Any]:
        """What they have seen so far."""
        if not self.path.exists():
            return {"answers": {}, "times": [], "wrong": [], "lost": []}
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    def answered(self, more: int, limit: float = 60) -> None:
        """Waits until so many more answers have come."""
        goal, end = len(self.seen()["times"]) + more, time.monotonic() + limit
        while len((seen := self.seen())["times"]) < goal:
            assert time.monotonic() < end, f"{len(seen['times'])} answers, {seen['lost'][-3:]}"
            assert self.process.poll() is None, "the clients have ended"
            time.sleep(0.05)

    def right(self) -> dict[str, Any]:
        """Fails where an answer was wrong, or a connection broke."""
        seen = self.seen()
        assert not seen["wrong"], f"answers that differ: {seen['wrong'][:3]}"
        assert not seen["lost"], f"{len(seen['lost'])} requests were lost: {seen['lost'][:3]}"
        return seen

    def end(self) -> dict[str, Any]:
        """Has them finish what they have asked."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(75)
        return self.right()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def serving(boxes: Boxes, name: str, kind: str) -> Box:
    program, *words = SERVERS[kind]
    box = boxes.start(name, [sys.executable, str(VICTIMS / program), *words], gpus=[A])
    box.until(lambda: "SERVING" in box.text(), 100, "SERVING")
    return box


@each(SERVERS)
def test_a_server(boxes: Boxes, uuids: list[str], tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """Under load no request is lost in moves, nor while it goes to disk; the image becomes a server on each GPU."""
    told = Told(f"container, server, {kind}")
    if kind != "plain":
        request.getfixturevalue("touched")
    since = time.monotonic()
    box = serving(boxes, "serve", kind)
    told(up=time.monotonic() - since)
    loads = [Load(box, tmp_path / "load")]
    try:
        (load,) = loads
        for to in (B, A, B, A):
            told.move(box, to, uuids)
            load.answered(3)
            load.right()
        timed(told, "suspend", lambda: single(operation.suspend(box.called, timeout=60)))
        timed(told, "resume", lambda: single(operation.resume(box.called, timeout=60)))
        load.answered(3)
        load.right()
        image = boxes.images / "serve"
        written = timed(
            told,
            "checkpoint",
            lambda: operation.checkpoint(box.called, image, leave_running=True, tcp_established=True, timeout=90),
        )
        assert (written.state, written.way) == ("running", "parked"), written
        load.answered(3)
        seen = load.end()
        told(asked=len(seen["times"]), lost=0, device_bytes=written.device_bytes)
        box.remove()
        for gpu in (A, B):
            bundle = boxes.same_bundle(box, f"clone{gpu}")
            options = {"to": str(gpu), "name": f"clone{gpu}", "bundle": str(bundle), "tcp_close": True, "timeout": 90}
            timed(told, f"clone on GPU {gpu}", lambda options=options: operation.restore(image, **options))
            clone = boxes.back(f"clone{gpu}", box, bundle)
            assert clone.nodes() == {f"nvidia{gpu}"}
            loads.append(Load(clone, tmp_path / f"load{gpu}"))
        for clone_load in loads[1:]:
            clone_load.answered(6)
            found = clone_load.end()
            assert found["answers"] == {k: seen["answers"][k] for k in found["answers"]}, "a clone answers otherwise"
        told.save(asked=len(seen["times"]), answered=len(seen["times"]), wrong=0, clones=2)
    finally:
        for one in loads:
            one.kill()

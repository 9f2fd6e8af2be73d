"""CRIU and Limosa's verbs on programs in a node: what is left of a checkpointed process can be dumped and restored."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from softgpu.far import Far

VICTIM = Path(__file__).parent / "checkpoint_victim.py"
pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]


class Victim:
    """A job started by ``limosa run`` in a node."""

    def __init__(self, node: Any, folder: Path, *options: str, prefix: tuple[str, ...] = ()):
        self.node, self.folder = node, folder
        folder.mkdir()
        program = [*prefix, sys.executable, VICTIM, folder, *options]
        # Without the shim: here the driver carries it all, and nobody else has a context on a GPU.
        answer = node.limosa("run", "-d", "--no-shim", "--name", folder.name, "--log", folder / "log", "--", *program)
        self.pid = int(answer.stdout.split()[0])
        self.goes_on()

    @property
    def rounds(self) -> int:
        try:
            return int((self.folder / "rounds").read_text())
        except FileNotFoundError:
            return 0

    def goes_on(self, limit: float = 60) -> None:
        before, end = self.rounds, time.monotonic() + limit
        while self.rounds <= before + 2:
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.01)

    def stands_still(self) -> bool:
        before = self.rounds
        time.sleep(0.2)
        return self.rounds == before

    def finish(self) -> None:
        (self.folder / "finish").touch()
        end = time.monotonic() + 60
        verdict = self.folder / "verdict"
        while not (verdict.exists() and verdict.read_text()):  # it is there a moment before it says anything
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.01)
        assert (self.folder / "verdict").read_text() == "right"


@pytest.fixture
def big(new_node: Callable[..., Any]) -> Any:
    """Limosa wants 64 MiB more than a job has."""
    return new_node(memory="256MiB")


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Callable[..., Victim]]:
    started: list[Victim] = []

    def go(node: Any, *options: str, **more: Any) -> Victim:
        started.append(Victim(node, tmp_path / f"job{len(started)}", *options, **more))
        return started[-1]

    yield go
    for victim in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(victim.pid, signal.SIGKILL)


def on(node: Any) -> set[int]:
    return {gpu for gpu in range(len(node.spec.gpus)) if node.switches.used(gpu) > node.spec.idle_bytes}


@pytest.mark.parametrize(
    "options", [(), ("--streams", "--vmm", "--pinned"), ("--child",), ("--child", "--streams", "--exported")]
)
def test_dumped_killed_and_restored(options: tuple[str, ...], big: Any, victims: Any, tmp_path: Path) -> None:
    victim = victims(big, *options)
    image = tmp_path / "image"
    for there in (None, 1):
        answer = big.limosa("checkpoint", victim.pid, "--output", image)
        assert not os.path.exists(f"/proc/{victim.pid}"), answer
        assert on(big) == set()
        assert victim.stands_still()
        big.limosa("restore", image, *(["--to", there] if there is not None else []))
        victim.goes_on()
        assert on(big) == {there or 0}
        shutil.rmtree(image)
    victim.finish()


def test_a_job_without_an_environment(big: Any, victims: Any, tmp_path: Path) -> None:
    """Its libraries were found by the node's own loader cache, which CRIU and the loader of what comes back see too."""
    victim = victims(big, "--child", prefix=("env", "-i"))
    image = tmp_path / "image"
    big.limosa("move", victim.pid, "--to", 1)
    big.limosa("checkpoint", victim.pid, "--output", image)
    big.limosa("restore", image, "--to", 0)
    victim.goes_on()
    assert on(big) == {0}
    victim.finish()


def test_left_running_and_restored_from_the_image_after_its_end(big: Any, victims: Any, tmp_path: Path) -> None:
    victim = victims(big, "--child", "--vmm")
    image = tmp_path / "image"
    big.limosa("checkpoint", victim.pid, "--output", image, "--leave-running")
    victim.goes_on()
    os.killpg(victim.pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{victim.pid}"):
        assert time.monotonic() < end
        time.sleep(0.01)
    big.limosa("restore", image)
    victim.goes_on()
    victim.finish()


def test_moved_suspended_resumed_and_toggled(big: Any, victims: Any) -> None:
    victim = victims(big, "--child", "--streams", "--vmm", "--exported", "--pinned")
    job = victim.pid
    big.limosa("move", job, "--to", 1)
    victim.goes_on()
    assert on(big) == {1}
    big.limosa("suspend", job)
    assert victim.stands_still()
    assert on(big) == set()
    controller = Far(big)
    assert controller.state(job) == "checkpointed"
    big.limosa("resume", job, "--to", 0)
    victim.goes_on()
    assert on(big) == {0}
    for state in ("checkpointed", "running"):
        big.limosa("toggle", job)
        assert controller.state(job) == state
    victim.goes_on()
    victim.finish()


def test_a_suspended_job_is_dumped_as_it_is_and_answers_when_it_is_back(big: Any, victims: Any, tmp_path: Path) -> None:
    victim = victims(big, "--child")
    image = tmp_path / "image"
    big.limosa("suspend", victim.pid)
    big.limosa("checkpoint", victim.pid, "--output", image)
    big.limosa("restore", image)
    controller = Far(big)
    if controller.state(victim.pid) == "checkpointed":
        big.limosa("resume", victim.pid)
    assert controller.state(victim.pid) == "running"
    victim.goes_on()
    victim.finish()


def test_a_job_that_could_open_one_gpu_goes_to_another_node(
    new_node: Callable[..., Any], victims: Any, tmp_path: Path
) -> None:
    """As on another machine: the GPUs have other UUIDs there, and nothing of the first node is left."""
    first, second = new_node(gpus=1, memory="256MiB"), new_node(gpus=1, memory="256MiB")
    victim = victims(first, "--vmm")
    image = tmp_path / "image"
    first.limosa("checkpoint", victim.pid, "--output", image)
    first.close()
    answer = second.limosa("restore", image, "--to", 0, rc=None)
    assert answer.rc == 0, answer
    victim.goes_on()
    assert on(second) == {0}
    victim.finish()


def test_questions_meanwhile_are_in_nobodys_way(big: Any, victims: Any, tmp_path: Path) -> None:
    """A process that is frozen in the middle of an answer holds nothing that CRIU cannot dump."""
    victim = victims(big)
    asking = [Far(big) for _ in range(3)]
    try:
        pending = [far.send(f"[state({victim.pid}) for _ in range(1000000)]") for far in asking]
        for image in ("first", "second"):
            big.limosa("checkpoint", victim.pid, "--output", tmp_path / image, "--leave-running")
            victim.goes_on()
        assert not any(answers.done for answers in pending)
    finally:
        for far in asking:
            far.process.kill()
    victim.finish()

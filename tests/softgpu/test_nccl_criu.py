"""CRIU and Limosa's verbs on ranks: without a communicator they are as any job, with one they are refused."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from softgpu.far import until

HERE = Path(__file__).parent
pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]


class Churn:
    """nccl_churn.py, started by ``limosa run``."""

    def __init__(self, node: Any, folder: Path):
        self.folder = folder
        folder.mkdir()
        program = [sys.executable, HERE / "nccl_churn.py", folder]
        answer = node.limosa("run", "-d", "--no-shim", "--name", "churn", "--log", folder / "log", "--", *program)
        self.pid = int(answer.stdout.split()[0])
        self.goes_on()

    def number(self, name: str) -> int:
        path = self.folder / name
        return int(path.read_text()) if path.exists() else 0

    def goes_on(self) -> None:
        before = self.number("rounds")
        until(lambda: self.number("rounds") > before + 2)

    def hold(self) -> None:
        (self.folder / "hold").touch()
        until((self.folder / "held").exists)

    def go(self) -> None:
        (self.folder / "hold").unlink()
        (self.folder / "held").unlink()
        self.goes_on()


@pytest.fixture
def node(new_node: Callable[..., Any]) -> Any:
    return new_node(memory="512MiB")


@pytest.fixture
def churn(node: Any, tmp_path: Path) -> Iterator[Churn]:
    job = Churn(node, tmp_path / "job")
    yield job
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)


def test_between_two_communicators_it_is_dumped_and_restored(node: Any, churn: Churn, tmp_path: Path) -> None:
    for number in range(2):
        churn.hold()
        image = tmp_path / f"image{number}"
        node.limosa("checkpoint", churn.pid, "--output", image)
        assert not os.path.exists(f"/proc/{churn.pid}")
        node.limosa("restore", image)
        churn.go()
    (churn.folder / "finish").touch()
    until(lambda: (churn.folder / "verdict").exists() and (churn.folder / "verdict").read_text())
    assert (churn.folder / "verdict").read_text() == "right"


def test_ranks_with_communicators_are_refused(node: Any, tmp_path: Path) -> None:
    program = [sys.executable, HERE / "nccl_agent.py", tmp_path, "--ranks", 2, "--steps", 100_000, "--pause", 5]
    answer = node.limosa("run", "-d", "--no-shim", "--name", "ranks", "--log", tmp_path / "log", "--", *program)
    until((tmp_path / "rank-1").exists)
    refused = node.limosa("suspend", answer.stdout.split()[0], rc=13)
    assert "NCCL ranks" in refused.stderr
    until(lambda: (tmp_path / "rank-1").read_text().count("\n") > 3)

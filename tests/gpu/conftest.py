"""What the GPU tests share: the machine's GPUs, the stamping victim, and the driver in two ways."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from op_support import ONE_GPU, do, filler, images, touched  # noqa: F401 - fixtures of test_op_*.py
from proofs import Prover

from limosa.errors import GpuUnavailable
from limosa.gpu import Driver, Inventory, LockResult, Process, State, inventory

VICTIMS = Path(__file__).parent / "victims"
# Where limosa is not installed it is found from any working folder: by its commands, its worker, and its heirs.
SOURCE = str(Path(__file__).parents[2] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
Stamping = Callable[..., Any]


def _end(*_: object) -> None:
    """What is ended from outside clears up: a job that stays would hold memory of GPUs on which others are measured."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout sends it twice
    raise KeyboardInterrupt("ended from outside")


signal.signal(signal.SIGTERM, _end)


@pytest.fixture(scope="session")
def gpus() -> Inventory:
    """The GPUs of this machine; two of one chip are needed, one with $LIMOSA_ONE_GPU; without them these tests fail."""
    found = inventory()
    assert len(found.gpus) >= (1 if ONE_GPU else 2), "these tests need two GPUs"
    assert len({gpu.name for gpu in found.gpus}) == 1, "these tests need GPUs of one chip"
    return found


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    """One worker for all tests, as a long-lived controller has it."""
    with Driver() as made:
        yield made


@pytest.fixture
def prover(limosa: Callable[..., Any], tmp_path: Path, gpus: Inventory, request: pytest.FixtureRequest) -> Prover:
    """Proves one job; named by the test."""
    return Prover(limosa, tmp_path, [gpu.uuid for gpu in gpus.gpus[:2]], request.node.name)


@pytest.fixture
def stamping(start: Callable[..., Any], tmp_path: Path) -> Stamping:
    """Starts the stamping victim: ``stamping("--gb", 1, "--graph")``; it is up and has made some steps."""
    count = iter(range(100))

    def go(*flags: object, env: dict[str, str] | None = None, limit: float = 180, ticks: int = 3) -> Any:
        folder = tmp_path / f"stamping{next(count)}"
        argv = [sys.executable, str(VICTIMS / "stamping.py"), str(folder), *map(str, flags)]
        victim = start(argv, folder=folder, env=env, limit=limit)
        victim.goes_on(ticks)
        return victim

    return go


class ByDriver:
    """The calls of :class:`Process` made through the worker, so that one test can show both."""

    def __init__(self, driver: Driver, pid: int):
        self.driver, self.pid = driver, pid

    @property
    def state(self) -> State:
        return self.driver.state(self.pid)

    @property
    def restore_thread_id(self) -> int:
        return self.driver.restore_thread_id(self.pid)

    def lock(self, timeout_ms: int = 0) -> None:
        assert self.driver.lock(self.pid, timeout_ms, limit=60) is LockResult.LOCKED

    def try_lock(self, timeout_ms: int) -> LockResult:
        return self.driver.lock(self.pid, timeout_ms, limit=60)

    def checkpoint(self) -> None:
        self.driver.checkpoint(self.pid, limit=120)

    def restore(self, gpu_mapping: dict[str, str] | None = None) -> None:
        self.driver.restore(self.pid, gpu_mapping, limit=120)

    def unlock(self) -> None:
        self.driver.unlock(self.pid)


@pytest.fixture
def ways(driver: Driver) -> Callable[[int], list[Any]]:
    """``ways(pid)``: the calls on a process, made in this process and made through the worker."""
    return lambda pid: [Process(pid), ByDriver(driver, pid)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Shows a failure as it comes: what is cut off has no summary, and time on such machines is dear."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n--- {report.nodeid} ({report.when})\n{report.longreprtext[-5000:]}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    """Marks that only these tests have."""
    config.addinivalue_line("markers", "gpu_core: what is run again on the last commit, in ten minutes at most")
    config.addinivalue_line("markers", "gpu_parked: proofs of the parked way (scripts/test-gpu.sh parked)")
    config.addinivalue_line("markers", "gpu_nccl: proofs of jobs of several ranks (scripts/test-gpu.sh nccl)")
    config.addinivalue_line("markers", "gpu_containers: jobs in containers (scripts/test-gpu.sh containers)")
    config.addinivalue_line("markers", "two_gpus: not run with $LIMOSA_ONE_GPU")
    config.addinivalue_line("markers", "four_gpus: only where there are four")
    config.addinivalue_line("markers", "gpu_alone: fills GPUs or measures: nothing else may run beside it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs more GPUs than $LIMOSA_ONE_GPU says, or than there are, is left out, and counted as deselected."""
    away = [item for item in items if ONE_GPU and item.get_closest_marker("two_gpus")]
    four = [item for item in items if item.get_closest_marker("four_gpus")]
    with contextlib.suppress(GpuUnavailable):  # where there are none, these tests say so
        if four and len(inventory().gpus) < 4:
            away += four
    if away:
        items[:] = [item for item in items if item not in away]
        config.hook.pytest_deselected(items=away)

"""Real processes that look as if they held CUDA state, and a driver double that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from driver_double import PROGRAM, DriverDouble

from limosa import gpu

GpuLike = Callable[..., int]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> DriverDouble:
    """The driver double, in place of the worker, NVML and the look at device nodes."""
    made = DriverDouble()
    install(made, monkeypatch)
    return made


def install(made: DriverDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a double where operations look for the driver."""
    monkeypatch.setattr(gpu, "Driver", lambda **_: made, raising=False)
    monkeypatch.setattr(gpu, "inventory", made.inventory, raising=False)
    monkeypatch.setattr(gpu, "openable", made.openable, raising=False)


@pytest.fixture
def gpu_like(start: Callable[..., object], double: DriverDouble, tmp_path: Path) -> GpuLike:
    """Starts a process that has something called libcuda mapped and tells the double what it holds."""
    import sys

    count = iter(range(100))

    def go(on: int = 0, size: int = 1 << 30) -> int:
        folder = tmp_path / f"gpu-like{next(count)}"
        folder.mkdir()
        victim = start([sys.executable, "-c", PROGRAM, str(folder)], folder=folder)
        double.adopt(victim.pid, on, size)  # type: ignore[attr-defined]
        return int(victim.pid)  # type: ignore[attr-defined]

    return go


@pytest.fixture(autouse=True)
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Journals, claims and records of one test are its own."""
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"

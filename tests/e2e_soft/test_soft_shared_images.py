"""Jobs whose processes share device memory by legacy IPC handles, written to disk and brought back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from soft_command import importer_of, start, used

from limosa.parking.shim import Shim
from limosa.process.identity import Identity

pytestmark = pytest.mark.criu

MIB = 1 << 20
SMALL = ["--chunk", "4MiB"]


def shares(pid: int) -> list[int]:
    with Shim(Identity.of(pid)) as shim:
        return [m.share for m in shim.memories() if m.share]


def is_shared(node: Any, job: Any, child: int) -> None:
    """It goes on, what is shared is one memory, and there once; whoever shares it has seen the other's changes."""
    job.goes_on(3)
    assert shares(job.pid) == shares(child) != []
    assert max(used(node)) < 96 * MIB
    time.sleep(0.3)


@pytest.mark.parametrize("moved", [False, True])
def test_ended_and_restored(parked: Any, tmp_path: Path, moved: bool) -> None:
    """Also where both have imported it since a move."""
    job = start(parked, "--mib", 24, "--export")
    child = importer_of(job)
    if moved:
        parked.says(0, "", "move", job.pid, "--to", 1)
        job.goes_on(2)
    for n, to in enumerate((1, 0)):
        said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / f"image{n}", *SMALL)
        assert said["way"] == "parked"
        assert 48 * MIB <= said["device_bytes"] < 72 * MIB, "what is shared is copied once"
        job.until_gone()
        said = parked.says(0, "", "restore", tmp_path / f"image{n}", "--to", to)
        assert 48 * MIB <= said["device_bytes"] < 72 * MIB
        is_shared(parked, job, child)
    parked.says(0, "", "move", job.pid, "--to", 1)
    is_shared(parked, job, child)
    job.finish()


def test_left_running_and_restored_from_that(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 24, "--export")
    child = importer_of(job)
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "-R", *SMALL)
    assert 48 * MIB <= said["device_bytes"] < 72 * MIB
    is_shared(parked, job, child)
    job.kill()
    job.until_gone()
    parked.says(0, "", "restore", tmp_path / "image", "--to", 1)
    is_shared(parked, job, child)
    job.finish()


def test_suspended_and_written_to_disk(parked: Any, tmp_path: Path) -> None:
    """Each process has a copy of its own in host memory; what comes back is one."""
    job = start(parked, "--mib", 24, "--export")
    child = importer_of(job)
    parked.limosa("suspend", job.pid)
    said = parked.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    assert 48 * MIB <= said["device_bytes"] < 72 * MIB
    job.until_gone()
    parked.says(0, "", "restore", tmp_path / "image", "--to", 1)
    is_shared(parked, job, child)
    job.finish()

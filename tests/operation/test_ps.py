"""What ``ps`` says of a job that its caller may not look at."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from driver_double import DriverDouble
from support import as_user

from limosa import gpu, operation
from limosa.operation.jobs import job
from limosa.operation.ps import _one

USER = 4242


def seen(pid: int, runtime: Path) -> dict[str, Any]:
    """What ``ps`` tells of a process that ``limosa run`` started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIMOSA_RUNTIME_DIR", str(runtime))
        found = _one(job(pid), {}, None, gpu.Driver(), by_run=True)
        return {"state": found.state, "reasons": [(r.id, r.exit_code, r.text) for r in found.reasons]}


def test_another_users_job_is_not_said_to_hold_nothing() -> None:
    runtime = Path(tempfile.mkdtemp(prefix="limosa-ps-"))
    runtime.chmod(0o755)
    with subprocess.Popen(["sleep", "30"]) as process:
        try:
            there = as_user(USER, lambda: seen(process.pid, runtime))
            text = f"process {process.pid} is root's: what it holds on a GPU cannot be looked at"
            assert there == {"state": "unknown", "reasons": [("permission", 11, text)]}
            mine = seen(process.pid, runtime)
            assert (mine["state"], mine["reasons"][0][0]) == ("running", "no-cuda-state")
        finally:
            process.kill()
            shutil.rmtree(runtime)


def test_what_nobody_foresaw_of_one_job_hides_no_other(
    gpu_like: Any, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, other = gpu_like(), gpu_like()

    def one(which: Any, *rest: Any) -> Any:
        if which.root.pid == odd:
            raise ValueError("invalid literal")
        return _one(which, *rest)

    monkeypatch.setattr(sys.modules["limosa.operation.ps"], "_one", one)
    listed = {found.pid: found for found in operation.ps(double)}  # type: ignore[arg-type]
    assert listed[other].state == "running"
    (reason,) = listed[odd].reasons
    assert (listed[odd].state, listed[odd].movable) == ("unknown", False)
    assert (reason.exit_code, reason.text) == (1, "could not be looked at (ValueError: invalid literal)")

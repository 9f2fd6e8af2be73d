"""What ``ps`` says of a job that its caller may not look at."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support import as_user

from limosa import gpu
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

"""A job in a container, moved to a GPU that the container does not have, while whoever moves it is killed."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers.runtimes import cgroup_layouts

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
TIMES = 12 if os.environ.get("LIMOSA_LONG_TESTS") else 4


@pytest.fixture
def kept(runc: Any, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LIMOSA_CONTAINER_STATE", str(runc.place / "state"))
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    return runc


def workers(node: Any) -> list[int]:
    found = []
    for pid in node.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "limosa-worker":
                found.append(pid)
    return found


def is_at_rest(node: Any, pid: int) -> dict[str, Any] | None:
    """The job by ``ps``, once nothing is under way on it any more and it runs."""
    (job,) = [j for j in node.limosa("ps", "-o", "json").json["jobs"] if j["pid"] == pid]
    return job if job["state"] == "running" and job["under_way"] is None else None


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
def test_the_container_has_the_gpu_that_its_job_is_on(cgroups: str, kept: Any) -> None:
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    node = kept.node
    for call in ("Checkpoint", "Restore", "Unlock"):
        node.switches.add(f"function=cuCheckpointProcess{call} delay=0.15 every=1")
    one = kept.start("/job", 16, 20, name=f"kept-{secrets.token_hex(3)}")
    one.goes_on()
    at = 0
    for n in range(TIMES):
        process = node.popen([sys.executable, "-m", "limosa", "-q", "move", one.pid, "--to", 1 - at])
        time.sleep(draw.uniform(0.6, 2.0))
        who = draw.choice(["limosa", "limosa and its worker"])
        if who != "limosa":
            for worker in workers(node):
                os.kill(worker, signal.SIGKILL)
        process.kill()
        process.wait(60)
        end = time.monotonic() + 120
        while True:
            said = node.limosa("recover", "-o", "json", rc=None)
            job = is_at_rest(node, one.pid)
            if said.rc == 0 and job is not None:
                break
            assert time.monotonic() < end, f"seed {seed}, {n}: {who} was killed: {said} {job}"
            time.sleep(0.2)
        (at,) = [gpu["index"] for gpu in job["gpus"]]
        seen = {name for name in one.run("ls", "/dev").stdout.split() if name[:6] == "nvidia" and name[6:].isdigit()}
        assert seen == {f"nvidia{at}"}, f"seed {seed}, {n}: {who} was killed, and it is on {at}"
        one.goes_on()

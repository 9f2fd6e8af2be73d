"""Jobs in containers of podman and runc, seen, moved, suspended and resumed from outside by the host's limosa."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers.runtimes import cgroup_layouts

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]
LIMOSA = [sys.executable, "-m", "limosa"]
# Tests run side by side, and a name is one container's on the machine.
TRAIN, TUNE = (f"{name}-{secrets.token_hex(3)}" for name in ("train", "trailer"))


@pytest.fixture
def box(container: Any, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts containers whose runtime's notes Limosa finds."""
    monkeypatch.setenv("LIMOSA_CONTAINER_STATE", str(container.runtime.place / "state"))
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    return container


def says(box: Any, code: int, *arguments: object) -> Any:
    """``limosa … -o json`` in the node."""
    verb, *rest = arguments
    return box.node.limosa(verb, "-o", "json", *rest, rc=code).json


def jobs(box: Any) -> dict[str, Any]:
    return {job["container"]["name"]: job for job in says(box, 0, "ps")["jobs"] if job["container"]}


def gpus_of(job: dict[str, Any]) -> list[int]:
    return [one["index"] for one in job["gpus"]]


def nodes(one: Any) -> set[str]:
    """The GPUs' nodes in a container, by a program that is started in it now."""
    return {name for name in one.run("ls", "/dev").stdout.split() if name.startswith("nvidia") and name[6:].isdigit()}


def may_open(one: Any, gpu: int) -> str:
    """What the device cgroup says to a program that is started in the container now."""
    said = one.run("sh", "-c", f": < /dev/nvidia{gpu}", rc=None)
    return (said.stdout + said.stderr).strip().rpartition(": ")[2]


def test_ps_shows_the_container_and_takes_it_as_a_job(box: Any) -> None:
    one = box("/job", 16, 20, name=TRAIN)
    one.goes_on()
    other = box("/job", 16, 20, name=TUNE, gpus=(1,))
    other.goes_on()
    found = jobs(box)
    assert set(found) == {TRAIN, TUNE}
    job = found[TRAIN]
    assert (job["pid"], job["state"], gpus_of(job)) == (one.pid, "running", [0])
    assert (job["container"]["runtime"], job["container"]["id"]) == (box.runtime.name, one.id)
    assert gpus_of(found[TUNE]) == [1]
    assert f"{box.runtime.name}:{TRAIN}" in box.node.limosa("ps").stdout
    called = f"{box.runtime.name}:{TRAIN}"
    assert says(box, 0, "suspend", called)["pid"] == one.pid
    assert jobs(box)[TRAIN]["state"] == "checkpointed"
    assert says(box, 0, "resume", "--container", one.id[:12])["pid"] == one.pid
    one.goes_on()
    if box.runtime.name == "runc":  # whose names are its ids
        assert says(box, 2, "suspend", "--container", "trai")["error"]["id"] == "usage"
    assert says(box, 10, "suspend", "docker:train")["error"]["id"] == "no-such-process"
    assert says(box, 10, "suspend", "--container", "nobody")["error"]["id"] == "no-such-process"


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
def test_a_container_with_one_gpu_is_given_another(cgroups: str, box: Any) -> None:
    one = box("/job", 16, 20, name=TRAIN)
    one.goes_on()
    assert nodes(one) == {"nvidia0"}
    plan = says(box, 0, "plan", "move", "--container", TRAIN, "--to", 1)
    assert [r["id"] for r in plan["reasons"]] == ["container-record"]
    assert len(plan["map"]) == 1, "the map is of the one GPU that the job can open"
    for to in (1, 0, 1):
        said = says(box, 0, "move", "--container", TRAIN, "--to", to)
        assert len(said["map"]) == 1
        assert gpus_of(jobs(box)[TRAIN]) == [to]
        one.goes_on()
        assert nodes(one) == {f"nvidia{to}"}
        assert may_open(one, to) == "No such device or address", "no driver has that number, and the filter lets it"
    says(box, 0, "suspend", "--container", TRAIN)
    says(box, 0, "resume", "--container", TRAIN, "--to", 0)
    assert gpus_of(jobs(box)[TRAIN]) == [0]
    one.goes_on()
    assert nodes(one) == {"nvidia0"}


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
@pytest.mark.parametrize("function", ["cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"])
def test_a_failure_leaves_the_container_as_it_was(cgroups: str, box: Any, function: str) -> None:
    one = box("/job", 16, 20, name=TRAIN)
    one.goes_on()
    box.node.switches.add(f"function={function} result=UNKNOWN")
    says(box, 21, "move", "--container", TRAIN, "--to", 1)
    assert gpus_of(jobs(box)[TRAIN]) == [0]
    one.goes_on()
    assert nodes(one) == {"nvidia0"}
    says(box, 0, "move", "--container", TRAIN, "--to", 1)
    assert nodes(one) == {"nvidia1"}
    one.goes_on()


@pytest.mark.parametrize("moment", ["checkpoint", "restore", "unlock"])
def test_what_a_killed_move_left_is_recovered(box: Any, moment: str) -> None:
    one = box("/job", 16, 20, name=TRAIN)
    one.goes_on()
    function = {"checkpoint": "Checkpoint", "restore": "Restore", "unlock": "Unlock"}[moment]
    rule = box.node.switches.add(f"function=cuCheckpointProcess{function} delay=0.5")
    process = box.node.popen([*LIMOSA, "move", "--container", TRAIN, "--to", "1"])
    end = time.monotonic() + 20
    while not box.node.switches.count(rule):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    end = time.monotonic() + 30
    while (said := box.node.limosa("recover", rc=None)).rc == 19 or jobs(box)[TRAIN]["state"] != "running":
        assert time.monotonic() < end, said
        time.sleep(0.1)
    (at,) = gpus_of(jobs(box)[TRAIN])
    assert nodes(one) == {f"nvidia{at}"}
    one.goes_on()
    says(box, 0, "move", "--container", TRAIN, "--to", 1 - at)
    assert nodes(one) == {f"nvidia{1 - at}"}
    one.goes_on()

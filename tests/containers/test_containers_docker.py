"""Docker itself, with its own daemon: what the host's limosa does to its containers, and what a restart gives back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers.engines import Engines
from containers.runtimes import Docker, cgroup_layouts, own_folders
from containers.test_containers_to_disk import nodes, until
from soft_node import Node

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
SHIM = "limosa.dev/job=shim"


@pytest.fixture
def docker(
    node: Node, cgroups: str, engines: Engines, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Docker]:
    """Docker with the image in its store; the CDI spec of the shim is there."""
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    own_folders(node, "/etc", "/usr/local/lib")
    node.limosa("cdi")
    with contextlib.closing(Docker(node, engines, tmp_path / "docker")) as made:
        made.load(rootfs)
        yield made


def says(docker: Docker, code: int, verb: str, *arguments: object) -> Any:
    """``limosa … -o json`` in the node."""
    return docker.node.limosa(verb, "-o", "json", *arguments, rc=code).json


def the_job(docker: Docker) -> dict[str, Any]:
    (job,) = says(docker, 0, "ps")["jobs"]
    return dict(job)


def gpus(docker: Docker) -> list[int]:
    return [one["index"] for one in the_job(docker)["gpus"]]


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
def test_a_container_is_seen_moved_suspended_and_resumed(cgroups: str, docker: Docker) -> None:
    one = docker.start("/job", 16, 20, cdi=[SHIM], name="train")
    one.goes_on()
    job = the_job(docker)
    assert (job["pid"], job["container"]["runtime"], job["container"]["name"]) == (one.pid, "docker", "train")
    assert one.id == job["container"]["id"]
    plan = says(docker, 0, "plan", "move", "docker:train", "--to", 1)
    assert [r["id"] for r in plan["reasons"]] == ["container-record"]
    for to in (1, 0, 1):
        assert says(docker, 0, "move", "docker:train", "--to", to)["way"] == "parked"
        assert gpus(docker) == [to]
        assert nodes(one) == {f"nvidia{to}"}
        one.goes_on()
    says(docker, 0, "suspend", "--container", one.id[:12])
    assert the_job(docker)["state"] == "checkpointed"
    says(docker, 0, "resume", "--container", "train", "--to", 0)
    one.goes_on()
    assert (gpus(docker), nodes(one)) == ([0], {"nvidia0"})
    says(docker, 0, "toggle", "docker:train")
    says(docker, 0, "toggle", "docker:train")
    one.goes_on()


def test_without_the_shim_the_driver_carries_it(docker: Docker) -> None:
    one = docker.start("/job", 16, 20, name="train")
    one.goes_on()
    assert says(docker, 0, "move", "docker:train", "--to", 1)["way"] == "driver"
    one.goes_on()
    assert nodes(one) == {"nvidia1"}


def test_started_again_it_gets_what_docker_has_noted(docker: Docker) -> None:
    docker.start("/job", 16, 20, cdi=[SHIM], name="train").goes_on()
    said = docker.node.limosa("move", "docker:train", "--to", 1)
    assert "record of docker:train does not change: started again, it gets what it was started with" in said.stderr
    docker("restart", "--time", "0", "train")
    one = docker.known("train")
    one.goes_on()
    assert (gpus(docker), nodes(one)) == ([0], {"nvidia0"})


def test_what_docker_holds_still_is_refused_and_so_is_the_way_to_disk(docker: Docker, tmp_path: Path) -> None:
    one = docker.start("/job", 16, 20, cdi=[SHIM], name="train")
    one.goes_on()
    docker("pause", "train")
    assert says(docker, 13, "move", "docker:train", "--to", 1)["error"]["id"] == "frozen"
    docker("unpause", "train")
    one.goes_on()
    error = says(docker, 13, "checkpoint", "docker:train", "--output", tmp_path / "image")["error"]
    assert "docker" in error["message"].lower(), error
    one.goes_on()
    assert not (tmp_path / "image").exists()
    says(docker, 0, "move", "docker:train", "--to", 1)
    one.goes_on()


def test_a_killed_move_is_recovered_and_an_ended_container_leaves_nothing(docker: Docker) -> None:
    one = docker.start("/job", 16, 20, cdi=[SHIM], name="train")
    one.goes_on()
    rule = docker.node.switches.add("function=cuCheckpointProcessRestore delay=0.5")
    moving = docker.node.popen([sys.executable, "-m", "limosa", "move", "docker:train", "--to", "1"])
    until(lambda: docker.node.switches.count(rule) > 0, 20)
    moving.kill()
    moving.wait(60)
    until(lambda: docker.node.limosa("recover", rc=None).rc == 0 and the_job(docker)["state"] == "running")
    one.goes_on()
    assert nodes(one) == {f"nvidia{gpu}" for gpu in gpus(docker)}
    docker("rm", "--force", "train")
    assert says(docker, 0, "ps")["jobs"] == []
    assert "nothing" in docker.node.limosa("recover").stdout

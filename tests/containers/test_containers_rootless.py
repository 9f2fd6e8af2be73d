"""Containers of rootless podman: its user works on his own, and so does root, which can give them another GPU.

The user has no further user ids (/etc/subuid), and the containers have no cgroup of their own, as with version 1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers.engines import Engines
from containers.runtimes import Container, Podman
from containers.test_containers_to_disk import until
from soft_node import Answer, Node, let_all_reach, make_the_folder_of_all
from support import open_the_way_to

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
UID = 1001
AS_USER = ("/usr/bin/setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups")


class Rootless(Podman):
    """podman of a user who is not root."""

    def __init__(self, node: Node, engines: Engines, place: Path):
        super().__init__(node, engines, place, runtime="crun")
        etc = place / ".config" / "containers"
        store = f'driver = "vfs"\ngraphroot = "{place}/graph"\nrunroot = "{place}/run"\n'
        (etc / "storage.conf").write_text(f'[storage]\n{store}[storage.options]\nignore_chown_errors = "true"\n')
        conf = etc / "containers.conf"
        conf.write_text(conf.read_text().replace('cgroupns = "private"', 'cgroupns = "host"'))
        (place / "xdg").mkdir(mode=0o700)
        for one in (place, *place.rglob("*")):
            os.chown(one, UID, UID)

    def call(self, *argv: object, **options: Any) -> Answer:
        return super().call(*AS_USER, *argv, **options)

    def in_cgroups(self) -> list[str]:
        return ["--cgroups", "disabled"]


@pytest.fixture
def rootless(
    node: Node,
    cgroups: str,
    engines: Engines,
    image: Path,
    tmp_path: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Rootless]:
    let_all_reach(node, Path(sys.base_prefix))
    make_the_folder_of_all(node)
    open_the_way_to(tmp_path / "any", runtime / "any")
    with contextlib.closing(Rootless(node, engines, tmp_path / "rootless")) as made:
        shutil.copy(image, made.place / "image.tar")
        os.chown(made.place / "image.tar", UID, UID)
        made.load(made.place / "image.tar")
        monkeypatch.setenv("LIMOSA_CONTAINER_STATE", f"{made.place}/xdg/crun")
        monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
        yield made


def of_user(rootless: Rootless, verb: str, *words: object) -> tuple[list[object], dict[str, str]]:
    """``limosa VERB … -o json`` of the user, and what it is started with."""
    argv = [*AS_USER, sys.executable, "-m", "limosa", verb, "-o", "json", *words]
    return argv, {"HOME": str(rootless.place), "XDG_RUNTIME_DIR": f"{rootless.place}/xdg"}


def as_user(rootless: Rootless, verb: str, *words: object, rc: int = 0) -> Any:
    argv, env = of_user(rootless, verb, *words)
    return rootless.node.run(argv, rc=rc, limit=180, env=env, cwd="/").json


def state_of(rootless: Rootless) -> str:
    (job,) = as_user(rootless, "ps")["jobs"]
    return str(job["state"])


def by_root(rootless: Rootless, verb: str, *words: object, rc: int = 0) -> Any:
    return rootless.node.limosa(verb, "-o", "json", *words, rc=rc).json


def nodes(one: Container) -> set[str]:
    """The GPUs' nodes that a program can open which is started in the container now."""
    script = "for n in 0 1; do test -c /dev/nvidia$n && echo nvidia$n; done; true"
    return set(one.run("sh", "-c", script).stdout.split())


def test_its_user_works_on_a_rootless_container(rootless: Rootless) -> None:
    one = rootless.start("/job", 16, 20, gpus=(0, 1), name="train")
    one.goes_on()
    (job,) = as_user(rootless, "ps")["jobs"]
    assert (job["pid"], job["container"]["runtime"], job["container"]["name"]) == (one.pid, "podman", "train")
    assert as_user(rootless, "plan", "move", "podman:train", "--to", 1)["verdict"] == "ok"
    for to in (1, 0):
        as_user(rootless, "move", "podman:train", "--to", to)
        (job,) = as_user(rootless, "ps")["jobs"]
        assert [gpu["index"] for gpu in job["gpus"]] == [to]
        one.goes_on()
    as_user(rootless, "suspend", "--container", one.id[:12])
    as_user(rootless, "resume", "podman:train")
    one.goes_on()
    for state in ("checkpointed", "running"):
        as_user(rootless, "toggle", "podman:train")
        assert state_of(rootless) == state
    one.goes_on()
    image = rootless.place / "image"
    assert as_user(rootless, "plan", "checkpoint", "podman:train", "--output", image, rc=13)["verdict"] == "refused"
    by_root(rootless, "move", one.pid, "--to", 1)
    one.goes_on()
    assert nodes(one) == {"nvidia0", "nvidia1"}


def test_its_user_recovers_what_his_killed_move_left(rootless: Rootless) -> None:
    one = rootless.start("/job", 16, 20, gpus=(0, 1), name="train")
    one.goes_on()
    rule = rootless.node.switches.add("function=cuCheckpointProcessRestore delay=0.5")
    argv, env = of_user(rootless, "move", "podman:train", "--to", 1)
    move = rootless.node.popen(argv, env=env, cwd="/")
    until(lambda: rootless.node.switches.count(rule), 20)
    os.kill(move.pid, signal.SIGKILL)  # setpriv has become it
    move.wait(60)
    end = time.monotonic() + 120
    argv, env = of_user(rootless, "recover")
    while (said := rootless.node.run(argv, rc=None, env=env, cwd="/")).rc == 19 or state_of(rootless) != "running":
        assert time.monotonic() < end, said
        time.sleep(0.1)
    one.goes_on()
    (job,) = as_user(rootless, "ps")["jobs"]
    (gpu,) = [gpu["index"] for gpu in job["gpus"]]
    as_user(rootless, "move", "podman:train", "--to", 1 - gpu)
    one.goes_on()


def test_root_gives_a_rootless_container_another_gpu(rootless: Rootless) -> None:
    one = rootless.start("/job", 16, 20, gpus=(0,), name="train")
    one.goes_on()
    assert as_user(rootless, "move", one.pid, "--to", 1, rc=2)["error"]["id"] == "invalid-map"
    for to in (1, 0, 1):
        said = by_root(rootless, "move", one.pid, "--to", to)
        assert len(said["map"]) == 1
        one.goes_on()
        assert nodes(one) == {f"nvidia{to}"}
    rootless.node.switches.add("function=cuCheckpointProcessRestore result=UNKNOWN")
    by_root(rootless, "move", one.pid, "--to", 0, rc=21)
    one.goes_on()
    assert nodes(one) == {"nvidia1"}
    one.run("sh", "-c", "rm -f /dev/nvidia0; /bin/busybox ln -s /etc/passwd /dev/nvidia0")
    by_root(rootless, "move", one.pid, "--to", 0)
    one.goes_on()
    assert nodes(one) == {"nvidia0"}
    assert "root" in one.run("cat", "/etc/passwd").stdout

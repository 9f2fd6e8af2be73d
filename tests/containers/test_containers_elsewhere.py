"""A container that was written to disk comes back on another machine: other GPUs, another store."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from containers.engines import Engines
from containers.runtimes import Podman, Runc, lay_out_cgroups, own_folders
from soft_node import Node
from test_containers_to_disk import Desk, as_undisturbed, desk_of, each, gpus_of, nodes

__all__ = ["desk_of"]
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]


@pytest.fixture
def desk(request: pytest.FixtureRequest, desk_of: Callable[[str], Desk]) -> Desk:
    return desk_of(request.param)


def uuids(desk: Desk) -> set[str]:
    return {gpu["uuid"] for gpu in desk.says(0, "gpus")["gpus"]}


@each("podman-parked", "runc-driver")
def test_it_comes_back_on_another_machine(
    cgroups: str,
    desk: Desk,
    word: str,
    new_node: Callable[..., Node],
    engines: Engines,
    image: Path,
    rootfs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = desk.with_shim() if word == "parked" else desk.job()
    one.goes_on()
    assert desk.checkpoint(one)["way"] == word

    node, place = new_node(gpus=2, memory="256MiB"), desk.place / "there"
    lay_out_cgroups(node, cgroups)
    with contextlib.ExitStack() as ends:
        there: Podman | Runc
        more = []
        if isinstance(desk.runtime, Podman):
            there = ends.enter_context(contextlib.closing(Podman(node, engines, place, runtime="runc")))
            for own, same in ((place, desk.runtime.place), (there.sockets, desk.runtime.sockets)):
                for file in (place / ".config/containers").glob("*.conf"):  # a machine's store lies where each has it
                    file.write_text(file.read_text().replace(str(own), str(same)))
                node.run(["mount", "--bind", own, same])
            there.load(image)
        else:
            there = ends.enter_context(contextlib.closing(Runc(node, engines, place, rootfs)))
            bundle = Path(one.name)
            shutil.copytree(desk.runtime.place / bundle / "up", place / bundle / "up", symlinks=True)
            shutil.copy(desk.runtime.place / bundle / "config.json", place / bundle)
            more = ["--bundle", there.same_bundle(one, f"{one.name}-there")]
        shutil.move(desk.image(), place / "image")
        monkeypatch.setenv("LIMOSA_CONTAINER_STATE", str(place / "state"))
        other = Desk(there, place)
        other.tag = desk.tag
        assert not uuids(other) & uuids(desk)
        if word == "parked":
            own_folders(node, "/etc", "/usr/local/lib")
            node.limosa("cdi")

        assert other.restore("--to", 1, *more)["way"] == word
        again = there.known(other.name())
        if isinstance(there, Podman):
            again.log = place / again.log.relative_to(desk.runtime.place)
        as_undisturbed(other, rootfs, again)
        assert gpus_of(other, again) == [1]
        assert nodes(again) == {"nvidia1"}
        assert other.says(0, "move", other.called(again), "--to", 0)["way"] == word
        again.goes_on()

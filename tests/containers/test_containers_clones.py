"""Several restores of one image at the same moment: each makes a container of its own, and they are all right."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers.runtimes import Container, bundle_config
from soft_node import Node
from test_containers_to_disk import (
    Desk,
    as_undisturbed,
    begin,
    desk_of,
    each,
    gpus_of,
    nothing_left,
    one_of_two,
    recovered,
    twin,
    until,
)
from test_containers_told import record_of

from limosa.process.tree import snapshot

__all__ = ["desk_of"]
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]
LARGE = 150  # MiB: a GPU has room for one


@pytest.fixture
def node(new_node: Callable[..., Node]) -> Node:
    return new_node(gpus=3, memory="256MiB")


@pytest.fixture(params=["podman", "runc", "containerd"])
def desk(request: pytest.FixtureRequest, desk_of: Callable[[str], Desk]) -> Desk:
    return desk_of(request.param)


def bundle(desk: Desk, one: Container, name: str) -> list[str]:
    """runc's clones need one each."""
    return ["--bundle", desk.runtime.same_bundle(one, desk.name(name))] if desk.runtime.name == "runc" else []


def begin_clone(desk: Desk, one: Container, name: str, gpu: int) -> Any:
    more = bundle(desk, one, name)
    return begin(desk, "restore", desk.image(), "--to", gpu, "--name", desk.name(name), *more, "-o", "json")


def is_at_it(desk: Desk, limosa: Any) -> None:
    """Waits until a restore has its claim."""
    code = "from limosa.process.places import own_folder; print(own_folder('claims'))"
    place = Path(desk.node.run([sys.executable, "-c", code], env=desk.runtime.environment()).stdout.strip())
    until(lambda: list(place.glob(f"restore-{limosa.pid}-*.json")), 60)


def test_three_at_the_same_moment(desk: Desk, rootfs: Path) -> None:
    one = desk.with_shim() if desk.runtime.name != "containerd" else desk.job()
    one.goes_on()
    desk.checkpoint(one)
    clones = [begin_clone(desk, one, f"clone{gpu}", gpu) for gpu in range(3)]
    assert [clone.wait(120) for clone in clones] == [0, 0, 0]
    for gpu in range(3):
        clone = desk.back(f"clone{gpu}")
        as_undisturbed(desk, rootfs, clone)
        assert gpus_of(desk, clone) == [gpu]
    assert len(desk.runtime.names()) == 3
    desk.limosa("verify", desk.image())
    assert not (desk.image() / "log/restore.log").exists()


def forgotten(image: Path) -> int:
    """Has the page cache forget an image's files; how many bytes these are."""
    files = [path for folder in ("chunks", "criu") for path in (image / folder).rglob("*") if path.is_file()]
    size, stays = sum(path.stat().st_size for path in files), 0
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with contextlib.suppress(BlockingIOError):  # it would have to be read
                os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
                stays += path.stat().st_size  # small ones may: somebody has just written them
    if stays > size // 2:
        pytest.skip(f"{image} cannot be had out of memory: its file system has no disk")
    return size


def from_the_disk(desk: Desk) -> int:
    """How many bytes this process, all that it has waited for, and the node's movers have had read from the disk."""
    space, found = os.stat(f"/proc/{desk.node.pid}/ns/mnt"), 0
    for pid in ["self", *snapshot()]:
        with contextlib.suppress(OSError):
            if pid == "self" or os.path.samestat(os.stat(f"/proc/{pid}/ns/mnt"), space):
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                found += sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    return found


@pytest.mark.parametrize("desk", ["podman", "runc"], indirect=True)
def test_two_at_the_same_moment_have_every_byte_read_from_the_disk_once(desk: Desk) -> None:
    """What was read for one, the other has from the page cache."""
    one = desk.with_shim("/job", LARGE, 5)
    one.goes_on()
    assert desk.checkpoint(one)["way"] == "parked"
    desk.restore(*bundle(desk, one, "first"), name="first")  # all programs are in memory then
    desk.back("first").remove()
    size = forgotten(desk.image())
    assert size > LARGE << 20
    before = from_the_disk(desk)
    clones = [begin_clone(desk, one, f"clone{gpu}", gpu) for gpu in (1, 2)]
    assert [clone.wait(120) for clone in clones] == [0, 0]
    read = from_the_disk(desk) - before
    assert size * 0.95 <= read < size * 1.2, (size, read)
    for gpu in (1, 2):
        desk.back(f"clone{gpu}").goes_on()


def test_one_is_killed_and_the_other_goes_on(desk: Desk, rootfs: Path) -> None:
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one)
    desk.node.switches.add("function=cuCheckpointProcessRestore delay=1.5 every=1")
    killed = begin_clone(desk, one, "killed", 0)
    is_at_it(desk, killed)
    other = begin_clone(desk, one, "other", 1)
    is_at_it(desk, other)
    assert desk.says(19, "rm", desk.image())["error"]["id"] == "busy"
    desk.limosa("verify", desk.image())
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(60)
    assert other.wait(120) == 0
    recovered(desk)
    clone = desk.back("other")
    as_undisturbed(desk, rootfs, clone)
    assert gpus_of(desk, clone) == [1]
    if desk.runtime.has(desk.name("killed")):  # its worker had all that it needed, and has finished it
        as_undisturbed(desk, rootfs, desk.back("killed"))
    desk.restore("--to", 2, *bundle(desk, one, "third"), name="third")
    as_undisturbed(desk, rootfs, desk.back("third"))


def test_two_of_one_name_are_not_begun(desk: Desk, rootfs: Path) -> None:
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one)
    desk.node.switches.add("function=cuCheckpointProcessRestore delay=1.5 every=1")
    first = begin(desk, "restore", desk.image(), "--to", "0", "-o", "json")
    is_at_it(desk, first)
    refused = desk.limosa("restore", desk.image(), "--to", "1", "-o", "json", rc=None)
    said = refused.json["error"]
    assert (refused.rc, said["id"]) in {(19, "busy"), (23, "container-name")}
    assert one.name in said["message"]
    assert first.wait(120) == 0
    again = desk.back()
    as_undisturbed(desk, rootfs, again)
    assert gpus_of(desk, again) == [0]


def with_folders(desk: Desk, *command: object) -> Container:
    """The job with a folder of the machine that it may change, and one that it may not; podman's with a volume, too."""
    binds = []
    for name, may in (("data", "rw"), ("models", "ro")):
        (desk.place / name).mkdir()
        binds.append((str(desk.place / name), f"/{name}", may))
    if desk.runtime.name == "podman":
        words = [f"--volume={source}:{target}:{may}" for source, target, may in binds]
        return desk.job(*command, options=[*words, f"--volume={desk.name('vol')}:/vol"])
    if desk.runtime.name == "containerd":
        words = [f"--mount=type=bind,src={source},dst={to},options=rbind:{may}" for source, to, may in binds]
        return desk.job(*command, options=words)
    mounts = bundle_config("", "", [], (0,))["mounts"]
    for source, target, may in binds:
        mounts.append({"destination": target, "type": "bind", "source": source, "options": ["rbind", may]})
    return desk.job(*command, mounts=mounts)


def test_what_a_clone_would_share_by_mistake_is_refused(desk: Desk, rootfs: Path) -> None:
    one = with_folders(desk)
    one.goes_on()
    desk.checkpoint(one, "--leave-running")
    shared = [f"folder {desk.place}/data"] + [f"volume {desk.name('vol')}"] * (desk.runtime.name == "podman")

    def refused_by(other: str, name: str) -> None:
        said = desk.restore("--to", 1, *bundle(desk, one, name), rc=23, name=name)["error"]
        assert (said["id"], desk.runtime.has(desk.name(name))) == ("clone-shares", False)
        assert f"{desk.runtime.name}:{desk.name(other)}" in said["message"]
        assert ", ".join(shared) in said["message"]
        assert "models" not in said["message"]

    refused_by("train", "first")
    desk.restore("--to", 1, *bundle(desk, one, "forced"), "--force=clone-shares", name="forced")
    desk.limosa("rm", desk.image())
    clone = desk.back("forced")
    clone.goes_on()
    desk.checkpoint(clone)  # an image of a clone is one of what that was made of
    refused_by("train", "second")
    desk.runtime.remove(one)
    desk.restore("--to", 1, *bundle(desk, one, "alone"), name="alone")  # nobody else changes it
    as_undisturbed(desk, rootfs, desk.back("alone"))
    refused_by("alone", "third")


def noted(desk: Desk, kind: str) -> list[str]:
    """What root's Limosa has noted of that kind."""
    code = "import sys; from limosa.process.places import own_folder; print(own_folder(sys.argv[1]))"
    place = desk.node.python(code, kind, env=desk.runtime.environment()).stdout.strip()
    return sorted(path.name for path in Path(place).iterdir() if not path.name.startswith("."))


def only(desk: Desk, rootfs: Path, name: str, gpu: int) -> None:
    """One container is there, on that GPU, and nothing besides; it is taken away."""
    assert desk.runtime.names() == [desk.name(name)]
    assert noted(desk, "claims") == noted(desk, "journals") == []
    clone = desk.back(name)
    (record,) = noted(desk, "cloned")
    assert record.startswith(f"{clone.pid}-")
    clone.goes_on()
    steps = clone.steps()
    assert gpus_of(desk, clone) == [gpu]
    assert "nothing" in desk.limosa("recover").stdout
    clone.remove()
    assert nothing_left(desk)
    undisturbed = twin(desk, rootfs, max(steps) + 1, LARGE)  # there is room for it now
    assert steps == {n: undisturbed[n] for n in steps}


def test_of_two_at_the_same_moment_one_is_refused_where_there_is_room_for_one(desk: Desk, rootfs: Path) -> None:
    """A name, a GPU's memory, a folder that both may change: what is left is as if the other had never come."""
    one = with_folders(desk, "/job", LARGE, 5)
    one.goes_on()
    desk.checkpoint(one)
    desk.node.switches.add("function=cuCheckpointProcessRestore delay=1.5 every=1")

    def words(name: str, gpu: int, *more: object) -> list[object]:
        return ["--to", gpu, "--name", desk.name(name), *bundle(desk, one, f"own-{next(numbers)}"), *more]

    numbers = itertools.count()
    for first, second in ((0, 0), (1, 2)):
        won, error = one_of_two(desk, words("train", first), words("train", second))
        reasons = ["busy", "container-name", "clone-shares"]  # each is so; which is seen first is chance
        assert error["id"] in [*reasons, *(["gpu-room"] if first == second else [])], error
        assert one.name in error["message"] or error["id"] == "gpu-room"
        only(desk, rootfs, "train", (first, second)[won])

    won, error = one_of_two(desk, words("a", 1), words("b", 2))
    assert error["id"] in ("busy", "clone-shares")
    assert f"{desk.place}/data" in error["message"]
    only(desk, rootfs, "ab"[won], won + 1)

    won, error = one_of_two(desk, *(words(name, 2, "--force=clone-shares") for name in "cd"))
    assert error["exit_code"] == 14
    only(desk, rootfs, "cd"[won], 2)


@each("podman-finished", "podman-undone", "runc-finished", "containerd-finished", "containerd-undone")
def test_what_is_noted_of_a_clone_is_right_after_its_restore_was_killed(desk: Desk, rootfs: Path, word: str) -> None:
    """What it was made of, while it is there; with containerd its new GPU. Who recovers has another environment."""
    one = with_folders(desk)
    one.goes_on()
    desk.checkpoint(one)
    call = "Unlock" if word == "finished" else "Restore result=UNKNOWN"
    rule = desk.node.switches.add(f"function=cuCheckpointProcess{call} delay=1 every=1")
    killed = begin_clone(desk, one, "killed", 1)
    until(lambda: desk.node.switches.count(rule))
    killed.kill()
    killed.wait(60)
    without = {name: value for name, value in desk.runtime.environment().items() if not name.startswith("CONTAINER")}
    until(lambda: "nothing" in desk.limosa("recover", rc=None, env=without).stdout)
    desk.node.switches.remove(rule)
    assert noted(desk, "claims") == noted(desk, "journals") == []
    if word == "finished":
        clone = desk.back("killed")
        as_undisturbed(desk, rootfs, clone)
        assert gpus_of(desk, clone) == [1]
        (record,) = noted(desk, "cloned")
        assert record.startswith(f"{clone.pid}-")
        if desk.runtime.name == "containerd":
            assert "/dev/nvidia1" in {d["path"] for d in record_of(desk, clone)["Spec"]["linux"]["devices"]}
        error = desk.restore("--to", 2, *bundle(desk, one, "twin"), rc=23, name="twin")["error"]
        assert (error["id"], f"{desk.runtime.name}:{clone.name}" in error["message"]) == ("clone-shares", True)
    else:
        assert nothing_left(desk)
        assert noted(desk, "cloned") == []
        desk.restore("--to", 2, name="next")  # nobody else changes the folder
        as_undisturbed(desk, rootfs, desk.back("next"))

"""``limosa cdi``: a container that asks for the device has the shim, and nothing else of it is changed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers.engines import OLD, Engines, old_c_library
from containers.images import OTHER, make_image, make_musl_rootfs, make_old_rootfs
from containers.runtimes import Container, Containerd, Podman, Runc, cgroup_layouts, own_folders
from soft_node import Node

from limosa.native.build import compilers

SHIM = "limosa.dev/job=shim"
BOTH = {"liblimosa_shim.so", "liblimosa_sight.so"}
OWN = "/etc/ld.so.preload"
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@pytest.fixture(autouse=True)
def spec(node: Node) -> dict[str, Any]:
    """The spec, in folders of the node's own."""
    own_folders(node, "/etc", "/usr/local/lib")
    told = node.limosa("cdi", "-o", "json").json
    assert told["changed"]
    return {**json.loads(node.run(["cat", told["spec"]]).stdout), "told": told}


@pytest.fixture
def of_rootfs(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Container]:
    """Starts a container of a root folder made by the test, with the runtime that is named."""

    def start(runtime: str, rootfs: Path, *command: object, **options: Any) -> Container:
        found: Podman | Runc = request.getfixturevalue(runtime)
        if isinstance(found, Runc):
            return found.start(*command, rootfs=rootfs, **options)
        name = f"localhost/{rootfs.name}:1"
        found.load(make_image(tmp_path / f"{rootfs.name}.tar", rootfs, name))
        return found.start(*command, image=name, **options)

    return start


def loaded(container: Container) -> set[str]:
    """The libraries of Limosa's, and of the test's, that its first process has loaded."""
    maps = Path(f"/proc/{container.pid}/maps").read_text().split()
    return {Path(word).name for word in maps if "/liblimosa_" in word or word == OTHER}


def sockets(container: Container) -> list[str]:
    """The abstract sockets of its network."""
    lines = Path(f"/proc/{container.pid}/net/unix").read_text().splitlines()
    return [line.split()[-1] for line in lines if line.split()[-1].startswith("@")]


def test_a_container_that_asks_has_the_shim_and_one_that_does_not_has_not(container: Any) -> None:
    one, other = container("/job", 16, 5, cdi=[SHIM]), container("/job", 16, 5)
    one.goes_on()
    other.goes_on()
    assert loaded(one) == BOTH
    assert any("limosa" in name for name in sockets(one))  # it answers
    assert loaded(other) == set()
    assert sockets(other) == []
    env = Path(f"/proc/{one.pid}/environ").read_text().split("\0")
    assert {"UV_USE_IO_URING=0", "NCCL_RAS_ENABLE=0"} <= set(env)
    assert not [word for word in env if word.startswith("LD_PRELOAD")]


def test_without_a_driver_it_does_nothing(container: Any) -> None:
    one = container("/job", "wait", gpus=None, cdi=[SHIM])
    one.wait_for("READY")
    assert loaded(one) == BOTH
    assert len(os.listdir(f"/proc/{one.pid}/task")) == 1
    assert sockets(one) == []
    assert (
        one.run("/job", 1, 1, 1, rc=None).stdout
        == "libcuda.so.1: cannot open shared object file: No such file or directory\n"
    )


def test_libuv_is_kept_from_an_io_uring(of_rootfs: Callable[..., Container], rootfs: Path, tmp_path: Path) -> None:
    """runc has no seccomp profile of its own, nor has a pod."""
    made = Path(shutil.copytree(rootfs, tmp_path / "with_program", symlinks=True))
    source = Path(__file__).parents[1] / "shim" / "rings.c"
    subprocess.run([*compilers()[0], "-w", "-D_GNU_SOURCE", "-o", made / "rings", source], check=True, timeout=60)
    one, other = of_rootfs("runc", made, "/job", "wait", cdi=[SHIM]), of_rootfs("runc", made, "/job", "wait")
    assert one.run("/rings").stdout.startswith("ring refused ENOSYS\n")
    here = subprocess.run([made / "rings"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert other.run("/rings").stdout.splitlines()[0] == here.splitlines()[0]


@pytest.mark.parametrize("runtime", ["podman", "runc"])
def test_under_musl_nothing_is_loaded(
    runtime: str, of_rootfs: Callable[..., Container], engines: Engines, tmp_path: Path
) -> None:
    rootfs = make_musl_rootfs(tmp_path / "musl", engines)
    one = of_rootfs(runtime, rootfs, "/job", "wait", gpus=None, cdi=[SHIM])
    one.wait_for("READY")
    assert loaded(one) == set()
    assert "ld-musl" in Path(f"/proc/{one.pid}/maps").read_text()
    assert "liblimosa_shim.so" in one.run("cat", OWN).stdout  # it is there


def test_an_images_own_ld_preload_is_kept(container: Any) -> None:
    one = container("/job", 16, 5, cdi=[SHIM], env=[f"LD_PRELOAD={OTHER}"])
    one.goes_on()
    assert loaded(one) == {*BOTH, Path(OTHER).name}
    assert f"LD_PRELOAD={OTHER}" in Path(f"/proc/{one.pid}/environ").read_text().split("\0")


@pytest.mark.parametrize("runtime", ["podman", "runc"])
def test_an_images_own_list_is_kept(
    runtime: str, of_rootfs: Callable[..., Container], rootfs: Path, tmp_path: Path
) -> None:
    made = Path(shutil.copytree(rootfs, tmp_path / "with_list", symlinks=True))
    (made / OWN.lstrip("/")).write_text(f"{OTHER}\n")
    one = of_rootfs(runtime, made, "/job", 16, 5, cdi=[SHIM])
    one.goes_on()
    assert loaded(one) == {*BOTH, Path(OTHER).name}
    words = one.run("cat", OWN).stdout.split()
    assert [Path(word).name for word in words] == ["liblimosa_shim.so", "liblimosa_sight.so", "other.so"]
    assert one.run("touch", OWN, rc=None).rc != 0 or one.run("cat", OWN).stdout.split() == words
    outside = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "limosa-test" not in line]
    assert "limosa" not in "\n".join(outside)  # nothing of the hook's stays there
    if runtime == "podman":
        assert OWN not in one.runtime("diff", one.id).stdout.split()  # type: ignore[operator]


@pytest.mark.parametrize("cgroups", cgroup_layouts()[:1], indirect=True)
def test_crun_calls_the_hook_as_well(cgroups: str, node: Node, engines: Engines, rootfs: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(rootfs, tmp_path / "with_list", symlinks=True))
    (made / OWN.lstrip("/")).write_text(f"{OTHER}\n")
    with contextlib.closing(Podman(node, engines, tmp_path / "podman", runtime="crun")) as podman:
        podman.load(make_image(tmp_path / "image.tar", made))
        one = podman.start("/job", 16, 5, cdi=[SHIM])
        one.goes_on()
        assert loaded(one) == {*BOTH, Path(OTHER).name}


@pytest.mark.parametrize("kind", ["link outside", "pipe", "too long", "link above"])
def test_a_list_that_is_none_does_no_harm(
    kind: str, of_rootfs: Callable[..., Container], rootfs: Path, tmp_path: Path
) -> None:
    made = Path(shutil.copytree(rootfs, tmp_path / "hostile", symlinks=True))
    own = made / OWN.lstrip("/")
    secret = tmp_path / "secret"
    secret.write_text(f"{OTHER}\n")
    if kind == "link outside":
        own.symlink_to(secret)
    elif kind == "link above":
        own.symlink_to("../" * 30 + str(secret).lstrip("/"))
    elif kind == "pipe":
        os.mkfifo(own)
    else:
        own.write_text(f"{OTHER}\n" * 10_000)
    found = of_rootfs("runc", made, "/job", 16, 5, cdi=[SHIM])
    found.goes_on()
    assert loaded(found) <= BOTH
    assert "other.so" not in found.run("cat", OWN, rc=None).stdout


def test_a_read_only_root_and_another_user(podman: Podman) -> None:
    one = podman.start("/job", 16, 5, cdi=[SHIM], options=["--read-only", "--user", "1000:1000"])
    one.goes_on()
    assert loaded(one) == BOTH


def test_what_containers_have_mounted_stays(node: Node, container: Any, spec: dict[str, Any]) -> None:
    one = container("/job", 16, 5, cdi=[SHIM])
    one.goes_on()
    told = node.limosa("cdi", "--remove", "-o", "json").json
    assert told["changed"]
    assert told["kept"] == [spec["told"]["libraries"]]
    assert "job" in one.run("ls", "/").stdout
    one.remove()
    end = time.monotonic() + 60
    while kept := node.limosa("cdi", "--remove", "-o", "json").json["kept"]:  # podman clears up after it has answered
        assert time.monotonic() < end, kept
    assert node.run(["ls", "/usr/local/lib/limosa"], rc=None).rc != 0


@pytest.mark.parametrize("same", [True, False], ids=["this", "another"])
def test_only_what_is_mounted_of_this_file_system_is_in_use(same: bool, node: Node, spec: dict[str, Any]) -> None:
    """Another machine's root, say, has a folder of that name too."""
    libraries = spec["told"]["libraries"]
    here = f"mount --bind {libraries} /mnt" if same else f"mount -t tmpfs none /usr/local/lib; mkdir -p {libraries}"
    one = node.popen(["unshare", "-m", "sh", "-ec", f"{here}; mount --bind {libraries} /mnt; echo; cat"], **PIPES)
    try:
        assert one.stdout.readline() == "\n"
        assert node.limosa("cdi", "--remove", "-o", "json").json["kept"] == ([libraries] if same else [])
    finally:
        one.communicate(timeout=20)


def test_the_spec_is_roots_and_for_everybody_to_read(node: Node, spec: dict[str, Any]) -> None:
    told = spec["told"]
    modes = node.run(["stat", "-c", "%a %u %n", told["spec"], told["libraries"]]).stdout.splitlines()
    assert modes == [f"644 0 {told['spec']}", f"755 0 {told['libraries']}"]
    assert node.limosa("cdi", "-o", "json").json["changed"] is False
    stdout = json.loads(node.limosa("cdi", "--output", "-").stdout)
    assert stdout == {key: value for key, value in spec.items() if key != "told"}
    other = "/etc/other.json"
    assert node.limosa("cdi", "--output", other, "-o", "json").json["spec"] == other
    assert json.loads(node.run(["cat", other]).stdout)["kind"] == "limosa.dev/job"
    assert node.limosa("cdi", "--remove", "--output", "/etc/passwd", "-o", "json").json["changed"] is False
    assert "root" in node.run(["cat", "/etc/passwd"]).stdout


def test_where_the_spec_cannot_be_written_nothing_is_installed(node: Node) -> None:
    node.limosa("cdi", "--remove")
    node.run(["mkdir", "--mode", "1777", "/etc/open"])
    node.run(["mkdir", "/etc/folder.json"])
    for path, why in (("/etc/open/x.json", "others can change that"), ("/etc/folder.json", "directory")):
        told = node.limosa("cdi", "--output", path, rc=11).stderr
        assert why in told
        assert "in a folder that only root can change, as /etc/cdi: --output" in told
        assert "sudo" not in told  # whoever is root has that
        assert node.run(["ls", "/usr/local/lib/limosa"], rc=None).rc != 0
    assert node.run(["ls", "-A", "/etc/open"]).stdout == ""


SOFT = "limosa.dev/softgpu"


@pytest.mark.parametrize("gpu", ["1", "all"])
def test_a_container_gets_a_nodes_gpus_by_their_cdi_names(gpu: str, node: Node, podman: Podman) -> None:
    file = "/etc/cdi/limosa.dev-softgpu.json"
    node.limosa("softgpu", "--cdi", file)
    one = podman.start("/job", 16, 5, gpus=None, cdi=[f"{SOFT}={gpu}", SHIM])
    one.goes_on()
    assert loaded(one) == BOTH
    names = [name for name in one.run("ls", "/dev").stdout.split() if name.startswith("nvidia") and name[-1].isdigit()]
    assert names == (["nvidia1"] if gpu == "1" else ["nvidia0", "nvidia1"])


def test_containerd_brings_both_by_its_own_cdi(node: Node, containerd: Containerd) -> None:
    node.limosa("softgpu", "--cdi", "/etc/cdi/limosa.dev-softgpu.json")
    one = containerd.start("/job", 16, 5, cdi=[f"{SOFT}=0", SHIM])
    one.goes_on()
    assert loaded(one) == BOTH
    assert any("limosa" in name for name in sockets(one))


@pytest.mark.parametrize("version", OLD)
def test_the_shim_and_the_software_gpu_load_in_images_of_older_systems(
    version: str, node: Node, of_rootfs: Callable[..., Container], engines: Engines, tmp_path: Path
) -> None:
    """What CUDA's images are made of, as far as it can be had: Ubuntu 16.04 to 22.04 (x86-64)."""
    node.limosa("softgpu", "--cdi", "/etc/cdi/limosa.dev-softgpu.json")
    rootfs = make_old_rootfs(tmp_path / f"glibc-{version}", engines, old_c_library(version))
    one = of_rootfs("runc", rootfs, "/job", 16, 5, gpus=None, cdi=[f"{SOFT}=0", SHIM])
    one.goes_on()
    if version < "2.34":
        assert f"/libc-{version}.so" in Path(f"/proc/{one.pid}/maps").read_text()
    else:  # it has no version in its name any more, and the loader says its own
        assert f"release version {version}." in one.run("/lib64/ld-linux-x86-64.so.2", "--version").stdout
    assert loaded(one) == BOTH
    assert any("limosa" in name for name in sockets(one))

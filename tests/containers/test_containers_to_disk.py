"""Containers of podman and runc are written to disk by the host's limosa, and come back as others of the same image."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers.engines import Engines
from containers.images import NAME, make_image
from containers.runtimes import Container, Podman, Pods, bundle_config, cgroup_layouts, own_folders, steps_of
from soft_node import Answer, Node

from limosa.parking.shim import Shim
from limosa.process.cgroups import cgroup_folders, frozen_by
from limosa.process.identity import Identity
from limosa.process.tree import descendants, snapshot

SHIM = "limosa.dev/job=shim"
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]


class Desk:
    """What a person at a machine with one runtime has: containers, limosa, a place for images."""

    def __init__(self, runtime: Any, place: Path):
        self.runtime, self.node, self.place = runtime, runtime.node, place
        self.tag = secrets.token_hex(3)  # tests run side by side, and a name is one container's on the machine

    def name(self, word: str = "train") -> str:
        return f"{word}-{self.tag}"

    def image(self, word: str = "image") -> Path:
        return self.place / word

    def limosa(self, *words: object, rc: int | None = 0, **options: Any) -> Answer:
        environment = self.runtime.environment()
        del environment["HOME"]
        options.setdefault("env", environment)
        return self.node.limosa(*words, rc=rc, **options)

    def says(self, code: int, verb: str, *words: object) -> Any:
        return self.limosa(verb, "-o", "json", *words, rc=code).json

    def job(self, *words: object, name: str = "train", **options: Any) -> Container:
        """The job in a container; its output is where it can be read from outside."""
        return self.runtime.start_job(*(words or ("/job", 16, 5)), name=self.name(name), **options)

    def with_shim(self, *words: object, **options: Any) -> Container:
        """The job under the shim: its device memory is copied while it computes."""
        own_folders(self.node, "/etc", "/usr/local/lib")
        self.node.limosa("cdi")
        return self.job(*words, cdi=[SHIM], **options)

    def called(self, one: Container) -> str:
        return f"{self.runtime.name}:{one.name}"

    def checkpoint(self, one: Container, *words: object, rc: int = 0, image: str = "image") -> Any:
        return self.says(rc, "checkpoint", self.called(one), "--output", self.image(image), *words)

    def restore(self, *words: object, rc: int = 0, image: str = "image", name: str = "") -> Any:
        named = ["--name", self.name(name)] if name else []
        return self.says(rc, "restore", self.image(image), *named, *words)

    def back(self, name: str = "train") -> Container:
        """The container that has come back under that name."""
        return self.runtime.known(self.name(name))


@pytest.fixture
def desk_of(
    request: pytest.FixtureRequest, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> Callable[[str], Desk]:
    """Makes one of that name; the runtimes are fetched before a test goes into a network of its own."""

    def of(name: str) -> Desk:
        made = Desk(request.getfixturevalue(name), tmp_path)
        monkeypatch.setenv("LIMOSA_CONTAINER_STATE", str(made.runtime.place / "state"))
        monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
        return made

    return of


@pytest.fixture(params=["podman", "runc", "containerd"])
def desk(request: pytest.FixtureRequest, desk_of: Callable[[str], Desk]) -> Desk:
    return desk_of(request.param)


def each(*names: str) -> Callable[..., Any]:
    """A test of these: "podman-frozen" is the runtime, and the word that the test gets besides."""
    pairs = [name.split("-", 1) for name in names]
    return pytest.mark.parametrize(("desk", "word"), pairs, indirect=["desk"], ids=names)


def gpus_of(desk: Desk, one: Container) -> list[int]:
    """The GPUs that it has memory on."""
    (job,) = [job for job in desk.says(0, "ps")["jobs"] if job["pid"] == one.pid]
    return [gpu["index"] for gpu in job["gpus"]]


def nodes(one: Container) -> set[str]:
    """The GPUs' nodes in a container, by a program that is started in it now."""
    return {name for name in one.run("ls", "/dev").stdout.split() if name.startswith("nvidia") and name[6:].isdigit()}


def listed(one: Container) -> set[str]:
    """The GPUs that NVML lists to a program that is started in it now, by their nodes."""
    return set(one.run("/job", "nvml").stdout.split())


def may_open(desk: Desk, one: Container, gpu: int) -> str:
    """What its device cgroup says to a program of the machine that is put into it: no driver has that number."""
    text, mounts = Path(f"/proc/{one.pid}/cgroup").read_text(), desk.node.run(["cat", "/proc/self/mountinfo"]).stdout
    folders = [folder for _, folder, mount in cgroup_folders(text, mounts, "devices") if folder != mount]
    words = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in folders) + f": < /dev/nvidia{gpu}"
    return desk.node.run(["sh", "-c", words], rc=None).stderr.strip().rpartition(": ")[2]


def as_undisturbed(desk: Desk, rootfs: Path, one: Container) -> None:
    """It goes on, and has computed what it computes where nobody disturbs it."""
    one.goes_on()
    steps = one.steps()
    undisturbed = twin(desk, rootfs, max(steps) + 1)
    assert steps == {n: undisturbed[n] for n in steps}


def twin(desk: Desk, rootfs: Path, steps: int, size: int = 16) -> dict[int, str]:
    """What the job computes where nobody disturbs it, on so many MiB."""
    return steps_of(desk.node.run([rootfs / "job", size, 0, steps]).stdout)


def test_a_container_ends_in_an_image_and_comes_back(desk: Desk, rootfs: Path) -> None:
    one = desk.job()
    one.goes_on()
    done = desk.checkpoint(one)
    assert (done["state"], done["way"]) == ("ended", "driver")
    assert not one.lives()
    assert not desk.runtime.has(one.name)
    desk.limosa("verify", desk.image())
    told = desk.says(0, "inspect", desk.image())
    assert (told["container"]["name"], told["image_schema"], told["job"]["pid"]) == (one.name, 3, 1)
    came = desk.restore()
    again = desk.back()
    assert (came["pid"], came["name"]) == (again.pid, desk.called(one))
    as_undisturbed(desk, rootfs, again)


@pytest.mark.parametrize("desk", ["runc"], indirect=True)
def test_what_a_killed_runc_has_mounted_is_not_emptied(desk: Desk) -> None:
    """``runc delete --force`` empties what is mounted in its folder: the root file system of the bundle."""
    one = desk.job()
    one.goes_on()
    rootfs, place = desk.runtime.place / one.name / "rootfs", desk.runtime.place / "state" / one.name / "criu-root"
    desk.node.run(["mkdir", place])
    desk.node.run(["mount", "--bind", rootfs, place])
    desk.checkpoint(one)
    assert {"job", "out"} <= set(desk.node.run(["ls", rootfs]).stdout.split())
    desk.restore()
    desk.back().goes_on()


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
@each("podman-parked", "runc-driver", "containerd-parked")
def test_it_comes_back_on_another_gpu(cgroups: str, desk: Desk, rootfs: Path, word: str) -> None:
    one = desk.with_shim() if word == "parked" else desk.job()
    one.goes_on()
    done = desk.checkpoint(one)
    assert done["way"] == word
    assert bool(done["device_bytes"]) == (word == "parked")
    came = desk.restore("--to", 1)
    told = desk.runtime.name == "containerd"
    assert [r["id"] for r in came["warnings"]] == ([] if told else ["container-record"])
    again = desk.back()
    as_undisturbed(desk, rootfs, again)
    if told:
        devices = desk.runtime("containers", "info", again.id).json["Spec"]["linux"]["devices"]
        assert [d["path"] for d in devices if d["path"][-1].isdigit() and "nvidia" in d["path"]] == ["/dev/nvidia1"]
    assert gpus_of(desk, again) == [1]
    assert nodes(again) == {"nvidia1"}
    assert [may_open(desk, again, gpu) for gpu in (0, 1)] == ["Operation not permitted", "No such device or address"]
    desk.says(0, "move", desk.called(again), "--to", 0)
    assert nodes(again) == {"nvidia0"}
    again.goes_on()


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
@each("podman-parked")
def test_one_that_has_its_gpu_by_a_cdi_name_comes_back_on_another(
    cgroups: str, desk: Desk, rootfs: Path, word: str
) -> None:
    """And gets the one of that name if podman starts it again."""
    own_folders(desk.node, "/etc", "/usr/local/lib")
    desk.node.limosa("cdi")
    desk.node.limosa("softgpu", "--cdi", "/etc/cdi/limosa.dev-softgpu.json")
    one = desk.job(gpus=None, cdi=["limosa.dev/softgpu=0", SHIM])
    one.goes_on()
    assert desk.checkpoint(one)["way"] == word
    assert [r["id"] for r in desk.restore("--to", 1)["warnings"]] == ["container-record"]
    again = desk.back()
    as_undisturbed(desk, rootfs, again)
    assert gpus_of(desk, again) == [1]

    def has(one: Container, gpu: int) -> None:
        assert nodes(one) == listed(one) == {f"nvidia{gpu}"}
        assert may_open(desk, one, gpu) == "No such device or address"
        assert may_open(desk, one, 1 - gpu) == "Operation not permitted"

    has(again, 1)
    desk.runtime("restart", "--time", 0, again.name)
    has(desk.back(), 0)


@each("runc-asked")
def test_who_asks_its_shim_at_the_wrong_moment_is_waited_for(desk: Desk, rootfs: Path, word: str) -> None:
    """A ``limosa ps``, for one: to CRIU it is a connection to a process outside."""
    one = desk.with_shim()
    one.goes_on()
    rule = desk.node.switches.add("function=cuCheckpointProcessCheckpoint delay=0.5")

    def ask() -> None:
        until(lambda: desk.node.switches.count(rule) > 0)
        with Shim(Identity.of(one.pid), limit=60) as shim:  # its turn comes when the checkpoint's is over
            shim.hello()
            time.sleep(0.15)

    asking = threading.Thread(target=ask)
    asking.start()
    assert desk.checkpoint(one)["way"] == "parked"
    asking.join()
    desk.restore()
    as_undisturbed(desk, rootfs, desk.back())


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
@each("runc-driver")
def test_one_that_was_moved_before_comes_back_with_that_gpu_alone(
    cgroups: str, desk: Desk, rootfs: Path, word: str
) -> None:
    """Its runtime's record, from which the new device cgroup is made, names the one that it began with."""
    one = desk.job()
    one.goes_on()
    desk.says(0, "move", desk.called(one), "--to", 1)
    desk.checkpoint(one)
    assert desk.restore()["way"] == word
    again = desk.back()
    as_undisturbed(desk, rootfs, again)
    assert nodes(again) == {"nvidia1"}
    assert [may_open(desk, again, gpu) for gpu in (0, 1)] == ["Operation not permitted", "No such device or address"]


@each("podman-driver", "runc-parked", "containerd-driver")
def test_left_running_it_goes_on_and_its_copies_do_as_well(desk: Desk, rootfs: Path, word: str) -> None:
    one = desk.with_shim() if word == "parked" else desk.job()
    one.goes_on()
    done = desk.checkpoint(one, "--leave-running")
    assert (done["state"], done["way"]) == ("running", word)
    as_undisturbed(desk, rootfs, one)
    assert desk.restore(rc=23)["error"]["id"] == "container-name"
    for number in (0, 1):
        bundle = []
        if desk.runtime.name == "runc":  # whose root's changes since are not in the image
            assert desk.restore(name=f"clone{number}", rc=23)["error"]["id"] == "container-bundle"
            bundle = ["--bundle", desk.runtime.same_bundle(one, desk.name(f"clone{number}"))]
        desk.restore("--to", number, *bundle, name=f"clone{number}")
    named = one.run("hostname").stdout.strip()
    assert named == {"podman": one.id[:12], "runc": one.name}.get(desk.runtime.name, socket.gethostname())
    for number in (0, 1):
        clone = desk.back(f"clone{number}")
        as_undisturbed(desk, rootfs, clone)
        assert gpus_of(desk, clone) == [number]
        assert clone.run("hostname").stdout.strip() == named, "not a name of its own"
        if desk.runtime.name == "podman":  # which was told another name while it made it
            hosts = [box.run("cat", "/etc/hosts").stdout for box in (one, clone)]
            assert hosts == [hosts[0], hosts[0].replace(one.name, clone.name)]
            assert f"{named} {clone.name}\n" in hosts[1]
    as_undisturbed(desk, rootfs, one)


@each("podman-none", "runc-own")
def test_its_loopback_interface_is_up_again(desk: Desk, word: str) -> None:
    """runc leaves it down."""

    def loopback(one: Container) -> list[str]:
        said = one.run("/bin/busybox", "ifconfig", "lo").stdout
        return [word for word in ("UP", "127.0.0.1", "RUNNING") if word in said]

    one = desk.job()
    one.goes_on()
    before = loopback(one)
    desk.checkpoint(one)
    desk.restore("--to", 1)
    again = desk.back()
    again.goes_on()
    assert loopback(again) == before == ["UP", "127.0.0.1", "RUNNING"]


def test_what_was_moved_in_place_goes_to_disk(desk_of: Callable[[str], Desk], rootfs: Path) -> None:
    """The memory that it has since then was opened outside of it."""
    desk = desk_of("runc")
    one = desk.with_shim()
    one.goes_on()
    desk.says(0, "move", desk.called(one), "--to", 1)
    one.goes_on()
    assert desk.checkpoint(one)["way"] == "parked"
    desk.restore("--to", 0)
    as_undisturbed(desk, rootfs, desk.back())


@each("runc-alone", "podman-mixed", "containerd-alone")
def test_what_has_nothing_to_park_stands_still_and_comes_back(desk: Desk, rootfs: Path, word: str) -> None:
    """Under the shim: its gate is closed in the image."""
    beside = ("/bin/sh", "-c", "/job 16 5 >/dev/null 2>&1 & exec /job 1 5")
    one = desk.with_shim(*(beside if word == "mixed" else ("/job", 1, 5)))
    one.goes_on()
    desk.says(0, "move", desk.called(one), "--to", 1)
    one.goes_on()
    desk.says(0, "suspend", desk.called(one))
    desk.says(0, "resume", desk.called(one))
    one.goes_on()
    desk.checkpoint(one)
    desk.restore("--to", 0)
    again = desk.back()
    again.goes_on()
    steps = again.steps()
    undisturbed = twin(desk, rootfs, max(steps) + 1, 1)
    assert steps == {n: undisturbed[n] for n in steps}


def test_several_processes_with_cuda_come_back_together(desk_of: Callable[[str], Desk], rootfs: Path) -> None:
    desk = desk_of("podman")
    one = desk.runtime.start("/bin/sh", "-c", "/job 16 5 & exec /job 16 5", name=desk.name(), options=["--init"])
    one.goes_on()

    def holders() -> int:
        (job,) = [job for job in desk.says(0, "ps")["jobs"] if job["container"]]
        return len([p for p in job["processes"] if p["memory_used"] >= 16 << 20])

    until(lambda: holders() == 2)
    desk.checkpoint(one)
    desk.restore("--to", 1)
    again = desk.back()
    as_undisturbed(desk, rootfs, again)
    assert holders() == 2
    (job,) = [job for job in desk.says(0, "ps")["jobs"] if job["container"]]
    assert [gpu["index"] for gpu in job["gpus"]] == [1]
    desk.says(0, "move", desk.called(again), "--to", 0)
    again.goes_on()


# --- what goes wrong ------------------------------------------------------------------------------------------


def until(happened: Callable[[], Any], limit: float = 90) -> Any:
    """Waits for it, without a pause that would miss it."""
    end = time.monotonic() + limit
    while not (found := happened()):
        assert time.monotonic() < end
        time.sleep(0.0005)
    return found


def is_frozen(one: Container) -> bool:
    """Whether its cgroup is."""
    text, mounts = Path(f"/proc/{one.pid}/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    return bool(frozen_by(text, mounts))


def started_by(desk: Desk, limosa: Any, *words: str) -> list[int]:
    """The processes below a limosa, or what its runtime has let do that, whose command line has all these words."""
    processes = snapshot()
    above = [limosa.pid]
    if desk.runtime.name == "containerd":  # a daemon, whose shims are nobody's children
        above += [pid for pid in processes if {"-id", "-address", str(desk.runtime.socket)} <= words_of(pid)]
    below = [pid for one in above for pid in descendants(one, processes)]
    return [pid for pid in below if set(words) <= words_of(pid) and not words_of(pid) & {"/bin/sh", "sh"}]


def words_of(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        return set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    return set()


def begin(desk: Desk, *words: object, **options: Any) -> Any:
    environment = desk.runtime.environment()
    del environment["HOME"]
    return desk.node.popen([sys.executable, "-m", "limosa", *words], env=environment, **options)


def one_of_two(desk: Desk, *both: list[object], image: str = "image") -> tuple[int, Any]:
    """Starts two restores side by side: which has made its container, and what the other said, before that one."""
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    limosas = [begin(desk, "restore", desk.image(image), *words, "-o", "json", **quiet) for words in both]
    until(lambda: any(limosa.poll() is not None for limosa in limosas), 120)
    lost = next(n for n, limosa in enumerate(limosas) if limosa.poll() is not None)
    said = [limosa.communicate(timeout=120)[0] for limosa in limosas]
    assert limosas[1 - lost].returncode == 0, said
    assert limosas[lost].returncode, "it was refused before the other one had done its work"
    return 1 - lost, json.loads(said[lost])["error"]


def recovered(desk: Desk) -> None:
    """Waits until nothing is left to recover."""
    until(lambda: "nothing" in desk.limosa("recover", rc=None).stdout)


@pytest.mark.long
@each(
    *("podman-frozen", "podman-image", "runc-driver", "runc-runtime", "runc-criu"),
    *("containerd-image", "containerd-runtime"),
)
def test_what_a_killed_checkpoint_leaves_is_recovered(desk: Desk, rootfs: Path, word: str) -> None:
    one = desk.job()
    one.goes_on()
    if word == "driver":
        rule = desk.node.switches.add("function=cuCheckpointProcessCheckpoint delay=0.5")
    limosa = begin(desk, "checkpoint", desk.called(one), "--output", desk.image())
    happened = {
        "driver": lambda: desk.node.switches.count(rule),
        "frozen": lambda: is_frozen(one),
        "runtime": lambda: started_by(desk, limosa, "--leave-running"),
        "criu": lambda: started_by(desk, limosa, "swrk"),
        "image": desk.image().exists,
    }
    until(happened[word])
    os.kill(limosa.pid, signal.SIGKILL)
    limosa.wait(120)
    recovered(desk)
    if word == "image" and not one.lives():
        desk.limosa("verify", desk.image())
        return
    as_undisturbed(desk, rootfs, one)
    if word != "image":
        assert not desk.image().exists()
        assert not list(desk.place.glob(".*partial*"))
    else:
        desk.limosa("verify", desk.image())
    desk.checkpoint(one, image="another")
    desk.limosa("verify", desk.image("another"))


@each("podman-runtime", "podman-criu", "runc-runtime", "containerd-criu")
def test_a_runtime_that_is_killed_leaves_the_container_running(desk: Desk, rootfs: Path, word: str) -> None:
    one = desk.job()
    words = ("swrk",) if word == "criu" else ("checkpoint", "--leave-running")
    for _ in range(5):
        one.goes_on()
        limosa = begin(desk, "checkpoint", desk.called(one), "--output", desk.image())
        while limosa.poll() is None and not is_frozen(one):
            time.sleep(0.002)
        while limosa.poll() is None:  # runc starts CRIU more than once, and the first ones end at once
            for pid in started_by(desk, limosa, *words):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if limosa.returncode:
            break
        desk.restore("--to", 0)  # it was written before anybody was killed
        one = desk.back()
        shutil.rmtree(desk.image())
    assert limosa.returncode == 21
    as_undisturbed(desk, rootfs, one)
    assert not desk.image().exists()
    desk.checkpoint(one)


@each(
    *("podman-runtime", "podman-made", "podman-driver", "runc-criu", "runc-driver"),
    *("containerd-made", "containerd-criu", "containerd-driver"),
)
def test_what_a_killed_restore_leaves_is_recovered(desk: Desk, rootfs: Path, word: str) -> None:
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one)
    if word == "driver":
        rule = desk.node.switches.add("function=cuCheckpointProcessRestore delay=0.5")
    limosa = begin(desk, "restore", desk.image(), "--to", "1")
    happened = {
        "runtime": lambda: started_by(
            desk, limosa, "restore", *(["--detach"] if desk.runtime.name != "podman" else [])
        ),
        "criu": lambda: started_by(desk, limosa, "swrk"),
        "made": lambda: desk.runtime.has(one.name),
        "driver": lambda: desk.node.switches.count(rule),
    }
    until(happened[word])
    os.kill(limosa.pid, signal.SIGKILL)
    limosa.wait(120)
    recovered(desk)
    if not desk.runtime.has(one.name):
        assert nothing_left(desk)
        desk.restore("--to", 1)
    assert desk.runtime.names() == [one.name]
    again = desk.back()
    as_undisturbed(desk, rootfs, again)
    assert nodes(again) == {"nvidia1"}


@each("podman-Restore", "runc-Unlock", "containerd-Unlock")
def test_a_restore_that_fails_leaves_nothing(desk: Desk, rootfs: Path, word: str) -> None:
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one)
    desk.node.switches.add(f"function=cuCheckpointProcess{word} result=UNKNOWN")
    desk.restore("--to", 1, rc=21)
    assert nothing_left(desk)
    desk.restore("--to", 1)
    as_undisturbed(desk, rootfs, desk.back())


@each("containerd-containerd-shim-runc-v2", "containerd-runc", "containerd-criu")
def test_what_brings_it_back_is_killed(desk: Desk, rootfs: Path, word: str) -> None:
    """The shim, the runc that it has started, or CRIU: nothing of the container is left, and the image is whole."""
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one)
    limosa = begin(desk, "restore", desk.image(), "--to", "1")
    words = {"criu": ("swrk",), "runc": ("restore", "--detach")}
    if word in words:
        killed = until(lambda: started_by(desk, limosa, *words[word]))
    else:
        until(lambda: started_by(desk, limosa, "restore", "--detach"))
        killed = [pid for pid in snapshot() if {"-id", one.name, "-address"} <= words_of(pid)]
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert limosa.wait(120) == 21
    assert nothing_left(desk)
    assert "nothing" in desk.limosa("recover").stdout
    desk.restore("--to", 1)
    as_undisturbed(desk, rootfs, desk.back())


def nothing_left(desk: Desk) -> bool:
    """Whether no container is there, nor what one was made of."""
    assert desk.runtime.names() == []
    if desk.runtime.name == "containerd":
        assert desk.runtime.snapshots() == []
        assert "limosa" not in desk.runtime("leases", "list").stdout
        assert "limosa" not in desk.runtime("content", "active").stdout
    return True


# --- what comes along, and what does not ----------------------------------------------------------------------

TICKS = """
echo changed > /changed; rm /etc/group; echo mine > /scratch/file; cat > /vol/file <<.
kept
.
exec 5> /tmp/open; sleep 1000 & n=0
while :; do n=$((n + 1)); echo "step $n hash 0x$n"; echo "line $n" >&5; sleep 0.02; done
"""


def is_read_by_checkpointctl(desk: Desk, one: Container) -> None:
    """All of it but what is in pages: Debian's 1.3.0 does not know how a CRIU from 4.1 on counts them."""
    podman, archive = desk.runtime, desk.image() / "criu/container.tar"
    shown = podman.call(podman.engines["checkpointctl"], "show", archive).stdout
    assert f"{one.name}   {NAME}   {one.id[:12]}   runc" in shown
    (found,) = podman.call(podman.engines["checkpointctl"], "inspect", "--all", "--format=json", archive).json
    assert (found["container_name"], found["id"], found["engine"]) == (one.name, one.id, "Podman")
    assert found["statistics"]["pages_written"] * 4096 == found["checkpoint_size"]["memory_pages_size"] > 0
    first = found["process_tree"]
    assert (first["pid"], [child["command"] for child in first["children"]]) == (1, ["sh"])
    files = {file["path"] for process in found["file_descriptors"] for file in process["open_files"]}
    assert "/tmp/open" in files
    assert {"/vol", "/bound", "/scratch"} <= {mount["destination"] for mount in found["mounts"]}


@pytest.mark.parametrize(("terminal", "volume"), [([], "there"), (["--tty", "--interactive"], "gone")])
def test_what_comes_along(desk_of: Callable[[str], Desk], terminal: list[str], volume: str) -> None:
    desk = desk_of("podman")
    (desk.place / "bound").mkdir()
    vol = desk.name("vol")
    options = ["--hostname", "here", "--tmpfs", "/scratch", "--volume", f"{vol}:/vol", "--init"]
    options += ["--volume", f"{desk.place}/bound:/bound", *terminal]
    one = desk.runtime.start("/bin/sh", "-c", TICKS, gpus=None, options=options, name=desk.name())
    one.goes_on()
    done = desk.checkpoint(one)
    assert done["way"] == "host"
    if not terminal:
        is_read_by_checkpointctl(desk, one)
    if volume == "gone":
        desk.runtime("volume", "rm", vol)
    (desk.place / "bound" / "since").write_text("seen")
    desk.restore(name="other")
    again = desk.back("other")
    last = max(one.steps())
    again.goes_on()
    assert max(again.steps()) > last
    assert again.run("cat", "/changed", "/scratch/file", "/vol/file", "/bound/since").stdout.split() == [
        "changed",
        "mine",
        "kept",
        "seen",
    ]
    assert "group" not in again.run("ls", "/etc").stdout.split()
    assert again.run("hostname").stdout.strip() == "here"
    assert again.run("ps").stdout.count("sleep 1000\n") == 1
    lines = again.run("cat", "/tmp/open").stdout.split("\n")[:-1]
    assert lines == [f"line {n}" for n in range(1, len(lines) + 1)]


def test_what_else_comes_along(desk_of: Callable[[str], Desk]) -> None:
    """A root that cannot be written to, a health check, a policy of restarts, /dev/shm, /tmp on tmpfs."""
    desk = desk_of("podman")
    podman = desk.runtime
    options = ["--read-only", "--restart", "always", "--health-cmd", "cat /tmp/lives", "--health-interval", "disable"]
    script = f"echo kept > /dev/shm/file; echo yes > /tmp/lives; {COUNTS}"
    one = podman.start("/bin/sh", "-c", script, gpus=None, options=options, name=desk.name())
    one.goes_on()
    assert podman("healthcheck", "run", one.name, rc=None).rc == 0
    desk.checkpoint(one)
    time.sleep(3)
    assert podman.names() == [], "no policy starts it again"
    desk.restore()
    again = desk.back()
    again.goes_on()
    assert again.run("cat", "/dev/shm/file", "/tmp/lives").stdout.split() == ["kept", "yes"]
    assert again.run("touch", "/made", rc=None).rc != 0
    assert podman("healthcheck", "run", again.name, rc=None).rc == 0
    (found,) = podman("container", "inspect", again.name).json
    assert found["HostConfig"]["RestartPolicy"]["Name"] == "always"
    assert found["HostConfig"]["ReadonlyRootfs"]


@pytest.mark.parametrize("policy", ["always", "on-failure:2", "no"])
def test_a_policy_of_restarts_holds_for_what_came_back(desk_of: Callable[[str], Desk], policy: str) -> None:
    """podman starts it anew when its first process ends: from its beginning, and on the GPU of its record."""
    desk = desk_of("podman")
    one = desk.job(options=["--restart", policy])
    one.goes_on()
    desk.checkpoint(one)
    desk.restore("--to", 1)
    again = desk.back()
    again.goes_on()
    assert min(again.steps()) > 0
    os.kill(again.pid, signal.SIGKILL)

    def state() -> tuple[str, int]:
        (found,) = desk.runtime("container", "inspect", again.name).json
        return found["State"]["Status"], found["RestartCount"]

    until(lambda: state() == (("exited", 0) if policy == "no" else ("running", 1)))
    if policy != "no":
        anew = desk.back()
        anew.goes_on()
        assert (min(anew.steps()), nodes(anew)) == (0, {"nvidia0"})


SYSTEMD = """
import socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind("/run/systemd/private")
    server.listen()
    while True:
        server.accept()[0].close()
        print("asked", flush=True)
"""


def test_a_health_check_comes_along_and_is_asked_by_hand(desk_of: Callable[[str], Desk]) -> None:
    """podman has systemd ask at intervals where it starts a container, and not where it restores one."""
    desk = desk_of("podman")
    podman = desk.runtime
    own_folders(desk.node, "/run/systemd")
    log = desk.place / "systemd"
    with open(log, "w") as out:
        systemd = desk.node.popen([sys.executable, "-c", SYSTEMD], stdout=out)
    until(lambda: desk.node.run(["test", "-S", "/run/systemd/private"], rc=None).rc == 0)
    options = ["--health-cmd", "cat /tmp/lives", "--health-interval", "5s", "--health-retries", "2"]
    script = f"echo yes > /tmp/lives; {COUNTS}"
    one = podman.start("/bin/sh", "-c", script, gpus=None, options=options, name=desk.name())
    one.goes_on()
    assert log.read_text(), "it has asked for a timer"
    desk.checkpoint(one)
    asked = log.read_text()
    desk.restore()
    again = desk.back()
    again.goes_on()
    assert log.read_text() == asked

    def found() -> Any:
        return podman("container", "inspect", again.name).json[0]

    check = {"Test": ["CMD-SHELL", "cat /tmp/lives"], "Interval": 5e9, "Timeout": 30e9, "Retries": 2}
    assert found()["Config"]["Healthcheck"] == check
    assert podman("healthcheck", "run", again.name, rc=None).rc == 0
    again.run("rm", "/tmp/lives")
    for _ in range(2):
        assert podman("healthcheck", "run", again.name, rc=None).rc == 1
    told = found()["State"]["Health"]
    assert (told["Status"], [one["ExitCode"] for one in told["Log"]]) == ("unhealthy", [0, 1, 1])
    systemd.kill()


@pytest.mark.parametrize("own", [True, False], ids=["podmans", "users"])
def test_what_podman_logs_of_one_that_came_back(desk_of: Callable[[str], Desk], own: bool) -> None:
    """podman's own file is in the image, so each clone's log begins with it. A file of the user's stays where it is."""
    desk = desk_of("podman")
    one = desk.runtime.start("/bin/sh", "-c", COUNTS, gpus=None, name=desk.name(), own_log=own)

    def logged(name: str) -> list[int]:
        return list(steps_of(desk.runtime("logs", desk.name(name)).stdout))

    until(lambda: logged("train")[3:])
    desk.checkpoint(one)
    began = 1 if own else max(one.steps()) + 1
    for name in ("train", "clone"):
        desk.restore(name=name)
        back = len(logged(name))
        until(lambda name=name, back=back: len(logged(name)) > back + 3)
        told = logged(name)
        assert told == list(range(began, began + len(told))), "none is missing"
    assert len({one.log, *(desk.back(name).log for name in ("train", "clone"))}) == 3
    assert own or max(one.steps()) + 1 == began


READS = """
echo begins; read -r line; echo got $line
while [ ! -e /go ]; do sleep 0.05; done
while read -r line; do echo got $line; done; echo closed; sleep 1000
"""


def attached(desk: Desk, one: Container) -> Any:
    """Who writes to its standard input: ``podman attach``."""
    words = [desk.runtime.engines["podman"], "attach", "--sig-proxy=false", one.name]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return desk.node.popen(words, env=desk.runtime.environment(), stdin=subprocess.PIPE, bufsize=0, **quiet)


@pytest.mark.parametrize("options", [["--interactive"], ["--tty", "--interactive"]], ids=["pipe", "terminal"])
def test_its_standard_input_can_be_written_to_again(desk_of: Callable[[str], Desk], options: list[str]) -> None:
    """What was written before and not read is lost."""
    desk = desk_of("podman")
    one = desk.runtime.start("/bin/sh", "-c", READS, gpus=None, options=options, name=desk.name())
    one.wait_for("begins")
    client = attached(desk, one)
    client.stdin.write(b"one\nunread\n")
    one.wait_for("got one")
    lost = [w["text"] for w in desk.checkpoint(one)["warnings"] if w["id"] == "container-input"]
    assert [text.split()[0] for text in lost] == ([] if "--tty" in options else ["7"])
    assert client.wait(60) == 0
    desk.restore()
    again = desk.back()
    client = attached(desk, again)
    client.stdin.write(b"two\n" + (b"\x04" if "--tty" in options else b""))
    again.run("touch", "/go")
    again.wait_for("got two")
    client.stdin.close()
    again.wait_for("closed")
    assert "got unread" not in again.said()


def test_what_system_v_keeps_for_processes_comes_along(desk_of: Callable[[str], Desk], tmp_path: Path) -> None:
    """Shared memory, semaphores and queues, and their keys. An open queue of POSIX's is refused by name."""
    desk = desk_of("podman")
    program = tmp_path / "ipc"
    subprocess.run(["cc", "-o", program, Path(__file__).with_name("ipc.c"), "-lrt"], check=True)

    def start(word: str) -> Container:
        there = ["--volume", f"{program}:/ipc:ro"]
        one = desk.runtime.start("/ipc", word, gpus=None, options=there, name=desk.name(word))
        one.goes_on()
        return one

    one = start("new")
    desk.checkpoint(one)
    desk.restore()
    again = desk.back("new")
    again.goes_on()
    other = again.run("sh", "-c", "/ipc & sleep 0.2; kill $!")
    assert set(again.steps().values()) == set(steps_of(other.stdout).values()) == {"0x431"}
    posix = start("posix")
    assert desk.checkpoint(posix, rc=13, image="posix")["error"]["id"] == "message-queue"
    posix.goes_on()
    again.run("/ipc", "posix", rc=1)
    assert "mqueue" in desk.checkpoint(again, rc=21, image="left")["error"]["message"], "one that nobody has open"
    again.goes_on()


def test_what_comes_along_with_containerd(desk_of: Callable[[str], Desk]) -> None:
    """Also what has changed in the root file system, into the snapshot of a container of another name."""
    desk = desk_of("containerd")
    (desk.place / "bound").mkdir()
    words = TICKS.replace("/vol/file", "/bound/file")
    mounts = ["type=tmpfs,src=tmpfs,dst=/scratch", f"type=bind,src={desk.place}/bound,dst=/bound,options=rbind:rw"]
    options = ["--hostname", "here", *(word for one in mounts for word in ("--mount", one))]
    one = desk.runtime.start("/bin/sh", "-c", words, gpus=None, options=options, name=desk.name())
    one.goes_on()
    assert desk.checkpoint(one)["way"] == "host"
    assert nothing_left(desk)
    (desk.place / "bound" / "since").write_text("seen")
    desk.restore(name="other")
    again = desk.back("other")
    last = max(again.steps())
    again.goes_on()
    assert max(again.steps()) > last
    told = again.run("cat", "/changed", "/scratch/file", "/bound/file", "/bound/since").stdout.split()
    assert told == ["changed", "mine", "kept", "seen"]
    assert "group" not in again.run("ls", "/etc").stdout.split()
    assert again.run("hostname").stdout.strip() == "here"
    lines = again.run("cat", "/tmp/open").stdout.split("\n")[:-1]
    assert lines == [f"line {n}" for n in range(1, len(lines) + 1)]
    desk.checkpoint(again, image="second")  # its own changes are still to what the image was
    desk.restore(image="second", name="third")
    third = desk.back("third")
    assert third.run("cat", "/changed").stdout == "changed\n"
    third.goes_on()
    third.remove()
    assert nothing_left(desk)


def test_what_containerd_does_not_bring_back_is_refused_by_name(desk_of: Callable[[str], Desk], rootfs: Path) -> None:
    desk = desk_of("containerd")
    ctr = desk.runtime

    def refused(one: Container) -> set[str]:
        plan = desk.says(13, "plan", "checkpoint", desk.called(one), "--output", desk.image())
        return {reason["id"] for reason in plan["reasons"] if reason["exit_code"]}

    def waits(name: str, *options: object, **more: Any) -> Container:
        return ctr.start("/bin/sleep", 1000, name=desk.name(name), options=options, **more)

    first = waits("first")
    ctr("tasks", "exec", "--detach", "--exec-id", "more", first.id, "/bin/sleep", 1000)
    assert "container-exec" in refused(first)
    assert refused(waits("ipc", "--with-ns", f"ipc:/proc/{first.pid}/ns/ipc")) == {"container-shares"}
    assert refused(waits("nerdctl", "--label", "nerdctl/name=x")) == {"container-runtime"}
    again = waits("again", "--label", "containerd.io/restart.status=running")
    assert refused(again) == {"container-restarts"}
    desk.checkpoint(again, "--leave-running", image="kept")
    assert refused(waits("rootfs", "--rootfs", image=rootfs)) == {"container-image"}
    ours, its = os.openpty()
    words = [desk.runtime.engines["ctr"], "run", "--detach", "--tty", "--cgroup", f"{ctr.parent}/tty"]
    words += ["--cpu-shares", "0", "--runc-binary", desk.runtime.engines["runc"], NAME, desk.name("tty"), "/bin/sh"]
    started = desk.node.popen(words, env=ctr.environment(), stdin=its, stdout=its, stderr=its, start_new_session=True)
    assert started.wait(60) == 0, os.read(ours, 4096)
    assert refused(ctr.known(desk.name("tty"))) == {"container-terminal"}


def test_an_image_comes_back_where_its_image_is(desk_of: Callable[[str], Desk]) -> None:
    """A containerd that does not have what the container was made of is told so, and nothing is made."""
    desk = desk_of("containerd")
    one = desk.runtime.start("/bin/sleep", 1000, name=desk.name())
    desk.checkpoint(one)
    desk.runtime("images", "delete", "--sync", NAME)
    assert desk.restore(rc=23)["error"]["id"] == "container-image"
    assert desk.restore("--bundle", desk.place, rc=23)["error"]["id"] == "container-bundle"
    assert nothing_left(desk)


def test_nobody_elses_socket_is_containerds(desk_of: Callable[[str], Desk]) -> None:
    """Another user who listens at the address is not asked."""
    desk = desk_of("containerd")
    one = desk.runtime.start("/bin/sleep", 1000, name=desk.name())
    (place := desk.place / "theirs").mkdir()
    code = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.setuid(1000); s.listen()\n"
    )
    code += "s.accept()[0].recv(1)"
    liar = desk.node.popen([sys.executable, "-c", code, place / "socket"])
    until((place / "socket").exists)
    time.sleep(0.2)
    environment = {**desk.runtime.environment(), "CONTAINERD_ADDRESS": str(place / "socket")}
    del environment["HOME"]
    words = ["checkpoint", "-o", "json", desk.called(one), "--output", desk.image()]
    error = desk.limosa(*words, rc=13, env=environment).json["error"]
    assert (error["id"], "root" in error["message"]) == ("container-runtime", True)
    liar.kill()


def test_what_cannot_come_along_is_refused_by_name(
    desk_of: Callable[[str], Desk], engines: Engines, image: Path
) -> None:
    desk = desk_of("podman")
    podman = desk.runtime

    def refused(one: Container) -> set[str]:
        plan = desk.says(13, "plan", "checkpoint", desk.called(one), "--output", desk.image())
        if one is not first:  # which others need
            one.remove()
        return {reason["id"] for reason in plan["reasons"] if reason["exit_code"]}

    def waits(name: str, *options: object) -> Container:
        return podman.start("/bin/sleep", 1000, gpus=None, name=desk.name(name), options=options)

    first = waits("first")
    assert refused(waits("net", "--network", f"container:{first.name}")) == {"container-shares"}
    assert refused(waits("ipc", "--ipc", f"container:{first.name}")) == {"container-shares"}
    assert refused(waits("host", "--pid", "host")) == {"container-shares"}
    podman("secret", "create", desk.name("secret"), "/etc/hostname")
    assert refused(waits("secret", "--secret", desk.name("secret"))) == {"container-secrets"}
    pod = podman("pod", "create", "--infra=false", "--share", "", "--name", desk.name("pod")).stdout.strip()
    assert refused(waits("inpod", "--pod", pod)) == {"container-shares"}
    podman("exec", "--detach", first.id, "/bin/sleep", 1000)
    assert "container-exec" in refused(first)
    inner = [pid for pid in started_in(first) if pid != first.pid]
    plan = desk.says(13, "plan", "checkpoint", inner[0], "--output", desk.image())
    assert plan["reasons"][0]["id"] == "container-part"
    with contextlib.closing(Podman(desk.node, engines, desk.place / "crun", runtime="crun")) as other:
        other.load(image)
        crun = Desk(other, desk.place)
        one = other.start("/bin/sleep", 1000, gpus=None, name=desk.name("crun"))
        plan = crun.says(13, "plan", "checkpoint", crun.called(one), "--output", desk.image())
        assert [reason["id"] for reason in plan["reasons"]] == ["container-runtime"]


COUNTS = "n=0; while :; do n=$((n + 1)); echo step $n hash 0x$n; sleep 0.05; done"


def started_in(one: Container) -> list[int]:
    """The processes of a container."""
    namespace = os.readlink(f"/proc/{one.pid}/ns/pid")
    found = []
    for pid in snapshot():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                found.append(pid)
    return sorted(found)


@pytest.mark.parametrize("cgroups", cgroup_layouts()[:1], indirect=True)
def test_a_stopped_process_keeps_nobody_waiting(cgroups: str, desk: Desk) -> None:
    script = f"sleep 1000 & {COUNTS}"
    one = desk.job("/bin/sh", "-c", shlex.quote(script) if desk.runtime.name == "runc" else script, gpus=None)
    one.goes_on()
    sleeper = next(p for p in started_in(one) if Path(f"/proc/{p}/cmdline").read_bytes() == b"sleep\x001000\0")
    os.kill(sleeper, signal.SIGSTOP)
    if cgroups == "v1":
        assert desk.checkpoint(one, rc=13)["error"]["id"] == "container-stopped"
        one.goes_on()
        os.kill(sleeper, signal.SIGCONT)
    desk.checkpoint(one)
    desk.restore()
    desk.back().goes_on()


def test_the_output_of_a_restored_container_of_runc_goes_to_a_file(desk_of: Callable[[str], Desk]) -> None:
    """Its first output was a pipe of its caller's, as of whoever keeps logs of runc's containers."""
    desk = desk_of("runc")
    script = COUNTS.replace("; sleep", "; echo no >&2; sleep")
    reader, writer = os.pipe()
    one = desk.runtime.start("/bin/sh", "-c", script, gpus=None, name=desk.name(), output=writer)
    os.close(writer)
    said = b""
    while b"step 3" not in said:
        said += os.read(reader, 4096)
    desk.checkpoint(one)
    log = desk.place / "said.log"
    log.write_text("before\n")
    came = desk.restore("--log", log)
    assert came["log"] == str(log)
    until(lambda: len(steps_of(log.read_text())) > 3)
    assert log.read_text().startswith("before\n")
    assert min(steps_of(log.read_text())) > 3
    lines = log.read_text().splitlines()[1:]
    assert {line for line in lines if "step" not in line} == {"no"}, "both go there, one behind the other"
    desk.checkpoint(desk.back(), image="again")
    last = max(steps_of(log.read_text()))
    desk.restore("--log", log, image="again")
    until(lambda: max(steps_of(log.read_text())) > last + 3)
    desk.back()
    os.close(reader)


def test_a_file_that_gets_no_output_is_not_said_to_have_it(desk_of: Callable[[str], Desk]) -> None:
    """Its first output was /dev/null, and so is that of the container that comes back."""
    desk = desk_of("runc")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    one = desk.runtime.start("/bin/sh", "-c", "while sleep 0.05; do echo a; done", name=desk.name(), output=nowhere)
    os.close(nowhere)
    desk.checkpoint(one)
    log = desk.place / "said.log"
    assert desk.restore("--log", log)["log"] == ""
    desk.back()
    assert log.read_text() == ""


def test_output_to_a_file_outside_is_refused(desk_of: Callable[[str], Desk]) -> None:
    desk = desk_of("runc")
    one = desk.runtime.start("/job", 16, 5, name=desk.name())
    one.goes_on()
    assert desk.checkpoint(one, rc=13)["error"]["id"] == "container-file"
    one.goes_on()


def test_a_terminal_of_runcs_is_refused_and_the_job_goes_on(desk_of: Callable[[str], Desk]) -> None:
    """Its other side is with whoever has started runc; a restore would have nobody to give the new one to."""
    desk = desk_of("runc")
    runc, name = desk.runtime, desk.name()
    made = bundle_config("", "", ["/bin/sh", "-c", COUNTS], None)
    ptys = {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["ptmxmode=0666"]}
    changes = {"process": {**made["process"], "terminal": True}, "mounts": [*made["mounts"], ptys]}
    bundle = runc.bundle(name, [], gpus=None, **changes)
    with socket.socket(socket.AF_UNIX) as console:
        console.bind(str(runc.sockets / "console"))
        console.listen()
        runc("run", "--detach", "--bundle", bundle, "--console-socket", runc.sockets / "console", name)
        taken, _ = console.accept()
        with taken:
            _, (terminal,), _, _ = socket.recv_fds(taken, 4096, 1)
    with open(terminal, "rb", buffering=0) as said:
        assert desk.checkpoint(runc.known(name), rc=13)["error"]["id"] == "container-terminal"
        assert not desk.image().exists()
        until(lambda: b"step 3 " in said.read(4096))


def test_a_bundle_that_has_a_terminal_by_now_is_refused_before_a_restore(desk_of: Callable[[str], Desk]) -> None:
    desk = desk_of("runc")
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one)
    path = desk.runtime.place / one.name / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "process": {**config["process"], "terminal": True}}))
    assert desk.restore(rc=23)["error"]["id"] == "container-terminal"
    path.write_text(json.dumps({**config, "process": {**config["process"], "terminal": None}}))  # runc takes it for no
    desk.restore()
    desk.back().goes_on()


def test_a_clone_with_the_machines_network_is_refused_where_the_port_is_taken(desk_of: Callable[[str], Desk]) -> None:
    desk = desk_of("podman")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listen = ["/bin/busybox", "httpd", "-f", "-p", f"127.0.0.1:{port}"]
    one = desk.runtime.start(*listen, gpus=None, name=desk.name(), options=["--network", "host"])
    until(lambda: answers("127.0.0.1", port))
    desk.checkpoint(one, "--leave-running")
    assert desk.restore(name="clone", rc=23)["error"]["id"] == "port-taken"
    one.remove()
    desk.restore(name="clone")
    desk.back("clone")
    until(lambda: answers("127.0.0.1", port))


PORTS = """
import sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
from limosa.image import ContainerRecord
from limosa.operation.container_plan import return_reasons
record = ContainerRecord(runtime="runc", id="x", name="x", ports=list(range(int(sys.argv[1]), 65536)))
found = [r.text for r in return_reasons(record, None, None) if r.id == "port-taken"]
print(sum(name.endswith(("/net/tcp", "/net/tcp6")) for name in opened), len(found), found)
"""


def test_an_image_with_every_port_does_not_have_the_tables_read_for_each(desk_of: Callable[[str], Desk]) -> None:
    desk = desk_of("runc")
    with contextlib.ExitStack() as held:
        ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(20)]
        ports += [held.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6)).getsockname()[1]]

        def told(first: int) -> list[str]:
            argv = [sys.executable, "-c", PORTS, first]
            return str(desk.node.run(argv, env=desk.runtime.environment()).stdout).split(" ", 2)

        assert told(0)[:2] == ["2", "16"]
        for port in (max(ports), ports[-1]):
            assert f"port {port} of" in told(port)[2]


def answers(at: str, port: int) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError):
        socket.create_connection((at, port), 5).close()
        return True
    return False


@pytest.mark.parametrize("cgroups", cgroup_layouts()[-1:], indirect=True)
def test_options_without_effect_are_refused_and_the_others_have_one(cgroups: str, desk: Desk) -> None:
    """A listener that is stopped has a connection that it has not accepted."""
    script = "/bin/busybox httpd -f -p 127.0.0.1:8080 & sleep 1; kill -STOP $!; sleep 1; "
    script += f"sleep 1000 | /bin/busybox nc 127.0.0.1 8080 & {COUNTS}"
    one = desk.job("/bin/sh", "-c", shlex.quote(script) if desk.runtime.name == "runc" else script, gpus=None)
    until(lambda: ":1F90 01 " in Path(f"/proc/{one.pid}/net/tcp").read_text())
    one.goes_on()

    def refused(verb: str, *words: object) -> list[str]:
        plan = desk.says(2, "plan", verb, *words)
        assert {r["id"] for r in plan["reasons"] if r["exit_code"] == 2} == {"container-option"}
        return [r["text"].split()[0] for r in plan["reasons"] if r["exit_code"] == 2]

    called = desk.called(one)
    given = ["--shell-job", "--link-remap", *(["--ext-unix-sk"] if desk.runtime.name == "podman" else [])]
    assert refused("checkpoint", called, "--output", desk.image(), *given) == given
    assert desk.checkpoint(one, "--tcp-close", rc=13)["error"]["id"] == "tcp-in-flight"
    one.goes_on()
    more = [] if desk.runtime.name == "podman" else ["--ext-unix-sk"]
    done = desk.checkpoint(one, "--skip-in-flight", "--tcp-close", "--print-stats", *more)
    assert done["stats"]["pages"] > 0, done
    given = ["--rewind-files", "--shell-job"]
    assert refused("restore", desk.image(), *given, "--cgroup", "/") == ["--rewind-files", "--cgroup", "--shell-job"]
    attached = desk.limosa("restore", desk.image(), "--attach", rc=2)
    assert "--attach has no effect on a container" in attached.stderr
    assert desk.runtime.names() == []
    came = desk.restore("--print-stats")
    assert came["stats"]["pages_restored"] > 0, came
    desk.back().goes_on()


def test_a_pods_container_goes_to_disk_and_runs_on(
    node: Node, engines: Engines, image: Path, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it ends its kubelet starts it anew, and what it comes back as is no pod's: both are refused by name."""
    with contextlib.closing(Pods(node, engines, tmp_path / "pods")) as pods:
        monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
        desk = Desk(pods, tmp_path)
        pods.load(image, "k8s.io")
        pods.load(make_image(tmp_path / "pause.tar", rootfs, Pods.PAUSE, command=("/job", "wait")), "k8s.io")
        id_, pid = pods.start_pod(desk.name("web"), "/bin/sh", "-c", "exec /job 16 5 > /out")
        one = Container(pods, id_, "server", pid, Path(f"/proc/{pid}/root/out"))
        one.goes_on()
        job = f"containerd:shop/{desk.name('web')}/server"
        refused = desk.says(13, "checkpoint", job, "--output", desk.image())
        assert refused["error"]["id"] == "container-restarts"
        done = desk.says(0, "checkpoint", job, "--output", desk.image(), "--leave-running")
        assert (done["state"], done["way"]) == ("running", "driver")
        as_undisturbed(desk, rootfs, one)
        desk.limosa("verify", desk.image())
        told = desk.says(0, "inspect", desk.image())["container"]
        assert (told["namespace"], told["pod"]) == ("k8s.io", f"shop/{desk.name('web')}")
        assert desk.restore(name="clone", rc=23)["error"]["id"] == "container-pod"
        desk.limosa("rm", desk.image())


def test_a_pods_container_is_seen_moved_only_if_forced_and_has_the_shim_by_its_annotation(
    node: Node, engines: Engines, image: Path, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one: what its kubelet would ask of containerd's CRI."""
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    own_folders(node, "/etc", "/usr/local/lib")
    node.limosa("cdi")
    with contextlib.closing(Pods(node, engines, tmp_path / "pods")) as pods:
        desk = Desk(pods, tmp_path)
        pods.load(image, "k8s.io")
        pods.load(make_image(tmp_path / "pause.tar", rootfs, Pods.PAUSE, command=("/job", "wait")), "k8s.io")
        asks = {"cdi.k8s.io/limosa": SHIM}
        id_, pid = pods.start_pod(desk.name("web"), "/bin/sh", "-c", "exec /job 64 5 > /out", annotations=asks)
        one = Container(pods, id_, "server", pid, Path(f"/proc/{pid}/root/out"))
        one.goes_on()
        (job,) = [job for job in desk.says(0, "ps")["jobs"] if job["pid"] == pid]
        where = {"runtime": "containerd", "id": id_, "name": "server", "pod": desk.name("web"), "namespace": "shop"}
        assert (job["container"], job["way"]) == (where, "parked")
        shown = f"in container containerd:server ({id_[:12]}), pod shop/{desk.name('web')}\n"
        assert shown in desk.limosa("ps", "-v").stdout

        record = pods("--namespace", "k8s.io", "containers", "info", id_).json
        called = f"containerd:shop/{desk.name('web')}/server"
        assert desk.says(13, "move", called, "--to", 1)["error"]["id"] == "pod-devices"
        moved = desk.says(0, "move", called, "--to", 1, "--force", "pod-devices")
        assert (moved["way"], [w["id"] for w in moved["warnings"]]) == ("parked", ["pod-devices", "container-record"])
        assert gpus_of(desk, one) == [1]
        one.goes_on()
        assert pods("--namespace", "k8s.io", "containers", "info", id_).json == record


def test_names_are_checked(desk_of: Callable[[str], Desk]) -> None:
    desk = desk_of("podman")
    one = desk.runtime.start("/bin/sleep", 1000, gpus=None, name=desk.name())
    desk.checkpoint(one)
    for name in ("-x", "../x", "a b", "", "x" * 200):
        assert desk.restore(f"--name={name}", rc=2)["error"]["exit_code"] == 2
    assert desk.runtime.names() == []


def test_a_cgroup_that_is_called_like_a_containers_leads_to_nothing(desk_of: Callable[[str], Desk]) -> None:
    """What is in it is no container that a runtime notes."""
    desk = desk_of("podman")
    place = f"{desk.runtime.parent}/libpod-{'ab' * 32}"
    stranger = desk.node.popen(["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sleep", "1000"])
    (inner,) = until(lambda: [pid for pid in descendants(stranger.pid, snapshot()) if pid != stranger.pid])
    folders = [Path(f"/sys/fs/cgroup/{name}{place}") for name in ("freezer", "devices", "unified", "")]
    for folder in folders:
        if (folder.parent.parent / "cgroup.procs").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cgroup.procs").write_text(str(inner))
    plan = desk.limosa("plan", "checkpoint", inner, "--output", desk.image(), "-o", "json", rc=13).json
    assert plan["reasons"][0]["id"] in ("container-part", "container-runtime")
    os.kill(inner, signal.SIGKILL)
    stranger.wait(60)


# --- the bundle of a container of runc's ------------------------------------------------------------------------


def test_a_bundle_is_the_same_by_whatever_path_it_is_named(desk_of: Callable[[str], Desk], rootfs: Path) -> None:
    """Over a link and over "..": where a container lives nobody comes in, and one that fails is not left there."""
    desk = desk_of("runc")
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one, "--leave-running")
    (link := desk.place / "link").symlink_to(desk.runtime.place)
    ways = [link / one.name, desk.runtime.place / "state" / ".." / one.name]
    for way in ways:
        error = desk.restore("--bundle", way, name="clone", rc=23)["error"]
        assert (error["id"], "another container lives" in error["message"]) == ("container-bundle", True)
    one.remove()
    own = desk.runtime.same_bundle(one, desk.name("own"))
    rule = desk.node.switches.add("function=cuCheckpointProcessRestore result=UNKNOWN every=1")
    for way in (link / own.name, own.parent / "state" / ".." / own.name):
        desk.restore("--bundle", way, name="clone", rc=21)
        assert nothing_left(desk)
    assert desk.node.switches.count(rule)


def test_a_copied_bundle_needs_a_cgroup_of_its_own(desk_of: Callable[[str], Desk], rootfs: Path) -> None:
    """Else the clone would be in the first one's: held still with it, and given its GPUs."""
    desk = desk_of("runc")
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one, "--leave-running")
    copy = desk.runtime.same_bundle(one, desk.name("copy"), cgroup=f"{desk.runtime.parent}//{one.name}/")
    error = desk.restore("--bundle", copy, name="copy", rc=23)["error"]
    assert (error["id"], one.name in error["message"]) == ("container-bundle", True)
    assert "cgroupsPath" in error["hint"]
    one.goes_on()
    one.remove()  # two clones at once, in the same cgroup: one is
    cgroup = f"{desk.runtime.parent}/both"
    copies = [desk.runtime.same_bundle(one, desk.name(word), cgroup) for word in ("a", "b")]
    desk.node.switches.add("function=cuCheckpointProcessRestore delay=1.5 every=1")
    words = [("--name", copy.name, "--bundle", copy, "--to", n) for n, copy in enumerate(copies)]
    both = [begin(desk, "restore", desk.image(), *more, "-o", "json") for more in words]
    codes = [limosa.wait(120) for limosa in both]
    assert sorted(codes) in ([0, 19], [0, 23])
    assert desk.runtime.names() == [copies[codes.index(0)].name]
    as_undisturbed(desk, rootfs, desk.runtime.known(copies[codes.index(0)].name))


def test_two_containers_in_one_cgroup_are_told_apart(desk_of: Callable[[str], Desk]) -> None:
    """Neither is called by the other's name, nor frozen or given a GPU with it."""
    desk = desk_of("runc")
    linux = bundle_config("", desk.runtime.parent, [], (0,))["linux"]
    both = {"linux": {**linux, "cgroupsPath": f"{desk.runtime.parent}/both"}}
    first, second = (desk.job("/job", 16, 5, name=word, **both) for word in ("first", "second"))
    first.goes_on()
    second.goes_on()
    called = {job["pid"]: job["container"]["name"] for job in desk.says(0, "ps")["jobs"]}
    assert called == {first.pid: first.name, second.pid: second.name}
    for one in (first, second):
        assert desk.checkpoint(one, rc=13)["error"]["id"] == "container-shares"
        assert desk.says(13, "move", desk.called(one), "--to", 1)["error"]["id"] == "container-shared"
        assert gpus_of(desk, one) == [0]
        one.goes_on()
    first.remove()
    desk.says(0, "move", desk.called(second), "--to", 1)
    second.goes_on()

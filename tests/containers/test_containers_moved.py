"""Jobs in containers of podman and runc, seen, moved, suspended and resumed from outside by the host's limosa."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers.runtimes import Crun, Podman, bundle_config, cgroup_layouts
from containers.test_containers_to_disk import listed, nodes, until

from limosa.parking import LIBRARY
from limosa.process.device_nodes import LIBRARY as SIGHT

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
MIB = 1 << 20
INSIDE = f"/lib/{LIBRARY.name}"
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


def may_open(one: Any, gpu: int) -> str:
    """What the device cgroup says to a program that is started in the container now."""
    said = one.run("sh", "-c", f": < /dev/nvidia{gpu}", rc=None)
    return (said.stdout + said.stderr).strip().rpartition(": ")[2]


# Joins a container's cgroup in every hierarchy that says something of devices, and opens the machine's own node.
OPEN_AS = """
import os, sys
for line in open(f"/proc/{sys.argv[1]}/cgroup").read().split("\\n")[:-1]:
    number, kinds, path = line.split(":", 2)
    for top in ["/sys/fs/cgroup/devices"] if kinds == "devices" else ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]:
        if (number == "0" or kinds == "devices") and path != "/" and os.path.exists(f"{top}{path}/cgroup.procs"):
            open(f"{top}{path}/cgroup.procs", "w").write(str(os.getpid()))
            break
try:
    os.open(f"/dev/nvidia{sys.argv[2]}", os.O_RDWR)
except OSError as error:
    print(error.strerror)
"""
LET, NOT_LET = "No such device or address", "Operation not permitted"  # no driver has that number; the filter


def filtered(one: Any, gpu: int) -> str:
    """What the device filter of a container says of a GPU, whatever nodes there are in it."""
    return str(one.runtime.node.python(OPEN_AS, one.pid, gpu).stdout).strip()


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
    assert f"in container {box.runtime.name}:{TRAIN} ({one.id[:12]})" in box.node.limosa("ps", "-v").stdout
    called = f"{box.runtime.name}:{TRAIN}"
    assert says(box, 0, "suspend", called)["pid"] == one.pid
    assert jobs(box)[TRAIN]["state"] == "checkpointed"
    assert says(box, 0, "resume", "--container", one.id[:12])["pid"] == one.pid
    one.goes_on()
    for state in ("checkpointed", "running"):
        assert says(box, 0, "toggle", called)["pid"] == one.pid
        assert jobs(box)[TRAIN]["state"] == state
    one.goes_on()
    if box.runtime.name == "runc":  # whose ids somebody has chosen: another that begins so may run
        assert says(box, 10, "suspend", "--container", "trai")["error"]["id"] == "no-such-process"
    assert says(box, 10, "suspend", "docker:train")["error"]["id"] == "no-such-process"
    assert says(box, 10, "suspend", "--container", "nobody")["error"]["id"] == "no-such-process"


@pytest.mark.parametrize("cgroups", cgroup_layouts()[:1], indirect=True)
def test_what_crun_notes(
    cgroups: str, node: Any, engines: Any, image: Path, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Podman(node, engines, tmp_path / "podman", runtime="crun")) as podman:
        podman.load(image)
        one = podman.start("/job", 16, 20, name=TRAIN)
        one.goes_on()
        monkeypatch.setenv("LIMOSA_CONTAINER_STATE", f"{tmp_path}/podman/xdg/crun")
        (job,) = node.limosa("ps", "-o", "json").json["jobs"]
        assert (job["container"]["runtime"], job["container"]["name"]) == ("podman", TRAIN)
        node.limosa("move", f"podman:{TRAIN}", "--to", 1)
        assert nodes(one) == {"nvidia1"}
        one.goes_on()


@pytest.mark.parametrize("cgroups", cgroup_layouts()[:1], indirect=True)
def test_crun_alone(
    cgroups: str, node: Any, engines: Any, rootfs: Path, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved in place, suspended and resumed; to disk it is refused."""
    with contextlib.closing(Crun(node, engines, tmp_path / "crun", rootfs)) as crun:
        one = crun.start("/job", 16, 20, name=TRAIN)
        one.goes_on()
        monkeypatch.setenv("LIMOSA_CONTAINER_STATE", str(tmp_path / "crun" / "state"))
        (job,) = node.limosa("ps", "-o", "json").json["jobs"]
        assert (job["container"]["runtime"], job["container"]["name"]) == ("crun", TRAIN)
        for to in (1, 0):
            node.limosa("move", f"crun:{TRAIN}", "--to", to)
            assert nodes(one) == {f"nvidia{to}"}
            one.goes_on()
        node.limosa("suspend", f"crun:{TRAIN}")
        node.limosa("resume", f"crun:{TRAIN}", "--to", 1)
        assert nodes(one) == {"nvidia1"}
        one.goes_on()
        refused = node.limosa("checkpoint", f"crun:{TRAIN}", "--output", tmp_path / "image", "-o", "json", rc=None)
        assert refused.rc == 13, refused
        one.goes_on()


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
def test_a_container_with_one_gpu_is_given_another(cgroups: str, box: Any) -> None:
    one = box("/job", 16, 20, name=TRAIN)
    one.goes_on()
    assert nodes(one) == listed(one) == {"nvidia0"}
    plan = says(box, 0, "plan", "move", "--container", TRAIN, "--to", 1)
    assert [r["id"] for r in plan["reasons"]] == ["container-record"]
    record = f"{box.runtime.name}:{TRAIN} does not change: started again, it gets what it was started with"
    assert len(plan["map"]) == 1, "the map is of the one GPU that the job can open"
    for to in (1, 0, 1):
        said = says(box, 0, "move", "--container", TRAIN, "--to", to)
        assert len(said["map"]) == 1
        assert [record in w["text"] for w in said["warnings"]] == [True], "also after it went back to the first GPU"
        assert gpus_of(jobs(box)[TRAIN]) == [to]
        one.goes_on()
        assert nodes(one) == listed(one) == {f"nvidia{to}"}
        assert may_open(one, to) == LET
        assert [filtered(one, gpu) for gpu in (to, 1 - to)] == [LET, NOT_LET]
    says(box, 0, "suspend", "--container", TRAIN)
    says(box, 0, "resume", "--container", TRAIN, "--to", 0)
    assert gpus_of(jobs(box)[TRAIN]) == [0]
    one.goes_on()
    assert nodes(one) == {"nvidia0"}


_GET_FLAGS, _SET_FLAGS, _APPEND_ONLY = 0x80086601, 0x40086602, 0x20  # FS_IOC_GETFLAGS …, FS_APPEND_FL


def append_only(folder: str, wanted: bool) -> None:
    """Files can be made there, and none can be removed: ``chattr +a``."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))[0]
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _APPEND_ONLY if wanted else flags & ~_APPEND_ONLY))
    finally:
        os.close(fd)


@pytest.mark.parametrize("cgroups", cgroup_layouts()[:1], indirect=True)
def test_what_cannot_be_taken_from_a_container_is_said(cgroups: str, box: Any) -> None:
    one = box("/job", 16, 20, name=TRAIN)
    one.goes_on()
    dev = f"/proc/{one.pid}/root/dev"
    append_only(dev, True)
    said = box.node.limosa("move", "--container", TRAIN, "--to", 1)
    assert "can still open a GPU that its job is not on" in said.stderr
    assert gpus_of(jobs(box)[TRAIN]) == [1]
    assert nodes(one) == {"nvidia0", "nvidia1"}
    one.goes_on()
    append_only(dev, False)
    said = says(box, 0, "move", "--container", TRAIN, "--to", 0)
    assert [w["id"] for w in said["warnings"]] == ["container-record"]
    assert nodes(one) == {"nvidia0"}
    one.goes_on()


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
    assert [filtered(one, gpu) for gpu in (0, 1)] == [LET, NOT_LET]
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
    until(lambda: box.node.switches.count(rule))
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    end = time.monotonic() + 120
    while (said := box.node.limosa("recover", rc=None)).rc == 19 or jobs(box)[TRAIN]["state"] != "running":
        assert time.monotonic() < end, said
        time.sleep(0.1)
    (at,) = gpus_of(jobs(box)[TRAIN])
    assert nodes(one) == {f"nvidia{at}"}
    one.goes_on()
    says(box, 0, "move", "--container", TRAIN, "--to", 1 - at)
    assert nodes(one) == {f"nvidia{1 - at}"}
    one.goes_on()


@pytest.fixture
def shimmed(box: Any) -> Any:
    """Starts a container in which the shim is preloaded."""

    def start(*command: object, **options: Any) -> Any:
        if box.runtime.name == "podman":
            words = ["--volume", f"{LIBRARY}:{INSIDE}:ro", "--env", f"LD_PRELOAD={INSIDE}"]
            return box(*command, options=[*words, *options.pop("options", [])], **options)
        name, gpus = options.pop("name"), options.pop("gpus", (0,))
        config = bundle_config(name, box.runtime.parent, list(map(str, command)), gpus)
        config["mounts"].append(
            {"destination": INSIDE, "type": "bind", "source": str(LIBRARY), "options": ["bind", "ro"]}
        )
        config["process"]["env"].append(f"LD_PRELOAD={INSIDE}")
        return box(*command, name=name, gpus=gpus, mounts=config["mounts"], process=config["process"])

    return start


def told_last(one: Any) -> str:
    """The bus id that the driver has told it of its GPU last."""
    return [line for line in one.said().splitlines() if line.startswith("at ")][-1].removeprefix("at ")


def test_memory_goes_the_parked_way_to_a_gpu_that_the_container_did_not_have(box: Any, shimmed: Any) -> None:
    one = shimmed("/job", 64, 20, name=TRAIN)
    one.goes_on()
    job = jobs(box)[TRAIN]
    assert job["way"] == "parked"
    one.run("touch", "/where")
    one.wait_for("at 0000:01:00.0")
    for to in (1, 0):
        said = says(box, 0, "move", "--container", TRAIN, "--to", to)
        assert (said["way"], len(said["map"])) == ("parked", 1), said
        assert said["bytes"] >= 64 * MIB
        one.goes_on()
        assert nodes(one) == {f"nvidia{to}"}
        assert gpus_of(jobs(box)[TRAIN]) == [to]
        assert told_last(one) == f"0000:0{to + 1}:00.0", "what the shim answers"
    assert says(box, 0, "suspend", "--container", TRAIN)["way"] == "parked"
    assert says(box, 0, "resume", "--container", TRAIN, "--to", 1)["way"] == "parked"
    one.goes_on()
    assert nodes(one) == {"nvidia1"}


def charged(one: Any) -> int:
    """Bytes that count for a container's memory limit."""
    path = next(line.split(":", 2)[2] for line in read(f"/proc/{one.pid}/cgroup") if ":memory:" in line)
    return int(Path(f"/sys/fs/cgroup/memory{path}/memory.usage_in_bytes").read_text())


def own_cgroups_of(pid: int) -> set[str]:
    """The cgroups below the top that a process is in; 0 is the version 2 that a node without it does not show."""
    return {line for line in read(f"/proc/{pid}/cgroup") if not line.endswith(":/") and not line.startswith("0:")}


def limosas(node: Any) -> dict[str, int]:
    """Limosa's own processes in a node: "limosa-vault" → its pid."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink(f"/proc/{node.pid}/ns/mnt"):
                found[read(f"/proc/{pid}/comm")[0]] = pid
    return {name: pid for name, pid in found.items() if name.startswith("limosa-")}


@pytest.mark.parametrize("cgroups", [one for one in cgroup_layouts() if one == "v1"], indirect=True)
def test_what_a_suspended_job_had_on_its_gpu_does_not_count_for_its_container(
    cgroups: str, box: Any, shimmed: Any
) -> None:
    """A software GPU's memory does, until then. Who takes it is in the cgroups of whoever has started limosa."""
    one = shimmed("/job", 64, 20, name=TRAIN)
    one.goes_on()
    assert charged(one) > 64 * MIB
    rule = box.node.switches.add("function=cuCheckpointProcessCheckpoint delay=0.5")
    suspend = box.node.popen([*LIMOSA, "suspend", "--container", TRAIN])
    until(lambda: box.node.switches.count(rule))
    found = limosas(box.node)
    assert set(found) == {"limosa-worker", "limosa-mover", "limosa-vault"}
    for pid in found.values():
        assert own_cgroups_of(pid) == own_cgroups_of(os.getpid())
        assert not own_cgroups_of(pid) & own_cgroups_of(one.pid)
    assert suspend.wait(120) == 0
    assert charged(one) < 32 * MIB
    says(box, 0, "resume", "--container", TRAIN)
    one.goes_on()


SIGHT_INSIDE = f"/lib/{SIGHT.name}"
SEES = "/tmp/sees/0123456789abcdef"


@pytest.fixture
def sighted(box: Any) -> Any:
    """Starts a container in which a job sees GPU 0 alone, as ``limosa run --gpus 0`` does it in there."""

    def start(make: str = f"echo -n 0 > {SEES}", gpus: tuple[int, ...] = (0, 1), **options: Any) -> Any:
        under = f"LD_PRELOAD={SIGHT_INSIDE} LIMOSA_SEES={SEES}"
        words = ["/bin/sh", "-c", f"mkdir -p /tmp/sees; {make}; {under} exec /job 16 20"]
        if box.runtime.name == "podman":
            volume = ["--volume", f"{SIGHT}:{SIGHT_INSIDE}:ro", *options.pop("options", [])]
            return box(*words, name=TRAIN, gpus=gpus, options=volume)
        config = bundle_config(TRAIN, box.runtime.parent, words, gpus)
        mount = {"destination": SIGHT_INSIDE, "type": "bind", "source": str(SIGHT), "options": ["bind", "ro"]}
        return box(*words, name=TRAIN, gpus=gpus, mounts=[*config["mounts"], mount])

    return start


@pytest.mark.parametrize("gpus", [(0, 1), (0,)], ids=["two", "one"])
def test_a_job_that_sees_one_gpu_of_its_container_sees_the_other_after_a_move(
    box: Any, sighted: Any, gpus: tuple[int, ...]
) -> None:
    one = sighted(gpus=gpus)
    one.goes_on()
    for to in (1, 0):
        said = says(box, 0, "move", "--container", TRAIN, "--to", to)
        assert len(said["map"]) == 1, "the map is of the one GPU that it sees"
        assert gpus_of(jobs(box)[TRAIN]) == [to]
        assert one.run("cat", SEES).stdout == str(to)
        assert nodes(one) == ({"nvidia0", "nvidia1"} if len(gpus) == 2 else {f"nvidia{to}"})
        one.goes_on()
    box.node.switches.add("function=cuCheckpointProcessRestore result=UNKNOWN")
    says(box, 21, "move", "--container", TRAIN, "--to", 1)
    assert one.run("cat", SEES).stdout == "0"
    one.goes_on()


NOT_WRITTEN = {
    "link": f"/bin/busybox ln -s /tmp/other {SEES}",
    "fifo": f"/bin/busybox mkfifo {SEES}",
    "words": f"echo secret > {SEES}",
}


@pytest.mark.parametrize("container", ["runc"], indirect=True)
@pytest.mark.parametrize("what", NOT_WRITTEN)
def test_what_a_job_sees_is_not_written_to_something_else(box: Any, sighted: Any, what: str) -> None:
    one = sighted()
    one.goes_on()
    one.run("sh", "-c", f"echo -n 0 > /tmp/other; rm {SEES}; {NOT_WRITTEN[what]}")
    assert says(box, 13, "move", "--container", TRAIN, "--to", 1)["error"]["id"] == "sees-inside"
    assert one.run("cat", "/tmp/other").stdout == "0"
    one.goes_on()


def test_what_was_started_in_the_container_later_goes_along(box: Any) -> None:
    one = box("/job", 16, 20, name=TRAIN)
    one.goes_on()
    process = box.node.popen(
        [*box.runtime.exec_words(one), "/job", 16, 20], stdout=-1, text=True, env=box.runtime.environment()
    )
    assert process.stdout.readline() == "READY\n"
    (job,) = [j for j in says(box, 0, "ps")["jobs"] if j["container"]]
    assert (job["pid"], len([p for p in job["processes"] if p["state"]])) == (one.pid, 2)
    other = next(p["pid"] for p in job["processes"] if p["state"] and p["pid"] != one.pid)
    said = says(box, 13, "move", other, "--to", 1)
    assert said["error"]["id"] == "container-shared", said
    says(box, 0, "move", f"{box.runtime.name}:{TRAIN}", "--to", 1)
    (job,) = [j for j in says(box, 0, "ps")["jobs"] if j["container"]]
    assert gpus_of(job) == [1]
    assert nodes(one) == {"nvidia1"}
    one.goes_on()
    assert "step" in process.stdout.readline()


def test_a_pod_is_not_lied_to_unless_forced(runc: Any, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMOSA_CONTAINER_STATE", str(runc.place / "state"))
    notes = {"io.kubernetes.cri.sandbox-name": "web", "io.kubernetes.cri.sandbox-namespace": "shop"}
    one = runc.start("/job", 16, 20, name=TRAIN, annotations={**notes, "io.kubernetes.cri.container-name": "server"})
    one.goes_on()
    (job,) = runc.node.limosa("ps", "-o", "json").json["jobs"]
    assert job["container"] == {"runtime": "runc", "id": TRAIN, "name": "server", "pod": "web", "namespace": "shop"}
    said = runc.node.limosa("move", "-o", "json", "runc:shop/web/server", "--to", 1, rc=13).json
    assert said["error"]["id"] == "pod-devices"
    runc.node.limosa("move", "runc:web/server", "--to", 1, "--force", "pod-devices")
    one.goes_on()
    assert nodes(one) == {"nvidia1"}


def test_a_container_that_may_hold_less_than_its_job_is_not_suspended(box: Any) -> None:
    if box.runtime.name == "podman":
        one = box("/job", 48, 20, name=TRAIN, options=["--memory", "80m"])
    else:
        config = bundle_config(TRAIN, box.runtime.parent, ["/job", "48", "20"], (0,))
        linux = config["linux"]
        linux["resources"] = {**linux["resources"], "memory": {"limit": 80 * MIB}}
        one = box("/job", 48, 20, name=TRAIN, linux=linux)
    one.goes_on()
    said = says(box, 15, "plan", "suspend", "--container", TRAIN)
    assert [r["id"] for r in said["reasons"] if r["exit_code"]] == ["cgroup"]
    one.goes_on()


# What a container's root may do to the place where the node of the GPU that it is given is to be.
IN_THE_WAY = {
    "file": "echo secret > /dev/nvidia1",
    "link": "ln -s /etc/target /dev/nvidia1",
    "folder": "mkdir /dev/nvidia1",
    "link-to-its-own": "ln -s nvidia0 /dev/nvidia1",
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_a_container_has_put_there_leads_nowhere(runc: Any, runtime: Path, what: str) -> None:
    target = Path("/etc/target")
    assert not target.exists()
    one = runc.start("/job", 16, 20, name=TRAIN)
    one.goes_on()
    one.run("sh", "-c", IN_THE_WAY[what])
    said = runc.node.limosa("move", "-o", "json", one.pid, "--to", 1, rc=None)
    assert said.rc in (0, 21), said
    (job,) = runc.node.limosa("ps", "-o", "json").json["jobs"]
    assert gpus_of(job) == [0 if said.rc else 1]
    assert not target.exists()
    assert (what == "folder") == (said.rc == 21), "a folder stays, and the job where it was"
    one.goes_on()


@pytest.mark.parametrize("cgroups", [one for one in cgroup_layouts() if one == "v1"], indirect=True)
@pytest.mark.parametrize("gpus", [(0,), (0, 1)], ids=["one", "two"])
def test_a_job_on_a_gpu_that_its_container_may_not_open_any_more_is_refused(
    cgroups: str, box: Any, gpus: tuple[int, ...]
) -> None:
    """Nothing is done to it, and nobody is told that it is where it is not. What version 2 denies cannot be seen."""
    one = box("/job", 16, 20, name=TRAIN, gpus=gpus)
    one.goes_on()
    path = next(line.split(":", 2)[2] for line in read(f"/proc/{one.pid}/cgroup") if ":devices:" in line)
    rule = f"c {os.major(numbers(box.node)['nvidia0'])}:0 rwm"

    def change(file: str) -> None:
        Path(f"/sys/fs/cgroup/devices{path}/devices.{file}").write_text(rule)

    change("deny")
    for verb in ("move", "plan move"):
        said = says(box, 13, *verb.split(), "--container", TRAIN, "--to", 1)
        error = said["error"] if verb == "move" else said["reasons"][0]
        text = error["message" if verb == "move" else "text"]
        assert (error["id"], "is on GPU 0 and cannot open it" in text) == ("container-devices", True)
        assert "device cgroup" in error["hint"]
    assert gpus_of(jobs(box)[TRAIN]) == [0]
    one.goes_on()
    change("allow")
    says(box, 0, "move", "--container", TRAIN, "--to", 1)
    assert gpus_of(jobs(box)[TRAIN]) == [1]
    one.goes_on()


def read(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def numbers(node: Any) -> dict[str, int]:
    """The machine's own GPU nodes."""
    return {one: os.stat(f"/proc/{node.pid}/root/dev/{one}").st_rdev for one in ("nvidia0", "nvidia1")}


def test_a_container_whose_dev_is_the_machines_is_not_changed(runc: Any, runtime: Path) -> None:
    """Bound into it, the machine's own nodes would be removed."""
    config = bundle_config(TRAIN, runc.parent, ["/job", "16", "20"], (0,))
    bind = {"destination": "/dev", "type": "bind", "source": "/dev", "options": ["rbind", "rw"]}
    mounts = [bind if m["destination"] == "/dev" else m for m in config["mounts"] if m["destination"][:5] != "/dev/"]
    one = runc.start("/job", 16, 20, name=TRAIN, mounts=mounts)
    one.goes_on()
    said = runc.node.limosa("move", "-o", "json", one.pid, "--to", 1, rc=13).json
    assert said["error"]["id"] == "container-devices"
    assert sorted(runc.node.run(["ls", "/dev"]).stdout.split()).count("nvidia0") == 1
    one.goes_on()

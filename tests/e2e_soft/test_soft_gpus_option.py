"""``limosa run --gpus``: what a job sees, and that it can be moved to a GPU that it does not see."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from e2e_soft.conftest import JOB, Soft

from limosa.process import device_nodes

MIB = 1 << 20


class Started:
    """A job that ``limosa run`` has started in a node."""

    def __init__(
        self, soft: Soft, *options: object, program: tuple[object, ...] = (), env: dict[str, str] | None = None
    ):
        self.soft, self.folder = soft, soft.place / f"run{time.monotonic_ns()}"
        self.folder.mkdir(parents=True)
        self.log = self.folder / "log"
        words = program or (sys.executable, JOB, self.folder, "--mib", 16)
        answer = soft.limosa("run", "-d", "--log", self.log, *options, "--", *words, env=env)
        self.pid = int(answer.stdout.split()[-1])
        soft.reaper.watch(self.pid)

    def ticks(self) -> int:
        return self.log.read_text().count("tick")

    def goes_on(self, n: int = 2, limit: float = 20) -> None:
        wanted, end = self.ticks() + n, time.monotonic() + limit
        while self.ticks() < wanted:
            assert time.monotonic() < end, self.log.read_text()[-2000:]
            time.sleep(0.01)

    def sees(self) -> list[int]:
        """Minor numbers of the GPUs whose nodes are not covered."""
        found = []
        for minor in range(8):
            path = f"/proc/{self.pid}/root{device_nodes.node(minor)}"
            if os.path.exists(path) and os.stat(path).st_rdev != os.stat("/dev/null").st_rdev:
                found.append(minor)
        return found

    def on(self) -> list[int]:
        gpus = self.soft.limosa("gpus", "-o", "json").json["gpus"]
        return [g["index"] for g in gpus if any(p["pid"] == self.pid for p in g["processes"])]


@pytest.fixture
def node(soft: Any) -> Soft:
    three: Soft = soft(gpus=3, memory="512MiB")
    return three


@pytest.mark.parametrize("shim", [True, False])
def test_moved_to_where_it_could_not_look(node: Soft, shim: bool) -> None:
    """There and further and back; what it has left it does not see any more."""
    job = Started(node, "--gpus", 0, *([] if shim else ["--no-shim"]))
    job.goes_on()
    assert (job.sees(), job.on()) == ([0], [0])
    for to in (2, 0):
        said = node.says(0, "", "move", job.pid, "--to", to)
        assert said["way"] == ("parked" if shim else "driver")
        assert len(said["map"]) == 1
        job.goes_on()
        assert (job.sees(), job.on()) == ([to], [to])
    assert device_nodes.node(0) not in Path("/proc/self/mountinfo").read_text()


def test_suspended_and_resumed_elsewhere(node: Soft) -> None:
    job = Started(node, "--gpus", 1)
    job.goes_on()
    node.says(0, "", "suspend", job.pid)
    rule = node.switches.add("function=cuCheckpointProcessRestore result=UNKNOWN")
    assert node.limosa("resume", job.pid, "--to", 2, rc=None).rc == 40
    node.switches.remove(rule)
    assert job.sees() == [1]
    node.says(0, "", "resume", job.pid, "--to", 2)
    job.goes_on()
    assert (job.sees(), job.on()) == ([2], [2])


def test_two_of_three(node: Soft) -> None:
    """What the map does not speak of stays; two can change places."""
    gpus = node.limosa("gpus", "-o", "json").json["gpus"]
    job = Started(node, "--gpus", f"{gpus[0]['uuid']},{gpus[2]['pci_bus_id']}")
    job.goes_on()
    assert (job.sees(), job.on()) == ([0, 2], [0])
    node.says(0, "", "move", job.pid, "--to", 1)
    assert (job.sees(), job.on()) == ([1, 2], [1])
    node.says(0, "", "move", job.pid, "--to", 2)
    assert (job.sees(), job.on()) == ([1, 2], [2])
    job.goes_on()


@pytest.mark.parametrize("rule", ["cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"])
@pytest.mark.parametrize("shim", [True, False])
def test_undone_it_is_and_sees_what_it_did(node: Soft, rule: str, shim: bool) -> None:
    job = Started(node, "--gpus", 0, *([] if shim else ["--no-shim"]))
    job.goes_on()
    name = node.switches.add(f"function={rule} result=UNKNOWN")
    assert node.limosa("move", job.pid, "--to", 1, rc=None).rc == 21
    node.switches.remove(name)
    job.goes_on()
    assert (job.sees(), job.on()) == ([0], [0])
    node.says(0, "", "move", job.pid, "--to", 1)
    assert (job.sees(), job.on()) == ([1], [1])


@pytest.mark.parametrize("moment", [0.2, 0.4])
@pytest.mark.parametrize("verb", ["move", "resume"])
def test_killed_and_recovered(node: Soft, verb: str, moment: float) -> None:
    """Wherever it is then, it sees that GPU alone, and can be moved again."""
    job = Started(node, "--gpus", 0)
    job.goes_on()
    if verb == "resume":
        node.says(0, "", "suspend", job.pid)
    rule = node.switches.add("function=cuCheckpointProcessRestore delay=0.2")
    moving = node.later(verb, job.pid, "--to", 2)
    time.sleep(moment)
    moving.kill()
    moving.communicate(timeout=60)
    node.switches.remove(rule)
    node.limosa("recover", rc=None)
    if node.state(job) == "checkpointed":  # type: ignore[arg-type]
        node.says(0, "", "resume", job.pid)
    job.goes_on()
    assert job.sees() == job.on()
    node.says(0, "", "move", job.pid, "--to", 1)
    assert (job.sees(), job.on()) == ([1], [1])
    job.goes_on()


COUNT = """
import os, time
from cuda.bindings import driver as cu
cu.cuInit(0)
print("devices", int(cu.cuDeviceGetCount()[1]), os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
print("tick", flush=True)
time.sleep(60)
"""


def test_who_may_not_hide_them_lets_the_environment_say_it(node: Soft) -> None:
    """As every user but root, and root in most containers: the driver heeds it, a program may change it."""
    gpus = node.limosa("gpus", "-o", "json").json["gpus"]
    log = node.place / "log"
    words = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", sys.executable, "-m", "limosa"]
    words += ["run", "-d", "--log", str(log), "--gpus", "2,1", "--", sys.executable, "-c", COUNT]
    done = node.run(words)
    node.reaper.watch(int(done.stdout.split()[-1]))
    assert "taken out of CUDA's sight" in done.stderr
    end = time.monotonic() + 10
    while "tick" not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    assert f"devices 2 {gpus[2]['uuid']},{gpus[1]['uuid']}" in log.read_text()


def test_what_it_sees_is_what_cuda_counts(node: Soft) -> None:
    """Whatever the environment said about other GPUs before."""
    job = Started(node, "--gpus", "2", program=(sys.executable, "-c", COUNT), env={"CUDA_VISIBLE_DEVICES": "0"})
    end = time.monotonic() + 10
    while not job.ticks():
        assert time.monotonic() < end, job.log.read_text()
        time.sleep(0.02)
    assert "devices 1 None" in job.log.read_text()


def test_a_gpu_without_a_node_is_hidden_already(node: Soft) -> None:
    """And cannot be moved to: it runs on where it is."""
    job = Started(node, "--gpus", "0")
    node.run(["mv", "/dev/nvidia1", "/dev/elsewhere"])
    job.goes_on()
    other = Started(node, "--gpus", "0,2")
    other.goes_on()
    assert other.sees() == [0, 2]
    assert node.limosa("move", job.pid, "--to", 1, rc=None).rc == 21
    job.goes_on()
    assert (job.sees(), job.on()) == ([0], [0])
    node.run(["mv", "/dev/elsewhere", "/dev/nvidia1"])


@pytest.mark.parametrize(("gpus", "words"), [("7", "'7'"), ("0,0", "twice"), ("0,", "''"), ("GPU-1", "GPU-1")])
def test_names_that_are_none(node: Soft, gpus: str, words: str) -> None:
    said = node.limosa("run", "-d", "--gpus", gpus, "--", "true", rc=None)
    assert said.rc == 125
    assert words in said.stderr


def test_all_of_them_is_nothing_to_hide(node: Soft) -> None:
    job = Started(node, "--gpus", "0,1,2")
    job.goes_on()
    assert os.readlink(f"/proc/{job.pid}/ns/mnt") == os.readlink(f"/proc/{node.pid}/ns/mnt")


def test_it_is_not_written_to_disk(node: Soft, tmp_path: Path) -> None:
    job = Started(node, "--gpus", 0)
    job.goes_on()
    said = node.says(13, "mount-namespace", "checkpoint", job.pid, "--output", tmp_path / "image")
    assert "limosa run --gpus" in said["error"]["message"]
    job.goes_on()


def test_nothing_of_it_is_left_outside() -> None:
    """A namespace of one thread: the process that changes another's keeps its own."""
    with pytest.raises(OSError, match=r"\d|No such"):
        device_nodes.show(2**22 - 3, [0], [1])
    before = os.readlink("/proc/self/ns/mnt")
    assert isinstance(device_nodes.may_hide(), bool)
    assert os.readlink("/proc/self/ns/mnt") == before
    assert subprocess.run(["true"], timeout=5, check=False).returncode == 0

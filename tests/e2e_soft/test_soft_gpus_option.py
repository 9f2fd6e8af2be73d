"""``limosa run --gpus``: what a job sees, and that it can be moved to a GPU that it does not see."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from e2e_soft.conftest import JOB, Soft

from limosa.process import device_nodes
from limosa.process.identity import Identity
from limosa.process.places import own_folder
from limosa.process.records import RunRecord

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

    def goes_on(self, n: int = 2, limit: float = 60) -> None:
        wanted, end = self.ticks() + n, time.monotonic() + limit
        while self.ticks() < wanted:
            assert time.monotonic() < end, self.log.read_text()[-2000:]
            time.sleep(0.01)

    def sees(self) -> list[int]:
        """Minor numbers of the GPUs whose nodes it may open."""
        with open(f"/proc/{self.pid}/environ") as file:
            environ = dict(item.split("=", 1) for item in file.read().split("\0") if "=" in item)
        return sorted(device_nodes.seen(environ["LIMOSA_SEES"]) or [])

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
    told = node.limosa("recover", rc=None).stderr
    if (state := node.state(job)) == "checkpointed":  # type: ignore[arg-type]
        node.says(0, "", "resume", job.pid)
    else:
        assert state == "running", told
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


def said(log: Path, limit: float = 60) -> str:
    """A log, once it has a tick."""
    end = time.monotonic() + limit
    while "tick" not in (text := log.read_text()):
        assert time.monotonic() < end, text
        time.sleep(0.02)
    return text


def test_where_the_library_was_not_built_the_environment_says_it(
    node: Soft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver heeds it; a program may change it."""
    gpus = node.limosa("gpus", "-o", "json").json["gpus"]
    log, program = node.place / "log", tmp_path / "without.py"
    program.write_text(
        "import sys; from pathlib import Path; from limosa.process import device_nodes\n"
        "device_nodes.LIBRARY = Path('/nowhere'); from limosa.__main__ import main; sys.exit(main())\n"
    )
    words = [sys.executable, str(program)]
    words += ["run", "-d", "--log", str(log), "--gpus", "2,1", "--", sys.executable, "-c", COUNT]
    done = node.run(words)
    node.reaper.watch(int(done.stdout.split()[-1]))
    assert "taken out of CUDA's sight" in done.stderr
    assert f"devices 2 {gpus[2]['uuid']},{gpus[1]['uuid']}" in said(log)


def test_what_it_sees_is_what_cuda_counts(node: Soft) -> None:
    """Whatever the environment said about other GPUs before."""
    job = Started(node, "--gpus", "2", program=(sys.executable, "-c", COUNT), env={"CUDA_VISIBLE_DEVICES": "0"})
    assert "devices 1 None" in said(job.log)


def test_a_gpu_without_a_node_is_hidden_already(node: Soft) -> None:
    """NVML leaves it out and numbers the others anew. It cannot be moved to: the job runs on where it is."""
    job = Started(node, "--gpus", "0")
    uuid = node.limosa("gpus", "-o", "json").json["gpus"][1]["uuid"]
    node.run(["mv", "/dev/nvidia1", "/dev/elsewhere"])
    job.goes_on()
    other = Started(node, "--gpus", "1")
    other.goes_on()
    assert other.sees() == [2], "nodes keep their numbers"
    assert node.limosa("move", job.pid, "--to", uuid, rc=None).rc == 2
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
    assert "LIMOSA_SEES" not in Path(f"/proc/{job.pid}/environ").read_text()


FORK = """
import subprocess, sys, time
from pathlib import Path
child = "from cuda.bindings import driver as cu; cu.cuInit(0); print('child', int(cu.cuDeviceGetCount()[1]))"
while True:
    print("tick", flush=True)
    time.sleep(0.05)
    if Path("ask").exists():
        Path("ask").unlink()
        subprocess.run([sys.executable, "-c", child])
"""


def test_what_it_starts_sees_what_it_sees(node: Soft) -> None:
    job = Started(
        node, "--gpus", "1,2", program=(sys.executable, "-c", f"import os; os.chdir({str(node.place)!r})" + FORK)
    )
    job.goes_on()
    (node.place / "ask").touch()
    end = time.monotonic() + 60
    while "child" not in job.log.read_text():
        assert time.monotonic() < end, job.log.read_text()
        time.sleep(0.02)
    assert "child 2" in job.log.read_text()


@pytest.mark.criu
@pytest.mark.parametrize("shim", [True, False])
def test_written_to_disk_and_brought_back_elsewhere(node: Soft, tmp_path: Path, shim: bool) -> None:
    """Also where what it sees is not noted any more, as after a restart of the machine."""
    job = Started(node, "--gpus", 0, *([] if shim else ["--no-shim"]))
    job.goes_on()
    node.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "one", "-R")
    job.goes_on()
    assert job.sees() == [0]
    for n, to in enumerate((2, 1)):
        image = tmp_path / f"image{n}"
        node.says(0, "", "checkpoint", job.pid, "--output", image)
        while os.path.exists(f"/proc/{job.pid}"):
            time.sleep(0.01)
        node.limosa("ps")
        if n:
            shutil.rmtree(sees_folder())
        node.says(0, "", "restore", image, "--to", to)
        node.limosa("ps")
        job.goes_on()
        assert (job.sees(), job.on()) == ([to], [to])
    assert node.says(0, "", "move", job.pid, "--to", 0)["way"] == ("parked" if shim else "driver")
    job.goes_on()
    assert (job.sees(), job.on()) == ([0], [0])


def sees_folder() -> Path:
    return Path(os.environ["LIMOSA_RUNTIME_DIR"]) / str(os.geteuid()) / "sees"


LATE = """
import os, time
from pathlib import Path
from cuda.bindings import driver as cu
while True:
    print("tick", flush=True)
    time.sleep(0.05)
    if Path("ask").exists():
        Path("ask").unlink()
        cu.cuInit(0)
        print("devices", int(cu.cuDeviceGetCount()[1]), flush=True)
"""


@pytest.mark.criu
def test_one_that_has_not_come_to_use_a_gpu_sees_its_own_when_it_is_back(node: Soft, tmp_path: Path) -> None:
    words = f"import os; os.chdir({str(node.place)!r})\n{LATE}"
    job = Started(node, "--gpus", "0,2", program=(sys.executable, "-c", words))
    job.goes_on()
    node.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image")
    while os.path.exists(f"/proc/{job.pid}"):
        time.sleep(0.01)
    node.limosa("ps")
    node.says(0, "", "restore", tmp_path / "image")
    job.goes_on()
    assert job.sees() == [0, 2]
    (node.place / "ask").touch()
    end = time.monotonic() + 60
    while "devices" not in job.log.read_text():
        assert time.monotonic() < end, job.log.read_text()
        time.sleep(0.02)
    assert "devices 2" in job.log.read_text()


def test_a_file_that_cannot_be_written_hides_nothing_and_holds_nothing_up(node: Soft) -> None:
    """What it is for is a shorter pause."""
    job = Started(node, "--gpus", 0)
    job.goes_on()
    (kept,) = sees_folder().iterdir()
    kept.unlink()
    sees_folder().rmdir()
    sees_folder().write_text("in the way")
    node.says(0, "", "move", job.pid, "--to", 1)
    job.goes_on()
    assert job.on() == [1]
    sees_folder().unlink()


def test_nothing_is_left_of_a_job_that_has_ended(node: Soft) -> None:
    job = Started(node, "--gpus", "0", program=("true",))
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{job.pid}"):
        assert time.monotonic() < end
        time.sleep(0.01)
    node.limosa("ps")
    assert list((sees_folder()).iterdir()) == []


@pytest.mark.criu
@pytest.mark.parametrize("gone", [True, False], ids=["moved away", "still there"])
def test_an_image_of_a_job_whose_sight_an_older_version_noted_comes_back_and_sees_all(
    node: Soft, tmp_path: Path, gone: bool
) -> None:
    """Its file was in a folder that every user could make; nothing is written there any more. It sees more, no less."""
    old = Path(os.environ["LIMOSA_RUNTIME_DIR"]) / "1001" / "sees"
    old.mkdir(parents=True)
    (old / "0123456789abcdef").write_text("0")
    env = {"LIMOSA_SEES": str(old / "0123456789abcdef"), "LD_PRELOAD": str(device_nodes.LIBRARY)}
    job = node.job("--mib", 16, env=env)
    own_folder("jobs")
    RunRecord(root=Identity.of(job.pid), name="old", command=["x"], sees=env["LIMOSA_SEES"]).save()
    node.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image")
    job.until_gone()
    if gone:
        shutil.rmtree(old.parent)
    plan = node.says(0, "", "plan", "restore", tmp_path / "image")
    assert "gpus-not-hidden" in [reason["id"] for reason in plan["reasons"]]
    said = node.says(0, "", "restore", tmp_path / "image")
    assert "gpus-not-hidden" in [reason["id"] for reason in said["warnings"]]
    job.goes_on(2)
    assert node.where(job) == [0]
    assert gone or (old / "0123456789abcdef").read_text() == "0"
    if gone:
        node.says(0, "", "move", job.pid, "--to", 1)
        job.goes_on(2)
        assert node.where(job) == [1]
    job.finish()

"""Jobs in other namespaces than the caller's, seen and driven from outside by the machine's pids."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soft_command import UNDER, Held, importer_of
from soft_contained import IN_NAMESPACES, inside_of, open_folder, start
from soft_job import JOB, Job
from soft_node import make_the_folder_of_all
from soft_ranks import Ranks

from limosa.parking import LIBRARY
from limosa.parking.names import names_of
from limosa.parking.shim import Shim, ShimError
from limosa.process.identity import Identity
from limosa.process.namespaces import Pids, is_ours

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

KINDS = ("pid", "mnt", "net", "ipc", "uts")
MIB = 1 << 20
SUBUID = 300_000


def seen(node: Any, pid: int) -> dict[str, Any]:
    """What ``limosa ps`` says of a job."""
    return next(job for job in node.limosa("ps", "-o", "json").json["jobs"] if job["pid"] == pid)


def on(node: Any, pid: int) -> list[int]:
    """The GPUs where a job has more than a context, by ``limosa ps``."""
    return [one["index"] for one in seen(node, pid)["gpus"] if one["memory_used"] >= 8 * MIB]


@pytest.mark.parametrize("user", [0, SUBUID], ids=["root", "user-namespace"])
@pytest.mark.parametrize("env", [{}, UNDER], ids=["driver", "shim"])
def test_every_verb_from_outside(parked: Any, env: dict[str, str], user: int) -> None:
    job = start(parked, "--mib", 16, env=env, user=user)
    assert not any(is_ours(job.pid, kind) for kind in KINDS)
    assert is_ours(job.pid, "user") == (not user)
    found = seen(parked, job.pid)
    assert found["way"] == ("parked" if env else "driver")
    assert found["movable"], found
    assert on(parked, job.pid) == [0]
    assert found["gpus"][0]["memory_used"] >= 16 * MIB
    for to in (1, 0):
        parked.says(0, "", "plan", "move", job.pid, "--to", to)
        said = parked.says(0, "", "move", job.pid, "--to", to)
        assert said["way"] == ("parked" if env else "driver"), str(said)
        assert on(parked, job.pid) == [to]
        job.goes_on(2)
    parked.says(0, "", "suspend", job.pid)
    assert parked.state(job) == "checkpointed"
    assert all(gpu["memory_used"] < 8 * MIB or env for gpu in parked.limosa("gpus", "-o", "json").json["gpus"])
    parked.says(0, "", "resume", job.pid, "--to", 1)
    assert on(parked, job.pid) == [1]
    job.goes_on(2)
    parked.says(0, "", "toggle", job.pid)
    assert parked.state(job) == "checkpointed"
    parked.says(0, "", "toggle", job.pid)
    job.goes_on(2)
    job.finish()


def test_a_user_works_on_his_own_job_in_a_user_namespace(parked: Any) -> None:
    """As with rootless containers: he may enter namespaces of his own, by a process made for that."""
    as_user = ["setpriv", "--reuid", 1001, "--regid", 1001, "--clear-groups"]
    make_the_folder_of_all(parked)
    folder = open_folder(parked)
    inside = ["env", f"LD_PRELOAD={LIBRARY}", sys.executable, str(JOB), str(folder), "--mib", "16"]
    argv = [*as_user, "unshare", "-Unp", "--map-root-user", "--fork", "--kill-child", *inside]
    job = Job(parked, folder, list(map(str, argv)))
    job.pid = inside_of(job.pid, ("pid", "net", "user"))
    job.wait_for("READY")

    def limosa(*arguments: object) -> Any:
        words = [*as_user, sys.executable, "-m", "limosa", arguments[0], "-o", "json", *arguments[1:]]
        return parked.run(words, env={"HOME": "/"}, cwd="/", limit=120).json

    (found,) = [one for one in limosa("ps")["jobs"] if one["pid"] == job.pid]
    assert (found["way"], found["movable"]) == ("parked", True)
    assert limosa("move", job.pid, "--to", 1)["way"] == "parked"
    job.goes_on(2)
    limosa("suspend", job.pid)
    limosa("resume", job.pid)
    assert parked.says(0, "", "move", job.pid, "--to", 0)["way"] == "parked", "by root"
    job.goes_on(2)
    job.finish()


class ContainedRanks(Ranks):
    """Ranks that talk over NCCL, in namespaces of their own; what they call each other are their own pids."""

    def __init__(self, node: Any, *options: object, ranks: int = 2):
        super().__init__(node, *options, ranks=ranks, under=False)
        self.pid = inside_of(self.pid)

    def _argv(self, folder: Path, steps: int, more: list[str]) -> list[str]:
        variables = [f"{name}={value}" for name, value in UNDER.items()]
        network = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        own = super()._argv(folder, steps, more)
        return [sys.executable, str(IN_NAMESPACES), "--", *network, "env", *variables, *own]

    @property
    def pids(self) -> list[int]:
        inner = super().pids
        pids = Pids(self.pid)
        return [pids.here(pid) for pid in inner]


def test_ranks_in_a_container_move_as_one(soft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    node = soft(gpus=4, memory="512MiB")
    job = ContainedRanks(node)
    assert job.gpus() == [[0], [1]]
    node.says(0, "", "move", job.pid, "--map", "0=1,1=0")
    assert job.gpus() == [[1], [0]]
    job.goes_on()
    node.says(0, "", "move", job.pid, "--map", "0=2,1=3")
    assert job.gpus() == [[3], [2]]
    job.goes_on()
    node.says(0, "", "suspend", job.pid)
    node.says(0, "", "resume", job.pid, "--map", "2=0,3=1")
    assert job.gpus() == [[1], [0]]
    job.goes_on()
    assert node.says(13, "", "move", job.pids[0], "--to", 2)["error"]["id"] == "nccl-ranks"
    job.finish()


@pytest.mark.criu
def test_a_job_in_a_time_namespace(parked: Any, tmp_path: Path) -> None:
    folder = open_folder(parked)
    apart = ["unshare", "--time", "--boottime", "100000", "--monotonic", "50000", "--fork", "setsid"]
    job = Job(parked, folder, [*apart, sys.executable, str(JOB), str(folder), "--mib", "16"])
    job.pid = inside_of(job.pid, ("time",))
    job.wait_for("READY")
    parked.says(0, "", "move", job.pid, "--to", 1)
    parked.says(0, "", "suspend", job.pid)
    parked.says(0, "", "resume", job.pid, "--to", 0)
    job.goes_on(2)
    image = tmp_path / "image"
    parked.says(0, "", "checkpoint", job.pid, "--output", image)
    assert parked.says(0, "", "restore", image, "--to", 1)["pid"] == job.pid
    assert not is_ours(job.pid, "time")
    assert on(parked, job.pid) == [1]
    last = (folder / "log").read_text().count("tick")
    end = time.monotonic() + 60
    while (folder / "log").read_text().count("tick") < last + 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    ticks = [line.split() for line in (folder / "log").read_text().splitlines() if line.startswith("tick")]
    clock = [float(words[2]) for words in ticks]
    assert clock == sorted(clock), "its clocks go on from where they were"
    assert clock[-1] > 50_000
    os.kill(job.pid, signal.SIGKILL)


def test_limosa_inside_and_limosa_outside_do_not_work_on_a_job_at_once(parked: Any, tmp_path: Path) -> None:
    """Neither sees the claims of the other."""
    job = start(parked, "--mib", 16)
    inner = Path(f"/proc/{job.pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1]
    inside = ["nsenter", "--target", job.pid, "--pid", "--mount", "--net", "--ipc", "--uts"]
    inside += ["env", f"LIMOSA_RUNTIME_DIR={tmp_path}/inside", sys.executable, "-m", "limosa"]

    def said(process: Any) -> int:
        out, err = process.communicate(timeout=120)
        assert process.returncode in (0, 19), f"{out} {err}"
        return int(process.returncode)

    for first in ("outside", "inside"):
        rule = parked.switches.add("function=cuCheckpointProcessCheckpoint hang")
        words = {"outside": [sys.executable, "-m", "limosa", "suspend", job.pid], "inside": [*inside, "suspend", inner]}
        begun = parked.popen(words.pop(first), stdout=-1, stderr=-1)
        end = time.monotonic() + 60
        while not parked.switches.count(rule):
            assert time.monotonic() < end
            time.sleep(0.01)
        (second,) = words.values()
        assert said(parked.popen(second, stdout=-1, stderr=-1)) == 19
        parked.switches.remove(rule)
        assert said(begun) == 0
        assert parked.state(job) == "checkpointed"
        (resume,) = ([*second[:-2], "resume", second[-1]],)  # the other one, once nobody is at it any more
        assert said(parked.popen(resume, stdout=-1, stderr=-1)) == 0
        job.goes_on(2)
    job.finish()


# Takes what Limosa in the container takes, as whoever it is by then, and keeps it.
HOLDS = """
import fcntl, os, struct, sys, time
ids = [int(word) for word in sys.argv[1:]]
fd = os.open("/proc/self/ns/pid", os.O_RDONLY)
os.setgroups([])
os.setresuid(*ids)
fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_RDLCK, 0, 0, 0, 0))
print("LOCKED", flush=True)
time.sleep(600)
"""
NOBODY = 65534


@pytest.mark.parametrize("user", [0, SUBUID], ids=["root", "user-namespace"])
def test_a_stranger_in_the_namespace_does_not_keep_root_outside_off(parked: Any, user: int) -> None:
    """He opens the file as his own; only a lock of one who may work on the job counts."""
    folder = open_folder(parked)
    ways = ["--user", str(user)] if user else []
    below = ["/bin/sh", "-c", '"$@" & wait', "sh", sys.executable, str(JOB), str(folder), "--mib", "16"]
    job = Job(parked, folder, [sys.executable, str(IN_NAMESPACES), *ways, "--", *below])
    job.wait_for("READY")
    first = inside_of(job.pid)
    job.pid = int(Path(f"/proc/{first}/task/{first}/children").read_text())
    job.goes_on(2)
    ours = [] if user else ["--mount", "--net", "--ipc", "--uts"]
    enter = ["nsenter", "--target", job.pid, "--pid", *ours, sys.executable, "-c", HOLDS]

    def holder(*ids: int) -> Any:
        process = parked.popen([*enter, *ids], stdout=-1, text=True)
        assert process.stdout.readline() == "LOCKED\n"
        return process

    def ended(process: Any) -> None:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.wait(timeout=60)

    # The second one is a set-uid program that a stranger has started and that has inherited the descriptor
    for ids in ((NOBODY,) * 3, (NOBODY, 0, 0)):
        stranger = holder(*ids)
        parked.says(0, "", "move", job.pid, "--to", 1)
        parked.says(0, "", "suspend", job.pid)
        parked.says(0, "", "resume", job.pid, "--to", 0)
        job.goes_on(2)
        for believed in {0, user}:
            other = holder(*(believed,) * 3)
            assert parked.says(19, "", "suspend", job.pid)["error"]["id"] == "busy"
            ended(other)
        ended(stranger)
    parked.says(0, "", "suspend", job.pid)
    parked.says(0, "", "resume", job.pid)
    job.finish()


@pytest.mark.parametrize("step", ["lock done", "checkpoint done", "restore begin"])
def test_what_a_killed_operation_left_is_recovered(slow: Any, step: str) -> None:
    job = start(slow, "--mib", 16, env=UNDER)
    process = slow.later("move", job.pid, "--to", 1, halts=step)
    slow.reaches(process, step)
    slow.kill("limosa", process)
    slow.ends(process)
    end = time.monotonic() + 60
    while slow.limosa("recover", rc=None).rc == 19:  # the worker still undoes it
        assert time.monotonic() < end
        time.sleep(0.1)
    assert slow.state(job) == "running"
    job.goes_on(2)
    slow.says(0, "", "move", job.pid, "--to", 1)
    job.goes_on(2)
    job.finish()


def test_who_shares_memory_is_known_by_the_pids_of_here(parked: Any) -> None:
    """A child of the job has opened its memory by a legacy handle: the shims tell of each other by inner pids."""
    job = start(parked, "--mib", 16, "--export", env=UNDER)
    inner = importer_of(job)
    child = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[0])
    assert inner != child
    with Shim(Identity.of(job.pid)) as shim:
        assert {pid for pids in shim.sharers().values() for pid in pids} == {child}
    with Shim(Identity.of(child)) as shim:
        assert {m.owner for m in shim.memories() if m.share} == {job.pid}
    assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "parked"
    job.goes_on(2)
    job.finish()


# Somebody in the job's namespaces, whose thread is called as the job's shim is: the name leads to the job's socket.
LIAR = """
import mmap, sys, time
from cuda.bindings import driver as cu

library, name = sys.argv[1:]
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
assert not int(cu.cuMemAlloc(4 << 20)[0])
file = open(library, "rb")
mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
open("/proc/thread-self/comm", "w").write(name)
print("READY", flush=True)
time.sleep(600)
"""


def test_nobody_in_the_container_passes_for_another(parked: Any) -> None:
    job = start(parked, "--mib", 16, env=UNDER)
    names = [p.read_text().strip() for p in Path(f"/proc/{job.pid}/task").glob("*/comm")]
    name = next(n for n in names if n.startswith("limosa-"))
    argv = ["nsenter", "-t", job.pid, "-m", "-u", "-i", "-n", "-p", sys.executable, "-c", LIAR, LIBRARY, name]
    outer = parked.popen(argv, stdout=-1, text=True)
    assert outer.stdout.readline() == "READY\n"
    liar = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
    assert [n.address for n in names_of(liar)] == [f"\0limosa/shim/{name.removeprefix('limosa-')}"]
    with pytest.raises(ShimError, match=f"process {job.pid} of user 0 has its name"):
        Shim(Identity.of(liar), patience=0.0)
    for pid in (liar, job.pid):  # all of a pid namespace is one job: who lies there keeps that from being moved
        parked.says(13, "", "suspend", pid)
    assert parked.state(job) == "running"
    os.kill(liar, signal.SIGKILL)
    outer.wait(timeout=60)  # it has reaped it: a first process ends only when nobody is left in its namespace
    parked.says(0, "", "move", job.pid, "--to", 1)
    job.goes_on(2)
    job.finish()  # and with it the first process of their pid namespace


def test_what_is_broken_off_is_undone(parked: Any) -> None:
    job = start(parked, "--mib", 16, env=UNDER)
    held = Held(parked, "cuCheckpointProcessCheckpoint", "move", job.pid, "--to", 1)
    held.interrupt()
    assert parked.ends(held.let_go()).rc == 22
    assert on(parked, job.pid) == [0]
    job.goes_on(2)
    job.finish()


def test_a_record_of_another_pid_namespace_is_not_taken_for_one_of_here(parked: Any) -> None:
    """``limosa run`` in a container that shares the runtime folder: its pids are other processes here, or none."""
    folder = open_folder(parked)
    run = [sys.executable, "-m", "limosa", "run", "--name", "inner", "--log", folder / "out", "--"]
    inside = [*run, sys.executable, JOB, folder, "--mib", "16"]
    job = Job(parked, folder, [sys.executable, str(IN_NAMESPACES), "--", *map(str, inside)])
    job.pid = inside_of(job.pid)
    job.log = folder / "out"
    job.until(job.log.exists, what="a log")
    job.wait_for("READY")

    def noted() -> list[Path]:
        return list(Path(os.environ["LIMOSA_RUNTIME_DIR"]).glob("0/jobs/*.json"))

    (record,) = noted()
    found = parked.limosa("ps", "-o", "json").json["jobs"]
    assert [(one["pid"], one["name"], one["way"]) for one in found] == [(job.pid, "", "parked")]
    parked.says(10, "", "suspend", "inner")
    assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "parked"
    assert noted() == [record], "it is there for who wrote it"
    job.goes_on(2)
    (folder / "stop").touch()

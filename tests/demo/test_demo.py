"""The demo: shows the same bits where they are, says so where they are not, and says what it could not show."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from support import pids, stat_of

from limosa import gpu
from limosa.demo import disturb, node
from limosa.demo.disturb import (
    CHECKPOINT,
    MOVE,
    SUSPEND,
    SWAP,
    SWAPPED,
    Did,
    NotDone,
    Show,
    compare,
    reasons,
    usable_gpus,
)
from limosa.demo.training import Ranks, Stack, Training, find_stack
from limosa.errors import DriverTooOld, LimosaError, NoSuchProcess, NoWorkingCriu, RunFailed

CPU = Stack(sys.executable, "numpy", why="PyTorch is not installed")
CUDA = Stack(sys.executable, "torch", "cuda")
DID = [Did(operation=CHECKPOINT, step=1, seconds=1.0)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """What the demo writes is removed with the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def quiet():
    return Show(tell=lambda _: None, steps=lambda *_: None, progress=lambda _: None)


def commands():
    """The command lines of all processes."""
    for pid in pids():
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def started_with(mark):
    """The command lines of all processes that have it in their environment."""
    for pid in pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"):
                yield Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def processes_of(session):
    return [pid for pid in pids() if (stat := stat_of(pid)) is not None and stat[1] == session and stat[2] != "Z"]


def test_one_bit_in_one_loss_is_a_difference():
    losses = [(0.1 * n).hex() for n in range(10)]
    same = compare(CPU, [], losses, list(losses), did=DID, not_done=[])
    assert same.same_bits
    assert same.exit_code == 0
    bent = list(losses)
    bent[7] = bent[7][:-4] + ("0" if bent[7][-4] != "0" else "1") + bent[7][-3:]
    other = compare(CPU, [], losses, bent, did=DID, not_done=[])
    assert not other.same_bits
    assert other.first_difference == 7
    assert other.exit_code == 1


@pytest.mark.parametrize("found", [[], ["0x1p+0"], ["0x1p+0"] * 3])
def test_missing_and_additional_losses_are_a_difference(found):
    result = compare(CPU, [], ["0x1p+0"] * 2, found, did=DID, not_done=[])
    assert not result.same_bits
    assert result.exit_code == 1


def test_where_nothing_could_be_disturbed_the_exit_code_says_why():
    not_done = [NotDone(operation=MOVE, why="no GPU"), NotDone(operation=CHECKPOINT, why="no CRIU", exit_code=24)]
    result = compare(CPU, [], ["0x1p+0"], ["0x1p+0"], did=[], not_done=not_done)
    assert result.same_bits
    assert result.exit_code == 24


def card(index, name="NVIDIA H200", free=100 << 30, **more):
    total = 140 << 30
    return gpu.Gpu(
        index=index, uuid=f"GPU-{index}", name=name, memory_total=total, memory_used=0, memory_free=free, **more
    )


@pytest.mark.parametrize(
    ("cards", "chosen", "why"),
    [
        ([], [], "no NVIDIA GPU"),
        ([card(0)], [0], "one GPU only"),
        ([card(0), card(1)], [0, 1], ""),
        ([card(0, free=5 << 30), card(1), card(2, free=50 << 30)], [1, 2], ""),
        ([card(0), card(1, free=1 << 30)], [0], "fewer than two"),
        ([card(0), card(1, mig=True)], [0], "fewer than two"),
        ([card(0), card(1, name="NVIDIA L4", free=9 << 30)], [0], "fewer than two"),
        ([card(0, free=0)], [], "one GPU"),
    ],
)
def test_which_gpus_take_part(monkeypatch, cards, chosen, why):
    monkeypatch.setattr(gpu, "inventory", lambda: gpu.Inventory(driver_version="580", cuda_version="13", gpus=cards))
    found, said = usable_gpus()
    assert [g.index for g in found] == chosen
    assert why in said
    assert bool(said) == bool(why)


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    def none():
        raise DriverTooOld(detail="there is no driver")

    monkeypatch.setattr(gpu, "inventory", none)
    assert usable_gpus() == ([], "there is no driver")


def test_what_can_be_shown_and_why_not_the_rest():
    assert reasons(2, "", CUDA) == {}
    assert {n: r.why for n, r in reasons(1, "one GPU only", CUDA).items()} == {MOVE: "one GPU only"}
    assert {n: r.why for n, r in reasons(0, "no GPU", CPU).items()} == {MOVE: "no GPU", SUSPEND: "no GPU"}
    assert set(reasons(2, "", CPU)) == {MOVE, SUSPEND}
    assert reasons(2, "", CPU)[MOVE].why == "PyTorch is not installed"


def test_software_gpus_run_what_has_their_kernels():
    stack = find_stack(2, software=True)
    assert (stack.framework, stack.device) == ("cuda", "cuda")
    assert find_stack(2, True, software=True).framework == "numpy"


@pytest.mark.parametrize(("software", "free", "fit"), [(True, 300 << 20, True), (False, 300 << 20, False)])
def test_a_software_gpu_needs_less_room(monkeypatch, software, free, fit):
    inventory = gpu.Inventory(driver_version="580", cuda_version="13", gpus=[card(0, free=free)], software=software)
    monkeypatch.setattr(gpu, "inventory", lambda: inventory)
    assert bool(usable_gpus()[0]) is fit


def test_without_root_there_is_no_node_and_that_is_said(monkeypatch):
    monkeypatch.delenv(node.WHY, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    why = node.go_on_in_a_node("there is no NVIDIA GPU here", [])
    assert why.startswith("there is no NVIDIA GPU here; ")
    assert "only root can make" in why
    assert "use sudo" in why


def test_a_node_without_a_gpu_does_not_lead_to_another_node(monkeypatch):
    monkeypatch.setenv(node.WHY, "there is no NVIDIA GPU here")
    assert "no GPU on it: the driver is broken" in node.go_on_in_a_node("the driver is broken", [])


def test_what_the_cpu_cannot_show_says_why_there_is_no_node(monkeypatch):
    monkeypatch.setattr(disturb, "_disturb", lambda *_: DID)
    result = disturb.run(quiet(), steps=50, pace=0.0, only_numpy=True, why_no_gpus="no GPU; not root")
    assert {n.why for n in result.not_done if n.operation in (MOVE, SUSPEND)} == {"no GPU; not root"}


def test_numpy_is_taken_where_pytorch_is_not_wanted():
    assert find_stack(0, only_numpy=True).framework == "numpy"


def test_a_bent_bit_in_a_real_run_fails_the_demo(monkeypatch):
    def bend(_name, job, *_):
        path = job.folder / "losses"
        text = path.read_bytes()
        at = text.index(b"p-") - 1  # the last digit of the first loss
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, b"1" if text[at : at + 1] != b"1" else b"2", at)
        os.close(fd)
        return DID

    monkeypatch.setattr(disturb, "_disturb", bend)
    result = disturb.run(quiet(), steps=50, pace=0.0, only_numpy=True)
    assert not result.same_bits
    assert result.first_difference == 0
    assert result.exit_code == 1


def test_a_machine_without_criu_is_told_so_and_ends_with_its_exit_code(monkeypatch):
    def fail(*_, **__):
        raise NoWorkingCriu(detail="none found")

    monkeypatch.setattr(disturb.operation, "checkpoint", fail)
    result = disturb.run(quiet(), steps=50, pace=0.0, only_numpy=True)
    assert result.same_bits
    assert result.exit_code == 24
    assert next(n for n in result.not_done if n.operation == CHECKPOINT).why == "no working CRIU: none found"


def test_a_disturbance_that_fails_is_no_excuse(monkeypatch):
    def fail(*_, **__):
        raise LimosaError(detail="broken")

    monkeypatch.setattr(disturb.operation, "checkpoint", fail)
    with pytest.raises(LimosaError, match="broken"):
        disturb.run(quiet(), steps=50, pace=0.0, only_numpy=True)


@pytest.mark.parametrize("long_enough", [100, 1 << 30])
def test_a_job_that_has_ended_before_its_disturbance_runs_again_with_more_steps(monkeypatch, long_enough):
    def late(_name, job, *_):
        if job.steps >= long_enough:
            return DID
        job.wait_for_end(lambda _: None)
        raise NoSuchProcess(pid=job.root.pid)

    told = []
    show = msgspec.structs.replace(quiet(), tell=told.append)
    monkeypatch.setattr(disturb, "_disturb", late)
    if long_enough > 1000:
        with pytest.raises(LimosaError, match="400 steps, too"):
            disturb.run(show, steps=50, pace=0.0, only_numpy=True)
    else:
        result = disturb.run(show, steps=50, pace=0.0, only_numpy=True)
        assert (result.steps, result.same_bits, result.did) == (100, True, DID)
    assert any("again, with more steps" in line for line in told)
    assert list(Path(tempfile.gettempdir()).glob("limosa-demo-*")) == []


def test_a_job_that_ends_with_steps_to_go_is_a_failure(monkeypatch):
    def gone(_name, job, *_):
        raise NoSuchProcess(pid=job.root.pid)

    monkeypatch.setattr(disturb, "_disturb", gone)
    with pytest.raises(NoSuchProcess):
        disturb.run(quiet(), steps=50, pace=0.2, only_numpy=True)


def test_a_training_that_is_killed_is_noticed_and_nothing_of_it_is_left(tmp_path):
    with Training(tmp_path / "run", CPU, 10_000, 0.01) as job:
        job.wait_for(3, lambda _: None)
        assert len(processes_of(job.root.pid)) == 3
        os.kill(job.root.pid, signal.SIGKILL)
        with pytest.raises(LimosaError, match="has ended"):
            job.wait_for(10_000, lambda _: None)
    assert processes_of(job.root.pid) == []


def is_sleep(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    return False


# Starts a session of sleep, whose leader has a pid that is free (clone3(2), set_tid).
WITH_PID = """
import ctypes, os, struct, sys, time
libc, pid = ctypes.CDLL(None, use_errno=True), ctypes.c_int(int(sys.argv[1]))
arguments = struct.pack("=11Q", 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(pid), 1, 0)
while (made := libc.syscall(435, arguments, len(arguments))) < 0:
    time.sleep(0.01)
if not made:
    os.setsid()
    os.execv("/bin/sleep", ["sleep", "60"])
os.waitpid(made, 0)
"""


@pytest.mark.root
def test_a_strangers_session_that_has_the_number_of_one_of_the_jobs_is_left_alone(tmp_path):
    """It came to be while the job was an image, whose restore fails then: that number is taken."""
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(Training(tmp_path / "run", CPU, 10_000, 0.01))
        job.wait_for(3, lambda _: None)
        for pid in processes_of(job.root.pid):
            os.kill(pid, signal.SIGKILL)
        starter = subprocess.Popen([sys.executable, "-c", WITH_PID, str(job.root.pid)])
        stack.callback(starter.kill)
        end = time.monotonic() + 60
        while not is_sleep(job.root.pid):  # not yet, or the job's own is still ending
            assert time.monotonic() < end
            time.sleep(0.01)
        job.__exit__()
        assert processes_of(job.root.pid) == [job.root.pid]
        os.kill(job.root.pid, signal.SIGKILL)
        starter.wait(60)


def test_the_pause_is_the_longest_gap_in_the_trainings_own_stamps(tmp_path):
    with Training(tmp_path / "run", CPU, 10_000, 0.01) as job:
        job.wait_for(3, lambda _: None)
        before = time.monotonic()
        os.kill(job.root.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(job.root.pid, signal.SIGCONT)
        stopped = time.monotonic() - before
        job.wait_for(len(job.lines()) + 3, lambda _: None)
        assert 0.45 < job.longest_gap(before) < stopped + 2


def test_ctrl_c_ends_the_demo_and_leaves_nothing(limosa, tmp_path):
    process = limosa("demo", "--numpy", wait=False)
    end = time.monotonic() + 120
    while not list(tmp_path.glob("limosa-demo-*/undisturbed/losses")):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 22
    assert list(tmp_path.glob("limosa-demo-*")) == []
    assert not any(str(tmp_path) in command for command in commands())


@pytest.mark.criu
def test_the_demo_as_people_run_it_with_numpy(limosa):
    result = limosa("demo", "--numpy", "--steps", 150, "-o", "json", rc=0)
    shown = result.json
    assert shown["schema"] == 1
    assert shown["same_bits"] is True
    assert shown["steps"] in [150 << n for n in range(4)]  # on a slow machine both run again, with more
    assert shown["last_loss"][0] == shown["last_loss"][1]
    assert [d["operation"] for d in shown["did"]] == [CHECKPOINT]
    assert 0 < shown["did"][0]["pause_seconds"] <= shown["did"][0]["seconds"] + 0.1
    assert {n["operation"] for n in shown["not_done"]} == {MOVE, SUSPEND}


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_as_people_run_it_without_a_gpu(limosa, runtime):
    """All of it on two software GPUs, two ranks there, then PyTorch on the CPU; said clearly, and nothing is left."""
    result = limosa("demo", "--steps", 200, rc=0, limit=550)
    assert "there is no NVIDIA GPU here: this runs on software GPUs" in result.stderr
    soft, ranks = result.stdout.split("two ranks over NCCL (a program on device memory) on 2 × Soft GPU H200")
    ranks, cpu = ranks.split("torch training with two data workers on the CPU")
    assert "a program on device memory on 2 × Soft GPU H200" in soft
    for name in ("move there", "move back", SUSPEND, CHECKPOINT):
        assert name in soft
    for name in (SWAP, SUSPEND, SWAPPED):
        assert name in ranks
    for part in (soft, ranks):
        assert re.search("all (200|400|800|1600) hashes are the same to the bit", part)
    assert CHECKPOINT in cpu
    assert re.search("all (200|400|800|1600) losses are the same to the bit", cpu)
    assert "These were software GPUs, not real ones" in cpu
    assert not Path("/dev/nvidia-soft").exists()
    assert list(started_with(f"LIMOSA_RUNTIME_DIR={runtime}")) == []  # mover, vault and worker would keep the node


@pytest.mark.criu
@pytest.mark.timeout(600)
def test_the_demo_in_a_node_that_somebody_has_started(limosa):
    """One GPU: it cannot move."""
    given = ["--gpus", 1, "--memory", "512MiB", "--", sys.executable, "-m", "limosa", "demo"]
    shown = limosa("softgpu", *given, "--steps", 200, "-o", "json", rc=0, limit=550).json
    assert (shown["framework"], shown["device"], shown["gpus"]) == ("cuda", "cuda", ["Soft GPU H200"])
    assert shown["software"]
    assert [d["operation"] for d in shown["did"]] == [SUSPEND, CHECKPOINT]
    assert [n["operation"] for n in shown["not_done"]] == [MOVE]
    assert shown["same_bits"] is shown["cpu"]["same_bits"] is True
    assert shown["last_loss"][0] == shown["last_loss"][1]
    assert [d["operation"] for d in shown["cpu"]["did"]] == [CHECKPOINT]


def test_the_ranks_are_started_without_nvls(tmp_path, monkeypatch):
    """The driver cannot checkpoint its multicast memory."""
    given = []

    def run(*_, env, **__):
        given.append(env)
        raise RunFailed(detail="seen")

    monkeypatch.setattr("limosa.job.run", run)
    with pytest.raises(RunFailed, match="seen"):
        Ranks(tmp_path / "run", CUDA, 1, 0.0)
    assert given[0]["NCCL_NVLS_ENABLE"] == "0"


def test_what_the_demo_lacks_is_looked_for_before_anything_is_run(monkeypatch):
    """Without NumPy and PyTorch the part on the GPUs is shown, and what is left out is said first."""
    from limosa.demo import training

    told = []
    monkeypatch.setattr(training, "_answers", lambda *_: False)
    monkeypatch.setattr(disturb, "usable_gpus", lambda: ([object(), object()], ""))
    monkeypatch.setattr(disturb.gpu, "inventory", lambda: type("Soft", (), {"software": True}))
    twice = disturb.compare(CUDA, [], ["0x1"], ["0x1"], did=DID, not_done=[])
    monkeypatch.setattr(disturb, "_twice", lambda *_, **__: told.append("runs") or twice)
    show = Show(tell=told.append, steps=lambda *_: None, progress=lambda _: None)
    result = disturb.run(show)
    (at,) = (n for n, line in enumerate(told) if "pip install numpy" in line)
    assert at < told.index("runs")
    assert told.count("runs") == 2  # and two ranks
    assert result.cpu is None
    monkeypatch.setattr(disturb, "usable_gpus", lambda: ([], "none"))
    with pytest.raises(LimosaError, match="NumPy or PyTorch"):
        disturb.run(show)

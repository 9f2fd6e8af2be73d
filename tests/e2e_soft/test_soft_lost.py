"""What cannot be brought back, and what must not be made of it: poisoned jobs, lost GPUs, a driver that lies."""

from __future__ import annotations

from typing import Any

from soft_command import Held

MIB = 1 << 20


def test_a_job_that_the_driver_has_lost_is_told_as_such(node: Any) -> None:
    """NVML says there is room and there is none: the driver's restore poisons the job (and Limosa cannot know)."""
    job = node.job("--mib", 64)
    node.limosa("suspend", job.pid)
    lie = node.switches.add(f"function=nvmlDeviceGetMemoryInfo* every=1 lie=free:{200 * MIB}")
    with node.switches.fill(0, leave=16 * MIB):
        said = node.says(40, "undo-failed", "resume", job.pid)
        assert said["error"]["job_state"] == "checkpointed"
        assert f"limosa resume {job.pid}" in said["error"]["hint"]
    node.switches.remove(lie)
    assert "CUDA_ERROR_OPERATING_SYSTEM" in node.says(40, "undo-failed", "resume", job.pid)["error"]["message"]
    node.limosa("recover")  # nothing that it could do, and nothing that it makes worse
    assert job.alive()
    assert node.state(job) == "checkpointed"


def test_where_the_room_is_not_there_restore_is_never_called(node: Any) -> None:
    job = node.job("--mib", 64)
    node.limosa("suspend", job.pid)
    calls = node.switches.add("function=cuCheckpointProcessRestore delay=0")
    with node.switches.fill(0, leave=16 * MIB):
        node.says(14, "gpu-room", "resume", job.pid)
    assert node.switches.count(calls) == 0
    node.limosa("resume", job.pid)
    assert node.switches.count(calls) == 1
    job.goes_on()
    job.finish()


def test_a_gpu_that_falls_off_the_bus_in_the_middle(node: Any) -> None:
    """The destination goes while the job is under way: it is back where it was."""
    job = node.job("--mib", 16)
    node.switches.add("function=step:checkpoint-released lost=1")
    answer = node.limosa("move", job.pid, "--to", 1, "-o", "json", rc=None)
    assert answer.rc in (12, 21, 40, 41), answer
    if answer.rc > 39:
        node.switches.lose(1, lost=False)
        node.limosa("recover" if answer.rc == 40 else "resume", *([] if answer.rc == 40 else [job.pid]))
    assert node.where(job) == [0]
    job.goes_on()
    job.finish()


def test_a_gpu_that_falls_off_the_bus_before_the_job_has_left(node: Any) -> None:
    """The destination goes while the job is locked: it is told so, and the job never stood aside."""
    job = node.job("--mib", 16)
    node.switches.add("function=cuCheckpointProcessLock lost=1")
    said = node.says(14, "no-room-on-gpu", "move", job.pid, "--to", 1)
    assert "does not answer any more" in said["error"]["message"]
    assert said["error"]["job_state"] == "running"
    assert node.where(job) == [0]
    job.goes_on()
    job.finish()


def test_a_lock_that_the_driver_never_takes(node: Any) -> None:
    """A driver that hangs is given up on; when it comes back the job is led back to running."""
    job = node.job()
    held = Held(node, "cuCheckpointProcessCheckpoint", "suspend", job.pid)
    node.says(19, "busy", "suspend", job.pid)
    assert node.ends(held.let_go()).rc == 0
    node.limosa("resume", job.pid)
    job.goes_on()
    job.finish()


def test_nvml_that_hangs_is_given_up_on(node: Any) -> None:
    """Nothing was touched, and the same command works when NVML answers again."""
    job = node.job("--mib", 16)
    rule = node.switches.add("function=nvml* every=1 hang")
    impatient = (
        "import sys, limosa.gpu.nvml as nvml; nvml.INVENTORY_LIMIT = 0.5\n"
        "from limosa.cli.main import entry; sys.argv[0] = 'limosa'; entry()"
    )
    for verb in (["gpus"], ["suspend", job.pid], ["move", job.pid, "--to", 1]):
        answer = node.python(impatient, *verb, "-o", "json", rc=12, limit=20)
        assert answer.json["error"]["message"] == "NVML has not answered for 0.5 s"
    node.switches.remove(rule)
    job.goes_on()
    node.limosa("suspend", job.pid)
    node.limosa("resume", job.pid)
    job.goes_on()
    job.finish()

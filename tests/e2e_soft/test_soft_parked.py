"""Jobs under the shim, moved with their memory held aside: real processes and driver calls, on software GPUs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from soft_command import importer_of, named, pieces, start, used
from support import end_marked

from limosa.parking.shim import Shim
from limosa.process.identity import Identity

MIB = 1 << 20


def test_there_and_back_with_the_same_memory(parked: Any) -> None:
    job = start(parked, "--mib", 64)
    assert [m.bytes >= 64 * MIB for m in pieces(job) if m.plain] == [True]
    for to in (1, 0, 1):
        said = parked.says(0, "", "move", job.pid, "--to", to)
        assert said["way"] == "parked"
        assert said["bytes"] >= 64 * MIB
        job.goes_on(2)
        assert all(m.imported and not m.away for m in pieces(job))
        on = used(parked)
        assert on[1 - to] < 32 * MIB, "the source was let go of"
        assert on[to] > 64 * MIB
    assert len(named(parked, "limosa-mover")) == 1, "one, for all of them"
    job.finish()


def test_a_runtime_folder_with_a_name_longer_than_a_sockets(
    parked: Any, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes 107 bytes: the mover could not listen there, and the job went the driver's way."""
    long = runtime / ("x" * 110)
    long.parent.mkdir(exist_ok=True)
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(long))
    try:
        job = start(parked, "--mib", 16)
        assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "parked"
        parked.says(0, "", "suspend", job.pid)
        parked.says(0, "", "resume", job.pid)
        job.goes_on(2)
        job.finish()
    finally:
        end_marked(f"LIMOSA_RUNTIME_DIR={long}")


def test_a_job_that_sees_one_gpu_makes_its_memory_there_itself(parked: Any) -> None:
    """It can import no memory of a GPU that it did not see when it began."""
    job = start(parked, "--mib", 64, CUDA_VISIBLE_DEVICES="0")
    for to in (1, 0, 1):
        said = parked.says(0, "", "move", job.pid, "--to", to)
        assert said["way"] == "parked"
        job.goes_on(2)
        assert [m.imported for m in pieces(job) if m.plain] == [to == 0]
    with parked.switches.fill(0, leave=32 * MIB):
        parked.says(14, "gpu-room", "move", job.pid, "--to", 0)
    parked.switches.add("function=cuMemCreate caller=job.py every=1 result=OUT_OF_MEMORY")
    parked.says(0, "", "move", job.pid, "--to", 0)  # there it imports
    parked.says(21, "", "move", job.pid, "--to", 1)
    job.goes_on(2)
    on = used(parked)
    assert on[0] > 64 * MIB > on[1]
    job.finish()


@pytest.mark.parametrize("room", ["for both", "for one", "for both, and then not"])
def test_what_it_makes_itself_was_there_before_it(parked: Any, room: str) -> None:
    """The GPU has it twice for a moment; where it has not the room, or has no more, contents come afterwards."""
    job = start(parked, "--mib", 64, CUDA_VISIBLE_DEVICES="0")
    rule = parked.switches.add("function=cuMemcpyDtoDAsync caller=limosa-mover every=1 delay=0")
    with parked.switches.fill(1, leave=144 * MIB) if room == "for one" else contextlib.nullcontext():
        if room.endswith("not"):
            parked.switches.add("function=cuMemCreate caller=job.py nth=1 result=OUT_OF_MEMORY")
        assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "parked"
    copied = parked.switches.count(rule)
    assert (copied > 1) is (room != "for one"), copied
    job.goes_on(2)
    assert used(parked)[0] < 32 * MIB
    job.finish()


def test_jobs_that_change_places(parked: Any) -> None:
    """There is room for both copies of both: neither goes through host memory."""
    one, other = start(parked, "--mib", 64), start(parked, "--mib", 96, "--gpu", 1)
    alone = parked.limosa("move", one.pid, "--to", 1, "-o", "json").json["results"][0]["bytes"]
    parked.limosa("move", one.pid, "--to", 0)
    for _ in range(2):
        answer = parked.limosa("move", one.pid, other.pid, "--swap", "-o", "json").json
        assert [said["way"] for said in answer["results"]] == ["parked", "parked"], answer
        assert [said["bytes"] for said in answer["results"]] == [alone, alone + 32 * MIB], "each its own"
        one.goes_on(2)
        other.goes_on(2)
    one.finish()
    other.finish()


def test_jax_waits_at_the_gate_whoever_carries_its_memory(parked: Any) -> None:
    """It asks the driver about its work all the time, which ends a checkpointed process."""
    jax, other = start(parked, "--mib", 280, "--jax"), start(parked, "--mib", 280, "--gpu", 1)
    for _ in range(2):  # there is no room for both copies
        answer = parked.limosa("move", jax.pid, other.pid, "--swap", "-o", "json").json
        assert [said["way"] for said in answer["results"]] == ["driver", "driver"], answer
    other.kill()
    fault = parked.switches.add("function=cuMemCreate caller=limosa-mover result=UNKNOWN every=1")
    assert parked.says(0, "", "move", jax.pid, "--to", 1)["way"] == "driver"
    parked.switches.remove(fault)
    assert parked.says(0, "", "move", jax.pid, "--to", 0)["way"] == "parked"
    assert parked.says(0, "", "suspend", jax.pid)["way"] == "parked"
    assert parked.says(0, "", "resume", jax.pid)["way"] == "parked"
    jax.goes_on(2)
    jax.finish()


def test_who_has_used_multicast_is_refused_where_the_driver_would_checkpoint_it(parked: Any) -> None:
    job = start(parked, "--multicast")
    for words in (["move", job.pid, "--to", 1], ["checkpoint", job.pid, "--output", parked.place / "image"]):
        parked.says(13, "multicast", *words)
    parked.says(0, "", "suspend", job.pid, "--release", "memory-only")
    parked.says(0, "", "resume", job.pid)
    assert parked.says(0, "", "move", job.pid, "--to", 1, "--force=multicast")["way"] == "parked"
    job.goes_on(2)
    job.finish()


def test_jax_without_the_shim_is_refused_while_it_runs(parked: Any) -> None:
    job = parked.job("--jax")
    for words in (["move", job.pid, "--to", 1], ["suspend", job.pid], ["checkpoint", job.pid, "--output", "/tmp/x"]):
        parked.says(13, "jax", *words)
    parked.says(0, "", "move", job.pid, "--to", 1, "--force=jax")
    parked.says(0, "", "suspend", job.pid, "--force=jax")
    parked.says(13, "jax", "checkpoint", job.pid, "--output", "/tmp/x")
    parked.says(0, "", "move", job.pid, "--to", 0)  # a resume there
    job.goes_on(2)
    job.finish()


def test_what_came_by_the_parked_way_is_counted_beside_a_larger_context(soft: Any) -> None:
    """Else a move would begin that has no room, and the driver loses a process that it cannot restore."""
    node = soft(memory="1GiB", rates={"context_bytes": 200 << 20})
    job = start(node, "--mib", 100)
    before = held(node, job)
    for to in (1, 0):
        assert node.says(0, "", "move", job.pid, "--to", to)["way"] == "parked"
        assert held(node, job) == before
    other = node.job("--mib", 350, "--gpu", 1)
    node.says(14, "gpu-room", "move", job.pid, "--to", 1)  # 274 MiB are left there, and a job of 300 is to come
    other.finish()
    job.goes_on(2)
    job.finish()


def held(node: Any, job: Any) -> int:
    (found,) = [one for one in node.limosa("ps", "-o", "json").json["jobs"] if one["pid"] == job.pid]
    return sum(gpu["memory_used"] for gpu in found["gpus"])


def test_what_the_driver_would_have_cost_is_told_as_planned(soft: Any) -> None:
    node = soft(memory="3GiB")
    job = start(node, "--mib", 800)
    planned = node.limosa("plan", "move", job.pid, "--to", 1, "-o", "json").json
    assert planned["other"]["pause_seconds"] > planned["estimate"]["pause_seconds"] + 0.1
    assert node.says(0, "", "move", job.pid, "--to", 1)["other"] == planned["other"]
    job.finish()


def test_jobs_that_change_places_on_full_gpus(parked: Any) -> None:
    """Both copies have no room at once: the driver carries them where it can, and where not it is said before."""
    one, other = start(parked, "--mib", 280), start(parked, "--mib", 280, "--gpu", 1)
    plan = parked.limosa("plan", "move", one.pid, other.pid, "--swap", "-o", "json").stdout
    assert '"driver-way"' in plan
    assert '"way": "parked"' not in plan
    answer = parked.limosa("move", one.pid, other.pid, "--swap", "-o", "json").json
    assert [said["way"] for said in answer["results"]] == ["driver", "driver"]
    one.goes_on(2)
    other.goes_on(2)
    other.finish()
    parked.limosa("move", one.pid, "--to", 0)  # it came by the parked way from now on
    other = start(parked, "--mib", 280, "--gpu", 1)
    assert all(m.imported for m in pieces(one) if m.plain)
    parked.limosa("move", one.pid, other.pid, "--swap", rc=14)
    one.goes_on(2)
    other.goes_on(2)
    one.finish()
    other.finish()


def test_without_the_shim_the_driver_carries_it(parked: Any) -> None:
    job = parked.job("--mib", 16)
    assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "driver"
    job.goes_on(2)
    job.finish()


def test_a_job_of_two_processes(parked: Any) -> None:
    job = start(parked, "--mib", 16, "--child")
    assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "parked"
    job.goes_on(3)
    job.finish()


def test_memory_that_two_processes_share(parked: Any) -> None:
    """Legacy IPC, with an event beside it: there once after a move, too, and the same in both."""
    job = start(parked, "--mib", 32, "--export")
    child = importer_of(job)
    for to in (1, 0, 1):
        said = parked.says(0, "", "move", job.pid, "--to", to)
        assert said["way"] == "parked"
        assert 64 * MIB <= said["bytes"] < 96 * MIB, "what is shared is there once"
        job.goes_on(3)
        on = used(parked)
        assert on[1 - to] < 32 * MIB, "the source was let go of"
        assert on[to] < 112 * MIB, "what is shared is there once"
    with Shim(Identity.of(child)) as shim:
        (theirs,) = [m for m in shim.memories() if m.owner]
    (ours,) = [m for m in pieces(job) if m.share]
    assert (theirs.share, theirs.owner, theirs.imported) == (ours.share, job.pid, True)
    time.sleep(0.5)
    job.finish()


def test_memory_that_is_shared_with_somebody_outside(parked: Any) -> None:
    """Moved without the other, each would have a memory of its own."""
    job = start(parked, "--mib", 16, "--export")
    child = importer_of(job)
    parked.says(13, "shared-memory", "move", child, "--to", 1)
    parked.says(13, "shared-memory", "suspend", child)
    parked.says(13, "shared-memory", "checkpoint", child, "--output", parked.place / "image")
    job.goes_on(2)
    os.kill(child, signal.SIGKILL)
    parked.says(0, "", "move", job.pid, "--to", 1)
    job.goes_on(2)
    job.kill()


@pytest.mark.parametrize("release", ["all", "memory-only"])
def test_shared_memory_stays_shared_when_it_was_aside(parked: Any, release: str) -> None:
    """Each process has a copy of its own in host memory meanwhile; what comes back is one."""
    job = start(parked, "--mib", 24, "--export")
    importer_of(job)
    for to in (1, 0) if release == "all" else (None,):
        assert parked.says(0, "", "suspend", job.pid, "--release", release)["way"] == "parked"
        assert parked.says(0, "", "resume", job.pid, *(["--to", to] if to is not None else []))["way"] == "parked"
        job.goes_on(3)
        on = used(parked)
        assert max(on) < 96 * MIB, "what is shared is there once"
    time.sleep(0.5)
    parked.says(0, "", "move", job.pid, "--to", 1)
    job.goes_on(3)
    job.finish()


def test_shared_memory_stays_shared_where_a_move_fails(parked: Any) -> None:
    job = start(parked, "--mib", 16, "--export")
    child = importer_of(job)
    rule = parked.switches.add(f"function=cuMemImportFromShareableHandle nth=1 caller={child} result=999")
    assert parked.limosa("move", job.pid, "--to", 1, rc=None).rc == 21
    parked.switches.remove(rule)
    job.goes_on(3)
    parked.says(0, "", "move", job.pid, "--to", 1)
    job.goes_on(3)
    time.sleep(0.5)
    job.finish()


def test_suspended_and_resumed_here_and_elsewhere(parked: Any) -> None:
    job = start(parked, "--mib", 48)
    for to in ([], ["--to", 1], [], ["--to", 0]):
        assert parked.says(0, "", "suspend", job.pid)["way"] == "parked"
        assert all(m.away for m in pieces(job))
        on = used(parked)
        assert max(on) < 16 * MIB
        assert parked.state(job) == "checkpointed"
        assert parked.says(0, "", "resume", job.pid, *to)["way"] == "parked"
        job.goes_on(2)
    job.finish()


@pytest.mark.criu
def test_a_suspended_job_is_written_to_disk_and_comes_back(parked: Any, tmp_path: Path) -> None:
    """Its arena is its own memory file: CRIU writes it, and the job that comes back has it."""
    job = start(parked, "--mib", 32)
    parked.limosa("suspend", job.pid)
    parked.limosa("checkpoint", job.pid, "--output", tmp_path / "image")
    job.until_gone()
    end = time.monotonic() + 60
    while named(parked, "limosa-vault") and time.monotonic() < end:
        time.sleep(0.1)
    assert not named(parked, "limosa-vault"), "nobody comes back for what it held"
    parked.limosa("restore", tmp_path / "image", "--to", 1)
    job.goes_on(2)
    assert parked.says(0, "", "move", job.pid, "--to", 0)["way"] == "parked"
    job.goes_on(2)
    job.finish()


def test_a_suspended_job_survives_the_vault(parked: Any) -> None:
    job = start(parked, "--mib", 32)
    parked.limosa("suspend", job.pid)
    parked.kill("limosa-vault")
    parked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_job_whose_gpu_does_not_come_to_rest_is_refused(parked: Any) -> None:
    """A kernel that does not end: the gate is opened again, nothing was touched."""
    job = start(parked, "--mib", 16, "--spin")
    for verb in (["move", job.pid, "--to", 1], ["suspend", job.pid]):
        said = parked.says(18, "gate", *verb)
        assert said["error"]["job_state"] == "running"
        (there,) = [m for m in pieces(job) if m.plain]
        assert not there.away
    said = parked.says(18, "", "move", job.pid, "--to", 1, "--timeout", 1)
    told = re.search(r"(?:within|longer than) ([0-9.]+) s", said["error"]["message"])
    assert told, said
    assert float(told[1]) <= 1, "the limit is the user's"
    assert parked.state(job) == "running"
    job.kill()


def test_a_swap_that_is_refused_says_why_once(node: Any) -> None:
    jobs = [node.job("--mib", 16), node.job("--mib", 16)]
    answer = node.limosa("move", *[job.pid for job in jobs], "--swap", rc=2)
    assert answer.stderr.count("--swap needs two jobs") == 1, answer
    assert f"jobs {jobs[0].pid} and {jobs[1].pid}: " in answer.stderr
    for job in jobs:
        job.kill()


def test_a_swap_that_is_refused_says_of_each_job_what_it_is(parked: Any) -> None:
    asleep, awake = start(parked, "--mib", 16), start(parked, "--mib", 16, "--gpu", 1)
    parked.limosa("suspend", asleep.pid)
    said = parked.says(13, "", "move", asleep.pid, awake.pid, "--swap")
    assert [one["error"]["job_state"] for one in said["results"]] == ["checkpointed", "running"]
    awake.goes_on(2)
    for job in (asleep, awake):
        job.kill()


def test_a_destination_without_room_is_refused(parked: Any) -> None:
    job = start(parked, "--mib", 64)
    with parked.switches.fill(1, leave=32 * MIB):
        parked.says(14, "gpu-room", "move", job.pid, "--to", 1)
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize(
    "rule",
    [
        "function=cuMemCreate caller=limosa-mover result=OUT_OF_MEMORY",
        "function=cuMemImportFromShareableHandle caller=limosa-mover result=INVALID_VALUE",
        "function=cuMemcpyDtoDAsync caller=limosa-mover result=UNKNOWN",
        "function=cuMemcpyDtoDAsync caller=limosa-mover crash=caller",
        "function=cuCheckpointProcessCheckpoint result=UNKNOWN",
        "function=cuCheckpointProcessRestore result=UNKNOWN",
        "function=cuMemUnmap caller=job.py result=UNKNOWN",
        "function=cuMemImportFromShareableHandle caller=job.py result=UNKNOWN",
        "function=cuMemMap caller=job.py result=UNKNOWN",
        "function=cuMemSetAccess caller=job.py result=UNKNOWN",
        "function=cuCtxSynchronize caller=job.py result=UNKNOWN",
    ],
)
def test_whatever_fails_once_the_job_runs_on_with_its_memory(parked: Any, rule: str) -> None:
    job = start(parked, "--mib", 32)
    parked.switches.add(rule)
    answer = parked.limosa("move", job.pid, "--to", 1, "-o", "json", rc=None)
    assert answer.rc in (0, 14, 21), answer
    there = answer.rc == 0
    job.goes_on(2)
    on = used(parked)
    assert on[int(there)] > 32 * MIB > on[int(not there)]
    assert parked.says(0, "", "move", job.pid, "--to", int(not there))["way"] == "parked"
    job.goes_on(2)
    job.finish()


def test_what_one_process_has_there_already_it_leaves_where_the_other_cannot_come(parked: Any) -> None:
    """Left mapped, it would go on with half of the job's memory on the other GPU."""
    job = start(parked, "--mib", 32, "--child")
    n = len(pieces(job)) + 1
    parked.switches.add(f"function=cuMemMap caller=job.py nth={n} result=UNKNOWN")
    parked.limosa("move", job.pid, "--to", 1, rc=21)
    job.goes_on(2)
    on = used(parked)
    assert on[0] > 64 * MIB
    assert on[1] < 32 * MIB
    job.finish()


@pytest.mark.parametrize("also", [[], ["--child"]], ids=["one", "two"])
def test_what_is_done_to_two_processes_is_done_at_once(soft: Any, monkeypatch: pytest.MonkeyPatch, also: Any) -> None:
    """Gates, the driver's checkpoints and restores, copies: each takes 1 s, of one process and of two."""
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    node = soft(gpus=2, memory="512MiB", costs=["checkpoint=1", "restore=1"], speeds=["peer=48MiB/s"])
    job = start(node, "--mib", 48, *also)
    rule = node.switches.add("function=cuCtxSynchronize caller=job.py delay=1 every=1")
    quickest = dict.fromkeys(("gate", "checkpoint", "restore", "copy"), 1e9)
    to = 0
    for _ in range(8):  # who is held up only takes longer
        to = 1 - to
        said = node.says(0, "", "move", job.pid, "--to", to)
        assert said["way"] == "parked"
        assert said["bytes"] == (1 + len(also)) * 48 * MIB
        took = {step: said["timings"][step] for step in quickest}
        assert min(took.values()) >= 0.99, took
        quickest = {step: min(took[step], quickest[step]) for step in quickest}
        if max(quickest.values()) < 1.8:
            break
    node.switches.remove(rule)
    assert max(quickest.values()) < 1.8, quickest
    assert node.where(job) == [to]
    job.goes_on(2)
    job.finish()


MOMENTS = {
    "move": ("park begin", "lock done", "checkpoint begin", "checkpoint done", "restore done", "map begin"),
    "suspend": ("park begin", "lock begin", "lock done", "checkpoint begin", "checkpoint done"),
    "resume": ("restore begin", "restore done", "unlock begin", "map begin"),
}


WHO = ("limosa", "limosa-mover", "limosa-vault")


@pytest.mark.timeout(600)
@pytest.mark.whole
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("verb", list(MOMENTS))
def test_whoever_is_killed_the_job_comes_back(slow: Any, who: str, verb: str) -> None:
    """SIGKILL when a step has been journalled, then one recover. One job goes through all.

    Every moment has somebody killed in it; ``make test-long`` has everybody killed in every one, as the campaign has.
    """
    job, here = start(slow, "--mib", 96), 0
    first, every = (0, 1) if "LIMOSA_LONG_TESTS" in os.environ else (WHO.index(who), len(WHO))
    for moment in MOMENTS[verb][first::every]:
        if verb == "resume":
            slow.limosa("suspend", job.pid)
        moving = slow.later(verb, job.pid, *(["--to", 1 - here] if verb == "move" else []), halts=moment)
        slow.reaches(moving, moment)
        slow.kill(who, moving)
        moving.communicate(timeout=120)
        assert (moving.returncode == -signal.SIGKILL) is (who == "limosa"), moment
        slow.limosa("recover", rc=None)
        if slow.state(job) == "checkpointed":
            assert verb in ("suspend", "resume"), moment
            slow.limosa("resume", job.pid)
        job.goes_on(3)
        on = [size > 64 * MIB for size in used(slow)]
        assert sorted(on) == [False, True], moment
        here = int(on[0])
        assert slow.says(0, "", "move", job.pid, "--to", here)["way"] == "parked", moment
        job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("moment", ["lock done", "checkpoint done", "restore done"])
def test_whoever_shares_goes_on_sharing_where_limosa_is_killed(slow: Any, moment: str) -> None:
    parked = slow
    job = start(parked, "--mib", 48, "--export")
    importer_of(job)
    moving = parked.later("move", job.pid, "--to", 1, halts=moment)
    parked.reaches(moving, moment)
    parked.kill("limosa", moving)
    moving.communicate(timeout=120)
    assert moving.returncode == -signal.SIGKILL
    parked.limosa("recover", rc=None)
    job.goes_on(3)
    for to in (0, 1):
        parked.says(0, "", "move", job.pid, "--to", to)
        job.goes_on(3)
    job.finish()

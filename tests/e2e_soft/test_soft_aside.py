"""Jobs under the shim put aside into the arena: reused, refused, given back, and with everybody killed on the way."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from soft_command import Held, importer_of, kill, named, start, used, waits_for

from limosa.errors import FailedUndone
from limosa.operation.journal import Member
from limosa.operation.parked.gates import any_shut, refuse_shut
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

MIB = 1 << 20
ONLY = "--release=memory-only"


def arena(node: Any, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = node.limosa("arena", "-o", "json", *arguments).json
    return found


def stand(job: Any) -> Stand:
    with Shim(Identity.of(job.pid)) as shim:
        return shim.hello().stand


def test_the_memory_alone_is_given_back_and_the_context_stays(parked: Any) -> None:
    job = start(parked, "--mib", 96)
    before = used(parked)[0]
    plan = parked.says(0, "", "plan", "suspend", job.pid, ONLY)
    assert (plan["verdict"], plan["way"], plan["other"]) == ("ok", "parked", None)
    said = parked.says(0, "", "suspend", job.pid, ONLY)
    assert (said["state"], said["release"], said["way"], said["bytes"] >= 96 * MIB) == (
        "parked",
        "memory-only",
        "parked",
        True,
    )
    assert "checkpoint" not in said["timings"]
    assert said["other"] is None
    assert 0 < used(parked)[0] <= before - 64 * MIB, "the context is there, the memory is not"
    shown = parked.limosa("ps", "-o", "json").json["jobs"][0]
    assert (shown["state"], shown["suspended"]["release"]) == ("parked", "memory-only")
    assert (shown["movable"], shown["reasons"][0]["id"]) == (False, "suspended-memory")
    assert "suspended (memory only)" in parked.limosa("ps").stdout
    assert parked.says(0, "", "suspend", job.pid, ONLY)["already"]
    parked.says(13, "suspended-memory", "suspend", job.pid)
    parked.says(13, "suspended-memory", "move", job.pid, "--to", 1)
    parked.says(13, "context-stays", "resume", job.pid, "--to", 1)
    parked.says(13, "suspended-memory", "checkpoint", job.pid, "--output", parked.place / "image")
    assert stand(job) is Stand.AWAY
    assert parked.says(0, "", "resume", job.pid)["way"] == "parked"
    job.goes_on(2)
    assert before <= used(parked)[0] < before + 32 * MIB, "the mover has a context there"
    assert parked.says(0, "", "toggle", job.pid)["state"] == "checkpointed"
    parked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize(("to", "there"), [(["--to", 1], 1), (["--to", 0], 0), (["--map", "0=1"], 1)])
def test_moving_a_suspended_job_resumes_it_there(parked: Any, to: list[object], there: int) -> None:
    job = start(parked, "--mib", 48)
    parked.limosa("suspend", job.pid)
    assert parked.says(0, "", "plan", "move", job.pid, *to)["operation"] == "resume"
    said = parked.says(0, "", "move", job.pid, *to)
    assert (said["state"], said["operation"], said["way"]) == ("running", "resume", "parked")
    assert stand(job) is Stand.OPEN
    job.goes_on(2)
    assert used(parked)[there] > 48 * MIB > used(parked)[1 - there]
    job.finish()


def test_a_job_that_was_moved_is_said_to_hold_its_memory(parked: Any) -> None:
    """NVML counts it for who has made it, on real GPUs for nobody."""
    job = start(parked, "--mib", 48)
    parked.limosa("move", job.pid, "--to", 1)
    shown = parked.limosa("ps", "-o", "json").json["jobs"][0]
    assert [(g["index"], g["memory_used"] > 48 * MIB) for g in shown["gpus"]] == [(1, True)]
    assert shown["processes"][0]["memory_used"] == shown["gpus"][0]["memory_used"]
    there = parked.limosa("gpus", "-o", "json").json["gpus"][1]["processes"]
    assert [p["memory_used"] for p in there if p["pid"] == job.pid] == [shown["gpus"][0]["memory_used"]]
    parked.limosa("suspend", job.pid)
    after = parked.limosa("ps", "-o", "json").json["jobs"][0]
    assert abs(after["gpus"][0]["memory_used"] - shown["gpus"][0]["memory_used"]) < 8 * MIB
    parked.limosa("resume", job.pid, "--to", 0)
    job.goes_on(2)
    job.finish()


def test_everything_on_a_gpu_is_moved_what_is_suspended_is_resumed(parked: Any) -> None:
    job, other = start(parked, "--mib", 24), start(parked, "--mib", 24)
    for one in (job, other):
        parked.limosa("move", one.pid, "--to", 1)
    parked.limosa("suspend", job.pid)
    said = parked.says(0, "", "move", job.pid, other.pid, "--from", 1, "--to", 0)
    assert [one["operation"] for one in said["results"]] == ["resume", "move"]
    for one in (job, other):
        assert stand(one) is Stand.OPEN
        one.goes_on(2)
        one.finish()


def test_a_suspended_job_does_not_change_places(parked: Any) -> None:
    job, other = start(parked, "--mib", 24), start(parked, "--mib", 24)
    parked.limosa("move", other.pid, "--to", 1)
    parked.limosa("suspend", job.pid)
    said = parked.limosa("move", "-o", "json", job.pid, other.pid, "--swap", rc=13)
    assert "suspended-memory" in said.stdout
    assert "limosa resume" in said.stdout
    other.goes_on(2)
    parked.limosa("resume", job.pid)
    for one in (job, other):
        one.goes_on(2)
        one.finish()


def test_no_job_is_said_to_run_that_stands_at_its_gate(parked: Any) -> None:
    job = start(parked, "--mib", 24)
    member = Member(identity=Identity.of(job.pid), was="checkpointed")
    refuse_shut([member])
    assert not any_shut([member])
    with Shim(member.identity) as shim:
        shim.close_gate(5.0)
    with pytest.raises(FailedUndone, match="would not go on"):
        refuse_shut([member])
    with Shim(member.identity) as shim:
        shim.open_gate()
    job.goes_on(2)
    parked.limosa("suspend", job.pid)
    assert any_shut([member])
    with pytest.raises(FailedUndone, match="would not go on"):
        refuse_shut([member])
    parked.limosa("resume", job.pid)
    refuse_shut([member])
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("moved", [False, True])
def test_a_gate_that_somebody_left_closed_is_refused_and_opened_by_recover(parked: Any, moved: bool) -> None:
    """With memory that came by the parked way the driver would lose the job."""
    job = start(parked, "--mib", 24)
    if moved:
        parked.limosa("move", job.pid, "--to", 1)
    with Shim(Identity.of(job.pid)) as shim:
        shim.close_gate(5.0)
    verbs: list[list[object]] = [
        ["move", job.pid, "--to", 0],
        ["move", job.pid, "--to", 1],
        ["suspend", job.pid],
        ["suspend", job.pid, ONLY],
        ["resume", job.pid],
        ["checkpoint", job.pid, "--output", parked.place / "image"],
    ]
    for verb in verbs:
        said = parked.says(19, "gate-closed", *verb)
        assert "limosa recover" in said["error"]["hint"]
    shown = parked.limosa("ps", "-o", "json").json["jobs"][0]
    assert (shown["movable"], "gate-closed" in {r["id"] for r in shown["reasons"]}) == (False, True)
    (would,) = parked.says(0, "", "recover", "--dry-run")["recovered"]
    assert (would["kind"], would["pid"], stand(job)) == ("gate", job.pid, Stand.CLOSED)
    other = {"LIMOSA_RUNTIME_DIR": str(parked.place / "another")}
    assert parked.says(0, "", "recover", env=other)["recovered"] == [], "its claims would not be seen"
    (did,) = parked.says(0, "", "recover")["recovered"]
    assert (did["kind"], did["pid"], stand(job)) == ("gate", job.pid, Stand.OPEN)
    job.goes_on(2)
    assert parked.says(0, "", "recover")["recovered"] == []
    assert parked.says(0, "", "move", job.pid, "--to", 0 if moved else 1)["way"] == "parked"
    job.goes_on(2)
    job.finish()


def test_the_memory_of_several_processes_and_gpus_alone(parked: Any) -> None:
    job = start(parked, "--mib", 24, "--also", 1, "--child")
    pids = [job.pid, *(int(p) for p in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())]
    assert len(pids) == 2
    # Three pieces and three contexts: the child has its own.
    waits_for(parked, lambda: sum(used(parked)) >= 3 * 24 * MIB + 3 * 8 * MIB)
    before = used(parked)
    said = parked.says(0, "", "suspend", job.pid, ONLY)
    assert said["bytes"] >= 3 * 24 * MIB
    for pid in pids:
        with Shim(Identity.of(pid)) as shim:
            assert shim.hello().stand is Stand.AWAY
    assert sum(used(parked)) < sum(before) - 40 * MIB
    parked.limosa("resume", job.pid)
    job.goes_on(3)
    job.finish()


def test_suspending_again_and_again_leaks_nothing(parked: Any) -> None:
    def things() -> dict[str, int]:
        found = {}
        for name, pid in (("job", job.pid), *((name, named(parked, name)[0]) for name in residents)):
            found[f"descriptors of {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
            found[f"mappings of {name}"] = len(Path(f"/proc/{pid}/maps").read_text().splitlines())
            found[f"threads of {name}"] = len(os.listdir(f"/proc/{pid}/task"))
        return found

    residents = ("limosa-mover", "limosa-vault")
    job = start(parked, "--mib", 40)
    code = "import sys; from limosa import operation as o; pid = int(sys.argv[1])\n"
    code += "for i in range(int(sys.argv[2])): o.suspend(pid, release=('all', 'memory-only')[i % 2]); o.resume(pid)"
    seen = []
    for times in (6, 10):
        parked.python(code, job.pid, times)
        job.goes_on(2)
        if not seen:
            time.sleep(2.5)  # what its controller had is let go of by then
        seen.append(things())
    # One a turn would be ten more. The C library keeps stacks and heaps of clients' threads: two mappings each, as many
    # as ever were there at once.
    most = {what: 8 if what.startswith("mappings") else 3 for what in seen[0]}

    def grown() -> dict[str, tuple[int, int]]:
        now = things()
        return {what: (n, now[what]) for what, n in seen[0].items() if now[what] > n + most[what]}

    end = time.monotonic() + 30
    while grown() and time.monotonic() < end:
        time.sleep(0.1)
    assert not grown()
    job.finish()


def test_a_full_gpu_refuses_to_take_the_memory_back(parked: Any) -> None:
    job = start(parked, "--mib", 96)
    parked.limosa("suspend", job.pid, ONLY)
    with parked.switches.fill(0, leave=64 * MIB):
        parked.says(14, "gpu-room", "resume", job.pid)
        assert stand(job) is Stand.AWAY
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("release", [[], [ONLY]])
def test_what_an_undone_suspend_gave_back_is_not_counted_twice(parked: Any, release: list[str]) -> None:
    job = start(parked, "--mib", 160)

    def size() -> int:
        return sum(gpu["memory_used"] for gpu in parked.limosa("ps", "-o", "json").json["jobs"][0]["gpus"])

    before = size()
    switch = parked.switches.add("function=cuMemcpyDtoHAsync caller=limosa-mover result=UNKNOWN")
    parked.says(21, "", "suspend", job.pid, *release)
    parked.switches.remove(switch)
    job.goes_on(2)
    parked.limosa("suspend", job.pid, *release)
    assert release or abs(size() - before) < 32 * MIB  # NVML still counts the context alone
    with parked.switches.fill(0, leave=before + 96 * MIB):
        parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("release", [[], [ONLY]])
def test_ctrl_c_in_the_copy_of_a_resume_leaves_it_suspended(parked: Any, release: list[str]) -> None:
    """The copy is what takes long: whoever stops it has not waited for the job to go on."""
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid, *release)
    held = Held(parked, "cuMemcpyHtoDAsync", "resume", job.pid)
    held.interrupt()
    parked.judge(parked.ends(held.let_go()), 22, "")
    assert stand(job) is Stand.AWAY
    assert parked.state(job) == ("parked" if release else "checkpointed")
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("release", [[], [ONLY]])
def test_a_job_that_takes_most_of_its_gpu_comes_back(parked: Any, release: list[str]) -> None:
    """What was made for it there is not asked for a second time."""
    job = start(parked, "--mib", 400)
    parked.limosa("suspend", job.pid, *release)
    parked.limosa("resume", job.pid, *([] if release else ["--to", 1]))
    job.goes_on(2)
    job.finish()


def test_a_mover_that_nobody_needs_makes_room(parked: Any) -> None:
    """Its context is in the way of a job that has no use for it, and of nobody who asks what is on a GPU."""
    first = start(parked, "--mib", 40, "--gpu", 1)
    parked.limosa("suspend", first.pid)
    (mover,) = named(parked, "limosa-mover")
    there = parked.limosa("gpus", "-o", "json").json["gpus"][1]
    taken = sum(p["memory_used"] for p in there["processes"] if p["pid"] == mover)
    assert taken > 0
    assert [j["pid"] for j in parked.limosa("ps", "-o", "json").json["jobs"]] == [first.pid]
    job = parked.job("--mib", 64)
    assert parked.says(0, "", "suspend", "--gpu", 0)["pid"] == job.pid
    needs = parked.limosa("ps", "-o", "json").json["jobs"]
    size = sum(gpu["memory_used"] for j in needs if j["pid"] == job.pid for gpu in j["gpus"])
    with parked.switches.fill(1, leave=size + 64 * MIB - taken // 2):
        parked.limosa("resume", job.pid, "--to", 1)
    assert mover not in named(parked, "limosa-mover")
    parked.limosa("resume", first.pid, "--to", 0)
    for one in (first, job):
        one.goes_on(2)
        one.finish()


def test_a_resume_elsewhere_that_was_undone_may_be_tried_again(parked: Any) -> None:
    """The driver knows it there from then on: its memory has to go where that is."""
    job = start(parked, "--mib", 64)
    parked.limosa("suspend", job.pid)
    for to, here in ((1, 1), (0, 0), (1, 1)):
        switch = parked.switches.add("function=cuMemMap caller=job.py result=UNKNOWN")
        assert parked.limosa("resume", job.pid, "--to", to, rc=None).rc == 21
        parked.switches.remove(switch)
        assert max(used(parked)) < 32 * MIB
        shown = parked.limosa("ps", "-o", "json").json["jobs"][0]
        assert [gpu["index"] for gpu in shown["gpus"]] == [here]
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    assert used(parked)[1] > 64 * MIB > used(parked)[0]
    job.finish()


def cannot_go_home(parked: Any, job: Any, copying: str, *command: object) -> None:
    """An operation fails while its GPU is full, which leaves it suspended (41); a resume brings it to the other one."""
    held = Held(parked, copying, *command, job.pid)
    waits_for(parked, lambda: parked.state(job) == "checkpointed")
    with parked.switches.fill(0, leave=2 * MIB):
        kill(parked, "limosa-mover")
        parked.judge(parked.ends(held.process), 41, "")
        parked.switches.remove(held.rule)
        assert stand(job) is Stand.AWAY
        parked.limosa("resume", job.pid, "--to", 1)


@pytest.mark.parametrize(
    ("copying", "command"), [("cuMemcpyDtoHAsync", ["suspend"]), ("cuMemcpyDtoDAsync", ["move", "--to", 1])]
)
def test_memory_that_cannot_go_home_is_not_lost(parked: Any, copying: str, command: list[object]) -> None:
    """The operation fails, and its GPU was filled meanwhile: what is away goes into an arena, for a resume."""
    job = start(parked, "--mib", 64)
    cannot_go_home(parked, job, copying, *command)
    job.goes_on(2)
    parked.limosa("move", job.pid, "--to", 0)
    job.goes_on(2)
    job.finish()


def test_shared_memory_that_cannot_go_home_is_shared_afterwards(parked: Any) -> None:
    job = start(parked, "--mib", 24, "--export")
    importer_of(job)
    cannot_go_home(parked, job, "cuMemcpyDtoDAsync", "move", "--to", 1)
    job.goes_on(3)
    assert max(used(parked)) < 96 * MIB, "what is shared is there once"
    time.sleep(0.5)
    job.finish()


def test_resumed_on_a_gpu_that_it_did_not_see(parked: Any) -> None:
    """It cannot import memory of that GPU, and makes it itself; what fails there leaves it suspended."""
    job = start(parked, "--mib", 64, CUDA_VISIBLE_DEVICES="0")
    parked.limosa("suspend", job.pid)
    for rule in (
        "function=cuMemCreate caller=job.py every=1 result=OUT_OF_MEMORY",
        "function=cuMemcpyHtoDAsync result=UNKNOWN",
    ):
        switch = parked.switches.add(rule)
        assert parked.limosa("resume", job.pid, "--to", 1, rc=None).rc in (14, 21)
        parked.switches.remove(switch)
        assert parked.state(job) == "checkpointed"
        assert max(used(parked)) < 32 * MIB
    said = parked.says(0, "", "resume", job.pid, "--to", 1)
    assert said["way"] == "parked"
    job.goes_on(2)
    for to in ([], ["--to", 0], ["--to", 1]):
        parked.limosa("suspend", job.pid)
        parked.limosa("resume", job.pid, *to)
        job.goes_on(2)
    assert used(parked)[0] < 32 * MIB
    job.finish()


def test_a_gpu_that_lets_one_process_in_is_no_place_for_job_and_mover(parked: Any) -> None:
    job = start(parked, "--mib", 40)
    parked.switches.compute_mode(1, "exclusive_process")
    parked.says(12, "exclusive", "move", job.pid, "--to", 1)
    parked.limosa("suspend", job.pid)
    parked.says(12, "exclusive", "resume", job.pid, "--to", 1)
    parked.switches.compute_mode(1, "default")
    parked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(2)
    job.finish()


def test_a_plan_of_a_checkpoint_heeds_the_rate(parked: Any) -> None:
    job, other = start(parked, "--mib", 64), parked.job("--mib", 16)

    def plan(of: Any, *options: object) -> dict[str, Any]:
        found: dict[str, Any] = parked.says(0, "", "plan", "checkpoint", of.pid, "-R", "--output", "image", *options)
        return found

    seconds = [plan(job, *rate)["estimate"]["seconds"] for rate in ([], ["--rate", "16M"])]
    assert 3 < seconds[1] - seconds[0] < 5
    assert "no-effect" not in {r["id"] for r in plan(job, "--rounds", 1)["reasons"]}
    (said,) = [r for r in plan(other, "--rate", "16M", "--rounds", 1)["reasons"] if r["id"] == "no-effect"]
    assert "--rate and --rounds without effect: the driver" in said["text"]
    for one in (job, other):
        one.finish()


def test_without_the_shim_there_is_no_memory_alone(parked: Any) -> None:
    job = parked.job("--mib", 16)
    parked.says(13, "no-shim", "suspend", job.pid, ONLY)
    parked.says(2, "", "suspend", job.pid, "--release=context")
    job.goes_on(2)
    job.finish()


def test_the_arena_is_made_once(parked: Any) -> None:
    assert arena(parked)["vault"] == 0
    job = start(parked, "--mib", 48)
    sizes = []
    for release in ([], [ONLY], []):
        parked.limosa("suspend", job.pid, *release)
        there = arena(parked)
        assert (there["used"], there["free"], there["pinned"]) == (64 * MIB, 0, 64 * MIB)
        assert sum(there["mover_memory"].values()) > 0
        sizes.append(there["mover"])
        parked.limosa("resume", job.pid)
        there = arena(parked)
        assert (there["used"], there["free"], there["pinned"]) == (0, 64 * MIB, 64 * MIB)
    assert len(set(sizes)) == 1
    job.goes_on(2)
    job.finish()


def test_nothing_of_the_one_before_is_left_in_a_segment(parked: Any) -> None:
    """It would be written to disk with the next."""
    first, second = start(parked, "--mib", 60), start(parked, "--mib", 34)
    parked.limosa("suspend", first.pid)
    parked.limosa("resume", first.pid)
    parked.limosa("suspend", second.pid)
    with Shim(Identity.of(second.pid)) as shim:
        filled = sum(m.bytes for m in shim.memories())
        fds = shim.kept()
    try:
        segment = next(fd for fd in fds if os.fstat(fd).st_size == 64 * MIB)
        assert any(os.pread(segment, MIB, filled - MIB))
        rest = os.pread(segment, 64 * MIB, filled)
    finally:
        for fd in fds:
            os.close(fd)
    assert len(rest) == 64 * MIB - filled
    assert not any(rest)
    parked.limosa("resume", second.pid)
    for one in (first, second):
        one.goes_on(2)
        one.finish()


def test_an_arena_that_was_asked_for_is_used_and_given_back(parked: Any) -> None:
    there = arena(parked, "64M", "--keep", "20m")
    assert (there["free"], there["pinned"], there["reserved"]) == (64 * MIB, 64 * MIB, 64 * MIB)
    assert 1100 < there["seconds"] <= 1200
    end = time.monotonic() + 60
    while (ends_in := arena(parked)["mover_ends_in"]) is None and time.monotonic() < end:
        time.sleep(0.05)  # the mover has not yet seen that we are gone
    assert 1000 < ends_in <= 1200, "with the arena, and no later"
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid)
    assert (arena(parked)["used"], arena(parked)["free"]) == (64 * MIB, 0)
    arena(parked, "0")
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    there = arena(parked, "--end")
    assert there["free"] == 0
    end = time.monotonic() + 60
    while named(parked, "limosa-mover") and time.monotonic() < end:
        time.sleep(0.05)
    assert not named(parked, "limosa-mover")
    assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "parked"
    job.goes_on(2)
    job.finish()


def test_the_size_of_an_arena_is_used_and_free_together(parked: Any) -> None:
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid)
    for size in (96, 256, 128):
        there = arena(parked, f"{size}M")
        assert (there["used"], there["free"], there["pinned"]) == (64 * MIB, (size - 64) * MIB, size * MIB), size
    parked.limosa("resume", job.pid)
    there = arena(parked)
    assert (there["used"], there["free"]) == (0, 128 * MIB)
    there = arena(parked, "64M")
    assert (there["used"], there["free"]) == (0, 64 * MIB)
    job.goes_on(2)
    job.finish()


def test_an_arena_that_is_given_back_says_whose_the_rest_is(parked: Any) -> None:
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid)
    arena(parked, "128M")
    for arguments in (["0"], ["--end"]):
        there = arena(parked, *arguments)
        assert (there["used"], there["free"]) == (64 * MIB, 0)
        assert there["held_by"] == {str(job.pid): 64 * MIB}
        assert there["pinned"] == (0 if arguments == ["--end"] else 64 * MIB), "it was waited for"
        (said,) = there["warnings"]
        assert (said["id"], said["hint"]) == ("arena-in-use", f"limosa resume {job.pid}")
    assert not named(parked, "limosa-mover")
    parked.limosa("resume", job.pid)
    there = arena(parked, "0")
    assert (there["used"], there["free"], there["held_by"], there["warnings"]) == (0, 0, {}, [])
    job.goes_on(2)
    job.finish()


def test_the_vault_ends_by_sigterm_once_it_holds_nothing(parked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "600")
    arena(parked, "64M")
    kill(parked, "limosa-vault", signal.SIGTERM)
    waits_for(parked, lambda: not named(parked, "limosa-vault"))
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid)
    (vault,) = named(parked, "limosa-vault")
    os.kill(vault, signal.SIGTERM)
    time.sleep(2.5)
    assert named(parked, "limosa-vault") == [vault]
    assert arena(parked)["used"] == 64 * MIB
    parked.limosa("resume", job.pid)
    waits_for(parked, lambda: not named(parked, "limosa-vault"))
    job.goes_on(2)
    job.finish()


def test_what_does_not_fit_is_refused_early(parked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(parked, "--mib", 96)
    monkeypatch.setenv("LIMOSA_ARENA_MAX", "96M")  # a segment of 128 MiB is needed
    for release in ([], [ONLY]):
        parked.says(15, "arena", "suspend", job.pid, *release)
    job.goes_on(2)
    parked.says(15, "no-room-on-host", "arena", "1G")
    monkeypatch.setenv("LIMOSA_ARENA_MAX", "a lot")
    parked.says(2, "usage", "plan", "suspend", job.pid)
    monkeypatch.setenv("LIMOSA_ARENA_MAX", "128M")
    parked.limosa("suspend", job.pid, ONLY)
    other = start(parked, "--mib", 8)
    parked.says(15, "arena", "suspend", other.pid)
    parked.limosa("resume", job.pid)
    parked.limosa("suspend", other.pid)
    parked.limosa("resume", other.pid)
    for one in (job, other):
        one.goes_on(2)
        one.finish()


def test_two_suspends_at_once_have_one_mover_and_segments_of_their_own(parked: Any) -> None:
    jobs = [start(parked, "--mib", 40, "--gpu", gpu) for gpu in (0, 1)]
    for verb, options in (("suspend", []), ("resume", []), ("suspend", [ONLY]), ("resume", [])):
        both = [parked.later(verb, job.pid, *options) for job in jobs]
        for one in both:
            assert parked.ends(one).rc == 0
        assert len(named(parked, "limosa-mover")) == 1
        if verb == "suspend":
            assert arena(parked)["used"] == 128 * MIB
    for job in jobs:
        job.goes_on(2)
        job.finish()


def no_mover_soon(node: Any) -> None:
    waits_for(node, lambda: not named(node, "limosa-mover"))


def test_the_mover_ends_by_itself_and_by_sigterm(parked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while jobs are suspended: it keeps nobody from resetting a GPU, and nothing is lost with it."""
    monkeypatch.setenv("LIMOSA_MOVER_IDLE", "1")
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid)
    no_mover_soon(parked)
    monkeypatch.setenv("LIMOSA_MOVER_IDLE", "600")
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    parked.limosa("suspend", job.pid, ONLY)
    assert 500 < arena(parked)["mover_ends_in"] <= 600
    kill(parked, "limosa-mover", signal.SIGTERM)
    no_mover_soon(parked)
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_sigterm_waits_for_what_is_under_way(parked: Any) -> None:
    job = start(parked, "--mib", 40)
    held = Held(parked, "cuMemcpyDtoHAsync", "suspend", job.pid)
    (mover,) = named(parked, "limosa-mover")
    os.kill(mover, signal.SIGTERM)
    time.sleep(1.5)
    assert named(parked, "limosa-mover") == [mover]
    assert parked.ends(held.let_go()).rc == 0
    no_mover_soon(parked)
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_a_mover_that_hangs_is_replaced(parked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid)
    (old,) = named(parked, "limosa-mover")
    os.kill(old, signal.SIGSTOP)
    monkeypatch.setenv("LIMOSA_ANSWER_SECONDS", "3")
    parked.limosa("resume", job.pid, "--to", 1)
    assert old not in named(parked, "limosa-mover")
    job.goes_on(2)
    job.finish()


def test_a_call_that_hangs_ends_the_mover_and_undoes(parked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid, ONLY)
    (old,) = named(parked, "limosa-mover")
    rule = parked.switches.add("function=cuMemcpyHtoDAsync caller=limosa-mover hang")
    monkeypatch.setenv("LIMOSA_COPY_SECONDS", "2")
    parked.says(21, "", "resume", job.pid)
    assert old not in named(parked, "limosa-mover")
    parked.switches.remove(rule)
    assert stand(job) is Stand.AWAY
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("release", [[], [ONLY]])
def test_a_mover_whose_context_is_lost_is_not_used_again(parked: Any, release: list[str]) -> None:
    job = start(parked, "--mib", 40)
    parked.switches.add("function=cuMemcpyDtoHAsync caller=limosa-mover nth=1 result=ILLEGAL_ADDRESS")
    parked.says(21, "", "suspend", job.pid, *release)
    job.goes_on(2)
    parked.limosa("suspend", job.pid, *release)
    parked.limosa("resume", job.pid)
    job.goes_on(2)
    assert len(named(parked, "limosa-mover")) == 1
    job.finish()


def test_what_cannot_be_pinned_is_copied_all_the_same(parked: Any) -> None:
    job = start(parked, "--mib", 96)
    parked.switches.add("function=cuMemHostRegister caller=limosa-mover result=OUT_OF_MEMORY")
    parked.limosa("suspend", job.pid)
    assert arena(parked)["pinned"] == 0
    parked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(2)
    job.finish()


def test_the_arena_of_a_job_that_ended_is_given_back(parked: Any) -> None:
    job = start(parked, "--mib", 40)
    parked.limosa("suspend", job.pid, ONLY)
    os.kill(job.pid, signal.SIGKILL)
    job.until_gone()
    end = time.monotonic() + 60
    while arena(parked)["used"] or arena(parked)["pinned"]:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_process_keeps_more_descriptors_than_go_into_a_packet(parked: Any) -> None:
    job = start(parked, "--mib", 8)
    fds = [os.memfd_create("kept") for _ in range(450)]
    inodes = [os.fstat(fd).st_ino for fd in fds]
    with Shim(Identity.of(job.pid)) as shim:
        assert shim.kept() == []
        for wanted in (450, 7, 200, 0):
            shim.keep(fds[:wanted])
            kept = shim.kept()
            assert [os.fstat(fd).st_ino for fd in kept] == inodes[:wanted]
            for fd in kept:
                os.close(fd)
    for fd in fds:
        os.close(fd)
    job.goes_on(2)
    job.finish()


@pytest.mark.parametrize("who", ["limosa-mover", "limosa-vault", "both"])
@pytest.mark.parametrize("release", [[], [ONLY]])
def test_a_suspended_job_survives_vault_and_mover(parked: Any, who: str, release: list[str]) -> None:
    job = start(parked, "--mib", 96)
    parked.limosa("suspend", job.pid, *release)
    for name in ("limosa-mover", "limosa-vault"):
        if who in (name, "both"):
            kill(parked, name)
    assert parked.says(0, "", "resume", job.pid, *([] if release else ["--to", 1]))["way"] == "parked"
    job.goes_on(2)
    job.finish()


_KILLED_AT = """
import contextlib, functools, os, signal, sys
from limosa import errors, operation
from limosa.operation import journal
from limosa.parking import mover, shim, vault
from limosa.process import records

left, verb, pid, victim = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
here = os.readlink("/proc/self/ns/mnt")

def kill():
    if victim == "limosa":
        os.kill(os.getpid(), signal.SIGKILL)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if open(f"/proc/{name}/comm").read().strip() == victim and os.readlink(f"/proc/{name}/ns/mnt") == here:
                os.kill(int(name), signal.SIGKILL)

def watched(cls, name):
    old = getattr(cls, name)
    @functools.wraps(old)
    def call(*arguments, **options):
        global left
        found = old(*arguments, **options)
        left -= 1
        if left == 0:
            kill()
        return found
    setattr(cls, name, call)

for cls, names in (
    (journal.Journal, "note"),
    (shim.Shim, "close_gate unmap map open_gate keep"),
    (mover.Mover, "hold host make"),
    (vault.Vault, "segments put drop"),
    (records.SuspendRecord, "save"),
):
    for name in names.split():
        watched(cls, name)
try:
    if verb == "resume":
        operation.resume(pid)
    else:
        operation.suspend(pid, release="memory-only")
except errors.LimosaError as error:
    print("undone:", error)
    assert 14 <= error.exit_code < 40, error
print("untouched" if left > 0 else "touched")
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["suspend", "resume"])
@pytest.mark.parametrize(
    ("victim", "also", "first", "every"),
    [
        ("limosa", "", 1, 1 if "LIMOSA_LONG_TESTS" in os.environ else 3),
        ("limosa", "limosa-mover", 1, 4),
        ("limosa", "limosa-vault", 2, 4),
        ("limosa-mover", "", 3, 3),
        ("limosa-vault", "", 2, 2),
    ],
)
def test_somebody_killed_after_every_step_of_a_memory_only_suspend(
    parked: Any, verb: str, victim: str, also: str, first: int, every: int
) -> None:
    """Of the ways in which somebody dies every one is tried at some steps; ``make test-long``: limosa alone at all."""
    job = start(parked, "--mib", 40)
    step = first
    while True:
        if verb == "resume" and stand(job) is not Stand.AWAY:
            parked.limosa("suspend", job.pid, ONLY)
        done = parked.run([sys.executable, "-c", _KILLED_AT, step, verb, job.pid, victim], rc=None)
        if also:
            kill(parked, also)
        if victim == "limosa":
            parked.limosa("recover")
        if "untouched" in done.stdout:
            break
        assert done.rc == (-signal.SIGKILL if victim == "limosa" else 0), (step, done)
        now = stand(job)
        assert now in (Stand.OPEN, Stand.AWAY), (step, now)
        if step % 4 == 0:
            shown = parked.limosa("ps", "-o", "json").json["jobs"][0]["state"]
            assert shown == {Stand.OPEN: "running", Stand.AWAY: "parked"}[now], step
        if now is Stand.AWAY and verb == "suspend":
            parked.limosa("resume", job.pid)
        if stand(job) is Stand.OPEN:
            job.goes_on(1)
        step += every
    assert step > 8, "it was held at every step"
    if stand(job) is Stand.AWAY:
        parked.limosa("resume", job.pid)
    job.goes_on(2)
    assert arena(parked)["used"] == 0
    assert sum(size > 32 * MIB for size in used(parked)) == 1, "nothing is left behind on the GPU"
    job.finish()

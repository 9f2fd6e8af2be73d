"""Jobs of several ranks that talk over NCCL, through every verb: all their bits are an undisturbed twin's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soft_command import Held, name_of, named, waits_for
from soft_ranks import Ranks, signalled

from limosa.native.build import compilers
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

SWAP = ("--map", "0=1,1=0")


@pytest.fixture
def two(soft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node of two GPUs with room for what is parked."""
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    return soft(gpus=2, memory="512MiB")


def test_two_ranks_change_places_again_and_again(two: Any) -> None:
    job = Ranks(two)
    assert job.gpus() == [[0], [1]]
    for turn in range(4):
        said = two.says(0, "", "move", job.pid, *SWAP)
        assert said["way"] == "driver"
        assert job.gpus() == ([[1], [0]] if turn % 2 == 0 else [[0], [1]])
        job.goes_on()
    job.finish()


def test_four_ranks_are_rotated(soft: Callable[..., Any]) -> None:
    node = soft(gpus=4, memory="256MiB")
    job = Ranks(node, "--p2p", ranks=4)
    for turn in range(1, 4):
        node.says(0, "", "move", job.pid, "--map", "0=1,1=2,2=3,3=0")
        assert job.gpus() == [[(rank + turn) % 4] for rank in range(4)]
        job.goes_on()
    job.finish()


def test_one_rank_alone_goes_elsewhere(soft: Callable[..., Any]) -> None:
    node = soft(gpus=4, memory="256MiB")
    job = Ranks(node)
    node.says(0, "", "move", job.pid, "--from", "1", "--to", "3")
    assert job.gpus() == [[0], [3]]
    job.goes_on()
    job.finish()


@pytest.mark.parametrize(
    "options",
    [
        ["--p2p"],
        ["--groups", "--watchdog"],
        ["--threads"],
        ["--skew", "5", "--barrier-every", "7"],
        ["--nonblocking", "--watchdog"],
        ["--by-pointer", "--anew", "--nonblocking", "--pause", "20"],
        ["--hasty", "--anew", "--nonblocking", "--pause", "20"],
        ["--split-in-group", "--by-pointer", "--anew", "--nonblocking", "--pause", "20"],
        ["--split-in-group", "--anew", "--pause", "20"],
        ["--split-in-group", "--anew", "--nonblocking", "--watchdog", "--pause", "20"],
        ["--p2p", "--groups", "--threads", "--skew", "5", "--barrier-every", "7", "--nonblocking", "--watchdog"],
        ["--capture"],
        ["--made-by", "ncclCommInitRank", "--watchdog"],
        ["--made-by", "ncclCommInitRankScalable"],
    ],
    ids="".join,
)
def test_whatever_the_ranks_do(two: Any, options: list[str]) -> None:
    job = Ranks(two, *options)
    for _ in range(2):
        two.says(0, "", "move", job.pid, *SWAP)
        job.goes_on()
    two.says(0, "", "suspend", job.pid)
    two.says(0, "", "resume", job.pid)
    job.goes_on()
    job.finish()


@pytest.mark.parametrize("grouped", [[], ["--split-in-group"]], ids=["", "grouped"])
@pytest.mark.parametrize("blocking", [["--nonblocking"], []], ids=["nonblocking", "blocking"])
def test_a_split_that_has_failed_and_was_aborted_is_in_nobodys_way(
    two: Any, blocking: list[str], grouped: list[str]
) -> None:
    rule = two.switches.add("function=step:nccl-init nth=2 result=ncclInternalError")
    job = Ranks(two, "--retry", *blocking, *grouped, ranks=1)
    assert two.switches.count(rule) > 0
    two.says(0, "", "move", job.pid, "--to", "1")
    job.goes_on()
    job.finish()


def test_communicators_have_the_names_and_the_settings_that_they_had(two: Any) -> None:
    """Also where the texts were the program's, and are long gone."""
    job = Ranks(two, "--named", "--nonblocking", "--watchdog")
    for _ in range(2):
        two.says(0, "", "move", job.pid, *SWAP)
        job.goes_on()
    job.finish()
    for rank in range(2):
        told, twin = ((folder / f"rank-{rank}.config").read_text() for folder in (job.folder, job.twin))
        assert told == twin
        world, parity = ({word.split("=")[0]: word for word in line.split()} for line in told.splitlines())
        assert "commName=b'world of 2'" in told.splitlines()[0]
        assert "commName=b'parity of 2'" in told.splitlines()[1]
        for words in (world, parity):
            assert {"blocking=0", "netName=b'Socket'", "minCTAs=2", "maxCTAs=8", "splitShare=1"} <= set(words.values())


def test_communicators_that_are_made_after_others_have_ended_have_handles_of_their_own(two: Any) -> None:
    """In each step one ends and one is made; a move puts new real ones where others were."""
    job = Ranks(two, "--anew")
    for _ in range(3):
        two.says(0, "", "move", job.pid, *SWAP)
        job.goes_on(40)
    job.finish()


@pytest.mark.parametrize(
    ("why", "option"),
    [
        ("nccl-function", ["--window"]),
        ("nccl-function", ["--shrink", "kept"]),
        ("nccl-memory", ["--memory"]),
        ("nccl-graph", ["--graph"]),
    ],
    ids=["function", "shrunk", "memory", "graph"],
)
def test_what_cannot_be_made_again_is_refused_before_anything_is_touched(two: Any, why: str, option: list[str]) -> None:
    two.switches.add("function=ncclBroadcast result=ncclSuccess every=1")  # as if it could be captured
    job = Ranks(two, *option)
    for verb in (["move", *SWAP], ["suspend"], ["checkpoint", "--output", two.place / "image"]):
        said = two.says(13, why, verb[0], job.pid, *verb[1:])
        assert f"process {job.pids[0]} (rank 0 of 2)" in said["error"]["message"]
    assert job.open() == [True, True]
    job.goes_on()
    job.finish()


def test_a_communicator_that_was_shrunk_is_made_again_without_the_one_that_it_is_from(soft: Callable[..., Any]) -> None:
    """Two of three ranks have it; the rank that was left out talks in the others."""
    node = soft(gpus=3, memory="256MiB")
    job = Ranks(node, "--shrink", "ended", ranks=3)
    for turn in (1, 2):
        node.says(0, "", "move", job.pid, "--map", "0=1,1=2,2=0")
        assert job.gpus() == [[(rank + turn) % 3] for rank in range(3)]
        job.goes_on()
    job.finish()


LINKED = "extern int ncclSoftgpuConfig(void *, void *);\nint use(void) { return ncclSoftgpuConfig(0, 0); }\n"


@pytest.mark.parametrize("by", ["called", "linked"])
def test_a_function_that_is_newer_than_the_list_is_refused_by_name(two: Any, tmp_path: Path, by: str) -> None:
    """To ask for it by ``dlsym`` is not to call it; to be linked with it may be."""
    if by == "called":
        job = Ranks(two, "--newer")
    else:
        compiler = [*compilers()[0], "-shared", "-fPIC", "-xc", "-", "-o", str(tmp_path / "l.so")]
        subprocess.run(compiler, input=LINKED, text=True, check=True)
        job = Ranks(two, "--load", tmp_path / "l.so")
    for verb in (["move", *SWAP], ["suspend"], ["checkpoint", "--output", two.place / "image"]):
        said = two.says(13, "nccl-newer", verb[0], job.pid, *verb[1:])
        assert "ncclSoftgpuConfig" in said["error"]["message"]
    assert job.open() == [True, True]
    job.goes_on()
    two.says(0, "", "move", job.pid, *SWAP, "--force=nccl-newer")
    job.goes_on()
    job.finish()


def test_a_rank_that_asks_without_a_pause_is_moved(two: Any, tmp_path: Path) -> None:
    """Its questions change nothing, and hold nobody up."""
    source = Path(__file__).parents[1] / "softgpu" / "asking.c"
    compiler = [*compilers()[0], "-O2", "-shared", "-fPIC", "-pthread", source, "-o", tmp_path / "asking.so"]
    subprocess.run(compiler, check=True)
    job = Ranks(two, "--asking", tmp_path / "asking.so")
    for _ in range(2):
        two.says(0, "", "move", job.pid, *SWAP)
        job.goes_on()
    job.finish()


def test_toggled_and_its_memory_alone_put_aside(two: Any) -> None:
    job = Ranks(two, "--elements", 1 << 19, "--register")
    for _ in range(2):
        two.says(0, "", "toggle", job.pid)
        assert job.gpus() == [[], []]
        two.says(0, "", "toggle", job.pid)
        job.goes_on(2)
    two.says(0, "", "suspend", "--release=memory-only", job.pid)
    two.says(0, "", "resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_a_captured_call_is_never_counted(two: Any) -> None:
    """Not in a rank that is at rest either, while the other one is not: they would not come to one point any more."""
    job = Ranks(two, "--capture", "--pause", 400)
    with Shim(Identity.of(job.pids[0])) as first, Shim(Identity.of(job.pids[1])) as second:
        both = (first, second)
        for _ in range(2):
            job.goes_on(1)
            for shim in both:
                shim.cut()
            first.rest(2)
            job.until(lambda: len(second.wants()[1]) == 1, "rank 1 waits for rank 0")
            for shim in both:
                shim.let()
            job.goes_on(1)
        assert len({tuple(comm.collectives for comm in shim.comms()[1]) for shim in both}) == 1
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on(1)


def test_suspended_and_resumed_elsewhere(two: Any) -> None:
    job = Ranks(two, "--watchdog")
    for gpus in ([[1], [0]], [[0], [1]]):
        two.says(0, "", "suspend", job.pid)
        assert job.gpus() == [[], []]
        before = job.steps()
        time.sleep(0.2)
        assert job.steps() == before
        two.says(0, "", "resume", job.pid, *SWAP)
        assert job.gpus() == gpus
        job.goes_on()
    job.finish()


@pytest.mark.parametrize("elements", [512, 1 << 19], ids=["driver", "parked"])
def test_where_others_took_the_room_meanwhile_all_ranks_stay_suspended_with_closed_communicators(
    two: Any, elements: int
) -> None:
    """At home as well: nothing of NCCL's is made where a rank is suspended."""
    job = Ranks(two, "--elements", elements)
    held = Held(two, "step:checkpoint-released", "move", job.pid, *SWAP)
    with two.switches.fill(0, leave=2 << 20), two.switches.fill(1, leave=2 << 20):
        two.judge(two.ends(held.let_go()), 41, "left-suspended")
    (shown,) = two.limosa("ps", "-o", "json").json["jobs"]
    assert (shown["state"], shown["communicators"]["closed"]) == ("checkpointed", True)
    two.says(0, "", "resume", job.pid)
    job.goes_on()
    job.finish()


def test_a_watchdog_that_looks_at_the_clock_does_not_see_how_long_it_was_suspended(two: Any) -> None:
    """A rank stands in a call of NCCL's all the while. PyTorch's watchdog would end it for that afterwards."""
    job = Ranks(two, "--elements", 1 << 19, "--watchdog", "--patience", "6")
    two.says(0, "", "suspend", job.pid)
    time.sleep(9)
    two.says(0, "", "resume", job.pid, *SWAP)
    job.goes_on()
    job.finish()


def test_large_buffers_go_the_parked_way(two: Any) -> None:
    job = Ranks(two, "--elements", 1 << 19, "--p2p")
    for _ in range(3):
        assert two.says(0, "", "move", job.pid, *SWAP)["way"] == "parked"
        job.goes_on(2)
    assert two.says(0, "", "suspend", job.pid)["way"] == "parked"
    two.says(0, "", "resume", job.pid, *SWAP)
    job.goes_on(2)
    job.finish()


@pytest.mark.criu
def test_written_to_disk_while_it_goes_on(two: Any, tmp_path: Path) -> None:
    job = Ranks(two, "--watchdog", "--p2p")
    two.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image", "--leave-running")
    job.goes_on()
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    at = [len(path.read_bytes()) for path in job.files()]
    two.says(0, "", "verify", tmp_path / "image")
    assert all(at)
    job.finish()


@pytest.mark.criu
@pytest.mark.parametrize("elements", [512, 1 << 19], ids=["driver", "parked"])
def test_written_to_disk_ended_and_restored_onto_the_other_gpus(two: Any, tmp_path: Path, elements: int) -> None:
    job = Ranks(two, "--elements", elements, "--watchdog", "--barrier-every", 5)
    for turn in range(2):
        two.says(0, "", "checkpoint", job.pid, "--output", tmp_path / f"image{turn}")
        assert not job.alive()
        two.says(0, "", "restore", tmp_path / f"image{turn}", *SWAP)
        assert job.gpus() == ([[1], [0]] if turn == 0 else [[0], [1]])
        job.goes_on()
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.finish()


@pytest.mark.parametrize("delay", [0.0, 0.15, 0.3, 0.45])
def test_while_the_communicators_are_being_made(two: Any, delay: float) -> None:
    """Each is made before the cut or after it. Who is too early is told so, and nothing happens to the job."""
    job = Ranks(two, "--threads", ready=False)
    assert len(job.pids) == 2
    time.sleep(delay)
    answer = two.limosa("move", job.pid, *SWAP, "-o", "json", rc=None)
    assert answer.rc in (0, 12, 13, 14, 18, 19, 21), answer
    job.goes_on()
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.finish()


def test_a_rank_that_has_not_begun_to_use_its_gpu_is_not_left_behind(two: Any) -> None:
    """It would begin on the GPU that the other one is on by then."""
    begin = two.place / "begin"
    job = Ranks(two, "--late", begin, ready=False)
    waits_for(two, lambda: sum(map(len, job.gpus())) == 1)
    error = two.says(13, "rank-to-come", "move", job.pid, *SWAP)["error"]
    assert "(rank 1)" in error["message"]
    begin.touch()
    job.goes_on()
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.finish()


@pytest.mark.criu
def test_an_image_of_a_rank_that_had_not_begun_goes_to_the_gpus_of_the_same_numbers(two: Any, tmp_path: Path) -> None:
    begin = two.place / "begin"
    job = Ranks(two, "--late", begin, ready=False)
    waits_for(two, lambda: sum(map(len, job.gpus())) == 1)
    two.says(0, "", "checkpoint", job.pid, "--output", tmp_path / "image")
    two.says(13, "rank-to-come", "restore", tmp_path / "image", *SWAP)
    two.says(0, "", "restore", tmp_path / "image")
    begin.touch()
    job.goes_on()
    assert job.gpus() == [[0], [1]]
    job.finish()


def test_slow_communicators_are_waited_for(two: Any) -> None:
    two.switches.add("function=step:nccl-init delay=0.3 every=1")
    job = Ranks(two, ready=False)
    waits_for(two, lambda: len(job.gpus()[0]) + len(job.gpus()[1]) == 2)
    answer = two.limosa("move", job.pid, *SWAP, "-o", "json", rc=None)
    assert answer.rc in (0, 13, 18, 19, 21), answer
    two.switches.clear()
    job.goes_on()
    job.finish()


def test_without_the_shim_it_is_refused(two: Any, tmp_path: Path) -> None:
    job = Ranks(two, under=False)
    two.says(13, "nccl-ranks", "move", job.pid, *SWAP)
    two.says(13, "nccl-ranks", "suspend", job.pid)
    two.says(13, "nccl-ranks", "checkpoint", job.pid, "--output", tmp_path / "image")
    assert not (tmp_path / "image").exists()
    job.goes_on()
    job.finish()


def test_one_rank_of_a_job_is_refused(two: Any) -> None:
    job = Ranks(two)
    said = two.says(13, "nccl-ranks", "move", job.pids[0], "--to", 1)
    assert "process" in str(said)
    two.says(13, "nccl-ranks", "suspend", job.pids[1])
    job.goes_on()
    job.finish()


def test_the_plan_names_the_communicators(two: Any) -> None:
    job = Ranks(two, "--threads")
    said = two.limosa("plan", "move", job.pid, *SWAP)
    assert "close 2 NCCL communicators between its processes" in said.stdout
    assert "make the communicators again" in said.stdout
    job.finish()


def test_ranks_that_do_not_meet_go_on(two: Any) -> None:
    """One is stopped: the others cannot come to where it is. It is refused, and everything opens again."""
    job = Ranks(two)
    with signalled(job.pids[1:], signal.SIGSTOP, signal.SIGCONT):
        answer = two.limosa("move", job.pid, *SWAP, "-o", "json", rc=None)
        assert answer.rc in (13, 21), answer
    job.goes_on()
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.finish()


def test_a_rank_that_hangs_in_a_call_is_named(two: Any) -> None:
    """Its collective never begins. The time is up, all gates open, and the words say who has not come."""
    job = Ranks(two)
    rule = two.switches.add(f"function=ncclAllReduce caller={job.pids[1]} hang")
    waits_for(two, lambda: two.switches.count(rule) > 0)
    said = two.says(18, "timed-out", "move", job.pid, *SWAP)
    assert str(job.pids[1]) in said["error"]["hint"], said
    assert job.open() == [True, True]
    two.switches.remove(rule)
    job.goes_on()
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.finish()


def test_a_rank_that_is_killed_while_it_is_being_stopped(two: Any) -> None:
    """The others are let on, and the agent ends them, as without Limosa. Nothing is left."""
    job = Ranks(two)
    rule = two.switches.add(f"function=ncclAllReduce caller={job.pids[1]} hang")
    waits_for(two, lambda: two.switches.count(rule) > 0)
    process = two.later("move", job.pid, *SWAP)
    two.reaches(process, "communicators begin")  # it stops them now, and one hangs
    os.kill(job.pids[1], signal.SIGKILL)
    answer = two.ends(process)
    assert answer.rc in (10, 21), answer
    waits_for(two, lambda: not job.alive())
    assert job.verdict() == "rank 1 ended with -9"
    two.limosa("recover")
    waits_for(two, lambda: [p for p in two.processes() if name_of(p) not in ("limosa-vault", "limosa-mover")] == [])
    job.is_as_its_twin()


@pytest.mark.parametrize("linger", [0, 4], ids=["both", "one"])
def test_a_rank_that_exits_well_while_it_is_being_stopped(two: Any, linger: int) -> None:
    """It ends its communicators and exits with 0, which no gate holds up: the others are let on."""
    job = Ranks(two, "--abort", "--linger", linger)
    rule = two.switches.add(f"function=ncclAllReduce caller={job.pids[1]} hang")
    waits_for(two, lambda: two.switches.count(rule) > 0)
    job.stands()  # the other waits for it, in this step or the next: that is the last one
    job.is_to_end(max(job.steps()) + 1)
    process = two.later("move", job.pid, *SWAP)
    two.reaches(process, "communicators begin")
    two.switches.remove(rule)
    answer = two.ends(process)
    assert answer.rc in (0, 10, 21), answer
    assert job.open() == [True, True]
    waits_for(two, lambda: job.verdict() != "")
    assert job.verdict() == "right", job.words()
    two.limosa("recover")
    waits_for(two, lambda: [p for p in two.processes() if name_of(p) not in ("limosa-vault", "limosa-mover")] == [])
    job.is_as_its_twin()


def test_a_rank_that_ends_its_communicators_before_the_others_is_said_to_be_one_that_ends(two: Any) -> None:
    """Its peers have a communicator then with a rank that there is no more. Nothing is touched, and all end well."""
    job = Ranks(two)
    rule = two.switches.add(f"function=ncclCommDestroy caller={job.pids[1]} hang")
    ends = two.switches.add(f"function=ncclCommDestroy caller={job.pids[0]} delay=0")
    job.is_to_end()
    # One is in its first, which is its own; the other in that of their common one.
    waits_for(two, lambda: two.switches.count(rule) > 0 and two.switches.count(ends) > 1)
    reasons = two.says(13, "", "move", job.pid, *SWAP)["error"]["reasons"]
    (reason,) = [reason for reason in reasons if reason["id"] == "nccl-ranks"]
    assert reason["hint"].endswith("; if its ranks are just ending, let them")
    two.switches.remove(rule)
    waits_for(two, lambda: job.verdict() != "")
    assert job.verdict() == "right", job.words()


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclCommInitRank*"])
def test_a_call_that_fails_once(two: Any, function: str) -> None:
    """It is tried again, or the move is undone. The job goes on in any case."""
    job = Ranks(two, "--watchdog")
    two.switches.add(f"function={function} result=ncclSystemError nth=1")
    answer = two.limosa("move", job.pid, *SWAP, "-o", "json", rc=None)
    assert answer.rc in (0, 21, 40), answer
    if answer.rc == 40:
        two.limosa("recover")
    job.goes_on()
    two.switches.clear()
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.finish()


@pytest.mark.parametrize("nth", [1, 3])
def test_an_operator_that_cannot_be_made_again_is_no_other_one(two: Any, nth: int) -> None:
    """Its old number may be another operator's on the new communicator: nobody goes on to compute with that."""
    job = Ranks(two, "--operators", "--groups")
    two.switches.add(f"function=ncclRedOpCreatePreMulSum result=ncclSystemError nth={nth}")
    two.says(0, "", "move", job.pid, *SWAP)  # it is tried again
    two.switches.clear()
    job.goes_on()
    job.finish()


@pytest.mark.parametrize("elements", [512, 1 << 19], ids=["driver", "parked"])
@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("ncclCommDestroy", "while they are closed"),
        ("cuCheckpointProcessLock", "closed"),
        ("cuCheckpointProcessRestore", "away"),
        ("ncclCommInitRank*", "while they are made again"),
        ("ncclGetUniqueId", "before they are made again"),
    ],
)
def test_limosa_is_killed(two: Any, function: str, what: str, elements: int) -> None:
    """At any point: ``recover`` brings the whole job back."""
    job = Ranks(two, "--elements", elements)
    held = Held(two, function, "move", job.pid, *SWAP)
    two.kill("limosa", held.process)
    held.let_go()
    held.process.wait()
    assert [answer["exit_code"] for answer in two.limosa("recover", "-o", "json").json["recovered"]] in ([0], []), what
    job.goes_on()
    assert sorted(job.gpus()) == [[0], [1]]
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.finish()


@pytest.mark.parametrize("function", ["ncclCommDestroy", "cuCheckpointProcessLock", "cuCheckpointProcessRestore"])
def test_ctrl_c_in_the_middle(two: Any, function: str) -> None:
    job = Ranks(two)
    held = Held(two, function, "move", job.pid, *SWAP)
    held.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    held.let_go()
    answer = two.ends(held.process)
    assert answer.rc in (0, 20, 21, 22, 130), answer
    job.goes_on()
    two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    job.finish()


def test_many_moves_leave_nothing(two: Any) -> None:
    job = Ranks(two, "--watchdog")
    two.says(0, "", "move", job.pid, *SWAP)

    def held() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/{what}")) for pid in job.pids for what in ("fd", "task")]

    job.goes_on()
    before, blocks = held(), len(two.blocks())
    for _ in range(6):
        two.says(0, "", "move", job.pid, *SWAP)
    job.goes_on()
    # What a command had of the job is closed once the job has seen that it has ended.
    waits_for(two, lambda: all(now <= was for now, was in zip(held(), before, strict=True)))
    assert len(two.blocks()) == blocks
    job.finish()
    waits_for(two, lambda: named(two, "limosa-vault") == [] == named(two, "limosa-mover"))
    assert os.listdir(f"{two.folder}/nccl") == []

"""Which maps a restore takes: a full permutation of every GPU whose device node the job can open."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from conformance.jobs import MIB, POSIX, Controller, Job, prop

JobIn = Callable[..., Job]
Start = Callable[..., Job]
UNKNOWN = "00112233445566778899aabbccddeeff"
NOTHING = "00" * 16
# GPUs as letters: a and b are the two of the node, u is one that is not there, z a UUID of zeros.
ACCEPTED = ["aa bb", "ab ba", "bb aa", "ba ab"]
REFUSED = {
    "first-alone": "aa",
    "second-alone": "bb",
    "first-to-second-alone": "ab",
    "second-to-first-alone": "ba",
    "both-to-first": "aa ba",
    "both-to-second": "ab bb",
    "first-twice": "aa ab",
    "first-twice-alike": "aa aa",
    "second-twice": "bb ba",
    "unknown-left": "aa ub",
    "unknown-right": "aa bu",
    "unknown-alone": "uu",
    "unknown-on-both-sides-of-both": "uu uu",
    "extra-unknown-pair": "aa bb uu",
    "extra-pair-twice": "aa bb aa",
    "extra-pair-of-a-swap": "ab ba ab",
    "zeros": "zz",
    "zeros-to-both": "za zb",
    "zeros-from-both": "az bz",
    "extra-zeros": "aa bb zz",
}


def pairs_of(words: str, controller: Controller) -> list[tuple[str, str]]:
    gpus = {"a": controller.uuids[0], "b": controller.uuids[1], "u": UNKNOWN, "z": NOTHING}
    known = [(gpus[word[0]], gpus[word[1]]) for word in words.split()]
    return known + [(uuid, uuid) for uuid in controller.uuids[2:]]


@pytest.mark.parametrize("words", ACCEPTED)
def test_a_full_permutation_is_taken(words: str, controller: Controller, job_in: JobIn) -> None:
    job = job_in("checkpointed")
    assert controller.restore(job.pid, pairs_of(words, controller)) == "SUCCESS"
    assert controller.state(job.pid) == "LOCKED"


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_and_the_job_stays_checkpointed(
    kind: str, controller: Controller, job_in: JobIn
) -> None:
    job = job_in("checkpointed")
    assert controller.restore(job.pid, pairs_of(REFUSED[kind], controller)) == "INVALID_VALUE"
    assert controller.state(job.pid) == "CHECKPOINTED"


@pytest.mark.parametrize("after", ["none", "identity", "swap"])
def test_after_a_refused_map_a_right_one_brings_the_job_back_intact(
    after: str, controller: Controller, job_in: JobIn
) -> None:
    job = job_in("refused")
    pairs = {"none": None, "identity": controller.identity, "swap": controller.swap}[after]
    controller.resume(job.pid, pairs)
    job.check_stamps()


def test_many_refused_maps_do_no_harm(controller: Controller, job_in: JobIn) -> None:
    job = job_in("checkpointed")
    for words in REFUSED.values():
        assert controller.restore(job.pid, pairs_of(words, controller)) == "INVALID_VALUE"
    controller.resume(job.pid, controller.identity)
    job.check_stamps()


def test_there_and_back_again(controller: Controller, job_in: JobIn) -> None:
    job = job_in("running")
    for _ in range(2):
        controller.cycle(job.pid, controller.swap)
    job.check_stamps()


def test_the_left_side_is_the_gpu_itself_not_the_one_that_the_job_began_on(
    controller: Controller, start: Start
) -> None:
    """After a swap the same map is the way back: it names GPUs, not what the job calls them."""
    job = start().start_up()
    memory = job.do("cuMemAlloc", 4096)
    places = []
    for _ in range(3):
        places.append(controller.gpus_of(job.pid))
        controller.cycle(job.pid, controller.swap)
    assert places == [{0}, {1}, {0}]
    assert job.says("cuMemFree", memory) == "SUCCESS"


# --- CUDA_VISIBLE_DEVICES changes nothing about the map ---------------------------------------------------------------


@pytest.mark.parametrize("visible", ["0", "1", "1,0", "0,1"])
@pytest.mark.parametrize("given", ["partial", "identity", "swap", "none"])
def test_a_job_that_sees_less_needs_the_same_map(
    visible: str, given: str, controller: Controller, job_in: JobIn
) -> None:
    job = job_in("running", f"CUDA_VISIBLE_DEVICES={visible}")
    (here,) = controller.gpus_of(job.pid)
    there = 1 - here
    maps = {"identity": controller.identity, "swap": controller.swap, "none": None}
    partial = [(controller.uuids[here], controller.uuids[there])]
    controller.suspend(job.pid)
    if given == "partial":
        assert controller.restore(job.pid, partial) == "INVALID_VALUE"
        assert controller.state(job.pid) == "CHECKPOINTED"
        return
    controller.resume(job.pid, maps[given])
    assert controller.gpus_of(job.pid) == {there if given == "swap" else here}
    assert job.says("cuMemAlloc", 4096) == "SUCCESS"


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("1", 1), ("1,0", 2), ("0,-1,1", 1), ("7", 0), ("", 0)])
def test_what_a_job_sees(visible: str, count: int, start: Start) -> None:
    job = start(CUDA_VISIBLE_DEVICES=visible)
    assert job.says("cuInit", 0) == ("SUCCESS" if count else "NO_DEVICE")
    answer = job.ask("cuDeviceGetCount")
    assert (answer.result, answer.value) == (("SUCCESS", count) if count else ("NOT_INITIALIZED", None))


@pytest.mark.parametrize("order", ["0", "1"])
def test_visible_devices_by_uuid(order: str, controller: Controller, start: Start) -> None:
    raw = controller.uuids[int(order)]
    uuid = "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))
    job = start(CUDA_VISIBLE_DEVICES=f"GPU-{uuid}").init()
    assert job.uuid(0) == raw


# --- memory of a GPU that the job did not see when it began -----------------------------------------------------------


def imports(job: Job, giver: Job, gpu: int) -> str:
    """What a job is answered that imports memory of a GPU, made by another that sees all of them."""
    handle = giver.do("cuMemCreate", 2 * MIB, prop(gpu, exportable=True), 0)
    fd = giver.do("cuMemExportToShareableHandle", handle, POSIX, 0)
    mine = job.run("take_fd", giver.pid, fd)
    answer = job.ask("cuMemImportFromShareableHandle", mine, POSIX)
    if answer.result == "SUCCESS":
        job.do("cuMemRelease", answer.value)
    job.run("close", mine)
    return answer.result


@pytest.mark.parametrize("visible", ["0", "1", "0,1", "1,0"])
def test_a_job_imports_only_memory_of_gpus_that_it_saw_at_first(
    visible: str, start: Start, controller: Controller
) -> None:
    """Also after it was moved to another one: what it makes itself is there."""
    giver = start().start_up()
    job = start(CUDA_VISIBLE_DEVICES=visible).start_up()
    (here,) = controller.gpus_of(job.pid)
    assert imports(job, giver, here) == "SUCCESS"
    controller.cycle(job.pid, controller.swap)
    (there,) = controller.gpus_of(job.pid)
    assert there == 1 - here
    answer = "SUCCESS" if len(visible) > 1 else "NOT_INITIALIZED"
    assert [imports(job, giver, there) for _ in range(2)] == [answer] * 2
    own = job.do("cuMemCreate", 2 * MIB, prop(exportable=True), 0)
    assert job.says("cuMemExportToShareableHandle", own, POSIX, 0) == "SUCCESS"


def test_where_the_other_node_was_hidden_the_answer_is_another(
    hidden: Callable[[int], Job], nodes: list[str], start: Start, controller: Controller
) -> None:
    giver = start().start_up()
    job = hidden(1)
    assert imports(job, giver, 0) == "SUCCESS"
    controller.suspend(job.pid)
    inside(job, f"umount {nodes[1]} && mount --bind /dev/null {nodes[0]}")
    controller.resume(job.pid, pairs_of("ab", controller))
    assert imports(job, giver, 1) == "INVALID_DEVICE"
    assert job.says("cuMemCreate", 2 * MIB, prop(exportable=True), 0) == "SUCCESS"


# --- device nodes that the job cannot open ----------------------------------------------------------------------------


@pytest.fixture
def nodes(controller: Controller) -> list[str]:
    """The device nodes of both GPUs, in the driver's order."""
    by_uuid = {gpu["uuid"]: f"/dev/nvidia{gpu['minor']}" for gpu in controller.inventory()}
    return [by_uuid[uuid] for uuid in controller.uuids]


@pytest.fixture
def hidden(nodes: list[str], start: Start) -> Callable[[int], Job]:
    """Starts a job that cannot open the device node of a GPU."""

    def go(gpu: int) -> Job:
        hide = f'mount --bind /dev/null {nodes[gpu]} && exec "$0" "$@"'
        return start(via=("unshare", "-m", "sh", "-c", hide)).start_up()

    return go


def inside(job: Job, command: str) -> None:
    """Run a command in the job's mount namespace."""
    subprocess.run(["nsenter", "-t", str(job.pid), "-m", "sh", "-c", command], check=True, timeout=20)


@pytest.mark.parametrize("gpu", [0, 1])
def test_a_job_sees_only_what_it_can_open(gpu: int, hidden: Callable[[int], Job], controller: Controller) -> None:
    job = hidden(gpu)
    assert job.do("cuDeviceGetCount") == 1
    assert job.uuid(0) == controller.uuids[1 - gpu]


ONE_NODE = {"own-pair": ("aa", True), "full-identity": ("aa bb", False), "full-swap": ("ab ba", False)}
ONE_NODE |= {"own-to-hidden": ("ab", False), "hidden-to-own": ("ba", False), "hidden-pair": ("bb", False)}


@pytest.mark.parametrize("kind", ONE_NODE)
def test_a_job_with_one_gpus_node_takes_a_map_of_one_pair(
    kind: str, hidden: Callable[[int], Job], controller: Controller
) -> None:
    job = hidden(1)
    words, taken = ONE_NODE[kind]
    controller.suspend(job.pid)
    assert controller.restore(job.pid, pairs_of(words, controller)) == ("SUCCESS" if taken else "INVALID_VALUE")
    assert controller.state(job.pid) == ("LOCKED" if taken else "CHECKPOINTED")


def test_a_job_with_one_gpus_node_takes_no_map(hidden: Callable[[int], Job], controller: Controller) -> None:
    job = hidden(1)
    controller.cycle(job.pid)
    assert controller.gpus_of(job.pid) == {0}


@pytest.mark.parametrize("cover", [True, False], ids=["own-node-covered", "own-node-left"])
def test_what_it_can_open_may_change_while_it_is_checkpointed(
    cover: bool, hidden: Callable[[int], Job], nodes: list[str], controller: Controller
) -> None:
    job = hidden(1)
    memory = job.do("cuMemAlloc", 4096)
    job.do("cuMemsetD8", memory, 0xA5, 4096)
    controller.suspend(job.pid)
    inside(job, f"umount {nodes[1]}" + (f" && mount --bind /dev/null {nodes[0]}" if cover else ""))
    controller.resume(job.pid, pairs_of("ab", controller))
    assert controller.gpus_of(job.pid) == {1}
    assert job.read(memory, 4096) == b"\xa5" * 4096


def test_after_such_a_move_a_cycle_needs_no_map(
    hidden: Callable[[int], Job], nodes: list[str], controller: Controller
) -> None:
    job = hidden(1)
    controller.suspend(job.pid)
    inside(job, f"umount {nodes[1]} && mount --bind /dev/null {nodes[0]}")
    controller.resume(job.pid, pairs_of("ab", controller))
    controller.cycle(job.pid)
    assert controller.gpus_of(job.pid) == {1}


def test_a_destination_that_is_covered_while_checkpointed_is_refused(
    start: Start, nodes: list[str], controller: Controller
) -> None:
    job = start(via=("unshare", "-m")).start_up()
    controller.suspend(job.pid)
    inside(job, f"mount --bind /dev/null {nodes[1]}")
    assert controller.restore(job.pid, pairs_of("ab ba", controller)) == "NOT_SUPPORTED"
    assert controller.state(job.pid) == "CHECKPOINTED"


def test_only_the_jobs_view_counts_not_the_controllers(start: Start, nodes: list[str], controller: Controller) -> None:
    job = start().start_up()
    hide = f'mount --bind /dev/null {nodes[1]} && exec "$0" "$@"'
    narrow = Controller.of(start(via=("unshare", "-m", "sh", "-c", hide))).init()
    assert len(narrow.uuids) == 1
    narrow.suspend(job.pid)
    assert narrow.restore(job.pid, controller.swap) == "SUCCESS"

"""What stands against restoring an image, and which GPU of this machine each GPU of the image becomes."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from limosa.errors import InvalidMap, NoWorkingCriu, UnknownGpu, WrongChip
from limosa.gpu import Gpu, Inventory
from limosa.image import GpuRecord, ImageFile, JobRecord, Manifest, TreeProcess
from limosa.operation import restore_plan
from limosa.operation.journal import Member
from limosa.operation.restore_options import Options
from limosa.operation.restore_plan import look, restored_members
from limosa.operation.taken_pids import taken_pids
from limosa.process.criu import Criu
from limosa.process.identity import Identity
from limosa.process.observation import CgroupObservation
from limosa.process.records import RunRecord

GB = 1 << 30
TOTAL = 140 * GB
FREE_PID = 4194301  # the largest that the kernel gives is 4194303; nobody gets there
A, B, C, D = (f"GPU-{n}0000000-0000-0000-0000-000000000000" for n in "abcd")
H200, L40S = "NVIDIA H200", "NVIDIA L40S"


def here(*uuids: str, name: str = H200, total: int = TOTAL, free: int = TOTAL, **fields: Any) -> Inventory:
    """A machine with these GPUs."""
    gpus = [
        Gpu(index=i, uuid=u, name=name, memory_total=total, memory_used=total - free, memory_free=free, minor=i)
        for i, u in enumerate(uuids)
    ]
    return msgspec.structs.replace(Inventory(driver_version="580.159.04", cuda_version="13.0", gpus=gpus), **fields)


def image(*holds: Mapping[str, int], openable: tuple[str, ...] = (A, B), **fields: Any) -> Manifest:
    """An image of a job on a machine with GPUs ``openable``; a CUDA process for each of ``holds``, and a plain root."""
    tree = [TreeProcess(pid=FREE_PID - 9, ppid=1, start_time=1)]
    for i, held in enumerate(holds):
        pid = FREE_PID - 8 + i
        tree.append(
            TreeProcess(pid=pid, ppid=tree[0].pid, start_time=2, cuda=True, openable=list(openable), held=dict(held))
        )
    plain = Manifest(
        created="2026-11-21T04:05:06Z",
        criu="4.2.1",
        kernel=platform.release(),
        machine=platform.machine(),
        driver="580.159.04" if holds else "",
        job=JobRecord(pid=tree[0].pid, uid=os.geteuid()),
        tree=tree,
        gpus=[GpuRecord(index=i, uuid=u, name=H200, memory_total=TOTAL) for i, u in enumerate(openable)],
    )
    return msgspec.structs.replace(plain, **fields)


def maps(manifest: Manifest, inventory: Inventory, **options: Any) -> list[dict[str, str]]:
    """The full map of each CUDA process."""
    return [m.map for m in restored_members(manifest, inventory, Options(**options))]


ON_A = {A: 4 * GB}


# --- which GPU becomes which ----------------------------------------------------------------------------------


def test_on_the_same_machine_every_gpu_stays() -> None:
    (member,) = restored_members(image(ON_A), here(A, B), Options())
    assert member.map == {A: A, B: B}
    assert not member.changes_gpu
    assert (member.was, member.held, member.root) == ("checkpointed", ON_A, FREE_PID - 9)


def test_only_processes_with_cuda_state_are_members() -> None:
    assert [m.pid for m in restored_members(image(ON_A, {}), here(A, B), Options())] == [FREE_PID - 8, FREE_PID - 7]
    assert restored_members(image(), here(A, B), Options()) == []


@pytest.mark.parametrize("to", ["1", B, B.removeprefix("GPU-")])
def test_to_moves_what_it_held_and_the_other_gives_way(to: str) -> None:
    assert maps(image(ON_A), here(A, B), to=to) == [{A: B, B: A}]


def test_to_the_gpu_where_it_was_changes_nothing() -> None:
    assert maps(image(ON_A), here(A, B), to="0") == [{A: A, B: B}]


def test_every_map_is_complete_and_has_no_gpu_twice() -> None:
    four = (A, B, C, D)
    (full,) = maps(image(ON_A, openable=four), here(*four), to="2")
    assert sorted(full) == sorted(full.values()) == sorted(four)
    assert (full[A], full[B], full[D]) == (C, B, D)


def test_what_gives_way_goes_to_a_gpu_of_its_own_chip() -> None:
    others = here(C, D)
    mixed = msgspec.structs.replace(
        others, gpus=[*here(A).gpus, msgspec.structs.replace(others.gpus[0], index=1, name=L40S), *here(D).gpus]
    )
    (full,) = maps(image(ON_A), mixed)
    assert full == {A: A, B: D}
    without = msgspec.structs.replace(mixed, gpus=mixed.gpus[:2])
    with pytest.raises(WrongChip, match="none left"):
        restored_members(image(ON_A), without, Options())


def test_the_left_side_of_a_map_is_the_image_s_index_the_right_side_this_machine_s() -> None:
    """The same two GPUs, which have changed numbers since (another slot order)."""
    assert maps(image(ON_A), here(B, A), gpu_map="0=0") == [{A: B, B: A}]
    assert maps(image(ON_A), here(B, A), gpu_map="0=1") == [{A: A, B: B}]
    assert maps(image(ON_A), here(B, A)) == [{A: A, B: B}]


@pytest.mark.parametrize("gpu_map", ["0=1,1=0", {"0": "1", "1": "0"}, {A: B, B: A}, f"{A}={B},{B}={A}"])
def test_a_map_is_text_or_a_mapping_by_index_or_uuid(gpu_map: Any) -> None:
    assert maps(image({A: GB, B: GB}), here(A, B), gpu_map=gpu_map) == [{A: B, B: A}]


@pytest.mark.parametrize(
    ("gpus", "gpu_map", "refused"),
    [((A, B), "0=1,1=0", True), ((A, B), None, False), ((C, D), "0=0,1=1", False), ((C, D), "0=1,1=0", True)],
)
def test_a_rank_that_had_not_begun_wants_the_others_on_gpus_of_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], gpu_map: str | None, refused: bool
) -> None:
    monkeypatch.setattr(restore_plan.gpu, "inventory", lambda: here(*gpus))
    started = image(ON_A, {B: GB})
    late = TreeProcess(pid=FREE_PID, ppid=started.tree[0].pid, start_time=3, rank_to_come=True)
    found = look(msgspec.structs.replace(started, tree=[*started.tree, late]), Options(gpu_map=gpu_map)).reasons
    assert [(r.pid, r.exit_code) for r in found if r.id == "rank-to-come"] == [(FREE_PID, 13)] * refused
    assert not any(r.id == "rank-to-come" for r in look(started, Options(gpu_map=gpu_map)).reasons)


def test_on_another_machine_what_was_held_has_to_be_told() -> None:
    with pytest.raises(InvalidMap, match="not in this machine") as caught:
        maps(image(ON_A), here(C, D))
    assert "--to" in caught.value.hint


def test_on_another_machine_the_rest_is_filled_in() -> None:
    assert maps(image(ON_A), here(C, D), to="0") == [{A: C, B: D}]
    assert maps(image(ON_A), here(C, D), to="1") == [{A: D, B: C}]
    assert maps(image(ON_A), here(C, D), gpu_map="0=1") == [{A: D, B: C}]
    assert maps(image({A: GB, B: GB}), here(C, D), gpu_map="0=1,1=0") == [{A: D, B: C}]


def test_on_another_machine_each_gpu_that_was_held_has_to_be_told() -> None:
    with pytest.raises(InvalidMap, match="not in this machine"):
        maps(image({A: GB, B: GB}), here(C, D), gpu_map="0=1")


def test_a_larger_machine_does() -> None:
    (full,) = maps(image(ON_A), here(B, C, D, A), to="2")
    assert (full[A], full[B]) == (D, B)


def test_each_process_of_a_job_gets_its_own_map() -> None:
    assert maps(image({A: GB}, {B: GB}), here(A, B), gpu_map="0=1,1=0") == [{A: B, B: A}] * 2


@pytest.mark.parametrize(
    ("held", "inventory", "options", "says"),
    [
        ({A: GB, B: GB}, here(A, B), {"gpu_map": "0=0,1=0"}, "mapped to one"),
        ({A: GB, B: GB}, here(A, B), {"gpu_map": "0=1"}, "too, where another one's is to go"),
        ({A: GB, B: GB}, here(A, B, C), {"to": "2"}, "several GPUs"),
        (ON_A, here(C), {"to": "0"}, "fewer GPUs"),
        (ON_A, here(A), {}, "fewer GPUs"),
        (ON_A, here(A, B), {"gpu_map": "0=1", "to": "1"}, "not both"),
        (ON_A, here(A, B), {"gpu_map": "0=1", "source": "0"}, "not both"),
        (ON_A, here(A, B), {"gpu_map": "0-1"}, "no map"),
        (ON_A, here(C, D, name=L40S), {"to": "0"}, L40S),
        (ON_A, here(C, D, total=TOTAL // 2), {"to": "0"}, "GPU 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_map_that_cannot_be_is_refused_in_words(
    held: dict[str, int], inventory: Inventory, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidMap, match=says):
        maps(image(held), inventory, **options)


@pytest.mark.parametrize("options", [{"to": "7"}, {"gpu_map": "0=7"}, {"gpu_map": "7=0"}, {"to": "1", "source": "7"}])
def test_a_gpu_that_nobody_has_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnknownGpu, match="7"):
        maps(image(ON_A), here(A, B), **options)


def test_from_says_which_of_several_goes() -> None:
    assert maps(image({A: GB, B: GB}), here(A, B, C), source="0", to="2") == [{A: C, B: B}]


# --- everything that is looked at -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def criu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A CRIU is found, of the version that is in here; "" for none."""
    found = {"version": "4.2.1"}

    def find(explicit: str | None = None) -> Criu:
        if not found["version"]:
            raise NoWorkingCriu(detail="none here")
        return Criu(argv=["criu"], version=found["version"])

    monkeypatch.setattr(restore_plan, "find_criu", find)
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Inventory]:
    """This machine's GPUs, which a test may change."""
    now = {"inventory": here(A, B)}
    monkeypatch.setattr("limosa.gpu.inventory", lambda: now["inventory"])
    return now


def told(manifest: Manifest, **options: Any) -> list[tuple[str, int]]:
    """(id, exit code) of each reason."""
    return [(r.id, r.exit_code) for r in look(manifest, Options(**options)).reasons]


def test_nothing_stands_against_an_image_that_fits() -> None:
    assert told(image()) == []


def test_nothing_stands_against_an_image_with_cuda_that_fits(machine: dict[str, Inventory]) -> None:
    ready = look(image(ON_A), Options())
    assert ready.reasons == []
    assert [type(m) for m in ready.members] == [Member]
    assert ready.inventory is machine["inventory"]


def test_another_kernel_is_a_warning_another_machine_a_refusal() -> None:
    assert told(image(kernel="5.10.0")) == [("kernel", 0)]
    assert told(image(machine="riscv128")) == [("machine", 12)]


@pytest.mark.parametrize(
    ("made", "found", "refused"),
    [
        ("4.2.1", "4.2.1", False),
        ("4.2", "4.2.1", False),
        ("4.2.1", "4.2", True),
        ("4.2.1", "4.10", False),
        ("4.2.1-1", "4.2.1", False),
        ("4.2.1", "3.17.1", True),
    ],
)
def test_an_older_criu_than_the_image_s_is_refused_and_can_be_forced(
    criu: dict[str, str], made: str, found: str, refused: bool
) -> None:
    criu["version"] = found
    assert told(image(criu=made)) == ([("criu-older", 24)] if refused else [])
    assert told(image(criu=made), force=["criu-older"]) == ([("criu-older", 0)] if refused else [])


def test_without_a_criu_it_is_refused(criu: dict[str, str]) -> None:
    criu["version"] = ""
    assert told(image()) == [("no-working-criu", 24)]


@pytest.mark.parametrize(
    ("caller", "owner", "refused"), [(1000, 1000, False), (1000, 1001, True), (0, 1001, False), (1000, 0, False)]
)
def test_a_job_of_another_user_is_root_s_to_restore(
    monkeypatch: pytest.MonkeyPatch, caller: int, owner: int, refused: bool
) -> None:
    manifest = image(job=JobRecord(pid=FREE_PID - 9, uid=owner))
    monkeypatch.setattr(os, "geteuid", lambda: caller)
    assert (("permission", 11) in told(manifest)) == refused


def test_another_driver_is_refused_and_can_be_forced(machine: dict[str, Inventory]) -> None:
    machine["inventory"] = here(A, B, driver_version="590.44")
    assert told(image(ON_A)) == [("driver-version", 12)]
    assert told(image(ON_A), force=["driver-version"]) == [("driver-version", 0)]


@pytest.mark.parametrize(
    ("version", "to", "refused"), [("575.57", "0", False), ("575.57", "1", True), ("569", "0", True)]
)
def test_a_driver_that_cannot_do_it_is_refused(
    machine: dict[str, Inventory], version: str, to: str, refused: bool
) -> None:
    machine["inventory"] = here(A, B, driver_version=version)
    assert told(image(ON_A, driver=version), to=to) == ([("driver-too-old", 12)] if refused else [])


def test_a_full_gpu_is_refused_and_named(machine: dict[str, Inventory]) -> None:
    machine["inventory"] = here(A, B, free=4 * GB - 1)
    (reason,) = look(image(ON_A), Options()).reasons
    assert (reason.id, reason.exit_code) == ("gpu-room", 14)
    assert "GPU 0" in reason.text


@pytest.mark.parametrize("software", [False, True])
def test_an_image_of_a_software_gpu_and_real_gpus_do_not_go_together(
    machine: dict[str, Inventory], software: bool
) -> None:
    machine["inventory"] = here(A, B, software=not software)
    assert told(image(ON_A, software_gpu=software)) == [("chip", 12)]


def test_a_map_that_cannot_be_is_a_reason_too(machine: dict[str, Inventory]) -> None:
    machine["inventory"] = here(C, D)
    assert told(image(ON_A)) == [("invalid-map", 2)]


def test_an_image_without_cuda_does_not_ask_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> Inventory:
        raise AssertionError("NVML was asked")

    monkeypatch.setattr("limosa.gpu.inventory", asked)
    assert told(image()) == []


# --- host memory ----------------------------------------------------------------------------------------------


class HostMemory:
    """A machine's memory as a restore's plan sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.available, self.grown = 8 * GB, 8 * GB
        self.levels: list[CgroupObservation] = []
        monkeypatch.setattr(restore_plan, "host_memory", lambda: (16 * GB, self.available))
        monkeypatch.setattr(restore_plan, "grow_host_memory", lambda needed, stop: self.grown)
        monkeypatch.setattr(restore_plan, "memory_levels", lambda text: self.levels)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """This machine's memory, which a test may change: 8 GiB available, no control group with a limit."""
    return HostMemory(monkeypatch)


def of_size(size: int) -> Manifest:
    return image(files=[ImageFile(path="criu/pages-1.img", size=size, blake3="0" * 64)])


def test_an_image_that_fits_into_memory_is_right(memory: HostMemory) -> None:
    assert told(of_size(8 * GB)) == []


def test_an_image_larger_than_the_machine_s_memory_is_refused_and_can_be_forced(memory: HostMemory) -> None:
    assert told(of_size(9 * GB)) == [("host-memory", 15)]
    assert told(of_size(9 * GB), force=["host-memory"]) == [("host-memory", 0)]


def test_memory_that_grows_when_it_is_touched_is_enough(memory: HostMemory) -> None:
    memory.grown = 9 * GB
    assert told(of_size(9 * GB)) == []


def test_a_control_group_without_room_is_refused_and_named(memory: HostMemory) -> None:
    roomy = CgroupObservation(path="/jobs", limit_bytes=64 * GB)
    memory.levels = [CgroupObservation(path="/jobs/small", limit_bytes=6 * GB, used_bytes=GB), roomy]
    (reason,) = look(of_size(6 * GB), Options()).reasons
    assert (reason.id, reason.exit_code, reason.forceable) == ("cgroup", 15, True)
    assert "/jobs/small" in reason.text
    assert told(of_size(5 * GB)) == []


def test_a_control_group_that_is_not_there_is_refused() -> None:
    assert told(image(), cgroup="/limosa-test-there-is-none") == [("usage", 2)]


# --- pids -----------------------------------------------------------------------------------------------------


def of_pid(pid: int, threads: tuple[int, ...] = ()) -> Manifest:
    return image(tree=[TreeProcess(pid=pid, ppid=1, start_time=1, threads=list(threads))])


def test_a_taken_pid_is_named_with_who_has_it() -> None:
    (reason,) = look(of_pid(os.getpid()), Options()).reasons
    assert (reason.id, reason.exit_code, reason.pid, reason.forceable) == ("pid-taken", 23, os.getpid(), False)
    assert str(os.getppid()) in reason.text


def test_a_thread_s_id_is_looked_for_too() -> None:
    assert told(of_pid(FREE_PID, threads=(os.getpid(),))) == [("pid-taken", 23)]


def test_a_pid_that_becomes_free_is_waited_for() -> None:
    with subprocess.Popen(["sleep", "0.2"]) as child:
        assert taken_pids(of_pid(child.pid), 60.0, lambda: bool(child.poll())) == []
        assert child.returncode == 0


def test_waiting_for_a_pid_ends_when_it_is_cancelled_or_has_been_long_enough() -> None:
    manifest = of_pid(os.getpid())
    begin = time.monotonic()
    assert len(taken_pids(manifest, 250.0, lambda: True)) == 1
    assert len(taken_pids(manifest, 0.1, lambda: False)) == 1
    assert time.monotonic() - begin < 60


def of_child(child: subprocess.Popen[bytes], **changed: Any) -> Manifest:
    """An image of this very process of ours."""
    who = Identity.of(child.pid)
    process = TreeProcess(pid=who.pid, ppid=1, start_time=who.start_time, command=["sleep", "60"])
    return image(tree=[msgspec.structs.replace(process, **changed)])


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    try:
        while Path(f"/proc/{process.pid}/cmdline").read_bytes() != b"sleep\x0060\0":
            time.sleep(0.005)  # not exec'ed yet
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_image_s_own_job_that_still_runs_is_recognised(child: subprocess.Popen[bytes]) -> None:
    (reason,) = taken_pids(of_child(child), 0.0)
    assert (reason.id, reason.exit_code, reason.pid) == ("pid-taken", 23, child.pid)
    assert "the image's own job: it still runs" in reason.text
    assert "end it first" in reason.hint


def test_the_image_s_job_that_runs_again_is_recognised(child: subprocess.Popen[bytes]) -> None:
    """CRIU gives a restored process a new start time."""
    RunRecord(root=Identity.of(child.pid), name="train", command=["sleep", "60"]).save()
    (reason,) = taken_pids(of_child(child, start_time=1), 0.0)
    assert "the same program 'train', started since" in reason.text


def test_somebody_else_under_its_pid_is_not_taken_for_it(child: subprocess.Popen[bytes]) -> None:
    for other in ({"command": ["sleep", "61"]}, {"command": []}, {"command": ["sleep", "61"], "start_time": 1}):
        (reason,) = taken_pids(of_child(child, **other), 0.0)
        assert f"pid {child.pid} is taken (sleep, state" in reason.text


def test_the_image_s_job_that_was_not_reaped_yet_is_recognised(child: subprocess.Popen[bytes]) -> None:
    manifest = of_child(child)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    (reason,) = taken_pids(manifest, 0.0)
    assert f"its parent {os.getpid()} (" in reason.text
    assert f"process {os.getpid()} reaps it" in reason.hint


def test_one_sentence_for_a_whole_tree_that_still_runs(child: subprocess.Popen[bytes]) -> None:
    manifest = of_child(child)
    more = TreeProcess(pid=os.getpid(), ppid=child.pid, start_time=1)
    assert len(taken_pids(msgspec.structs.replace(manifest, tree=[*manifest.tree, more]), 0.0)) == 1


def test_the_image_s_own_job_that_goes_on_running_is_not_waited_for(child: subprocess.Popen[bytes]) -> None:
    begun = time.monotonic()
    assert len(taken_pids(of_child(child), 250.0, lambda: False)) == 1
    assert time.monotonic() - begun < 60


def test_the_image_s_own_job_that_is_about_to_go_is_waited_for(child: subprocess.Popen[bytes]) -> None:
    manifest = of_child(child)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    reaping = threading.Timer(1.0, child.wait)
    reaping.start()
    assert taken_pids(manifest, 60.0, lambda: False) == []
    reaping.join()

"""Rules that let calls fail: which calls they mean, what they do, and every hazard's switch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from softgpu.far import Died, Far, quick_enough, until

from limosa_softgpu.faults import HAZARDS

MIB = 1 << 20
ONE_ALLOCATION = """
import os
from cuda.bindings import driver as cu
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
print(int(cu.cuMemAlloc(4096)[0]))
"""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def job(node: Any) -> Far:
    job = Far(node)
    job("start()")
    job("plain(2, 1)")
    return job


# --- which calls ----------------------------------------------------------------------------------------------------


def test_the_first_call_by_default_and_then_no_more(node: Any, job: Far) -> None:
    rule = node.switches.add("function=cuMemAlloc_v2 result=CUDA_ERROR_UNKNOWN")
    answers = [job("word(cu.cuMemAlloc(4096)[0])") for _ in range(3)]
    assert answers == ["UNKNOWN", "SUCCESS", "SUCCESS"]
    assert node.switches.count(rule) == 3
    assert sum(f"fault {rule}: cuMemAlloc_v2" in line for line in node.log()) == 1


def test_the_nth_call_of_the_whole_node(node: Any, job: Far) -> None:
    other = Far(node)
    other("start()")
    node.switches.add("function=cuMemAlloc_v2 nth=4 result=719")
    answers = [far("word(cu.cuMemAlloc(4096)[0])") for far in (job, other, job, other, job)]
    assert answers == ["SUCCESS"] * 3 + ["LAUNCH_FAILED", "SUCCESS"]


def test_each_call_until_the_rule_is_taken_away(node: Any, job: Far) -> None:
    rule = node.switches.add("function=cuMem* every=1 result=CUDA_ERROR_OUT_OF_MEMORY")
    assert [job("word(cu.cuMemAlloc(4096)[0])") for _ in range(3)] == ["OUT_OF_MEMORY"] * 3
    assert job("word(cu.cuMemGetInfo()[0])") == "OUT_OF_MEMORY"
    assert job("word(cu.cuCtxSynchronize()[0])") == "SUCCESS"
    assert node.switches.count(rule) == 4
    node.switches.remove(rule)
    assert job("word(cu.cuMemAlloc(4096)[0])") == "SUCCESS"


def test_only_one_process_or_only_about_one(node: Any, job: Far, controller: Far) -> None:
    other = Far(node)
    other("start()")
    node.switches.add(f"function=cuMemAlloc_v2 every=1 caller={other.pid} result=2")
    assert other("word(cu.cuMemAlloc(4096)[0])") == "OUT_OF_MEMORY"
    assert job("word(cu.cuMemAlloc(4096)[0])") == "SUCCESS"
    node.switches.add(f"function=cuCheckpoint* every=1 target={job.pid} result=CUDA_ERROR_NOT_SUPPORTED")
    assert controller.lock(job.pid) == "NOT_SUPPORTED"
    assert controller.state(other.pid) == "running"


def test_rules_from_the_start(new_node: Callable[..., Any]) -> None:
    node = new_node(faults=["function=cuInit nth=2 result=CUDA_ERROR_NO_DEVICE"])
    far = Far(node)
    assert [far("word(cu.cuInit(0)[0])") for _ in range(3)] == ["SUCCESS", "NO_DEVICE", "SUCCESS"]


@pytest.mark.parametrize("name", ["far.py", "f?r.*", "python*", "a-name-of-its-own"])
def test_a_process_by_a_name_that_is_known_before_it_starts(node: Any, tmp_path: Path, name: str) -> None:
    node.switches.add(f"function=cuMemAlloc every=1 caller={name} result=2")
    other = tmp_path / "other"
    other.write_text(ONE_ALLOCATION)
    other.chmod(0o755)
    meant = Far(node)
    meant("open('/proc/self/comm', 'w').write('a-name-of-its')")  # cut by the kernel to 15 letters
    meant("start()")
    expected = "SUCCESS" if name == "a-name-of-its-own" else "OUT_OF_MEMORY"
    assert meant("word(cu.cuMemAlloc(4096)[0])") == expected
    node.switches.clear()
    node.switches.add("function=cuMemAlloc every=1 caller=a-name-of-its result=2")
    assert meant("word(cu.cuMemAlloc(4096)[0])") == "OUT_OF_MEMORY"
    assert node.run([sys.executable, other]).stdout == "0\n"
    node.switches.add("function=cuMemAlloc every=1 caller=other result=2")
    assert node.run([sys.executable, other]).stdout == "2\n"


def test_a_target_by_its_name(node: Any, job: Far, tmp_path: Path) -> None:
    script = tmp_path / "master.py"
    script.write_text(
        "import sys; from cuda.bindings import driver as cu; cu.cuInit(0)\n"
        "print(int(cu.cuCheckpointProcessLock(int(sys.argv[1]), None)[0]))\n"
    )
    node.switches.add("function=cuCheckpointProcessLock every=1 target=master.py result=999")
    assert node.run([sys.executable, script, job.pid]).stdout == "0\n"
    node.switches.add("function=cuCheckpointProcessUnlock every=1 target=far.py result=999")
    assert job(f"unlock({job.pid})") == "UNKNOWN"
    node.switches.add("hazard=restore-poisons target=master.py")
    node.switches.remove("000002")
    for call in ("checkpoint", "restore", "unlock"):
        assert job(f"{call}({job.pid})") == "SUCCESS"
    assert job(f"state({job.pid})") == "running"


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        ("result=CUDA_ERROR_NO_DEVICE", ["NO_DEVICE", "SUCCESS"]),
        ("nth=2 result=999", ["SUCCESS", "UNKNOWN"]),
        ("after=999", ["UNKNOWN", "SUCCESS"]),
        ("every=1 result=3", ["NOT_INITIALIZED"] * 2),
    ],
)
def test_cuinit_fails(node: Any, rule: str, answer: list[str]) -> None:
    node.switches.add(f"function=cuInit {rule}")
    far, controller = Far(node), Far(node)
    assert [far("word(cu.cuInit(0)[0])") for _ in range(2)] == answer
    initialised = "SUCCESS" in answer
    assert (controller.state(far.pid) == "running") == initialised
    with open(f"/proc/{far.pid}/maps") as file:
        assert ("/dev/nvidia" in file.read()) == initialised  # one that has no driver keeps nothing of the node


def test_cuinit_crashes_hangs_and_is_slow(node: Any) -> None:
    rule = node.switches.add("function=cuInit crash=caller")
    with pytest.raises(Died):
        Far(node)("cu.cuInit(0)")
    node.switches.remove(rule)
    rule = node.switches.add("function=cuInit hang")
    far = Far(node)
    pending = far.send("word(cu.cuInit(0)[0])")
    time.sleep(0.3)
    assert not pending.done
    node.switches.remove(rule)
    assert pending.value() == "SUCCESS"
    node.switches.add("function=cuInit delay=0.5")
    begin = time.monotonic()
    Far(node)("ok(cu.cuInit(0))")
    assert time.monotonic() - begin >= 0.5


def test_calls_before_cuinit_fail_and_keep_nothing_of_the_node(node: Any) -> None:
    node.switches.add("function=cuDriverGetVersion nth=2 result=999")
    node.switches.add("function=cuDeviceGetCount after=100")
    far = Far(node)
    assert [far("word(cu.cuDriverGetVersion()[0])") for _ in range(3)] == ["SUCCESS", "UNKNOWN", "SUCCESS"]
    assert far("cu.cuDriverGetVersion()[1]") == 13000
    assert far("word(cu.cuDeviceGetCount()[0])") == "NOT_INITIALIZED"
    with open(f"/proc/{far.pid}/maps") as file:
        assert "/dev/nvidia" not in file.read()
    assert far("word(cu.cuInit(0)[0])") == "SUCCESS"


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemAlloc_v2", "cuMemAll*"])
def test_a_function_is_meant_with_and_without_its_version(node: Any, job: Far, name: str) -> None:
    node.switches.add(f"function={name} result=CUDA_ERROR_NOT_MAPPED")
    assert [job("word(cu.cuMemAlloc(4096)[0])") for _ in range(2)] == ["NOT_MAPPED", "SUCCESS"]


def test_a_rule_that_means_nothing_is_void_and_said(node: Any, job: Far) -> None:
    folder = f"{node.folder}/faults"
    for name, text in (("zz1", "functoin=* result=2"), ("zz2", "result=CUDA_ERROR_WHATEVER"), ("zz3", "hang=5")):
        with open(f"{folder}/{name}", "w") as file:
            file.write(text)
    node.switches.add("function=cuProfilerInitialize result=2")  # counts the generation up
    assert job("word(cu.cuMemAlloc(4096)[0])") == "SUCCESS"
    assert [sum(f"fault {name} is void" in line for line in node.log()) >= 1 for name in ("zz1", "zz2", "zz3")] == [
        True
    ] * 3


# --- what they do ---------------------------------------------------------------------------------------------------


def test_the_work_is_done_and_the_answer_is_another(node: Any, job: Far, controller: Far) -> None:
    node.switches.add("function=cuCheckpointProcessLock after=CUDA_ERROR_UNKNOWN")
    assert controller.lock(job.pid) == "UNKNOWN"
    assert controller.state(job.pid) == "locked"
    node.switches.add("function=cuMemsetD8_v2 after=999")
    assert controller.unlock(job.pid) == "SUCCESS"
    address = job("int(ok(cu.cuMemAlloc(4096)))")
    assert job(f"word(cu.cuMemsetD8({address}, 7, 4096)[0])") == "UNKNOWN"
    job("back = bytearray(4096)")
    job(f"ok(cu.cuMemcpyDtoH(back, {address}, 4096))")
    assert job("set(back) == {7}")


def test_a_hang_ends_with_its_rule_and_a_delay_by_itself(node: Any, job: Far) -> None:
    rule = node.switches.add("function=cuMemAlloc_v2 hang")
    call = job.send("context() or word(cu.cuMemAlloc(4096)[0])")
    time.sleep(0.3)
    assert not call.done
    node.switches.remove(rule)
    assert call.value() == "SUCCESS"
    node.switches.add("function=cuMemGetInfo_v2 delay=0.4")
    before = time.monotonic()
    assert job("word(cu.cuMemGetInfo()[0])") == "SUCCESS"
    assert time.monotonic() - before >= 0.4


def test_a_crash_of_the_caller_before_and_after(node: Any, job: Far, controller: Far) -> None:
    for rule, state in (("crash=caller", "running"), ("crash-after=caller", "locked")):
        doomed = Far(node)
        node.switches.add(f"function=cuCheckpointProcessLock {rule} caller={doomed.pid}")
        with pytest.raises(Died) as caught:
            doomed.lock(job.pid)
        assert caught.value.args == (-signal.SIGKILL,)
        assert controller.state(job.pid) == state


def test_a_crash_of_the_target_before_and_after(node: Any, controller: Far) -> None:
    for rule, answers in (
        ("crash=target", {"OPERATING_SYSTEM", "NOT_INITIALIZED"}),
        ("crash-after=target", {"SUCCESS"}),
    ):
        job = Far(node)
        job("start()")
        node.switches.add(f"function=cuCheckpointProcessLock {rule}")
        assert controller.lock(job.pid) in answers
        assert job.died() == -signal.SIGKILL


def test_a_state_that_is_not_true(node: Any, job: Far, controller: Far) -> None:
    node.switches.add(f"function=cuCheckpointProcessGetState state=3 target={job.pid}")
    assert [controller.state(job.pid) for _ in range(2)] == ["failed", "running"]
    node.switches.add("function=cuCheckpointProcessGetState state=9 every=1")
    assert controller.state(job.pid) == 9  # a number that nobody has a word for


def test_memory_that_is_full(node: Any, job: Far, controller: Far) -> None:
    node.switches.add("function=cuMemAlloc_v2 memory=device")
    assert job("word(cu.cuMemAlloc(4096)[0])") == "OUT_OF_MEMORY"
    node.switches.add("function=cuMemHostAlloc memory=host")
    assert job("word(cu.cuMemHostAlloc(4096, 0)[0])") == "OUT_OF_MEMORY"
    node.switches.add("function=cuCheckpointProcessCheckpoint memory=host")
    assert controller.lock(job.pid) == "SUCCESS"
    assert [controller.checkpoint(job.pid) for _ in range(2)] == ["OUT_OF_MEMORY", "SUCCESS"]
    node.switches.add("function=cuCheckpointProcessRestore memory=device")
    assert [controller.restore(job.pid) for _ in range(2)] == ["OUT_OF_MEMORY", "OPERATING_SYSTEM"]
    assert controller.state(job.pid) == "checkpointed"


def test_a_gpu_lost_at_a_call(node: Any, job: Far) -> None:
    node.switches.add("function=cuMemAlloc_v2 nth=2 lost=0")
    assert job("word(cu.cuMemAlloc(4096)[0])") == "SUCCESS"
    assert job("word(cu.cuMemAlloc(4096)[0])") != "SUCCESS"
    assert job("word(cu.cuCtxSynchronize()[0])") != "SUCCESS"


def test_nvml_lies_and_times_out(node: Any) -> None:
    ask = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        "try: print(n.nvmlDeviceGetMemoryInfo(h).free)\n"
        "except n.NVMLError as e: print('error', e.value)\n"
    )
    node.switches.add("function=nvmlDeviceGetMemoryInfo* lie=free:12345678")
    assert node.python(ask).stdout == "12345678\n"
    assert node.python(ask).stdout == f"{60 * MIB}\n"
    node.switches.add("function=nvmlDeviceGetMemoryInfo* result=NVML_ERROR_TIMEOUT")
    assert node.python(ask).stdout == "error 10\n"


STEPS = {
    "lock-begin": ("lock", "running"),
    "lock-closed": ("lock", "running"),
    "checkpoint-begin": ("checkpoint", "locked"),
    "checkpoint-saved": ("checkpoint", "locked"),
    "restore-begin": ("restore", "checkpointed"),
    "unlock-begin": ("unlock", "locked"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_in_the_middle_leaves_it_as_it_was_and_the_next_try_succeeds(
    step: str, node: Any, job: Far, controller: Far
) -> None:
    call, state = STEPS[step]
    node.switches.add(f"function=step:{step} result=CUDA_ERROR_UNKNOWN")
    for each in ("lock", "checkpoint", "restore", "unlock"):
        if each == call:
            assert controller(f"{each}({job.pid})") == "UNKNOWN"
            assert controller.state(job.pid) == state
        assert controller(f"{each}({job.pid})") == "SUCCESS"
    assert job("intact()")


def test_a_restore_that_fails_with_its_memory_claimed_is_final_and_keeps_no_memory(
    node: Any, job: Far, controller: Far
) -> None:
    controller.suspend(job.pid)
    node.switches.add("function=step:restore-claimed result=CUDA_ERROR_UNKNOWN")
    assert [controller.restore(job.pid) for _ in range(2)] == ["UNKNOWN", "OPERATING_SYSTEM"]
    assert node.switches.used(0) == 4 * MIB


@pytest.mark.parametrize(
    "step",
    ["lock-closed", "checkpoint-saved", "checkpoint-released", "restore-claimed", "restore-loaded", "unlock-begin"],
)
def test_a_target_that_dies_in_the_middle(step: str, node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add(f"function=step:{step} crash=caller")
    answers = [controller(f"{call}({job.pid})") for call in ("lock", "checkpoint", "restore", "unlock")]
    assert "OPERATING_SYSTEM" in answers
    assert set(answers) <= {"SUCCESS", "OPERATING_SYSTEM", "NOT_INITIALIZED"}
    assert job.died() == -signal.SIGKILL
    node.switches.remove(rule)
    assert controller("ok(cu.cuMemGetInfo()) if context() is None else 0") is not None
    assert os.listdir(f"{node.folder}/requests") == []


def test_a_target_that_hangs_in_the_middle_goes_on_with_the_rules_end(node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add("function=step:checkpoint-saved hang")
    assert controller.lock(job.pid) == "SUCCESS"
    call = controller.send(f"checkpoint({job.pid})")
    time.sleep(0.2)
    assert not call.done
    node.switches.remove(rule)
    assert call.value() == "SUCCESS"


# --- hazards --------------------------------------------------------------------------------------------------------


def test_restore_poisons(node: Any, job: Far, controller: Far) -> None:
    controller.suspend(job.pid)
    node.switches.add("hazard=restore-poisons")
    assert [controller.restore(job.pid) for _ in range(2)] == ["OUT_OF_MEMORY", "OPERATING_SYSTEM"]
    assert [controller.unlock(job.pid), controller.lock(job.pid)] == ["ILLEGAL_STATE"] * 2


def test_first_synchronise_segfaults(node: Any, job: Far, controller: Far) -> None:
    node.switches.add("hazard=first-synchronise-segfaults")
    job("ok(cu.cuCtxSynchronize())")
    controller.suspend(job.pid)
    controller.resume(job.pid)
    job("ok(cu.cuMemAlloc(4096))")  # another call first
    job("ok(cu.cuCtxSynchronize())")
    controller.suspend(job.pid)
    call = job.send("ok(cu.cuCtxSynchronize())", main=True)
    assert controller.restore(job.pid) == "SUCCESS"  # a lock does not hold a synchronise
    with pytest.raises(Died) as caught:
        call.value()
    assert caught.value.args == (-signal.SIGSEGV,)


def test_killed_by_cgroup(node: Any, job: Far, controller: Far) -> None:
    node.switches.add(f"hazard=killed-by-cgroup caller={job.pid}")
    assert controller.lock(job.pid) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "OPERATING_SYSTEM"
    assert job.died() == -signal.SIGKILL


def test_collective_deadlocks_lock(node: Any, job: Far, controller: Far) -> None:
    other = Far(node)
    other("start()")
    rule = node.switches.add(f"hazard=collective-deadlocks-lock caller={other.pid}")
    assert controller.lock(job.pid, 60000) == "SUCCESS"
    assert controller.lock(other.pid, 200) == "NOT_READY"
    assert controller.state(other.pid) == "running"
    node.switches.remove(rule)
    assert controller.lock(other.pid, 60000) == "SUCCESS"


def test_nccl_shared_memory_lost(node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add("hazard=nccl-shared-memory-lost")
    controller.suspend(job.pid)
    node.switches.remove(rule)
    assert [controller.restore(job.pid) for _ in range(2)] == ["NOT_SUPPORTED"] * 2
    assert controller.state(job.pid) == "checkpointed"


def test_no_map_refused(node: Any, job: Far, controller: Far) -> None:
    uuids = controller("[bytes(ok(cu.cuDeviceGetUuid(i)).bytes).hex() for i in range(2)]")
    node.switches.add("hazard=no-map-refused")
    controller.suspend(job.pid)
    assert controller.restore(job.pid) == "INVALID_VALUE"
    controller.resume(job.pid, [(uuid, uuid) for uuid in uuids])
    assert job("intact()")


@pytest.mark.parametrize("call", ["lock", "state", "restore"])
def test_lock_hangs_when_stopped_also_where_it_is_not(call: str, node: Any, job: Far, controller: Far) -> None:
    other = Far(node)
    other("start()")
    if call == "restore":
        controller.suspend(job.pid)
    rule = node.switches.add(f"hazard=lock-hangs-when-stopped target={job.pid}")
    waits = controller.send(f"{call}({job.pid}{', 100' if call == 'lock' else ''})")
    time.sleep(0.4)
    assert not waits.done  # its own time-out is past
    assert Far(node).state(other.pid) == "running"
    node.switches.remove(rule)
    assert waits.value() == ("running" if call == "state" else "SUCCESS")


def test_state_blocks_in_flight_also_where_nothing_is(node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add("hazard=state-blocks-in-flight")
    query = controller.send(f"state({job.pid})")
    assert Far(node).lock(job.pid) == "SUCCESS"
    assert not query.done
    node.switches.remove(rule)
    assert query.value() == "locked"


def test_ipc_lost_also_where_there_is_none(node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add("hazard=ipc-lost caller=far.py")
    controller.suspend(job.pid)
    node.switches.remove(rule)
    assert [controller.restore(job.pid) for _ in range(2)] == ["INVALID_VALUE", "OPERATING_SYSTEM"]
    assert controller.state(job.pid) == "checkpointed"


def test_managed_not_supported_also_where_there_is_none(node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add("hazard=managed-not-supported")
    assert controller.lock(job.pid) == "SUCCESS"
    assert [controller.checkpoint(job.pid) for _ in range(2)] == ["NOT_SUPPORTED", "UNKNOWN"]
    assert controller.state(job.pid) == "locked"
    node.switches.remove(rule)
    assert controller.unlock(job.pid) == "SUCCESS"
    controller.suspend(job.pid)
    controller.resume(job.pid)
    assert job("intact()")


@pytest.mark.parametrize("call", ["checkpoint", "restore"])
def test_stays_locked_after_controller_death(call: str, node: Any, job: Far, controller: Far) -> None:
    assert controller.lock(job.pid) == "SUCCESS"
    if call == "restore":
        assert controller.checkpoint(job.pid) == "SUCCESS"
    node.switches.add("hazard=stays-locked-after-controller-death nth=1")
    doomed = Far(node)
    doomed("ok(cu.cuInit(0))")
    doomed.send(f"{call}({job.pid})")
    assert doomed.died() == -signal.SIGKILL
    after = {"checkpoint": "checkpointed", "restore": "locked"}[call]
    assert controller.state(job.pid) == after  # it waits for what is under way
    if call == "checkpoint":
        assert controller.restore(job.pid) == "SUCCESS"
    assert controller.unlock(job.pid) == "SUCCESS"
    assert job("intact()")
    assert os.listdir(os.path.join(node.folder, "requests")) == []


def test_chips_differ_also_where_they_are_alike(node: Any, job: Far, controller: Far) -> None:
    a, b = controller("[bytes(ok(cu.cuDeviceGetUuid(i)).bytes).hex() for i in range(2)]")
    node.switches.add("hazard=chips-differ")
    controller.suspend(job.pid)
    assert controller.restore(job.pid, [(a, b), (b, a)]) == "INVALID_VALUE"
    assert controller.state(job.pid) == "checkpointed"
    controller.resume(job.pid, [(a, a), (b, b)])
    assert job("intact()")


def test_needs_persistence_also_where_it_is_on(node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add("hazard=needs-persistence")
    controller.suspend(job.pid)
    assert controller.restore(job.pid) == "NOT_INITIALIZED"
    node.switches.remove(rule)
    controller.resume(job.pid)
    assert job("intact()")


def test_bus_id_remembered_also_on_the_same_node(node: Any, job: Far, controller: Far) -> None:
    bus = "ok(cu.cuDeviceGetPCIBusId(13, 0)).decode().rstrip(chr(0))"
    before = job(bus)
    node.switches.add("hazard=bus-id-remembered")
    controller.suspend(job.pid)
    controller.resume(job.pid)
    after = job(bus)
    assert after != before
    there = [gpu["pci_bus_id"] for gpu in node.limosa("gpus", "-o", "json").json["gpus"]]
    assert [before[-10:] in bus for bus in there] == [True, False]
    assert not any(after[-10:] in bus for bus in there)  # no GPU of this machine has it
    assert job("intact()")


def test_a_thread_id_is_noted_or_refused(node: Any, job: Far, controller: Far) -> None:
    thread = next(int(tid) for tid in os.listdir(f"/proc/{job.pid}/task") if int(tid) != job.pid)
    rule = node.switches.add("hazard=thread-id-as-pid")
    assert [controller.state(thread), controller.state(job.pid)] == ["running", "running"]
    assert node.switches.count(rule) == 1
    node.switches.add("hazard=thread-id-refused")
    assert controller.state(thread) == "OPERATING_SYSTEM"
    assert controller.lock(thread) == "OPERATING_SYSTEM"
    assert controller.state(job.pid) == "running"


def test_every_hazard_is_told_of_and_tried() -> None:
    """In the documentation's table, and by a rule in this file."""
    here = Path(__file__)
    told = (here.parents[2] / "docs" / "softgpu.md").read_text(encoding="utf-8")
    tried = "".join(path.read_text(encoding="utf-8") for path in here.parent.glob("test_*.py"))
    assert {name for name in HAZARDS if f"`{name}`" not in told} == set()
    assert {name for name in HAZARDS if f"hazard={name}" not in tried and f'"{name}"' not in tried} == set()


@pytest.mark.parametrize("hazard", ["vgpu", "mig", "mps", "mig-not-supported", "mps-not-supported"])
def test_not_supported(hazard: str, node: Any, job: Far, controller: Far) -> None:
    if hazard == "mig":
        node.switches.mig(0)
    elif hazard == "mps":
        node.switches.mps()
    else:
        node.switches.add(f"hazard={hazard}")
    assert controller.lock(job.pid) == "NOT_SUPPORTED"
    assert controller.state(job.pid) == "running"


def test_multicast_hangs(node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add("hazard=multicast-hangs")
    assert controller.lock(job.pid) == "SUCCESS"
    call = controller.send(f"checkpoint({job.pid})")
    time.sleep(0.2)
    assert not call.done
    node.switches.remove(rule)
    assert call.value() == "SUCCESS"


def test_kill_after_restore_hangs(node: Any, job: Far, controller: Far) -> None:
    rule = node.switches.add("hazard=kill-after-restore-hangs")
    other = Far(node)
    other("start()")
    controller.suspend(job.pid)
    controller.resume(job.pid)
    assert controller.state(other.pid) == "running"
    controller.suspend(job.pid)  # checkpointed again before it is killed: no harm
    job.process.kill()
    job.died()
    assert controller.state(other.pid) == "running"
    controller.suspend(other.pid)
    controller.resume(other.pid)
    other.process.kill()
    other.died()
    query = controller.send(f"state({controller.pid})")
    time.sleep(0.2)
    assert not query.done
    node.switches.remove(rule)
    assert query.value() == "running"


def test_init_slow(node: Any) -> None:
    def begins() -> float:
        rule = node.switches.add("hazard=init-slow nth=1")
        far = Far(node)
        far("begin = time.monotonic(); ok(cu.cuInit(0)); took = time.monotonic() - begin")
        node.switches.remove(rule)
        return float(far("took"))

    quick_enough(begins, 2.7, 6)


def test_states_4_and_5(new_node: Callable[..., Any]) -> None:
    node = new_node(faults=["hazard=states-4-and-5"])
    job, controller, other = Far(node), Far(node), Far(node)
    job("start()")
    job("plain(2, 1)")
    controller("ok(cu.cuInit(0))")
    assert controller.lock(job.pid) == "SUCCESS"
    for call, step, between, after in (
        ("checkpoint", "checkpoint-saved", (4, "checkpointing"), "checkpointed"),
        ("restore", "restore-claimed", (5, "restoring"), "running"),
    ):
        rule = node.switches.add(f"function=step:{step} hang")
        under_way = controller.send(f"{call}({job.pid})")
        until(lambda rule=rule: node.switches.count(rule) > 0)
        assert other.state(job.pid) in between
        assert other(f"thread_id({job.pid})") > 0
        waits = other.send(f"unlock({job.pid})")  # what changes something has to wait
        time.sleep(0.05)
        assert not waits.done
        node.switches.remove(rule)
        assert under_way.value() == "SUCCESS"
        assert waits.value() == ("ILLEGAL_STATE" if call == "checkpoint" else "SUCCESS")
        assert other.state(job.pid) == after
    assert job("intact()")


def test_no_rule_costs_next_to_nothing(node: Any, job: Far) -> None:
    job("clocks = __import__('timeit').repeat(lambda: cu.cuCtxGetCurrent(), timer=time.thread_time, number=4000)")
    assert job("min(clocks)") < 0.4  # 100 microseconds a call would be a folder read each time

"""The checkpoint calls on software GPUs: the restore thread, its queue, deaths on either side, who may ask whom.

What each call answers in each state is the conformance suite's; here is what only this implementation has to get right.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from softgpu.far import Far, quick_enough, until

from limosa.native.build import compilers
from limosa_softgpu.state import opened

MIB = 1 << 20
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def far(node: Any) -> Callable[..., Far]:
    return lambda *prefix, **options: Far(node, *prefix, **options)


@pytest.fixture
def job(far: Callable[..., Far]) -> Far:
    """A process with a context, 6 MiB of plain memory and 4 MiB of a handle."""
    job = far()
    job("start()")
    job("plain(6, 1)")
    job("vmm(4, 2)")
    return job


def status(pid: int, field: str) -> int:
    """A number of /proc/PID/status; kB as bytes."""
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * (1024 if line.endswith("kB\n") else 1)


def of_the_node(pid: int) -> list[str]:
    """Descriptors and mappings of a process that have to do with the node."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    with open(f"/proc/{pid}/maps") as file:
        found += [line.split(maxsplit=5)[-1].strip() for line in file if "/" in line]
    return [path for path in found if path.startswith("/dev/nvidia")]


class HeldIn:
    """A target that is held in a step of a call until it is let go."""

    def __init__(self, node: Any, step: str, how: str = "hang"):
        self._switches = node.switches
        self._rule = self._switches.add(f"function=step:{step} {how}")

    def begun(self) -> None:
        """Waits until a call has come there."""
        until(lambda: self._switches.count(self._rule) > 0)

    def __call__(self) -> None:
        self._switches.remove(self._rule)


def waiting(node: Any) -> list[str]:
    return os.listdir(os.path.join(node.folder, "requests"))


# --- one process through its states ---------------------------------------------------------------------------------


def test_the_memory_is_the_targets_own_while_it_is_checkpointed(job: Far, controller: Far, node: Any) -> None:
    assert of_the_node(job.pid)
    before = status(job.pid, "RssAnon")
    controller.suspend(job.pid)
    assert of_the_node(job.pid) == []
    assert not [fd for fd in os.listdir(f"/proc/{job.pid}/fd") if "socket" in os.readlink(f"/proc/{job.pid}/fd/{fd}")]
    # 10 MiB of the application's, 8 MiB that every context takes beside.
    assert status(job.pid, "RssAnon") - before == pytest.approx(18 * MIB, abs=2 * MIB)
    assert node.switches.used(0) == 4 * MIB
    assert not [block for block in node.blocks() if os.stat(f"{node.folder}/memory/{block}").st_size]
    controller.resume(job.pid)
    assert status(job.pid, "RssAnon") - before < 2 * MIB
    assert job("intact()")
    assert node.switches.used(0) > 4 * MIB


@pytest.mark.parametrize("wrong", [(1 << 64) - 8 * MIB, 1 << 62])
def test_what_a_checkpoint_takes_is_no_strangers_to_say(job: Far, controller: Far, node: Any, wrong: int) -> None:
    """Everybody in the node may write there: 10 MiB were copied into 2, or there was no memory for it."""
    with opened(node.folder) as state:
        state.rates.checkpoint_bytes = wrong
        del state
    controller.suspend(job.pid)
    controller.resume(job.pid)
    assert job("intact()")


def test_one_call_of_the_c_librarys_mmap_holds_everything(
    far: Callable[..., Far], controller: Far, tmp_path: Path
) -> None:
    (compiler, *_), *_ = compilers()
    source = tmp_path / "answer.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <sys/mman.h>\n"
        "void *mmap(void *a, size_t n, int p, int f, int d, off_t o) {\n"
        '  void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");\n'
        '  if (f & MAP_POPULATE) { FILE *t = fopen(getenv("TOLD"), "a");\n'
        '    fprintf(t, "%zu %d %d %d\\n", n, p, f, d); fclose(t); }\n'
        "  return real(a, n, p, f, d, o); }\n"
    )
    library, told = tmp_path / "answer.so", tmp_path / "told"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    job = far(env={"LD_PRELOAD": str(library), "TOLD": str(told)})
    job("start()")
    job("plain(6, 1)")
    controller.suspend(job.pid)
    (line,) = told.read_text().splitlines()
    assert line == f"{14 * MIB} 3 {0x8000 | 0x22} -1"
    controller.resume(job.pid)
    assert job("intact()")


def test_a_locked_process_stands_still_in_its_next_call(job: Far, controller: Far) -> None:
    job("ticking()")
    until(lambda: job("ticks") > 5)
    assert controller.lock(job.pid, 60000) == "SUCCESS"
    first = job("ticks")
    time.sleep(0.1)
    assert job("ticks") - first <= 1
    blocked = job.send("context() or ok(cu.cuMemAlloc(4096)) and None")
    assert controller.checkpoint(job.pid) == "SUCCESS"
    synchronising = job.send("ok(cu.cuCtxSynchronize())", main=True)  # held by a checkpoint only
    time.sleep(0.1)
    assert not blocked.done
    assert not synchronising.done
    controller.resume(job.pid)
    blocked.value()
    synchronising.value()
    until(lambda: job("ticks") > first + 5)
    assert job("intact()")


def test_questions_that_no_gate_holds_are_answered_in_a_checkpointed_process_and_open_nothing(
    job: Far, controller: Far
) -> None:
    questions = "ok(cu.cuDeviceGetPCIBusId(32, 0)), ok(cu.cuDeviceTotalMem(0)), ok(cu.cuDriverGetVersion())"
    before = job(questions)
    controller.suspend(job.pid)
    assert job(questions) == before
    assert job("word(cu.cuDeviceGetName(64, 0)[0])") == "OPERATING_SYSTEM"
    assert of_the_node(job.pid) == []
    controller.resume(job.pid)


def test_the_restore_thread_is_one_of_the_targets(job: Far, controller: Far) -> None:
    thread = controller(f"thread_id({job.pid})")
    with open(f"/proc/{job.pid}/task/{thread}/comm") as file:
        assert file.read() == "cuda-restore\n"
    controller.suspend(job.pid)
    assert controller(f"thread_id({job.pid})") == thread
    controller.resume(job.pid)


@pytest.mark.parametrize("who", ["itself", "another"])
def test_a_process_can_put_itself_aside(who: str, job: Far, controller: Far) -> None:
    assert job(f"lock({job.pid})") == "SUCCESS"
    assert job(f"state({job.pid})") == "locked"
    assert job(f"checkpoint({job.pid})") == "SUCCESS"
    assert of_the_node(job.pid) == []
    assert job(f"state({job.pid})") == controller.state(job.pid) == "checkpointed"
    bringer = job if who == "itself" else controller
    bringer.resume(job.pid)
    assert of_the_node(job.pid)
    assert job("intact()")


# --- time-outs and queues -------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_end_makes_a_lock_time_out(job: Far, controller: Far) -> None:
    job("spin()")

    def gives_up() -> float:
        before = time.monotonic()
        assert controller.lock(job.pid, 200) == "NOT_READY"
        return time.monotonic() - before

    quick_enough(gives_up, 0.2, 2)
    assert controller.state(job.pid) == "running"
    job("ok(cu.cuMemAlloc(1024))")  # the gate is open again
    synchronising = job.send("context() or ok(cu.cuCtxSynchronize())")
    time.sleep(0.05)
    assert controller.lock(job.pid, 200) == "NOT_READY"  # now a thread waits inside as well
    lock = controller.send(f"lock({job.pid})")
    time.sleep(0.05)
    assert not lock.done
    job("release()")
    assert lock.value() == "SUCCESS"
    synchronising.value()
    assert controller.unlock(job.pid) == "SUCCESS"


def test_requests_queue_up_and_each_is_answered_once(job: Far, far: Callable[..., Far], controller: Far) -> None:
    others = [far() for _ in range(3)]
    locks = [asker.send(f"lock({job.pid})") for asker in others for _ in range(4)]
    assert sorted(lock.value() for lock in locks) == ["ILLEGAL_STATE"] * 11 + ["SUCCESS"]
    states = [asker.send(f"[state({job.pid}) for _ in range(50)]") for asker in others]
    for answers in states:
        assert answers.value() == ["locked"] * 50
    assert controller.unlock(job.pid) == "SUCCESS"


def test_a_state_query_waits_for_the_checkpoint_under_way(new_node: Callable[..., Any]) -> None:
    node = new_node()
    job, controller, other = Far(node), Far(node), Far(node)
    job("start()")
    assert controller.lock(job.pid) == "SUCCESS"
    let_go = HeldIn(node, "checkpoint-saved")
    under_way = controller.send(f"checkpoint({job.pid})")
    let_go.begun()
    query = other.send(f"state({job.pid})")
    time.sleep(0.2)
    assert not query.done
    let_go()
    assert query.value() == "checkpointed"
    assert under_way.value() == "SUCCESS"
    controller.resume(job.pid)


def test_a_stopped_target_is_waited_for(job: Far, controller: Far, node: Any) -> None:
    os.kill(job.pid, signal.SIGSTOP)
    lock = controller.send(f"lock({job.pid}, 100)")
    query = controller.send(f"state({job.pid})")
    time.sleep(0.5)
    assert not lock.done
    assert not query.done
    os.kill(job.pid, signal.SIGCONT)
    assert lock.value() == "SUCCESS"
    assert query.value() in ("running", "locked")
    assert controller.unlock(job.pid) == "SUCCESS"
    assert waiting(node) == []


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_a_controller_killed_while_it_waits_its_turn_is_forgotten(job: Far, far: Callable[..., Far], node: Any) -> None:
    os.kill(job.pid, signal.SIGSTOP)
    doomed = far()
    doomed.send(f"lock({job.pid})")
    until(lambda: len(waiting(node)) == 1)
    doomed.process.kill()
    doomed.process.wait()
    os.kill(job.pid, signal.SIGCONT)
    assert far().state(job.pid) == "running"
    assert waiting(node) == []


@pytest.mark.parametrize("inside", [False, True])
def test_a_lock_that_still_waits_when_its_controller_dies_is_not_taken(
    inside: bool, job: Far, far: Callable[..., Far], node: Any
) -> None:
    job("spin()")
    waiting_call = job.send("ok(cu.cuCtxSynchronize())", main=True) if inside else None
    doomed, other = far(), far()
    held = HeldIn(node, "lock-begin", "delay=0")  # by the kernel alone
    doomed.send(f"lock({job.pid})")
    held.begun()
    time.sleep(0.5)
    query = other.send(f"state({job.pid})")
    time.sleep(0.2)
    assert not query.done
    assert other(f"thread_id({job.pid})") > 0  # which can be seen from outside
    doomed.process.kill()
    doomed.process.wait()
    assert query.value() == "running"
    job.send("release()").value()
    if waiting_call:
        waiting_call.value()
    assert other.state(job.pid) == "running"
    assert job("intact()")


def test_a_process_whose_cuinit_found_no_gpu_has_a_state_and_cannot_be_locked(
    far: Callable[..., Far], controller: Far
) -> None:
    job = far(env={"CUDA_VISIBLE_DEVICES": ""})
    assert job("word(cu.cuInit(0)[0])") == "NO_DEVICE"
    assert controller.state(job.pid) == "running"
    assert controller.lock(job.pid) == "OPERATING_SYSTEM"
    for call in (controller.checkpoint, controller.restore, controller.unlock):
        assert call(job.pid) == "ILLEGAL_STATE"
    assert of_the_node(job.pid) == []


def test_what_a_killed_controller_leaves_is_cleared_up_by_the_next(
    job: Far, far: Callable[..., Far], node: Any
) -> None:
    doomed, other = far(), far()
    pid_namespace = os.stat(f"/proc/{doomed.pid}/ns/pid").st_ino
    answer = os.path.join(node.folder, "requests", "00000000000000aa.answer")
    os.symlink(f"0 0 {doomed.pid} {pid_namespace}", answer)
    assert other.state(job.pid) == "running"
    assert waiting(node) == [os.path.basename(answer)]  # it may still look for it
    doomed.process.kill()
    doomed.process.wait()
    assert other.state(job.pid) == "running"
    assert waiting(node) == []


def test_a_controller_killed_in_mid_checkpoint_leaves_it_to_be_finished(new_node: Callable[..., Any]) -> None:
    node = new_node()
    job, other = Far(node), Far(node)
    job("start()")
    job("plain(4, 1)")
    other("ok(cu.cuInit(0))")
    for call, step, state in (
        ("checkpoint", "checkpoint-saved", "checkpointed"),
        ("restore", "restore-claimed", "locked"),
    ):
        doomed = Far(node)
        doomed("ok(cu.cuInit(0))")
        if call == "checkpoint":
            assert doomed.lock(job.pid) == "SUCCESS"
        let_go = HeldIn(node, step)
        doomed.send(f"{call}({job.pid})")
        let_go.begun()
        doomed.process.kill()
        doomed.process.wait()
        let_go()
        assert other.state(job.pid) == state
    assert other.unlock(job.pid) == "SUCCESS"
    assert job("intact()")


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore"])
def test_a_target_killed_in_the_middle_is_told_to_its_controller(call: str, new_node: Callable[..., Any]) -> None:
    node = new_node()
    job, controller = Far(node), Far(node)
    job("start()")
    controller("ok(cu.cuInit(0))")
    if call == "lock":
        job("spin()")
    else:
        assert controller.lock(job.pid) == "SUCCESS"
    if call == "restore":
        assert controller.checkpoint(job.pid) == "SUCCESS"
    steps = {"lock": "lock-begin", "checkpoint": "checkpoint-saved", "restore": "restore-claimed"}
    held = HeldIn(node, steps[call], "delay=0" if call == "lock" else "hang")  # the lock waits for the kernel
    under_way = controller.send(f"{call}({job.pid})")
    held.begun()
    assert not under_way.done
    os.kill(job.pid, signal.SIGKILL)
    assert under_way.value() == "OPERATING_SYSTEM"
    assert controller.state(job.pid) in ("OPERATING_SYSTEM", "NOT_INITIALIZED")
    assert waiting(node) == []
    assert node.switches.used(0) >= 4 * MIB
    assert controller.send("ok(cu.cuDeviceGetCount())").value() == 2


def test_a_target_that_was_stopped_and_becomes_another_program_does_not_hang_its_controller(
    far: Callable[..., Far], controller: Far, node: Any
) -> None:
    job = far()
    job("start()")
    job("spin()")
    held = HeldIn(node, "lock-begin", "delay=0")  # by the kernel alone
    lock = controller.send(f"lock({job.pid})")
    held.begun()
    job.send("os.execv('/bin/sleep', ['sleep', '60'])")
    assert lock.value() == "OPERATING_SYSTEM"
    assert controller.state(job.pid) == "NOT_INITIALIZED"


# --- who is asked ---------------------------------------------------------------------------------------------------


def test_a_thread_stands_for_its_process(job: Far, controller: Far) -> None:
    threads = [int(tid) for tid in os.listdir(f"/proc/{job.pid}/task")]
    assert len(threads) > 2
    for tid in threads:
        assert controller.lock(tid) == "SUCCESS"
        assert controller.state(job.pid) == "locked"
        assert controller.unlock(tid) == "SUCCESS"


def test_processes_without_the_driver_are_never_touched(far: Callable[..., Far], controller: Far, node: Any) -> None:
    plain = far()  # has the bindings, not the driver
    impostor = node.popen(
        [
            sys.executable,
            "-c",
            "import signal, time\nopen('/proc/self/comm', 'w').write('cuda-restore')\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
            "print(flush=True)\ntime.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    assert impostor.stdout
    assert impostor.stdout.readline() == b"\n"
    for pid in (plain.pid, impostor.pid, node.pid, 1):
        assert controller.state(pid) == "NOT_INITIALIZED"
        assert controller.lock(pid, 100) == "NOT_INITIALIZED"
    assert status_pending(impostor.pid) == 0
    for pid in (0, -1, 1 << 30):
        assert controller.state(pid) == "OPERATING_SYSTEM"


def status_pending(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1], 16) for line in file if re.match(r"(SigPnd|ShdPnd):", line))


def test_a_process_of_another_node_has_no_driver_here(job: Far, new_node: Callable[..., Any]) -> None:
    stranger = Far(new_node())
    stranger("ok(cu.cuInit(0))")
    assert stranger.state(job.pid) == "NOT_INITIALIZED"
    assert stranger.lock(job.pid, 100) == "NOT_INITIALIZED"


def test_somebody_elses_process_is_not_permitted_and_ones_own_is(
    far: Callable[..., Far], job: Far, controller: Far
) -> None:
    nobody = far()
    # Loaded before, as what is in root's folders cannot be read afterwards; dumpable again, as a new program would be.
    nobody("ctypes.CDLL('libcuda.so.1'); cu.cuDriverGetVersion(); import random")
    nobody("os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)")
    assert nobody("ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)") == 0
    nobody("ok(cu.cuInit(0))")
    assert nobody.state(job.pid) == "NOT_PERMITTED"
    assert nobody.lock(job.pid, 100) == "NOT_PERMITTED"
    nobody("context()")
    nobody("plain(2, 3)")
    controller.suspend(nobody.pid)  # by root
    controller.resume(nobody.pid)
    assert nobody("intact()")


def test_a_child_forked_since_has_no_driver_and_dies_without_harm(job: Far, controller: Far) -> None:
    child = job("os.fork() or time.sleep(60)")
    assert controller.state(child) == "NOT_INITIALIZED"
    assert of_the_node(child)  # inherited: what CRIU needs the plugin for
    controller.suspend(job.pid)
    controller.resume(job.pid)
    os.kill(child, signal.SIGKILL)
    assert job("intact()")


# --- maps, room -----------------------------------------------------------------------------------------------------


def uuids(controller: Far) -> list[str]:
    return list(controller("[bytes(ok(cu.cuDeviceGetUuid(i)).bytes).hex() for i in range(ok(cu.cuDeviceGetCount()))]"))


def held(node: Any) -> list[int]:
    return [node.switches.used(gpu) - 4 * MIB for gpu in range(len(node.spec.gpus))]


def test_a_map_moves_it_and_a_wrong_one_leaves_it_as_it_was(job: Far, controller: Far, node: Any) -> None:
    a, b = uuids(controller)
    assert held(node)[1] == 0
    for mapping in ([(a, b), (b, a)], [(a, b), (b, a)], [(a, a), (b, b)]):
        controller.suspend(job.pid)
        for wrong in (
            [(a, b)],
            [(a, a)],
            [(a, b), (b, b)],
            [(a, b), (a, a)],
            [(a, b), (b, a), (b, b)],
            [(b, a), (a, "00" * 16)],
        ):
            assert controller.restore(job.pid, wrong) == "INVALID_VALUE"
            assert controller.state(job.pid) == "checkpointed"
            assert of_the_node(job.pid) == []
        controller.resume(job.pid, mapping)
        assert job("intact()")
    assert held(node)[1] == 0
    controller.suspend(job.pid)
    controller.resume(job.pid, [(a, b), (b, a)])
    assert held(node)[0] == 0
    assert held(node)[1] >= 10 * MIB
    controller.suspend(job.pid)
    controller.resume(job.pid)  # no map: it stays
    assert held(node)[0] == 0


def test_other_chips_are_refused(new_node: Callable[..., Any]) -> None:
    node = new_node(gpus=3, chip=["H200", "H200", "H100"])
    job, controller = Far(node), Far(node)
    job("start()")
    controller("ok(cu.cuInit(0))")
    a, b, c = uuids(controller)
    controller.suspend(job.pid)
    assert controller.restore(job.pid, [(a, c), (c, a), (b, b)]) == "INVALID_VALUE"
    assert controller.restore(job.pid, [(a, b), (b, a), (c, c)]) == "SUCCESS"


def test_what_can_be_opened_may_change_while_it_is_checkpointed(
    node: Any, controller: Far, far: Callable[..., Far]
) -> None:
    a, b = uuids(controller)
    hide = "mount --bind /dev/null /dev/nvidia1"
    job = far("unshare", "-m", "sh", "-c", f'{hide} && exec "$0" "$@"')
    job("start()")
    job("plain(4, 1)")
    controller.suspend(job.pid)
    for wrong in ([(a, a), (b, b)], [(a, b), (b, a)], [(a, b)]):
        assert controller.restore(job.pid, wrong) == "INVALID_VALUE"
    controller.resume(job.pid, [(a, a)])
    controller.suspend(job.pid)
    swap = "umount /dev/nvidia1 && mount --bind /dev/null /dev/nvidia0"
    subprocess.run(["nsenter", "-t", str(job.pid), "-m", "sh", "-c", swap], check=True, timeout=60)
    assert controller.restore(job.pid) == "NOT_SUPPORTED"  # it cannot stay
    controller.resume(job.pid, [(a, b)])
    assert held(node)[0] == 0
    controller.suspend(job.pid)
    controller.resume(job.pid)
    assert job("intact()")


def test_a_restore_without_room_is_the_end_of_it(job: Far, controller: Far, node: Any) -> None:
    controller.suspend(job.pid)
    with node.switches.fill(0, leave=12 * MIB):
        assert controller.restore(job.pid) == "OUT_OF_MEMORY"
        assert held(node)[0] <= 64 * MIB - 4 * MIB - 12 * MIB  # and nothing of it is kept
    assert controller.state(job.pid) == "checkpointed"
    assert controller.restore(job.pid) == "OPERATING_SYSTEM"
    for call in (controller.unlock, controller.checkpoint, controller.lock):
        assert call(job.pid) == "ILLEGAL_STATE"
    assert of_the_node(job.pid) == []


def test_managed_memory_is_not_supported_and_it_runs_on(job: Far, controller: Far) -> None:
    """No later checkpoint either, with the memory long freed (docs/results/mixing-ways-2026-11-23-2.jsonl)."""
    managed = job("int(ok(cu.cuMemAllocManaged(4096, 1)))")
    assert controller.lock(job.pid) == "SUCCESS"
    assert [controller.checkpoint(job.pid) for _ in range(3)] == ["NOT_SUPPORTED", "UNKNOWN", "UNKNOWN"]
    assert controller.state(job.pid) == "locked"
    assert controller.unlock(job.pid) == "SUCCESS"
    assert controller.lock(job.pid) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "UNKNOWN"
    assert controller.unlock(job.pid) == "SUCCESS"
    assert job("intact()")
    job(f"ok(cu.cuMemFree({managed}))")
    assert controller.lock(job.pid) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "UNKNOWN"
    assert controller.unlock(job.pid) == "SUCCESS"
    assert job("intact()")


def test_host_memory_that_is_not_to_be_had_leaves_it_whole_and_never_to_be_saved(job: Far, controller: Far) -> None:
    """Every later checkpoint is UNKNOWN, with memory or without (docs/results/mixing-ways-2026-11-23.jsonl)."""
    import resource

    with open(f"/proc/{job.pid}/statm") as file:
        size = int(file.read().split()[0]) * 4096
    resource.prlimit(job.pid, resource.RLIMIT_AS, (size + 4 * MIB, resource.RLIM_INFINITY))
    assert controller.lock(job.pid) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "OUT_OF_MEMORY"
    assert controller.state(job.pid) == "locked"
    resource.prlimit(job.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert controller.checkpoint(job.pid) == "UNKNOWN"
    assert controller.state(job.pid) == "locked"
    assert controller.unlock(job.pid) == "SUCCESS"
    assert job("intact()")


def test_a_lost_gpu_cannot_be_saved_and_one_lost_meanwhile_can_be_left(job: Far, controller: Far, node: Any) -> None:
    a, b = uuids(controller)
    assert controller.lock(job.pid) == "SUCCESS"
    node.switches.lose(0)
    assert controller.checkpoint(job.pid) == "DEVICE_UNAVAILABLE"
    assert controller.state(job.pid) == "locked"
    node.switches.lose(0, False)
    assert controller.checkpoint(job.pid) == "SUCCESS"
    node.switches.lose(0)
    assert controller.restore(job.pid) == "NOT_SUPPORTED"
    assert controller.state(job.pid) == "checkpointed"
    node.switches.lose(0, False)
    controller.resume(job.pid, [(a, b), (b, a)])
    assert job("intact()")


def test_rates_and_fixed_costs_are_kept(new_node: Callable[..., Any]) -> None:
    node = new_node(rates={"checkpoint": 40 * MIB, "restore": 80 * MIB, "checkpoint_fixed": 0.1, "restore_fixed": 0.05})
    job, controller = Far(node), Far(node)
    job("start()")
    job("plain(16, 1)")
    controller("ok(cu.cuInit(0))")
    assert controller.lock(job.pid) == "SUCCESS"
    times = {"checkpoint": 0.5, "restore": 0.25}
    took = dict.fromkeys(times, 1e9)
    for _ in range(8):  # the quickest: whoever is held up only takes longer
        for call, seconds in times.items():
            took[call] = min(took[call], seconds_of(controller, f"assert {call}({job.pid}) == 'SUCCESS'"))
            assert took[call] >= seconds, call
        if all(took[call] < seconds + 0.5 for call, seconds in times.items()):
            break
    else:
        raise AssertionError(took)
    assert controller.unlock(job.pid) == "SUCCESS"


def test_every_step_and_every_copy_takes_its_time(new_node: Callable[..., Any]) -> None:
    """A rate and a fixed cost each, and both together; nothing else is slower."""
    node = new_node(
        speeds=["copy=80MiB/s", "host-to-device=160MiB/s", "peer=40MiB/s", "checkpoint=80MiB/s", "pinned=80MiB/s"],
        costs=["copy=0.1", "lock=0.15", "unlock=0.2", "checkpoint=0.1", "restore=0.25"],
    )
    job, controller = Far(node), Far(node)
    job("start(); a, b = plain(8, 1), int(ok(cu.cuMemAlloc(8 * MIB))); host = bytearray(8 * MIB)")
    job("ok(cu.cuDevicePrimaryCtxRetain(1)); context(1); c = int(ok(cu.cuMemAlloc(8 * MIB))); context(0)")
    controller("ok(cu.cuInit(0))")
    for code, seconds in {
        "ok(cu.cuMemcpyHtoD(a, blocks[0][1], 8 * MIB))": 0.15,
        "ok(cu.cuMemcpyDtoH(host, a, 8 * MIB))": 0.2,
        "ok(cu.cuMemcpyDtoD(b, a, 8 * MIB)); ok(cu.cuCtxSynchronize())": 0.2,
        "ok(cu.cuMemcpyDtoD(c, a, 8 * MIB)); ok(cu.cuCtxSynchronize())": 0.3,
        "ok(cu.cuMemcpyDtoH(bytearray(16), a, 16))": 0.1,
        "ok(cu.cuMemHostAlloc(8 * MIB, 0))": 0.1,
        "ok(cu.cuMemAlloc(4096))": 0,
    }.items():
        quick_enough(lambda code=code: seconds_of(job, code), seconds, seconds + 0.4)
    steps = {"lock": 0.15, "checkpoint": 0.1 + 24 / 80, "restore": 0.25, "unlock": 0.2}
    took = dict.fromkeys(steps, 1e9)
    for _ in range(8):
        for call, seconds in steps.items():
            took[call] = min(took[call], seconds_of(controller, f"assert {call}({job.pid}) == 'SUCCESS'"))
            assert took[call] >= seconds, call
        if all(took[call] < seconds + 0.5 for call, seconds in steps.items()):
            break
    else:
        raise AssertionError(took)
    assert job("intact()")


def seconds_of(far: Far, code: str) -> float:
    far(f"begin = time.monotonic(); {code}; took = time.monotonic() - begin")
    return float(far("took"))


def test_older_drivers_take_no_map(new_node: Callable[..., Any]) -> None:
    node = new_node(driver="570.86.15")
    job, controller = Far(node), Far(node)
    job("start()")
    controller("ok(cu.cuInit(0))")
    a, b = uuids(controller)
    controller.suspend(job.pid)
    assert controller.restore(job.pid, [(a, a), (b, b)]) == "INVALID_VALUE"
    controller.resume(job.pid)


def test_a_cgroup_without_room_kills_it_in_the_middle(node: Any, job: Far, controller: Far) -> None:
    """The kernel does it, as what is saved is the process's own memory; where no cgroup can be made, the node does."""
    with cgroup_of_its_own(job) as limit:
        job("plain(24, 3)")
        if limit:
            limit(8 * MIB)
        else:
            node.switches.add(f"hazard=killed-by-cgroup caller={job.pid}")
        assert controller.lock(job.pid) == "SUCCESS"
        assert controller.checkpoint(job.pid) == "OPERATING_SYSTEM"
        assert job.died() == -signal.SIGKILL


@contextlib.contextmanager
def cgroup_of_its_own(job: Far) -> Iterator[Callable[[int], None] | None]:
    """Puts a job into one; gives what limits it to so many bytes more than it has, or None where there can be none."""
    with open("/proc/self/cgroup") as file:
        mine = next((line.rstrip("\n").split(":", 2)[2] for line in file if ":memory:" in line), None)
    old = mine is not None
    above = Path(f"/sys/fs/cgroup/memory{mine}" if old else "/sys/fs/cgroup")
    most, now = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    folder = above / f"limosa-test-{os.getpid()}"

    def limit(more: int) -> None:
        (folder / most).write_text(str(int((folder / now).read_text()) + more))
        if not old:
            (folder / "memory.swap.max").write_text("0")

    try:
        folder.mkdir()
    except OSError:  # not ours to make
        yield None
        return
    try:
        usable = (folder / most).exists()
        if usable:
            try:
                (folder / "cgroup.procs").write_text(str(job.pid))
            except OSError:
                usable = False
        yield limit if usable else None
    finally:
        job.process.kill()
        job.died()
        until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()

"""One process on real GPUs: the scenarios of cuda_core's checkpoint tests and what Limosa adds, with content compared.

Every victim stamps its memory all the time and is asked at the end whether every page is what it wrote: ``finish``.
A time-out is a failure.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from limosa.errors import DriverError, DriverHung, DriverTimeout, IllegalState, NoCudaState, NotAProcess, NotSupported
from limosa.gpu import Driver, Inventory, LockResult, Process, State, complete_map, inventory, openable

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MIB = 1 << 20


def on(pid: int) -> set[int]:
    """The indices of the GPUs that a process is on, by NVML (what it says of itself is stale after a move)."""
    return {gpu.index for gpu in inventory().gpus if gpu.holds(pid)}


def moved(gpus: Inventory, pid: int, changes: dict[int, int], held: set[int]) -> dict[str, str]:
    """The full map for changes given as indices; ``held`` are the indices of the GPUs that the job is on."""
    by_index = {gpu.index: gpu.uuid for gpu in gpus.gpus}
    wanted = {by_index[a]: by_index[b] for a, b in changes.items()}
    return complete_map(wanted, openable(gpus, pid), {by_index[i]: 1 for i in held}, gpus.gpus)


# --- cuda_core's scenarios --------------------------------------------------------------------------------------------


def test_a_job_is_running_at_first_and_its_restore_thread_is_one_of_its_own(stamping, ways):
    victim = stamping()
    for process in ways(victim.pid):
        assert process.state == "running"
        assert process.restore_thread_id in {int(tid) for tid in os.listdir(f"/proc/{victim.pid}/task")}
    victim.finish()


def stands_still(victim: Any, seconds: float = 0.3) -> bool:
    before = len(victim.ticks())
    time.sleep(seconds)
    return len(victim.ticks()) - before <= 1


def test_a_locked_job_stands_still_and_goes_on_when_unlocked(stamping, ways):
    victim = stamping()
    for process, timeout_ms in itertools.product(ways(victim.pid), (0, 5000)):
        process.lock(timeout_ms)
        assert process.state == "locked"
        time.sleep(0.05)
        assert stands_still(victim)
        process.unlock()
        assert process.state == "running"
        victim.goes_on()
    victim.finish()


def test_a_full_cycle_lets_go_of_the_gpu_and_brings_every_page_back(stamping, ways):
    victim = stamping("--gb", 1, "--graph", "--pinned")
    for process in ways(victim.pid):
        before = inventory().gpus[0].memory_used
        process.lock()
        process.checkpoint()
        assert process.state == "checkpointed"
        assert on(victim.pid) == set()
        assert inventory().gpus[0].memory_used < before - 900 * MIB
        process.restore()
        assert process.state == "locked"
        process.unlock()
        assert process.state == "running"
        assert on(victim.pid) == {0}
        victim.goes_on()
    victim.finish()


def test_a_job_rotates_over_all_gpus_and_back(stamping, ways, gpus):
    victim = stamping("--gb", 1, "--graph", "--pinned")
    count = len(gpus.gpus)
    for process, step in itertools.product(ways(victim.pid), range(count)):
        assert on(victim.pid) == {step}
        process.lock()
        process.checkpoint()
        process.restore(moved(gpus, victim.pid, {i: (i + 1) % count for i in range(count)}, {step}))
        process.unlock()
        assert on(victim.pid) == {(step + 1) % count}
        victim.goes_on()
    victim.finish()


def test_a_job_on_two_gpus_swaps_them_and_swaps_back(stamping, ways, gpus):
    victim = stamping("--gb", 0.1, "--two-gpus")
    here = on(victim.pid)
    assert here >= {0, 1}
    for process in ways(victim.pid):
        process.lock()
        process.checkpoint()
        process.restore(moved(gpus, victim.pid, {0: 1, 1: 0}, here))
        process.unlock()
        assert on(victim.pid) == here
        victim.goes_on()
    victim.finish()


def test_two_jobs_exchange_their_gpus(stamping, ways, gpus):
    first, second = stamping("--gb", 0.5), stamping("--gb", 0.5, "--device", "cuda:1")
    places = [{0}, {1}]
    for pair in zip(ways(first.pid), ways(second.pid), strict=True):
        assert [on(process.pid) for process in pair] == places
        for process in pair:
            process.lock()
        for process in pair:
            process.checkpoint()
        for process, (here,), (there,) in zip(pair, places, reversed(places), strict=True):
            process.restore(moved(gpus, process.pid, {here: there}, {here}))
        for process in pair:
            process.unlock()
        places.reverse()
        assert [on(process.pid) for process in pair] == places
    for victim in (first, second):
        victim.goes_on()
        victim.finish()


# --- what fails, and leaves the job as it was -------------------------------------------------------------------------


def test_steps_out_of_order_are_illegal_and_change_nothing(stamping, ways):
    victim = stamping()
    for process in ways(victim.pid):
        for step in (process.checkpoint, process.restore, process.unlock):
            with pytest.raises(IllegalState) as caught:
                step()
            assert caught.value.result == "CUDA_ERROR_ILLEGAL_STATE"
            assert caught.value.fields["pid"] == victim.pid
        assert process.state == "running"
    victim.goes_on()
    victim.finish()


def test_a_process_without_cuda_has_no_state(start, ways):
    victim = start("counter")
    for process in ways(victim.pid):
        with pytest.raises(NoCudaState):
            _ = process.state
    victim.finish()


def test_a_thread_is_refused_though_the_driver_would_take_it(stamping, ways):
    victim = stamping()
    thread = max(int(tid) for tid in os.listdir(f"/proc/{victim.pid}/task"))
    assert thread != victim.pid
    for process in ways(thread):
        with pytest.raises(NotAProcess):
            process.try_lock(100)
    assert Process(victim.pid).is_running
    victim.finish()


def times_out(attempt: Callable[[], LockResult | None], process: Any) -> bool:
    """Whether an attempt to lock a busy job times out; between two of its kernels it may succeed."""
    for _ in range(5):
        if attempt() is LockResult.TIMED_OUT:
            return True
        process.unlock()
        time.sleep(0.5)
    return False


def test_a_lock_that_times_out_leaves_the_job_running(stamping, ways):
    victim = stamping("--busy", 3, "--gb", 0.1, ticks=1)
    for process in ways(victim.pid):
        assert times_out(partial(process.try_lock, 100), process)
        assert process.state == "running"
        victim.goes_on(1)
    process = Process(victim.pid)
    with pytest.raises(DriverTimeout, match="within 100 ms"):
        times_out(partial(process.lock, 100), process)
    assert process.is_running
    victim.goes_on(1)
    victim.finish()


def test_a_refused_map_leaves_the_job_checkpointed_and_a_right_one_brings_it_back(stamping, ways, gpus):
    victim = stamping("--gb", 0.5)
    for here, there, process in zip((0, 1), (1, 0), ways(victim.pid), strict=True):
        process.lock()
        process.checkpoint()
        with pytest.raises(DriverError, match="INVALID_VALUE") as caught:
            process.restore({gpus.gpus[here].uuid: gpus.gpus[there].uuid})
        assert "every GPU" in caught.value.hint
        assert process.state == "checkpointed"
        process.restore(moved(gpus, victim.pid, {here: there}, {here}))
        process.unlock()
        assert on(victim.pid) == {there}
        victim.goes_on()
    victim.finish()


def test_managed_memory_is_not_supported_and_the_job_runs_on(stamping):
    victim = stamping("--managed")
    with pytest.raises(NotSupported) as caught:
        Process(victim.pid).suspend()
    assert caught.value.job_state == "running"
    assert Process(victim.pid).is_running
    victim.goes_on()
    victim.finish()


# --- what Process adds ------------------------------------------------------------------------------------------------


def test_suspend_resume_toggle_and_waiting(stamping, gpus):
    victim = stamping("--gb", 0.5)
    process = Process(victim.pid)
    process.suspend(timeout_ms=5000)
    assert process.is_checkpointed
    with pytest.raises(DriverTimeout, match="it is checkpointed"):
        process.wait_for_state("running", timeout=0.05)
    other = {str(gpu.index): gpu.index for gpu in gpus.gpus} | {"0": 1, gpus.gpus[1].pci_bus_id: gpus.gpus[0].uuid[4:]}
    other.pop("1")
    process.resume(other)  # GPUs by index, PCI bus id and bare UUID
    assert process.is_running
    assert on(victim.pid) == {1}
    assert process.toggle() == State.CHECKPOINTED
    waiter = threading.Timer(0.2, process.toggle)
    waiter.start()
    assert process.wait_for_state(State.RUNNING, timeout=60) == "running"
    waiter.join()
    victim.goes_on()
    victim.finish()


def test_it_says_the_same_as_cuda_cores_class(stamping):
    from cuda.core import checkpoint

    victim = stamping()
    theirs, ours = checkpoint.Process(victim.pid), Process(victim.pid)
    assert theirs.state == ours.state == "running"
    assert theirs.restore_thread_id == ours.restore_thread_id
    theirs.lock(timeout_ms=5000)
    ours.checkpoint()
    assert theirs.state == ours.state == "checkpointed"
    theirs.restore()
    ours.unlock()
    victim.goes_on()
    victim.finish()


# --- the worker -------------------------------------------------------------------------------------------------------


def test_jobs_are_worked_on_in_parallel(stamping, driver: Driver):
    victims = [stamping("--gb", 1, "--device", f"cuda:{n}") for n in (0, 1)]
    spans: dict[int, tuple[float, float]] = {}

    def checkpoint(pid: int) -> None:
        begin = time.monotonic()
        driver.checkpoint(pid, limit=120)
        spans[pid] = (begin, time.monotonic())

    for victim in victims:
        assert driver.lock(victim.pid, 5000, limit=60) is LockResult.LOCKED
    threads = [threading.Thread(target=checkpoint, args=(victim.pid,)) for victim in victims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert driver.states([victim.pid for victim in victims]) == {victim.pid: "checkpointed" for victim in victims}
    first, second = spans.values()
    assert max(first[0], second[0]) < min(first[1], second[1])
    for victim in victims:
        driver.restore(victim.pid, None, limit=120)
        driver.unlock(victim.pid)
    for victim in victims:
        victim.goes_on()
        victim.finish()


def test_a_stopped_job_hangs_the_driver_and_limosa_gives_up_on_the_call(stamping, gpus):
    victim = stamping()
    with Driver() as driver:
        driver.available()
        first = driver.pid
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DriverHung):
                driver.lock(victim.pid, timeout_ms=200, limit=3)
            assert driver.under_way(victim.pid) == "lock"
            assert driver.inventory().gpus  # by another worker
            assert driver.pid not in (None, first)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        assert driver.wait_under_way(victim.pid, timeout=30)
        if driver.state(victim.pid) == State.LOCKED:
            driver.unlock(victim.pid)
        assert driver.state(victim.pid) == State.RUNNING
    victim.goes_on()
    victim.finish()


CONTROLLER = """
import sys
from limosa.gpu import Driver
driver, pid = Driver(), int(sys.argv[1])
driver.set_will([sys.executable, "-c", sys.argv[2], sys.argv[1], sys.argv[3]])
driver.lock(pid, 5000, limit=60)
print("now", driver.pid, flush=True)
driver.checkpoint(pid, limit=120)
"""
WILL = """
import sys
from limosa.gpu import Process
process = Process(int(sys.argv[1]))
before = str(process.state)
process.resume()
open(sys.argv[2], "w").write(before)
"""


def test_a_controller_killed_in_the_middle_of_a_checkpoint_leaves_a_worker_that_undoes_it(stamping, tmp_path: Path):
    victim = stamping("--gb", 8)
    done = tmp_path / "done"
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(victim.pid), WILL, str(done)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(part) for part in sys.path if part)},
    )
    try:
        assert controller.stdout
        assert controller.stdout.readline().startswith("now")
        time.sleep(0.5)  # a checkpoint of 8 GB takes seconds
        assert controller.poll() is None
    finally:
        controller.kill()
        controller.wait()
    victim.until(done.exists, 120, "for the will")
    assert done.read_text() == "checkpointed"
    victim.goes_on()
    victim.finish()


def test_facts_about_the_driver(driver: Driver, gpus):
    facts = driver.facts()
    assert facts.available
    assert facts.can_suspend
    assert facts.can_change_gpus
    assert facts.gpus == len(gpus.gpus)
    assert all(facts.symbols[name] for name in facts.symbols if name != "cuCheckpointOperationComplete")
    assert facts.bindings_ok


def test_the_worker_holds_no_memory_on_any_gpu(driver: Driver):
    driver.available()
    assert driver.pid
    assert on(driver.pid) == set()


def test_the_pause_is_what_the_victim_sees(stamping):
    victim = stamping("--gb", 1)
    process = Process(victim.pid)
    begin = time.monotonic()
    process.suspend()
    process.resume()
    ours = time.monotonic() - begin
    victim.goes_on(20)
    gap = max(later - earlier for earlier, later in itertools.pairwise(victim.ticks()))
    assert ours - 0.1 < gap < ours + 0.5
    victim.finish()

"""The gate: closed and opened under threads that never rest, callbacks, long waits, forks; and what it costs."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shim_turns import cycled
from soft_node import Node
from softgpu.far import Far, until

from limosa.native.build import SHIM
from limosa.parking.protocol import Stand
from limosa.parking.shim import GateStaysOpen, Shim
from limosa.process.identity import Identity

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
CYCLES = 60
NANOSECONDS = 200  # a generous bound: a call passes the gate in ten or so on an idle machine


def memory_held(pid: int) -> list[str]:
    """Descriptors of device memory."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [link for link in links if "nvidia-soft/memory" in link]


def test_threads_that_allocate_launch_wait_and_exit_all_the_time(job: Far, shim: Shim) -> None:
    """Each piece of memory is compared with what was written before it is freed."""
    job("crowd(6)")
    closed, end = 0, time.monotonic() + 60
    for n in itertools.count():
        if n >= CYCLES and (job("rounds[0]") > 100 or time.monotonic() > end):
            break  # on a busy machine its threads may have had few turns
        closed += cycled(shim)
        time.sleep(0.02)  # open for a moment
    freed, threads, bad = job("uncrowd()")
    assert bad == []
    assert closed >= n - 2
    assert freed > 100
    assert threads > 6
    assert shim.memories() == []


def test_a_kernel_that_spins_keeps_it_open(job: Far, shim: Shim) -> None:
    job("large(4)")
    job("spin()")
    begun = time.monotonic()
    with pytest.raises(GateStaysOpen):
        shim.close_gate(0.5)
    assert 0.4 < time.monotonic() - begun < 60, "it spins for ever"
    assert shim.hello().stand == Stand.OPEN
    assert job("says('cuMemAlloc', 4 << 20)") == "SUCCESS"
    job("release()")
    assert cycled(shim)
    assert job("intact()")


def test_a_thread_in_a_long_synchronise(job: Far, shim: Shim) -> None:
    job("spin()")
    pending = job.send("(context(), says('cuCtxSynchronize'))[1]")
    time.sleep(0.2)
    with pytest.raises(GateStaysOpen):
        shim.close_gate(0.3)
    assert not pending.done
    assert job("says('cuCtxGetDevice')") == "SUCCESS"
    job("release()")
    assert pending.value() == "SUCCESS"
    assert cycled(shim)


def test_one_limit_for_the_wait_before_and_its_own(job: Far, shim: Shim) -> None:
    """A wait that was given up on ends late: what is left of the limit is for the other GPU's work."""
    job("spin()")
    job("context(1); spin(); context(0)")
    with pytest.raises(GateStaysOpen):
        shim.close_gate(0.3)
    begun = time.monotonic()
    job.send("(time.sleep(3.8), release())")
    with pytest.raises(GateStaysOpen):
        shim.close_gate(4)
    assert 3.9 < time.monotonic() - begun < 7.4, "a limit of its own ends after 7.8 s"
    job("ctypes.c_uint32.from_address(_keep[1]).value = 1")
    assert cycled(shim)


def test_a_close_waits_for_work_that_ends_in_time(job: Far, shim: Shim) -> None:
    job("large(4)")
    job("spin()")
    job.send("(time.sleep(0.4), release())")
    shim.close_gate(60)
    shim.open_gate()


def test_a_free_waits_for_a_kernel_as_the_drivers_does(job: Far) -> None:
    address = job("large(4)")
    job("spin()")
    pending = job.send(f"(context(), says('cuMemFree', {address}))[1]")
    with pytest.raises(TimeoutError):
        pending.value(0.4)
    job("release()")
    assert pending.value() == "SUCCESS"


def test_asked_while_a_free_waits(job: Far, shim: Shim) -> None:
    """Nothing waits for the tables while an application's thread waits for the GPU."""
    address = job("large(4)")
    job("spin()")
    pending = job.send(f"(context(), says('cuMemFree', {address}))[1]")
    time.sleep(0.2)
    begun = time.monotonic()
    assert len(shim.memories()) == 1
    assert job("says('cuMemAlloc', 4 << 20)") == "SUCCESS"
    assert time.monotonic() - begun < 8, "it is given ten seconds for an answer"
    job("release()")
    assert pending.value() == "SUCCESS"


def test_host_callbacks(new_node: Callable[..., Node], library: Path, compiled: Callable[..., Path]) -> None:
    """A callback that takes as long as a lock that another thread holds around its calls of the driver."""
    node = new_node(memory="256MiB")
    program = compiled("callbacks.c", "-ldl", "-lpthread")
    job = node.popen([program, 120], env={"LD_PRELOAD": str(library)}, stdout=-1, text=True)
    assert job.stdout.readline() == "ready\n"
    closed = late = 0
    with Shim(Identity.of(job.pid)) as shim:
        end = time.monotonic() + 2
        while time.monotonic() < end or (not closed and time.monotonic() < end + 60):
            try:
                shim.close_gate(0.2)
            except GateStaysOpen:
                late += 1  # the callback waits for a thread that waits at the gate: it is opened again
                continue
            shim.open_gate()
            closed += 1
    job.terminate()  # it ends well
    assert job.wait(60) == 0
    assert re.fullmatch(r"callbacks \d+\n", job.stdout.read())
    assert closed > 0, late


def test_a_child_that_was_forked(job: Far, shim: Shim) -> None:
    """It starts programs while the gate is closed, and has neither the parent's socket nor its memory."""
    job("large(4)")
    assert cycled(shim)  # what was taken back is held by a descriptor too
    job("import subprocess, sys")
    shim.close_gate(60)
    ran = job("subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout")
    assert ran == "5\n"
    child = job("(lambda pid: pid if pid else (time.sleep(250), os._exit(0)))(os.fork())")
    until(lambda: not memory_held(child))
    assert os.listdir(f"/proc/{child}/task") == [str(child)]
    # What it calls does not wait for a gate that nobody would open for it.
    code = "(lambda pid: os.waitpid(pid, 0)[1] if pid else os._exit(int(cu.cuDriverGetVersion()[0])))(os.fork())"
    assert job(code) == 0
    shim.open_gate()
    assert job(f"os.kill({child}, 9)") is None
    assert job("intact()")


def test_a_child_forked_from_a_crowd(job: Far, shim: Shim) -> None:
    """What other threads are in at that moment does not keep a child from the driver."""
    job("crowd(4)")
    code = "(lambda pid: os.waitpid(pid, 0)[1] if pid else os._exit(int(cu.cuDriverGetVersion()[0])))(os.fork())"
    for _ in range(20):
        assert job(code) == 0
        assert cycled(shim)
    assert job("uncrowd()")[-1] == []


def test_a_signal_between_counting_and_looking(compiled: Callable[..., Path]) -> None:
    """Its handler calls the driver: a thread that has not looked at the gate yet passes it for nobody."""
    program = compiled("handler.c", SHIM / "gate.c", f"-I{SHIM}", "-D_GNU_SOURCE", "-lpthread")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines() == ["closed 1", "through 0", "behind it 1", "inside 1", "outside 0"]


@pytest.mark.parametrize("watched", [[], ["-fsanitize=thread"], ["-fsanitize=address,undefined"]], ids=" ".join)
def test_nobody_is_behind_a_gate_that_was_opened_and_closed_at_once(
    compiled: Callable[..., Path], watched: list[str]
) -> None:
    """Whoever was woken and has not been counted yet when it closes again waits again; no race, no wrong access."""
    program = compiled("turns.c", f"-I{SHIM}", "-D_GNU_SOURCE", "-lpthread", *watched)
    ran = subprocess.run([program, "1"], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "0\n", f"a thread was in the driver behind a closed gate {ran.stdout.strip()} times"
    assert "Sanitizer" not in ran.stderr


def test_a_thread_that_the_gate_cannot_know_ends_the_job_with_words(compiled: Callable[..., Path]) -> None:
    program = compiled("crowded.c", f"-I{SHIM}", "-D_GNU_SOURCE", "-lpthread")
    ran = subprocess.run([program], check=False, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr.count("no memory")) == (127, 1), ran


def test_two_processes_each_its_own(start: Callable[..., Far]) -> None:
    first, second = start(), start()
    first("large(4, 1)")
    second("large(6, 2)")
    with Shim(Identity.of(first.pid)) as one, Shim(Identity.of(second.pid)) as two:
        one.close_gate(60)
        assert second("intact()")
        assert [len(one.memories()), len(two.memories())] == [1, 1]
        one.open_gate()
    assert first("intact()")


def test_what_a_call_costs(node: Node, library: Path, compiled: Callable[..., Path]) -> None:
    """Nanoseconds that passing the gate adds to a call, the least of five turns each."""
    program = compiled("cost.c", "-ldl")
    least = {}
    for _ in range(5):
        for how in ("bare", "shim"):
            env = {"LD_PRELOAD": str(library)} if how == "shim" else {}
            spent = float(node.run([program], env=env).stdout)
            least[how] = min(least.get(how, spent), spent)
    added = least["shim"] - least["bare"]
    print(f"a call: {least['bare']:.1f} ns bare, {least['shim']:.1f} ns under the shim: {added:.1f} ns")
    assert added < NANOSECONDS

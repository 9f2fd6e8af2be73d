"""The driver's own part of a checkpoint: memory that is ready for it, and a stack limit that is lower meanwhile."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from softgpu.far import Far

from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, ShimError
from limosa.process.identity import Identity

MIB = 1 << 20
pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
STACK = "ok(cu.cuCtxGetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE))"


@pytest.fixture
def controller(node: Any) -> Far:
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    return controller


@pytest.fixture
def left(job: Far) -> Far:
    """A job with 60 MiB that the driver looks after, in pieces too small for the shim."""
    for seed in range(60):
        job(f"plain(1, {seed})")
    return job


def status(pid: int, key: str) -> int:
    """Bytes of a line of /proc/PID/status."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))


def largest(pid: int) -> int:
    """Bytes of its largest piece of anonymous memory."""
    with open(f"/proc/{pid}/maps") as file:
        found = re.findall(r"(?m)^(\w+)-(\w+) rw-p 00000000 00:00 0 *$", file.read())
    return max(int(end, 16) - int(begin, 16) for begin, end in found)


def settled(read: Callable[[], int], wanted: Callable[[int], bool], limit: float = 60) -> int:
    end = time.monotonic() + limit
    while not wanted(value := read()):
        assert time.monotonic() < end, value
        time.sleep(0.01)
    return value


@pytest.mark.parametrize("mib", [0, 40, 69, 128, 300])
def test_the_driver_gets_what_is_ready(left: Far, shim: Shim, controller: Far, mib: int) -> None:
    """Too little, enough, too much: it has what it asks for, and nothing is left over."""
    assert shim.bulk(0) == 0
    sizes = []
    for _ in range(3):
        shim.bulk(mib * MIB)
        assert status(left.pid, "VmRSS") >= mib * MIB
        shim.close_gate(60)
        controller.suspend(left.pid)
        asked = shim.bulk(0)
        assert 60 * MIB <= asked < 80 * MIB
        held = status(left.pid, "RssAnon")
        assert held >= asked
        controller.resume(left.pid)
        shim.open_gate()
        assert left("intact()") is True
        settled(lambda: status(left.pid, "RssAnon"), lambda now: now < held - 50 * MIB)  # noqa: B023
        sizes.append(status(left.pid, "VmSize"))
    assert sizes[2] <= sizes[1] + MIB


def test_without_a_closed_gate(left: Far, shim: Shim, controller: Far) -> None:
    """The driver's way: only what was made ready is given away, and no gate is touched."""
    shim.bulk(70 * MIB)
    controller.suspend(left.pid)
    assert 60 * MIB <= shim.bulk(0) < 80 * MIB
    assert largest(left.pid) >= 60 * MIB
    controller.resume(left.pid)
    assert left("intact()") is True


def test_it_is_let_go_of_when_nobody_wants_it(left: Far) -> None:
    """Asked for, and then not: by 0, by a client that goes, and by an open gate."""
    base = status(left.pid, "RssAnon")
    low: Callable[[int], bool] = lambda now: now < base + 20 * MIB  # noqa: E731
    rss: Callable[[], int] = lambda: status(left.pid, "RssAnon")  # noqa: E731
    with Shim(Identity.of(left.pid)) as shim:
        shim.bulk(200 * MIB)
        assert rss() > base + 190 * MIB
        shim.bulk(0)
        assert low(rss())
        shim.bulk(100 * MIB)
        shim.bulk(200 * MIB)  # more of the same
        assert base + 190 * MIB < rss() < base + 230 * MIB
        shim.close_gate(60)
        shim.open_gate()
        settled(rss, low)
        shim.bulk(200 * MIB)
        assert rss() > base + 190 * MIB
    settled(rss, low)
    assert left("intact()") is True


def test_the_application_gets_its_own(left: Far, shim: Shim) -> None:
    """Memory that it maps and populates itself while something is ready: zeroes, its own, and what is ready stays."""
    shim.bulk(300 * MIB)
    left("import mmap")
    left("m = mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)")
    assert left("m[:].count(0) == len(m)") is True
    assert shim.bulk(0) == 0  # the driver has asked for nothing
    left("m.close()")


def test_the_application_gets_what_it_asks_for(left: Far, shim: Shim) -> None:
    """Memory of that kind and size, but low: what is ready is somewhere else."""
    shim.bulk(300 * MIB)
    left("import mmap")
    left("m = mmap.mmap(-1, 200 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE | 0x40)")
    assert left("ctypes.addressof(ctypes.c_char.from_buffer(m))") < 1 << 31
    assert shim.bulk(0) == 0


def test_a_child_does_not_inherit_it(left: Far, shim: Shim) -> None:
    """And goes on by itself, whatever was ready in its parent."""
    shim.bulk(300 * MIB)
    left(
        "def child():\n"
        "    import mmap\n"
        "    r, w = os.pipe()\n"
        "    if not (pid := os.fork()):\n"
        "        m = mmap.mmap(-1, 200 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)\n"
        "        size = next(l for l in open('/proc/self/status') if l.startswith('VmSize'))\n"
        "        os.write(w, size.encode()); os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    return int(os.read(r, 100).split()[1]) * 1024\n"
    )
    mine = status(left.pid, "VmSize")
    assert left("child()") < mine - 50 * MIB


def test_a_busy_program(left: Far, shim: Shim, controller: Far) -> None:
    """Threads that map, write and unmap, and children, while memory is made ready, given away and let go of."""
    left(
        "import mmap, threading\n"
        "wrong, rounds, stop = [], [0], []\n"
        "flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE\n"
        "def maps(size):\n"
        "    while not stop:\n"
        "        m = mmap.mmap(-1, size, flags=flags)\n"
        "        wrong.extend(i for i in range(0, size, 65536) if m[i])\n"
        "        m[::65536] = b'x' * len(range(0, size, 65536))\n"
        "        m.close(); rounds[0] += 1\n"
        "def forks():\n"
        "    while not stop:\n"
        "        if not (pid := os.fork()):\n"
        "            mmap.mmap(-1, 40 << 20, flags=flags); os._exit(0)\n"
        "        wrong.extend([pid] if os.waitpid(pid, 0)[1] else [])\n"
        "for size in (33 << 20, 80 << 20): threading.Thread(target=maps, args=(size,), daemon=True).start()\n"
        "threading.Thread(target=forks, daemon=True).start()\n"
    )
    for turn in range(6):
        shim.bulk((64 + 16 * turn) * MIB)
        if turn % 2:
            shim.close_gate(60)
            controller.suspend(left.pid)
            controller.resume(left.pid)
            shim.open_gate()
        else:
            shim.bulk(0 if turn == 2 else 128 * MIB)
    assert left("stop.append(1) or time.sleep(0.5) or (wrong, rounds[0] > 5)") == [[], True]
    assert left("intact()") is True


def test_a_usual_stack_limit_is_lower_while_the_gate_is_closed(job: Far, shim: Shim, controller: Far) -> None:
    """Put back by the gate itself, whoever opens it."""
    assert job(STACK) == 1024
    for _ in range(2):
        shim.close_gate(60)
        shim.stack(16)
        assert job("stack_beneath()") == 16
        pending = job.send(STACK, main=True)
        controller.suspend(job.pid)
        controller.resume(job.pid)
        shim.open_gate()
        assert pending.value() == job(STACK) == 1024


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuDeviceGetCount"])
def test_a_context_that_cannot_be_reached_keeps_the_gate_closed(node: Any, job: Far, shim: Shim, call: str) -> None:
    """Its limit is the lower one still, so no kernel may come to it."""
    shim.close_gate(60)
    shim.stack(16)
    rule = node.switches.add(f"function={call} every=1 result=NOT_PERMITTED")
    for put_back in (lambda: shim.stack(0), shim.open_gate):
        with pytest.raises(ShimError) as caught:
            put_back()
        assert caught.value.fields["result"] == 800
        assert shim.hello().stand == Stand.CLOSED
    node.switches.remove(rule)
    shim.open_gate()
    assert job(STACK) == 1024


@pytest.mark.parametrize("mine", [4096, 2048, 512])
def test_a_stack_limit_of_its_own_is_left_alone(job: Far, shim: Shim, mine: int) -> None:
    job(f"ok(cu.cuCtxSetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE, {mine}))")
    shim.close_gate(60)
    shim.stack(16)
    assert job("stack_beneath()") == mine
    shim.open_gate()
    assert job(STACK) == mine


def test_each_context_gets_its_own_back(job: Far, shim: Shim) -> None:
    job("context(1); ok(cu.cuCtxSetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE, 2048)); context(0)")
    shim.close_gate(60)
    shim.stack(16)
    shim.stack(0)
    shim.stack(16)
    shim.open_gate()
    assert [job(STACK), job(f"context(1) or {STACK}")] == [1024, 2048]


@pytest.fixture
def switched_off(node: Any, library: Any) -> Iterator[tuple[Far, Shim]]:
    job = Far(node, env={"LD_PRELOAD": str(library), "LIMOSA_SHIM_WITHOUT": "bulk,stack"})
    job("start()")
    with Shim(Identity.of(job.pid)) as shim:
        yield job, shim


def test_both_can_be_switched_off(switched_off: tuple[Far, Shim], controller: Far) -> None:
    job, shim = switched_off
    before = status(job.pid, "RssAnon")
    for seed in range(40):
        job(f"plain(1, {seed})")
    shim.bulk(200 * MIB)
    assert status(job.pid, "RssAnon") < before + 100 * MIB
    shim.close_gate(60)
    shim.stack(16)
    controller.suspend(job.pid)
    assert shim.bulk(0) == 0  # it has not even been looked at
    controller.resume(job.pid)
    shim.open_gate()
    assert job("intact()") is True
    assert job(STACK) == 1024
    assert os.path.exists(f"/proc/{job.pid}")


@pytest.mark.parametrize("parkable", [0, 16])
def test_a_move_uses_both_and_leaves_nothing(node: Any, left: Far, parkable: int) -> None:
    """By the parked way and by the driver's; also where it fails and is undone."""
    if parkable:
        left(f"large({parkable}, 99)")
    assert left("intact()") is True
    way = "parked" if parkable else "driver"
    base = status(left.pid, "RssAnon")
    for to in (1, 0):
        said = node.limosa("move", "-o", "json", left.pid, "--to", to).json
        assert said["way"] == way
        with Shim(Identity.of(left.pid)) as shim:
            assert 60 * MIB <= shim.bulk(0) < 80 * MIB  # without its being ready nobody would have seen it
        assert left(STACK) == 1024
        assert left("intact()") is True
    rule = node.switches.add("function=cuCheckpointProcessRestore result=UNKNOWN")
    assert node.limosa("move", left.pid, "--to", 1, rc=None).rc == 21
    node.switches.remove(rule)
    assert left(STACK) == 1024
    assert left("intact()") is True
    settled(lambda: status(left.pid, "RssAnon"), lambda now: now < base + 30 * MIB)


def test_a_suspended_job_keeps_nothing_that_is_not_used(node: Any, left: Far) -> None:
    left("large(16, 99)")
    base = status(left.pid, "RssAnon")
    node.limosa("suspend", left.pid)
    assert status(left.pid, "RssAnon") < base + 90 * MIB
    node.limosa("resume", left.pid, "--to", 1)
    assert left(STACK) == 1024
    assert left("intact()") is True


@pytest.mark.parametrize(("nth", "rc"), [(1, 0), (2, 21)])
def test_a_limit_that_cannot_be_set(node: Any, job: Far, nth: int, rc: int) -> None:
    """Not lowered: it costs time. Not put back at the destination: the job comes home, where it can."""
    job("large(16, 99)")
    rule = node.switches.add(f"function=cuCtxSetLimit nth={nth} result=OUT_OF_MEMORY")
    assert node.limosa("move", job.pid, "--to", 1, rc=None).rc == rc
    node.switches.remove(rule)
    assert job(STACK) == 1024
    assert job("intact()") is True
    assert node.limosa("move", "-o", "json", job.pid, "--to", 1 if rc else 0).json["way"] == "parked"
    assert job(STACK) == 1024

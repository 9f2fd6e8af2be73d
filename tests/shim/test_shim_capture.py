"""Streams that are being captured into graphs: the gate lets captures finish, and none is spoilt."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest
from shim_turns import cycle
from softgpu.far import Far

from limosa.parking.protocol import Stand
from limosa.parking.shim import GateStaysOpen, Shim
from limosa.process.identity import Identity

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
CYCLES = 40
# What the job has beside the usual: one capture, by steps; threads that capture nearly all the time.
WORDS = """
def begin(mode=0):
    global capturing
    context()
    capturing = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamBeginCapture(capturing, cu.CUstreamCaptureMode(mode)))

def end():
    code, graph = cu.cuStreamEndCapture(capturing)
    if not int(code):
        ok(cu.cuGraphDestroy(graph))
    return word(code)

def status(stream=None):
    return int(ok(cu.cuStreamIsCapturing(capturing if stream is None else stream)))

def captures(seconds, gap, mode, stream=None):
    try:
        context()
        stream = ok(cu.cuStreamCreate(1)) if stream is None else stream
        while working:
            ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode(mode)))
            end_of_it = time.monotonic() + seconds
            while time.monotonic() < end_of_it:
                assert int(ok(cu.cuStreamIsCapturing(stream))) == 1
                time.sleep(0.001)
            graph = ok(cu.cuStreamEndCapture(stream))
            ok(cu.cuGraphDestroy(graph))
            rounds[0] += 1
            time.sleep(gap)
    except BaseException as error:
        bad.append(repr(error))
    rounds.append(0)

def begin_captures(*all):
    for one in all:
        threading.Thread(target=captures, args=one).start()

def end_captures(n):
    global working
    working = False
    until(lambda: len(rounds) == 1 + n)
    return [rounds[0], bad]
"""


def test_threads_that_capture_again_and_again(job: Far, shim: Shim) -> None:
    """Two that overlap, in all modes: closed between two captures each time, and every capture ends well."""
    job(WORDS)
    job("large(4)")
    job("begin_captures((0.03, 0.0001, 0), (0.02, 0.0001, 2), (0.01, 0.001, 1))")
    end = time.monotonic() + 60
    for n in itertools.count():
        if n >= CYCLES and (job("rounds[0]") >= CYCLES or time.monotonic() > end):
            break  # on a busy machine its threads may have had few turns
        cycle(shim)
        time.sleep(0.005)
    ended, bad = job("end_captures(3)")
    assert bad == []
    assert ended >= CYCLES
    assert job("intact()")


def test_none_begins_between_the_cut_and_its_end(job: Far, shim: Shim) -> None:
    """Not after the gate was closed and opened meanwhile either: communicators may be about to be made."""
    job(WORDS)
    job("begin_captures((0.001, 0.001, 0))")
    shim.cut()
    shim.rest(60)
    shim.close_gate(60)
    shim.open_gate()
    before = job("rounds[0]")
    time.sleep(0.3)
    assert job("rounds[0]") - before <= 1  # one may have been at its end
    shim.let()
    job("until(lambda: rounds[0] > %d)" % (before + 5))  # noqa: UP031
    assert job("end_captures(1)")[1] == []


def test_the_default_stream_of_a_thread(job: Far, shim: Shim) -> None:
    job(WORDS)
    job("begin_captures((0.02, 0.0001, 0, 2))")
    end = time.monotonic() + 60
    for n in itertools.count():
        if n >= 10 and (job("rounds[0]") >= 5 or time.monotonic() > end):
            break
        cycle(shim)
        time.sleep(0.02)
    ended, bad = job("end_captures(1)")
    assert bad == []
    assert ended >= 5


def test_one_that_is_longer_than_the_limit(job: Far, shim: Shim) -> None:
    """Refused as a gate that does not close, within the limit; the job notices nothing."""
    job(WORDS)
    job("large(4)")
    job("begin()")
    begun = time.monotonic()
    with pytest.raises(GateStaysOpen, match="it is capturing a CUDA graph") as caught:
        shim.close_gate(0.5)
    assert 0.4 < time.monotonic() - begun < 60, "it captures for ever"
    assert caught.value.exit_code == 18
    assert shim.hello().stand == Stand.OPEN
    assert job("status()") == 1
    assert job("end()") == "SUCCESS"
    cycle(shim)
    assert job("intact()")


def test_one_that_ends_in_time(job: Far, shim: Shim) -> None:
    """The thread that has begun it ends it while somebody waits for the gate."""
    job(WORDS)
    job("begin()")
    said: list[str] = []
    ending = threading.Timer(0.3, lambda: said.append(job("end()")))
    ending.start()
    shim.close_gate(60)
    shim.open_gate()
    ending.join()
    assert said == ["SUCCESS"]


def test_ranks_come_to_rest_between_captures(start: Callable[..., Far]) -> None:
    """One that is longer than a part of the wait is let finish. From there on none begins until all are let go on."""
    job = start()
    job(WORDS)
    job("begin()")
    said: list[str] = []
    ending = threading.Timer(1.2, lambda: said.append(job("end()")))
    with Shim(Identity.of(job.pid)) as shim:
        ending.start()
        shim.cut()
        shim.rest(60)
        ending.join()
        assert said == ["SUCCESS"]
        job("begin_captures((0.01, 0.001, 0))")
        time.sleep(0.3)
        assert job("rounds") == [0]
        shim.close_gate(60)  # as the parked way does: no capture is open
        shim.open_gate()
        shim.let()
        job("until(lambda: rounds[0] > 2)")
    assert job("end_captures(1)")[1] == []


def test_ended_in_other_ways(job: Far, shim: Shim) -> None:
    """By an error, by the end of its stream, by the end of its context: none keeps the gate open."""
    job(WORDS)
    job("begin()")
    assert job("says('cuCtxSynchronize')") == "STREAM_CAPTURE_UNSUPPORTED"
    assert job("status()") == 2
    assert job("end()") == "STREAM_CAPTURE_INVALIDATED"
    cycle(shim)
    job("begin()")
    job("ok(cu.cuStreamDestroy(capturing))")
    cycle(shim)
    job("other = ok(cu.cuCtxCreate(None, 0, 0))")
    job("capturing = ok(cu.cuStreamCreate(1))")
    job("ok(cu.cuStreamBeginCapture(capturing, cu.CUstreamCaptureMode(0)))")
    with pytest.raises(GateStaysOpen):
        shim.close_gate(0.1)
    job("ok(cu.cuCtxDestroy(other))")
    cycle(shim)


def test_an_end_by_the_wrong_thread(job: Far, shim: Shim) -> None:
    """It has not ended."""
    job(WORDS)
    job("begin()")
    assert job.send("(context(), end())[1]").value() == "STREAM_CAPTURE_WRONG_THREAD"
    with pytest.raises(GateStaysOpen):
        shim.close_gate(0.1)
    assert job("end()") == "SUCCESS"
    cycle(shim)


def test_memory_that_comes_and_goes_during_one(job: Far, shim: Shim) -> None:
    """Neither spoils it; what was freed is there until a later allocation."""
    job(WORDS)
    address = job("int(ok(cu.cuMemAlloc(4 << 20)))")
    job("begin(2)")
    assert job(f"says('cuMemFree', {address})") == "SUCCESS"
    assert job("int(ok(cu.cuMemAlloc(6 << 20)))")
    assert len(shim.memories()) == 2
    assert job("status()") == 1
    assert job("end()") == "SUCCESS"
    job("int(ok(cu.cuMemAlloc(8 << 20)))")
    assert sorted(memory.bytes >> 20 for memory in shim.memories()) == [6, 8]
    cycle(shim)


def test_a_child_of_a_process_that_captures(job: Far, shim: Shim) -> None:
    """Nothing of its parent's captures is left in it."""
    job(WORDS)
    job("begin()")
    code = "(lambda pid: os.waitpid(pid, 0)[1] if pid else os._exit(int(cu.cuDriverGetVersion()[0])))(os.fork())"
    assert job(code) == 0
    assert job("end()") == "SUCCESS"
    cycle(shim)

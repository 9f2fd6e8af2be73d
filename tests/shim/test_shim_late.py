"""Memory that is freed while nobody may wait for its work: nothing hangs, and nothing goes before its work is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from soft_node import Node
from softgpu.far import Far, until

from limosa.parking.shim import Shim

MIB = 1 << 20
pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
# What jobs here have beside the usual: a stream that does nothing before it is told to, and captures.
WORDS = """
library = ctypes.CDLL("libcuda.so.1")
goes_on = threading.Event()
holding = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda nothing: goes_on.wait(250) and None)

def held():
    stream = ok(cu.cuStreamCreate(1))
    assert library.cuLaunchHostFunc(ctypes.c_void_p(int(stream)), holding, None) == 0
    return stream

def begin():
    global capturing
    capturing = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamBeginCapture(capturing, cu.CUstreamCaptureMode(2)))

def end():
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(capturing))))

def look():
    ok(cu.cuMemAlloc(4096))
"""


@pytest.fixture
def job(job: Far) -> Far:
    job(WORDS)
    return job


def test_two_threads_let_go_of_the_same(node: Node, library: Path, compiled: Callable[..., Path]) -> None:
    """Each piece once, and all of them."""
    said = node.run([compiled("freeing.c", "-ldl", "-lpthread")], env={"LD_PRELOAD": str(library)})
    assert said.stdout == "0\n"


def test_what_was_freed_in_a_capture_is_there_when_it_has_ended(job: Far, shim: Shim) -> None:
    """No allocation is needed for it."""
    job("large(4); large(2)")
    job("begin()")
    assert job("[says('cuMemFree', block[0]) for block in blocks]") == ["SUCCESS"] * 2
    assert len(shim.memories()) == 2
    job("end()")
    assert shim.memories() == []


def test_free_memory_is_asked_for(job: Far, shim: Shim) -> None:
    """What is still in use when the capture ends is waited for by whoever asks what is free."""
    job("look()")  # small memory comes in pieces
    before = job("free()")
    job("address = large(4); stream = held(); begin()")
    job("ok(cu.cuMemFree(address)); end(); look()")
    assert len(shim.memories()) == 1
    job("threading.Timer(0.3, goes_on.set).start()")
    assert job("free()") == before
    assert shim.memories() == []


def test_each_waits_for_its_own_context(job: Far, shim: Shim) -> None:
    """Work of another GPU may still use what is that GPU's, however idle the current one is."""
    job("context(1); address = large(4); stream = held(); context(0)")
    job("begin(); ok(cu.cuMemFree(address)); end()")
    job("ok(cu.cuMemAlloc(2 * MIB))")
    assert [memory.bytes >> 20 for memory in shim.memories()] == [4, 2]
    job("goes_on.set(); ok(cu.cuStreamSynchronize(stream)); look()")
    assert [memory.bytes >> 20 for memory in shim.memories()] == [2]


def test_a_free_in_a_streams_order_does_not_wait(job: Far, shim: Shim) -> None:
    """What the stream waits for is done by the same thread afterwards."""
    job("address = large(4); stream = held()")
    assert job("says('cuMemFreeAsync', address, stream)", 60) == "SUCCESS"
    assert job("[says('cuMemFreeAsync', address, stream), says('cuMemFree', address)]") == ["INVALID_VALUE"] * 2
    job("look()")
    assert len(shim.memories()) == 1
    job("goes_on.set(); ok(cu.cuStreamSynchronize(stream)); look()")
    assert shim.memories() == []


def test_a_free_in_the_order_of_another_gpus_stream(job: Far, shim: Shim) -> None:
    """Which may still be reading it."""
    job("context(1); stream = held(); context(0); address = large(4)")
    assert job("says('cuMemFreeAsync', address, stream)", 60) == "SUCCESS"
    job("look()")
    assert len(shim.memories()) == 1
    job("goes_on.set(); context(1); ok(cu.cuStreamSynchronize(stream)); look()")
    assert shim.memories() == []


def test_one_that_ends_with_its_streams_context(job: Far, shim: Shim) -> None:
    job("address = large(4); made = ok(cu.cuCtxCreate(None, 0, 0)); stream = held()")
    job("ok(cu.cuMemFreeAsync(address, stream)); goes_on.set(); ok(cu.cuCtxDestroy(made)); context()")
    assert shim.memories() == []
    job("look()")


def test_where_memory_is_short_it_is_waited_for(job: Far, shim: Shim) -> None:
    for call in (
        "cu.cuMemAlloc(160 * MIB)",
        "cu.cuMemCreate(160 * MIB, made_of(), 0)",
        "cu.cuMemAllocManaged(160 * MIB, 1)",
    ):
        job("goes_on.clear(); address = ok(cu.cuMemAlloc(160 * MIB)); stream = held()")
        assert job("says('cuMemFreeAsync', address, stream)", 60) == "SUCCESS"
        job("threading.Timer(0.3, goes_on.set).start()")
        job(f"got = ok({call})")
        assert job("goes_on.is_set()") or "Managed" in call  # what is managed may lie elsewhere
        job("ok(cu.cuMemRelease(got))" if "Create" in call else "ok(cu.cuMemFree(got))")
        job("goes_on.set(); ok(cu.cuCtxSynchronize()); look()")
    assert shim.memories() == []


def test_a_context_ends_after_those_who_look_at_what_is_in_it(job: Far, shim: Shim) -> None:
    """Somebody waits for an event of it, because memory is short."""
    job("address = large(160); now = ok(cu.cuCtxGetCurrent()); made = ok(cu.cuCtxCreate(None, 0, 0)); stream = held()")
    assert job("says('cuMemFreeAsync', address, stream)", 60) == "SUCCESS"
    looks = job.send("[ok(cu.cuCtxSetCurrent(now)), says('cuMemAlloc', 160 * MIB)][1]")
    with pytest.raises(TimeoutError):
        looks.value(0.3)
    ends = job.send("[says('cuCtxDestroy', made), goes_on.is_set()]")
    with pytest.raises(TimeoutError):
        ends.value(0.3)
    job("goes_on.set()")
    assert looks.value() == "SUCCESS"
    assert ends.value() == ["SUCCESS", True]
    job("context(); look()")
    assert [memory.bytes >> 20 for memory in shim.memories()] == [160]


def test_it_is_let_go_of_when_the_gate_is_closed(job: Far, shim: Shim) -> None:
    """Not carried along."""
    job("address = large(4); stream = held(); ok(cu.cuMemFreeAsync(address, stream))")
    threading.Timer(0.3, lambda: job("goes_on.set()")).start()
    shim.close_gate(60)
    assert shim.memories() == []
    shim.open_gate()
    job("look(); blocks.clear(); large(4)")
    assert job("intact()")


def test_a_free_in_a_streams_order_during_its_capture(job: Far, shim: Shim) -> None:
    """A graph frees what graphs have allocated; the capture goes on, and the memory is there."""
    job("address = large(4); begin()")
    assert job("says('cuMemFreeAsync', address, capturing)") == "INVALID_VALUE"
    assert job("int(ok(cu.cuStreamIsCapturing(capturing)))") == 1
    job("end()")
    assert job("intact()")
    assert job("says('cuMemFree', address)") == "SUCCESS"
    until(lambda: not shim.memories())

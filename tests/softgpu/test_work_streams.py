"""Streams, events and callbacks: what waits for what, what is over when, and what a closed gate holds."""

from __future__ import annotations

import time
from typing import Any

import pytest
from softgpu.far import Far, FarError


@pytest.fixture
def job(node: Any) -> Far:
    """A program with a context, the kernels, and a flag that a kernel spins on until `go(flag)`."""
    program = Far(node)
    program("start(); u, h = ctypes.c_uint64, ctypes.c_uint32")
    program("module = ok(cu.cuModuleLoadData(PTX.read_bytes() + b'\\0'))")
    program("kernel = {n: ok(cu.cuModuleGetFunction(module, n.encode())) for n in ('fill', 'spin', 'hash')}")
    program(
        "def flag():\n"
        "    made = int(ok(cu.cuMemHostAlloc(64, 0)))\n"
        "    ctypes.memset(made, 0, 64)\n"
        "    return made\n"
        "def go(made):\n"
        "    h.from_address(made).value = 1\n"
        "def hold(stream, made):\n"
        "    ok(cu.cuLaunchKernel(kernel['spin'], 1, 1, 1, 1, 1, 1, 0, stream, ((made, 1), (u, h)), 0))\n"
        "def fill(stream, address, value, n=64):\n"
        "    ok(cu.cuLaunchKernel(kernel['fill'], 2, 1, 1, 32, 1, 1, 0, stream, ((address, n, value), (u, u, u)), 0))\n"
        "def read(address):\n"
        "    back = bytearray(8)\n"
        "    ok(cu.cuMemcpyDtoH(back, address, 8))\n"
        "    return int.from_bytes(back, 'little')\n"
    )
    return program


def test_one_streams_work_is_done_in_order(job: Far) -> None:
    job("s = ok(cu.cuStreamCreate(1)); f = flag(); a = int(ok(cu.cuMemAlloc(512)))")
    job("hold(s, f); fill(s, a, 5); fill(s, a, 6)")
    assert job("said(cu.cuStreamQuery(s))") == "NOT_READY"
    job("go(f)")
    assert job("[said(cu.cuStreamSynchronize(s)), said(cu.cuStreamQuery(s)), read(a)]") == ["SUCCESS", "SUCCESS", 6]


def test_streams_do_not_wait_for_each_other(job: Far) -> None:
    job("s, t = [ok(cu.cuStreamCreate(1)) for _ in range(2)]; f = flag(); a = int(ok(cu.cuMemAlloc(512)))")
    job("hold(s, f); fill(t, a, 7)")
    assert job("said(cu.cuStreamSynchronize(t))") == "SUCCESS"
    assert job("said(cu.cuStreamQuery(s))") == "NOT_READY"
    job("go(f)")


def test_default_stream_waits_for_blocking_streams(job: Far) -> None:
    job("s, free = ok(cu.cuStreamCreate(0)), ok(cu.cuStreamCreate(1)); f = flag(); a = int(ok(cu.cuMemAlloc(512)))")
    job("hold(s, f); fill(0, a, 1)")
    assert job("[said(cu.cuStreamQuery(x)) for x in (s, 0, free)]") == ["NOT_READY", "NOT_READY", "SUCCESS"]
    job("fill(free, a + 256, 3, 32); ok(cu.cuStreamSynchronize(free))")
    job("go(f)")
    assert job("[said(cu.cuStreamSynchronize(0)), read(a)]") == ["SUCCESS", 1]


def test_blocking_streams_wait_for_the_default_stream(job: Far) -> None:
    job("s, free = ok(cu.cuStreamCreate(0)), ok(cu.cuStreamCreate(1)); f = flag(); a = int(ok(cu.cuMemAlloc(512)))")
    job("hold(0, f); fill(s, a, 1); fill(free, a + 256, 2, 32)")
    job("ok(cu.cuStreamSynchronize(free))")
    assert job("said(cu.cuStreamQuery(s))") == "NOT_READY"
    job("go(f); ok(cu.cuStreamSynchronize(s))")
    assert job("read(a)") == 1


def test_per_thread_default_stream(job: Far) -> None:
    """Each thread's own, ordered with the legacy one, not with other threads'."""
    job("f = flag(); a = int(ok(cu.cuMemAlloc(512))); hold(2, f)")
    assert job("[said(cu.cuStreamQuery(x)) for x in (2, 1, 0)]") == ["NOT_READY"] * 3
    other = job.send("context(), fill(2, a, 4), ok(cu.cuStreamSynchronize(2))")
    other.value()
    assert job("said(cu.cuStreamQuery(2))") == "NOT_READY"
    job("go(f); ok(cu.cuStreamSynchronize(2))")
    assert job("read(a)") == 4


def test_events(job: Far) -> None:
    job("s = ok(cu.cuStreamCreate(1)); f = flag(); first, last, quick = [ok(cu.cuEventCreate(x)) for x in (0, 0, 2)]")
    assert job("[said(cu.cuEventQuery(first)), said(cu.cuEventSynchronize(first))]") == ["SUCCESS", "SUCCESS"]
    assert job("said(cu.cuEventElapsedTime(first, last))") == "INVALID_HANDLE"  # never recorded
    job("ok(cu.cuEventRecord(first, s)); hold(s, f); ok(cu.cuEventRecord(last, s)); ok(cu.cuEventRecord(quick, s))")
    assert job("said(cu.cuEventQuery(last))") == "NOT_READY"
    assert job("said(cu.cuEventElapsedTime(first, last))") == "NOT_READY"
    waiting = job.send("said(cu.cuEventSynchronize(last))")
    time.sleep(0.1)
    assert not waiting.done
    job("go(f)")
    assert waiting.value() == "SUCCESS"
    assert 100 <= job("ok(cu.cuEventElapsedTime(first, last))") < 20000
    assert job("said(cu.cuEventElapsedTime(first, quick))") == "INVALID_HANDLE"  # no timing
    job("ok(cu.cuEventDestroy(first))")
    assert job("said(cu.cuEventQuery(first))") == "INVALID_HANDLE"
    assert job("said(cu.cuEventDestroy(first))") == "INVALID_HANDLE"


def test_flags_and_handles_that_are_none(job: Far) -> None:
    assert job("[said(cu.cuEventCreate(x)) for x in (4, 6, 8)]") == ["INVALID_VALUE", "SUCCESS", "INVALID_VALUE"]
    assert job("[said(cu.cuStreamCreate(x)) for x in (2, 3)]") == ["INVALID_VALUE"] * 2
    assert job("[said(cu.cuStreamSynchronize(x)) for x in (3, 4096)]") == ["INVALID_HANDLE"] * 2
    assert job("[said(cu.cuStreamDestroy(x)) for x in (0, 1, 2)]") == ["INVALID_HANDLE"] * 3
    job("s = ok(cu.cuStreamCreate(0)); ok(cu.cuStreamDestroy(s))")
    assert job("[said(x) for x in (cu.cuStreamDestroy(s), cu.cuStreamQuery(s))]") == ["INVALID_HANDLE"] * 2


def test_a_stream_waits_for_an_event_of_another(job: Far) -> None:
    """For what it marked when the wait was submitted: a later record does not matter."""
    job("s, t = [ok(cu.cuStreamCreate(1)) for _ in range(2)]; f, g = flag(), flag(); a = int(ok(cu.cuMemAlloc(512)))")
    job("e = ok(cu.cuEventCreate(2)); hold(s, f); ok(cu.cuEventRecord(e, s)); ok(cu.cuStreamWaitEvent(t, e, 0))")
    job("fill(t, a, 8); hold(s, g); ok(cu.cuEventRecord(e, s))")
    assert job("said(cu.cuStreamQuery(t))") == "NOT_READY"
    job("go(f); ok(cu.cuStreamSynchronize(t))")
    assert job("[said(cu.cuEventQuery(e)), read(a)]") == ["NOT_READY", 8]
    job("go(g); ok(cu.cuEventSynchronize(e)); ok(cu.cuEventDestroy(e))")


def test_an_event_that_was_never_recorded_holds_nothing(job: Far) -> None:
    job("s = ok(cu.cuStreamCreate(1)); e = ok(cu.cuEventCreate(0)); ok(cu.cuStreamWaitEvent(s, e, 0))")
    assert job("said(cu.cuStreamQuery(s))") == "SUCCESS"


def test_an_event_of_another_device_cannot_be_recorded_but_awaited(job: Far) -> None:
    job("e = ok(cu.cuEventCreate(0)); f = flag(); hold(0, f); ok(cu.cuEventRecord(e, 0))")
    job("context(1); s = ok(cu.cuStreamCreate(1))")
    assert job("said(cu.cuEventRecord(e, s))") == "INVALID_HANDLE"
    job("ok(cu.cuStreamWaitEvent(s, e, 0))")
    assert job("said(cu.cuStreamQuery(s))") == "NOT_READY"
    job("go(f); ok(cu.cuStreamSynchronize(s))")


def test_a_destroyed_stream_finishes_its_work(job: Far) -> None:
    job("s = ok(cu.cuStreamCreate(1)); f = flag(); a = int(ok(cu.cuMemAlloc(512))); hold(s, f); fill(s, a, 9)")
    job("ok(cu.cuStreamDestroy(s)); go(f); ok(cu.cuCtxSynchronize())")
    assert job("read(a)") == 9


def test_what_a_stream_says(job: Far) -> None:
    job("s = ok(cu.cuStreamCreateWithPriority(1, -3)); low = ok(cu.cuStreamCreateWithPriority(0, 9))")
    assert job("[ok(cu.cuStreamGetFlags(s)), ok(cu.cuStreamGetPriority(s)), ok(cu.cuStreamGetPriority(low))]") == [
        1,
        -3,
        0,
    ]
    assert job("int(ok(cu.cuStreamGetCtx(s))) == int(ok(cu.cuCtxGetCurrent()))")
    assert job("len({int(ok(cu.cuStreamGetId(x))) for x in (0, 2, s, low)})") == 4
    assert job("int(ok(cu.cuStreamIsCapturing(s)))") == 0
    assert job("[int(x) for x in ok(cu.cuCtxGetStreamPriorityRange())]") == [0, -5]


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_capture_is_empty_or_spoilt(job: Far, mode: int) -> None:
    """A wait spoils it in any mode, and so does what would have to be captured; a free as the modes say."""
    job("s, t = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))")
    job("d = [ok(cu.cuMemAlloc(4096)) for _ in range(4)]")
    job("asked = lambda: int(ok(cu.cuStreamIsCapturing(s)))")
    begin, end = f"said(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode({mode})))", "said(cu.cuStreamEndCapture(s))"
    assert job("said(cu.cuStreamBeginCapture(0, cu.CUstreamCaptureMode(2)))") == "STREAM_CAPTURE_UNSUPPORTED"
    assert job(end) == "ILLEGAL_STATE"
    assert [job(begin), job("asked()"), job(begin), job("said(cu.cuStreamSynchronize(t))")] == [
        "SUCCESS", 1, "ILLEGAL_STATE", "SUCCESS"
    ]  # fmt: skip
    job("ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(s))))")
    assert job("asked()") == 0
    unsupported = "STREAM_CAPTURE_UNSUPPORTED"
    free = "said(cu.cuMemFree(d.pop()))"
    for call, says in (
        ("said(cu.cuCtxSynchronize())", unsupported),
        ("said(cu.cuStreamSynchronize(s))", unsupported),
        ("said(cu.cuStreamQuery(s))", unsupported),
        ("said(cu.cuMemsetD8Async(d[0], 1, 16, s))", "NOT_SUPPORTED"),
        (free, "SUCCESS" if mode == 2 else unsupported),
    ):
        assert [job(begin), job(call)] == ["SUCCESS", says], call
        assert job("asked()") == (1 if says == "SUCCESS" else 2), call
        assert job(end) == ("SUCCESS" if says == "SUCCESS" else "STREAM_CAPTURE_INVALIDATED"), call
    assert job(begin) == "SUCCESS"
    others = job.send(f"(context(), {free})[1]").value()
    assert others == (unsupported if mode == 0 else "SUCCESS")
    job(end)
    assert job("said(cu.cuCtxSynchronize())") == "SUCCESS"


def test_host_functions(job: Far) -> None:
    """Called in order, by the driver's thread; they may not call the driver."""
    job(
        "seen = []\n"
        "kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)\n"
        "@kind\n"
        "def first(data):\n"
        "    seen.append((data, said(cu.cuCtxGetCurrent()), said(cu.cuMemAlloc(16)), threading.get_ident()))\n"
        "raw = ctypes.CDLL('libcuda.so.1')\n"
        "s = ok(cu.cuStreamCreate(1)); f = flag(); hold(s, f)\n"
        "assert raw.cuLaunchHostFunc(ctypes.c_void_p(int(s)), first, ctypes.c_void_p(77)) == 0\n"
    )
    assert job("seen") == []
    job("go(f); ok(cu.cuStreamSynchronize(s))")
    assert job("[seen[0][:3], seen[0][3] == threading.get_ident()]") == [[77, "NOT_PERMITTED", "NOT_PERMITTED"], False]
    assert job("raw.cuLaunchHostFunc(ctypes.c_void_p(int(s)), None, None)") == 1


def test_callbacks_are_told_of_the_error(job: Far) -> None:
    job(
        "seen = []\n"
        "kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)\n"
        "@kind\n"
        "def tell(stream, status, data):\n"
        "    seen.append((stream == int(s), status, data))\n"
        "raw = ctypes.CDLL('libcuda.so.1')\n"
        "s = ok(cu.cuStreamCreate(1))\n"
        "handle = ctypes.c_void_p(int(s))\n"
        "assert raw.cuStreamAddCallback(handle, tell, ctypes.c_void_p(5), 1) == 1\n"
        "assert raw.cuStreamAddCallback(handle, tell, ctypes.c_void_p(5), 0) == 0\n"
        "ok(cu.cuStreamSynchronize(s))\n"
        "f = flag()\n"
        "hold(s, f); fill(s, 4096, 1)\n"
        "assert raw.cuStreamAddCallback(handle, tell, ctypes.c_void_p(6), 0) == 0\n"
        "go(f)\n"
    )
    assert job("said(cu.cuStreamSynchronize(s))") == "ILLEGAL_ADDRESS"
    assert job("seen") == [[True, 0, 5], [True, 700, 6]]


def test_ended_threads_take_their_streams_along(job: Far) -> None:
    """No thread of the driver is left over for streams that nobody can use any more."""
    count = "len(os.listdir('/proc/self/task'))"
    job("f = flag(); hold(0, f); go(f); ok(cu.cuCtxSynchronize()); a = int(ok(cu.cuMemAlloc(512)))")
    before = job(count)
    for _ in range(5):
        job.send("context(), fill(2, a, 4), ok(cu.cuStreamSynchronize(2))").value()
    job("for _ in range(5):\n    s = ok(cu.cuStreamCreate(0)); fill(s, a, 1); ok(cu.cuStreamDestroy(s))")
    job("ok(cu.cuCtxSynchronize())")
    end = time.monotonic() + 60
    while job(count) > before and time.monotonic() < end:
        time.sleep(0.02)
    assert job(count) == before


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_a_lock_waits_for_submitted_work(job: Far, node: Any) -> None:
    """And lets no new work in; NOT_READY when it takes too long, then everything goes on."""
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    job("s = ok(cu.cuStreamCreate(1)); f = flag(); a = int(ok(cu.cuMemAlloc(512))); hold(s, f); fill(s, a, 3)")
    assert controller.lock(job.pid, 200) == "NOT_READY"
    assert controller.state(job.pid) == "running"
    job("fill(s, a, 4)")
    locking = controller.send(f"lock({job.pid}, 60000)")
    time.sleep(0.2)
    assert not locking.done
    job("go(f)")
    assert locking.value() == "SUCCESS"
    held = job.send("context(), fill(s, a, 5)")
    time.sleep(0.2)
    assert not held.done
    assert job("ok(cu.cuDeviceGetCount())") == 2  # a query is not held
    assert controller.unlock(job.pid) == "SUCCESS"
    held.value()
    job("ok(cu.cuStreamSynchronize(s))")
    assert job("read(a)") == 5


def test_a_blocked_synchronise_makes_a_lock_time_out(job: Far, node: Any) -> None:
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    job("f = flag(); hold(0, f)")
    waiting = job.send("context(), said(cu.cuCtxSynchronize())")
    time.sleep(0.1)
    assert controller.lock(job.pid, 300) == "NOT_READY"
    job("go(f)")
    assert waiting.value()[1] == "SUCCESS"
    assert controller.lock(job.pid, 60000) == "SUCCESS"
    assert controller.unlock(job.pid) == "SUCCESS"


AT_ONCE = {
    "cuCtxSynchronize()": "AWAITS",
    "cuStreamSynchronize(s)": "AWAITS",
    "cuStreamQuery(s)": "AWAITS",
    "cuEventQuery(e)": "AWAITS",
    "cuEventSynchronize(e)": "AWAITS",
    "cuDeviceGetName(64, 0)": "OPERATING_SYSTEM",
    "cuStreamWaitEvent(s, e, 0)": "SUCCESS",
    "cuDevicePrimaryCtxRetain(0)": "SUCCESS",
    "cuFuncGetAttribute(cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, kernel['fill'])": "SUCCESS",
    "cuDeviceGetUuid(0)": "SUCCESS",
    "cuCtxGetCurrent()": "SUCCESS",
    "cuStreamGetPriority(s)": "SUCCESS",
}
"""What answers in a locked process, and what it does in a checkpointed one: as a real driver's."""
HELD = (
    *("cuInit(0)", "cuDevicePrimaryCtxRetain(1)", "cuCtxGetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE)", "cuStreamCreate(0)"),
    *("cuEventRecord(e, s)", "cuEventCreate(0)", "cuMemcpyDtoH(bytearray(8), a, 8)", "cuMemsetD8(a, 1, 8)"),
    "cuModuleGetFunction(module, b'hash')",
)


def test_what_a_locked_and_a_checkpointed_process_can_call(job: Far, node: Any) -> None:
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    job("s = ok(cu.cuStreamCreate(1)); e = ok(cu.cuEventCreate(0)); a = int(ok(cu.cuMemAlloc(512))); fill(s, a, 3)")
    job("here = ok(cu.cuCtxGetCurrent()); ok(cu.cuEventRecord(e, s))")

    def ask(calls: Any) -> dict[str, Any]:
        return {call: job.send(f"ok(cu.cuCtxSetCurrent(here)), said(cu.{call})") for call in calls}

    assert controller.lock(job.pid, 60000) == "SUCCESS"
    held = ask(HELD)
    assert {call: one.value()[1] for call, one in ask(AT_ONCE).items()} == dict.fromkeys(AT_ONCE, "SUCCESS")
    assert controller.checkpoint(job.pid) == "SUCCESS"
    waiting = ask(call for call, answer in AT_ONCE.items() if answer == "AWAITS")
    at_once = {call: answer for call, answer in AT_ONCE.items() if answer != "AWAITS"}
    assert {call: one.value()[1] for call, one in ask(at_once).items()} == at_once
    time.sleep(0.3)
    assert [call for call, one in (held | waiting).items() if one.done] == []
    assert controller.restore(job.pid) == "SUCCESS"
    assert {one.value()[1] for one in waiting.values()} == {"SUCCESS"}
    time.sleep(0.1)
    assert [call for call, one in held.items() if one.done] == []
    assert controller.unlock(job.pid) == "SUCCESS"
    assert {call: one.value()[1] for call, one in held.items()} == dict.fromkeys(HELD, "SUCCESS")


def test_a_synchronise_while_checkpointed_may_crash_the_job(job: Far, node: Any) -> None:
    """It has been seen of a real driver; here where a rule says so."""
    node.switches.add("hazard=synchronise-while-checkpointed-segfaults")
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    controller.suspend(job.pid)
    job.send("context(), cu.cuCtxSynchronize()")
    assert job.died() == -11


def test_the_uuid_follows_a_move_and_the_bus_id_does_not(job: Far, node: Any) -> None:
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    seen = "[bytes(ok(cu.cuDeviceGetUuid(i)).bytes).hex() for i in (0, 1)]"
    bus_ids = "[ok(cu.cuDeviceGetPCIBusId(32, i)).decode() for i in (0, 1)]"
    first, second = job(seen)
    before = job(bus_ids)
    controller.suspend(job.pid)
    controller.resume(job.pid, [(first, second), (second, first)])
    assert job(seen) == [second, first]
    assert job(bus_ids) == before


def test_streams_and_events_survive_a_checkpoint(job: Far, node: Any) -> None:
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    job("s = ok(cu.cuStreamCreate(0)); e = ok(cu.cuEventCreate(0)); a = int(ok(cu.cuMemAlloc(512))); fill(s, a, 11)")
    job("ok(cu.cuEventRecord(e, s))")
    controller.suspend(job.pid)
    with pytest.raises(FarError):
        job("raise RuntimeError('its host side runs')")
    controller.resume(job.pid)
    assert job("[said(cu.cuEventQuery(e)), said(cu.cuStreamSynchronize(s)), read(a)]") == ["SUCCESS", "SUCCESS", 11]
    job("fill(s, a, 12); ok(cu.cuStreamSynchronize(s))")
    assert job("read(a)") == 12

"""The rules of streams, events and host callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from conformance.jobs import Job, number, pointer

NON_BLOCKING = 1


@pytest.fixture
def job(job_in: Callable[[str], Job]) -> Job:
    """A running job with a context and kernels; whatever it is busy with is ended after the test."""
    return job_in("running")


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
def test_a_streams_flags(flags: int, work: Job) -> None:
    stream = work.do("cuStreamCreate", flags)
    assert work.do("cuStreamGetFlags", stream) == flags
    work.do("cuStreamDestroy", stream)


def test_create_with_unknown_flags(work: Job) -> None:
    assert work.says("cuStreamCreate", 0x80) == "INVALID_VALUE"


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (-1, -1), (5, 0), (-100, "greatest")])
def test_a_streams_priority_is_brought_into_range(asked: int, given: int | str, work: Job) -> None:
    least, greatest = work.do("cuCtxGetStreamPriorityRange")
    assert least == 0
    assert greatest < 0
    stream = work.do("cuStreamCreateWithPriority", NON_BLOCKING, asked)
    assert work.do("cuStreamGetPriority", stream) == (greatest if given == "greatest" else given)
    work.do("cuStreamDestroy", stream)


@pytest.mark.parametrize("call", ["cuStreamQuery", "cuStreamSynchronize"])
@pytest.mark.parametrize("stream", [0, 1, 2], ids=["null", "legacy", "per-thread"])
def test_the_streams_that_are_always_there(stream: int, call: str, work: Job) -> None:
    assert work.says(call, stream) == "SUCCESS"


def test_query_tells_whether_work_is_under_way(job: Job) -> None:
    stream = job.do("cuStreamCreate", NON_BLOCKING)
    flag = job.spin(stream)
    assert job.says("cuStreamQuery", stream) == "NOT_READY"
    job.raise_flag(flag)
    assert job.says("cuStreamSynchronize", stream) == "SUCCESS"
    assert job.says("cuStreamQuery", stream) == "SUCCESS"


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"])
def test_a_synchronise_waits_for_the_work(call: str, job: Job) -> None:
    stream, event = job.do("cuStreamCreate", NON_BLOCKING), job.do("cuEventCreate", 0)
    flag = job.spin(stream)
    job.do("cuEventRecord", event, stream)
    args = {"cuStreamSynchronize": [stream], "cuCtxSynchronize": [], "cuEventSynchronize": [event]}[call]
    waiting = job.start(call, *args)
    assert waiting.result(0.4) == "BLOCKED"
    job.raise_flag(flag)
    assert waiting.result(60) == "SUCCESS"


def test_streams_do_not_wait_for_each_other(job: Job) -> None:
    first, second = (job.do("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    memory = job.do("cuMemAlloc", 4096)
    flag = job.spin(first)
    job.fill(memory, 8, 5, stream=second)
    assert job.says("cuStreamSynchronize", second, limit=60) == "SUCCESS"
    job.raise_flag(flag)


@pytest.mark.parametrize(("flags", "waits"), [(0, True), (NON_BLOCKING, False)], ids=["blocking", "non-blocking"])
def test_the_legacy_stream_waits_for_blocking_streams(flags: int, waits: bool, job: Job) -> None:
    stream = job.do("cuStreamCreate", flags)
    memory = job.do("cuMemAlloc", 4096)
    flag = job.spin(stream)
    waiting = job.start("cuMemsetD8Async", memory, 1, 4096, 0)
    assert waiting.result(60) == "SUCCESS"
    done = job.start("cuStreamSynchronize", 0)
    assert done.result(0.5 if waits else 60) == ("BLOCKED" if waits else "SUCCESS")
    job.raise_flag(flag)
    assert done.result(60) == "SUCCESS"


def test_work_in_a_stream_is_done_in_order(work: Job, memory: int) -> None:
    stream = work.do("cuStreamCreate", NON_BLOCKING)
    for n in range(20):
        work.fill(memory, 512, n, stream=stream)
    work.do("cuStreamSynchronize", stream)
    assert work.words(memory, 2) == (19, 19)
    work.do("cuStreamDestroy", stream)


def test_destroy_of_a_busy_stream_lets_its_work_end(job: Job) -> None:
    stream = job.do("cuStreamCreate", NON_BLOCKING)
    memory = job.do("cuMemAlloc", 4096)
    flag = job.spin(stream)
    job.fill(memory, 8, 6, stream=stream)
    assert job.says("cuStreamDestroy", stream, limit=60) == "SUCCESS"
    job.raise_flag(flag)
    job.do("cuCtxSynchronize")
    assert job.words(memory) == (6,)


@pytest.mark.parametrize("stream", [0, 1, 2], ids=["null", "legacy", "per-thread"])
def test_destroy_of_a_stream_that_is_always_there(stream: int, work: Job) -> None:
    assert work.says("cuStreamDestroy", stream) == "INVALID_HANDLE"


def test_ids_of_streams_differ(work: Job) -> None:
    streams = [work.do("cuStreamCreate", NON_BLOCKING) for _ in range(3)]
    assert len({work.do("cuStreamGetId", stream) for stream in streams}) == 3
    for stream in streams:
        work.do("cuStreamDestroy", stream)


def test_the_context_of_a_stream(work: Job) -> None:
    stream = work.do("cuStreamCreate", 0)
    assert work.do("cuStreamGetCtx", stream) == work.context
    work.do("cuStreamDestroy", stream)


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuEventQuery", "cuEventSynchronize"])
def test_an_event_that_was_never_recorded_is_done(call: str, work: Job) -> None:
    event = work.do("cuEventCreate", 0)
    assert work.says(call, event) == "SUCCESS"
    work.do("cuEventDestroy", event)


def test_an_event_is_done_when_its_work_is(job: Job) -> None:
    stream, event = job.do("cuStreamCreate", NON_BLOCKING), job.do("cuEventCreate", 0)
    flag = job.spin(stream)
    job.do("cuEventRecord", event, stream)
    assert job.says("cuEventQuery", event) == "NOT_READY"
    job.raise_flag(flag)
    job.do("cuEventSynchronize", event)
    assert job.says("cuEventQuery", event) == "SUCCESS"


def test_a_stream_waits_for_another_ones_event(job: Job) -> None:
    first, second = (job.do("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    event = job.do("cuEventCreate", 0)
    flag = job.spin(first)
    job.do("cuEventRecord", event, first)
    job.do("cuStreamWaitEvent", second, event, 0)
    assert job.says("cuStreamQuery", second) == "NOT_READY"
    job.raise_flag(flag)
    assert job.says("cuStreamSynchronize", second) == "SUCCESS"


def test_waiting_for_an_event_that_was_never_recorded_is_no_wait(work: Job) -> None:
    event, stream = work.do("cuEventCreate", 0), work.do("cuStreamCreate", NON_BLOCKING)
    work.do("cuStreamWaitEvent", stream, event, 0)
    assert work.says("cuStreamSynchronize", stream) == "SUCCESS"


def test_elapsed_time_is_about_what_passed(job: Job) -> None:
    stream = job.do("cuStreamCreate", NON_BLOCKING)
    first, second = (job.do("cuEventCreate", 0) for _ in range(2))
    flag = job.spin(stream)
    job.do("cuStreamSynchronize", 0)
    job.raise_flag(flag)
    job.do("cuStreamSynchronize", stream)
    job.do("cuEventRecord", first, stream)
    flag = job.spin(stream)
    time.sleep(0.2)
    job.raise_flag(flag)
    job.do("cuEventRecord", second, stream)
    job.do("cuEventSynchronize", second)
    assert 150 < job.do("cuEventElapsedTime", first, second) < 20000


@pytest.mark.parametrize("kind", ["never-recorded", "without-timing", "not-done"])
def test_elapsed_time_of_events_that_have_none(kind: str, job: Job) -> None:
    stream = job.do("cuStreamCreate", NON_BLOCKING)
    first, second = (job.do("cuEventCreate", 2 if kind == "without-timing" else 0) for _ in range(2))
    flag = job.spin(stream) if kind == "not-done" else None
    if kind != "never-recorded":
        job.do("cuEventRecord", first, stream)
        job.do("cuEventRecord", second, stream)
    if flag is None:
        job.do("cuCtxSynchronize")
    assert job.says("cuEventElapsedTime", first, second) == ("NOT_READY" if flag else "INVALID_HANDLE")
    if flag is not None:
        job.raise_flag(flag)


def test_an_events_flags_are_checked(work: Job) -> None:
    assert work.says("cuEventCreate", 0x80) == "INVALID_VALUE"


def test_an_interprocess_event_must_be_without_timing(work: Job) -> None:
    assert work.says("cuEventCreate", 4) == "INVALID_VALUE"


# --- callbacks --------------------------------------------------------------------------------------------------------


def test_a_host_function_runs_in_its_place_in_the_stream(job: Job) -> None:
    stream = job.do("cuStreamCreate", NON_BLOCKING)
    flag = job.spin(stream)
    job.do("cuLaunchHostFunc", stream, job.run("callback", "late", "host", False, None), 0)
    time.sleep(0.1)
    assert job.run("callback_state", "late")["count"] == 0
    job.raise_flag(flag)
    job.do("cuStreamSynchronize", stream)
    assert job.run("callback_state", "late")["count"] == 1


def test_a_host_function_holds_up_what_is_behind_it(job: Job) -> None:
    stream = job.do("cuStreamCreate", NON_BLOCKING)
    memory = job.do("cuMemAlloc", 4096)
    job.do("cuLaunchHostFunc", stream, job.run("callback", "hold", "host", True, None), 0)
    job.fill(memory, 8, 1, stream=stream)
    assert job.says("cuStreamQuery", stream) == "NOT_READY"
    job.run("release", "hold")
    assert job.says("cuStreamSynchronize", stream, limit=60) == "SUCCESS"


@pytest.mark.parametrize("call", ["cuCtxSynchronize", "cuMemFree_v2", "cuStreamQuery"])
def test_no_driver_calls_in_a_host_function(call: str, job: Job) -> None:
    stream = job.do("cuStreamCreate", NON_BLOCKING)
    job.do("cuLaunchHostFunc", stream, job.run("callback", "calls", "host", False, call), 0)
    job.do("cuStreamSynchronize", stream)
    assert job.run("callback_state", "calls")["inside"] == 800  # NOT_PERMITTED


def test_a_stream_callback_is_told_stream_status_and_data(work: Job) -> None:
    stream = work.do("cuStreamCreate", NON_BLOCKING)
    work.do("cuStreamAddCallback", stream, work.run("callback", "told", "stream", False, None), 0x1234, 0)
    work.do("cuStreamSynchronize", stream)
    assert work.run("callback_state", "told")["arguments"] == [stream, 0, 0x1234]


def test_a_stream_callbacks_flags_must_be_zero(work: Job) -> None:
    address = work.run("callback", "flags", "stream", False, None)
    assert work.says("cuStreamAddCallback", 0, address, 0, 1) == "INVALID_VALUE"


# --- launches ---------------------------------------------------------------------------------------------------------


def test_saxpy_rounds_twice(work: Job, memory: int) -> None:
    import struct

    x, y, a = 1.0000001192092896, -1.0000002384185791, 1.0000001192092896
    work.write(memory, struct.pack("<ff", y, x))
    args = (pointer(memory), pointer(memory + 4), (a, "c_float"), number(1))
    assert work.launch("saxpy", *args) == "SUCCESS"
    assert struct.unpack("<f", work.read(memory, 4)) == (0.0,)  # with one rounding it would be 2**-46


def test_hash_depends_on_each_word_and_its_place(work: Job, memory: int) -> None:
    work.stamped(memory, 512, 1)
    out = memory + 65536
    work.write(out, bytes(8))
    assert work.launch("hash", pointer(memory), number(512), pointer(out)) == "SUCCESS"
    words = work.words(memory, 512)
    assert work.words(out) == (sum((w ^ (w >> 29)) * (2 * i + 1) for i, w in enumerate(words)) % (1 << 64),)

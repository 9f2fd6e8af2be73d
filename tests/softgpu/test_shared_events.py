"""Events that two processes know (cuIpcGetEventHandle, cuIpcOpenEventHandle): one waits for the work of the other."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from softgpu.far import Far

pytestmark = pytest.mark.timeout(300)

# What the far end needs beside what far.py gives it.
WORDS = """
lib = ctypes.CDLL('libcuda.so.1')
INTERPROCESS = 6  # and no timing
class Handle(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_ubyte * 64)]
def event(flags=INTERPROCESS):
    return ok(cu.cuEventCreate(flags))
def handle_of(event):
    handle = Handle()
    code = lib.cuIpcGetEventHandle(ctypes.byref(handle), ctypes.c_void_p(int(event)))
    return code or bytes(handle.bytes).hex()
def opened(handle):
    global e
    found = ctypes.c_void_p()
    code = lib.cuIpcOpenEventHandle(ctypes.byref(found), Handle.from_buffer_copy(bytes.fromhex(handle)))
    if not code:
        e = cu.CUevent(found.value)
    return code
def asked(event):
    return word(cu.cuEventQuery(event)[0])
"""


def make(node: Any) -> Far:
    far = Far(node)
    far("start(); s = ok(cu.cuStreamCreate(1))")
    far(WORDS)
    return far


@pytest.fixture
def pair(node: Any) -> tuple[Far, Far]:
    """An exporter and an importer of the event ``e``."""
    exporter, importer = make(node), make(node)
    exporter("e = event()")
    handle = exporter("handle_of(e)")
    assert importer(f"opened({handle!r})") == 0
    return exporter, importer


@pytest.fixture
def controller(node: Any) -> Far:
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    return controller


def files(node: Any) -> list[str]:
    return sorted(os.listdir(f"/proc/{node.pid}/root/dev/shm"))


def maps(far: Far) -> list[str]:
    with open(f"/proc/{far.pid}/maps") as file:
        return [line.split()[-1] for line in file if "/dev/shm/cuda.shm." in line]


def held(far: Far) -> list[str]:
    links = [os.readlink(f"/proc/{far.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{far.pid}/fd")]
    return [path for path in links if "cuda.shm" in path]


def test_what_was_never_recorded_is_over(pair: tuple[Far, Far]) -> None:
    assert [far("asked(e)") for far in pair] == ["SUCCESS", "SUCCESS"]


@pytest.mark.parametrize("recorder", [0, 1])
def test_each_sees_what_the_other_records(pair: tuple[Far, Far], recorder: int) -> None:
    one, other = pair[recorder], pair[1 - recorder]
    one("spin(); ok(cu.cuEventRecord(e, 0))")
    assert (one("asked(e)"), other("asked(e)")) == ("NOT_READY", "NOT_READY")
    waiting = other.send("context() or ok(cu.cuEventSynchronize(e))")
    other("a = int(ok(cu.cuMemAlloc(MIB))); b = bytearray(1)")
    other("ok(cu.cuStreamWaitEvent(s, e, 0)); ok(cu.cuMemsetD8Async(a, 7, MIB, s))")
    time.sleep(0.3)
    assert other("word(cu.cuStreamQuery(s)[0])") == "NOT_READY"
    assert not waiting.done
    one("release()")
    waiting.value()
    other("ok(cu.cuStreamSynchronize(s)); ok(cu.cuMemcpyDtoH(b, a, 1))")
    assert other("b[0]") == 7
    assert (one("asked(e)"), other("asked(e)")) == ("SUCCESS", "SUCCESS")


def test_a_wait_is_for_what_was_recorded_before_it(pair: tuple[Far, Far]) -> None:
    exporter, importer = pair
    exporter("ok(cu.cuEventRecord(e, 0)); ok(cu.cuEventSynchronize(e)); spin()")
    importer("ok(cu.cuStreamWaitEvent(s, e, 0))")
    exporter("ok(cu.cuEventRecord(e, 0))")
    importer("ok(cu.cuStreamSynchronize(s))")
    assert importer("asked(e)") == "NOT_READY"
    exporter("release()")
    importer("ok(cu.cuEventSynchronize(e))")


def test_a_record_that_is_under_way_when_the_event_is_exported(node: Any) -> None:
    exporter, importer = make(node), make(node)
    exporter("e = event(); spin(); ok(cu.cuEventRecord(e, 0))")
    handle = exporter("handle_of(e)")
    assert importer(f"opened({handle!r})") == 0
    assert importer("asked(e)") == "NOT_READY"
    exporter("release()")
    importer("ok(cu.cuEventSynchronize(e))")


def test_many_records_from_both_sides_end(pair: tuple[Far, Far]) -> None:
    code = (
        "for i in range(300): ok(cu.cuEventRecord(e, s)); ok(cu.cuStreamWaitEvent(0, e, 0))\n"
        "ok(cu.cuCtxSynchronize())\n"
    )
    running = [far.send("context()\n" + code) for far in pair]
    for one in running:
        one.value()
    assert [far("asked(e)") for far in pair] == ["SUCCESS", "SUCCESS"]


def test_who_waits_for_a_process_that_is_killed_goes_on(pair: tuple[Far, Far]) -> None:
    exporter, importer = pair
    exporter("spin(); ok(cu.cuEventRecord(e, 0))")
    waiting = importer.send("context() or ok(cu.cuEventSynchronize(e))")
    time.sleep(0.2)
    assert not waiting.done
    exporter.process.kill()
    exporter.died()
    waiting.value()


def test_what_cannot_be_shared_or_opened(pair: tuple[Far, Far], node: Any) -> None:
    exporter, importer = pair
    assert exporter("handle_of(event(0))") == 1
    assert exporter("handle_of(12345)") == 400
    assert importer("handle_of(e)") == 1  # an opened one cannot be shared on
    assert exporter("opened(handle_of(e))") == 201
    assert importer(f"opened({'00' * 64!r})") == 1
    assert exporter("word(cu.cuEventCreate(4)[0])") == "INVALID_VALUE"  # interprocess, with timing
    handle = exporter("f = event()") or exporter("handle_of(f)")
    exporter("ok(cu.cuEventDestroy(f))")
    assert importer(f"opened({handle!r})") == 400
    left = exporter("handle_of(e)")
    exporter.process.kill()
    exporter.died()
    assert importer(f"opened({left!r})") == 400


def test_files_tell_who_exports_and_go(pair: tuple[Far, Far], node: Any) -> None:
    exporter, importer = pair
    (file,) = files(node)
    assert file.split(".")[3] == f"{exporter.pid:x}"
    assert maps(exporter) == maps(importer) == [f"/dev/shm/{file}"]
    assert [held(far) for far in pair] == [[f"/dev/shm/{file}"], []]
    importer("ok(cu.cuEventDestroy(e))")
    assert maps(importer) == []
    exporter("f = event(); handle_of(f)")
    assert len(files(node)) == 2
    exporter("ok(cu.cuEventDestroy(f))")
    assert files(node) == [file]
    exporter("threading.Timer(0.05, ctypes.CDLL(None).exit, (0,)).start()")
    exporter.died()
    assert files(node) == []


def test_a_child_has_nothing_of_it(pair: tuple[Far, Far], node: Any) -> None:
    for far in pair:
        far("said, say = os.pipe()\nchild = os.fork()\nif child == 0: os.write(say, b'1'); ctypes.CDLL(None).exit(0)\n")
        assert far("len(os.read(said, 1))") == 1
        far("os.waitpid(child, 0)")
        assert len(files(node)) == 1  # the child's end did not take it away
        assert len(held(far)) == (far is pair[0])
        assert far("asked(e)") == "SUCCESS"


def test_both_sides_are_restored_and_go_on_sharing(pair: tuple[Far, Far], controller: Far) -> None:
    exporter, importer = pair
    for far in pair:
        controller.suspend(far.pid)
    for far in pair:
        controller.resume(far.pid)
    exporter("spin(); ok(cu.cuEventRecord(e, 0))")
    assert importer("asked(e)") == "NOT_READY"
    exporter("release()")
    importer("ok(cu.cuEventSynchronize(e))")
    assert importer("asked(e)") == "SUCCESS"


def test_a_lock_times_out_while_work_waits_for_another_process(pair: tuple[Far, Far], controller: Far) -> None:
    exporter, importer = pair
    exporter("spin(); ok(cu.cuEventRecord(e, 0))")
    importer("ok(cu.cuStreamWaitEvent(s, e, 0))")
    assert controller.lock(importer.pid, 300) == "NOT_READY"
    exporter("release()")
    assert controller.lock(importer.pid, 60000) == "SUCCESS"
    assert controller.unlock(importer.pid) == "SUCCESS"


def test_limosa_sees_it_and_refuses(pair: tuple[Far, Far], node: Any) -> None:
    told = node.limosa("plan", "suspend", pair[1].pid, "-o", "json", rc=None).json
    assert told["verdict"] == "refused"
    assert any("ipc" in reason["id"] for reason in told["reasons"]), told["reasons"]

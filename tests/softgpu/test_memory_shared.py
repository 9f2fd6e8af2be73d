"""Virtual memory and legacy IPC: the rules, what lives how long, several processes, what a checkpoint does with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from softgpu.far import Far

from limosa_softgpu.state import opened

MIB = 1 << 20
pytestmark = pytest.mark.timeout(300)

# What the far end needs beside what far.py gives it.
WORDS = """
import socket
POSIX = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
NONE, READ, WRITE = (cu.CUmemAccess_flags(value) for value in (0, 1, 3))
def prop(device=0, kind=cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, handles=POSIX):
    made = cu.CUmemAllocationProp()
    made.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = kind
    made.location.id = device
    made.requestedHandleTypes = handles
    return made
def access(flags=WRITE, device=0):
    made = cu.CUmemAccessDesc()
    made.location = prop(device).location
    made.flags = flags
    return [made]
def create(mib, **options):
    return ok(cu.cuMemCreate(mib * MIB, prop(**options), 0))
def reserve(mib):
    return int(ok(cu.cuMemAddressReserve(mib * MIB, 0, 0, 0)))
def mapped(mib, handle, flags=WRITE):
    address = reserve(mib)
    ok(cu.cuMemMap(address, mib * MIB, 0, handle, 0))
    if flags is not None:
        ok(cu.cuMemSetAccess(address, mib * MIB, access(flags), 1))
    return address
def export(handle):
    return int(ok(cu.cuMemExportToShareableHandle(handle, POSIX, 0)))
def send(path, fd):
    with socket.socket(socket.AF_UNIX) as far_end:
        far_end.connect(path)
        socket.send_fds(far_end, [b'x'], [fd])
def listen(path):
    global door
    door = socket.socket(socket.AF_UNIX); door.bind(path); door.listen()
def take():
    with door.accept()[0] as near_end:
        return socket.recv_fds(near_end, 1, 1)[1][0]
def text(address, size):
    return bytes.fromhex(get(address, size)).decode()
lib = ctypes.CDLL('libcuda.so.1')
class Handle(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_ubyte * 64)]
def handle_of(address):
    handle = Handle()
    code = lib.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.bytes).hex() if code == 0 else code
def opened(handle, flags=1):
    address = ctypes.c_uint64()
    made = Handle.from_buffer_copy(bytes.fromhex(handle))
    lib.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    code = lib.cuIpcOpenMemHandle_v2(ctypes.byref(address), made, flags)
    return address.value if code == 0 else -code
"""


def passed(one: Far, two: Far, path: Any) -> None:
    """Send the descriptor ``fd`` of one process to another, as its ``fd``."""
    two(f"listen({str(path)!r})")
    one(f"send({str(path)!r}, fd)")
    two("fd = take()")


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("says('cuMemCreate', 0, prop(), 0)", "INVALID_VALUE"),
        ("says('cuMemCreate', MIB, prop(), 0)", "INVALID_VALUE"),
        ("says('cuMemCreate', 2 * MIB, prop(), 1)", "INVALID_VALUE"),
        ("says('cuMemCreate', 2 * MIB, cu.CUmemAllocationProp(), 0)", "INVALID_VALUE"),
        ("says('cuMemCreate', 2 * MIB, prop(device=2), 0)", "INVALID_DEVICE"),
        ("says('cuMemCreate', 2 * MIB, prop(device=-1), 0)", "INVALID_DEVICE"),
        ("says('cuMemCreate', 1 << 40, prop(), 0)", "OUT_OF_MEMORY"),
        ("says('cuMemCreate', 2 * MIB, prop(handles=FABRIC), 0)", "NOT_SUPPORTED"),
        ("says('cuMemCreate', 2 * MIB, prop(kind=cu.CUmemLocationType(2)), 0)", "NOT_SUPPORTED"),
        ("says('cuMemCreate', 2 * MIB, prop(kind=cu.CUmemLocationType(4)), 0)", "INVALID_VALUE"),
        ("int(ok(cu.cuMemGetAllocationGranularity(prop(), cu.CUmemAllocationGranularity_flags(0))))", 2 * MIB),
        ("says('cuMemRelease', 12345)", "INVALID_VALUE"),
        ("says('cuMemAddressReserve', 0, 0, 0, 0)", "INVALID_VALUE"),
        ("says('cuMemAddressReserve', MIB, 0, 0, 0)", "INVALID_VALUE"),
        ("says('cuMemAddressReserve', 2 * MIB, 3 * MIB, 0, 0)", "INVALID_VALUE"),
        ("says('cuMemAddressReserve', 2 * MIB, 0, 0, 1)", "INVALID_VALUE"),
        ("says('cuMemAddressReserve', 1 << 46, 0, 0, 0)", "OUT_OF_MEMORY"),
        ("says('cuMemAddressFree', reserve(4), 2 * MIB)", "INVALID_VALUE"),
        ("says('cuMemAddressFree', reserve(4) + 2 * MIB, 2 * MIB)", "INVALID_VALUE"),
        ("[says('cuMemAddressFree', a, 2 * MIB) for a in [reserve(2)] * 2]", ["SUCCESS", "INVALID_VALUE"]),
        ("says('cuMemMap', reserve(2), 2 * MIB, 0, 12345, 0)", "INVALID_VALUE"),
        ("says('cuMemMap', reserve(2), 2 * MIB, 0, create(2), 1)", "INVALID_VALUE"),
        ("says('cuMemMap', reserve(4), 4 * MIB, 0, create(2), 0)", "NOT_SUPPORTED"),
        ("says('cuMemMap', reserve(4), 2 * MIB, 2 * MIB, create(4), 0)", "NOT_SUPPORTED"),
        ("says('cuMemMap', reserve(4), 2 * MIB, 0, create(4), 0)", "NOT_SUPPORTED"),
        ("says('cuMemMap', reserve(4) + MIB, 2 * MIB, 0, create(2), 0)", "INVALID_VALUE"),
        ("says('cuMemMap', reserve(2), 4 * MIB, 0, create(4), 0)", "INVALID_VALUE"),
        ("says('cuMemMap', int(ok(cu.cuMemAlloc(2 * MIB))), 2 * MIB, 0, create(2), 0)", "INVALID_VALUE"),
        ("says('cuMemMap', mapped(2, create(2)), 2 * MIB, 0, create(2), 0)", "INVALID_VALUE"),
        ("says('cuMemUnmap', reserve(2), 2 * MIB)", "SUCCESS"),
        ("says('cuMemUnmap', reserve(2), 4 * MIB)", "INVALID_VALUE"),
        ("says('cuMemUnmap', reserve(2), MIB)", "INVALID_VALUE"),
        ("says('cuMemUnmap', 1 << 46, 2 * MIB)", "INVALID_VALUE"),
        ("says('cuMemUnmap', mapped(4, create(4)), 2 * MIB)", "INVALID_VALUE"),
        ("says('cuMemAddressFree', mapped(2, create(2)), 2 * MIB)", "INVALID_VALUE"),
        ("says('cuMemSetAccess', reserve(2), 2 * MIB, access(), 1)", "INVALID_VALUE"),
        ("says('cuMemSetAccess', mapped(4, create(4)), 2 * MIB, access(), 1)", "INVALID_VALUE"),
        ("says('cuMemSetAccess', mapped(2, create(2)), 2 * MIB, access(device=2), 1)", "INVALID_VALUE"),
        ("says('cuMemSetAccess', mapped(2, create(2)), 2 * MIB, [], 0)", "INVALID_VALUE"),
        ("says('cuMemGetAccess', prop().location, reserve(2))", "INVALID_VALUE"),
        ("[int(ok(cu.cuMemGetAccess(prop(d).location, mapped(2, create(2)) + 5))) for d in (0, 1)]", [3, 0]),
        ("says('cuMemRetainAllocationHandle', reserve(2))", "INVALID_VALUE"),
        ("says('cuMemExportToShareableHandle', create(2), FABRIC, 0)", "INVALID_VALUE"),
        ("says('cuMemExportToShareableHandle', create(2, handles=cu.CUmemAllocationHandleType(0)), POSIX, 0)",
         "INVALID_VALUE"),
        ("says('cuMemExportToShareableHandle', 12345, POSIX, 0)", "INVALID_VALUE"),
        ("says('cuMemImportFromShareableHandle', 1000, POSIX)", "UNKNOWN"),
        ("says('cuMemImportFromShareableHandle', os.open('/dev/null', 0), POSIX)", "UNKNOWN"),
        ("says('cuMemImportFromShareableHandle', 0, FABRIC)", "NOT_SUPPORTED"),
    ],
)  # fmt: skip
def test_rules(rules_job: Far, code: str, answer: Any) -> None:
    assert rules_job(code) == answer


def test_a_refused_call_takes_nothing(job: Far) -> None:
    before = job("free()")
    job("h = create(2); a = mapped(2, h)")
    for call in ("'cuMemMap', a, 2 * MIB, 0, h, 0", "'cuMemUnmap', a, 4 * MIB", "'cuMemAddressFree', a, 2 * MIB"):
        assert job(f"says({call})") == "INVALID_VALUE"
    job("ok(cu.cuMemUnmap(a, 2 * MIB)); ok(cu.cuMemAddressFree(a, 2 * MIB)); ok(cu.cuMemRelease(h))")
    assert job("free()") == before


def test_a_hint_is_followed_where_there_is_room(job: Far) -> None:
    job("a = reserve(8); ok(cu.cuMemAddressFree(a, 8 * MIB)); want = a + 2 * MIB")
    assert job("int(ok(cu.cuMemAddressReserve(4 * MIB, 0, want, 0))) == want")
    assert job("int(ok(cu.cuMemAddressReserve(4 * MIB, 0, want, 0))) != want")


def test_memory_is_out_of_reach_until_access_is_given(job: Far) -> None:
    job("a = mapped(2, create(2), flags=None)")
    assert job("says('cuMemcpyHtoD', a, b'12345678', 8)") == "INVALID_VALUE"
    job("ok(cu.cuMemSetAccess(a, 2 * MIB, access(), 1)); put(a, b'12345678')")
    job("ok(cu.cuMemSetAccess(a, 2 * MIB, access(NONE), 1))")
    assert job("says('cuMemcpyHtoD', a, b'12345678', 8)") == "INVALID_VALUE"
    job("ok(cu.cuMemSetAccess(a, 2 * MIB, access(device=1), 1))")  # not the one that would copy
    assert job("says('cuMemcpyHtoD', a, b'12345678', 8)") == "INVALID_VALUE"
    job("ok(cu.cuMemSetAccess(a, 2 * MIB, access(), 1))")
    assert job("text(a, 8)") == "12345678"


def test_memory_may_be_mapped_several_times(job: Far) -> None:
    job("h = create(6); one = mapped(6, h); two = mapped(6, h)")
    job("put(one + 5 * MIB, b'from the one')")
    assert job("text(two + 5 * MIB, 12)") == "from the one"


def test_mappings_side_by_side_are_one_range(job: Far) -> None:
    job("a = reserve(8)")
    job("for i in range(4): ok(cu.cuMemMap(a + 2 * i * MIB, 2 * MIB, 0, create(2), 0))")
    job("ok(cu.cuMemSetAccess(a, 8 * MIB, access(), 1)); put(a + MIB, bytes(range(1, 101)) * 50000)")
    assert job("text(a + MIB, 5000000) == (bytes(range(1, 101)) * 50000).decode()")
    job("ok(cu.cuMemUnmap(a + 2 * MIB, 4 * MIB))")
    assert job("says('cuMemcpyHtoD', a + MIB, bytes(2 * MIB), 2 * MIB)") == "INVALID_VALUE"
    job("ok(cu.cuMemUnmap(a, 8 * MIB))")  # a hole in it is no hindrance
    job("ok(cu.cuMemAddressFree(a, 8 * MIB))")


def test_memory_lives_as_long_as_a_handle_or_mapping(job: Far) -> None:
    before = job("free()")
    job("h = create(4); a = mapped(4, h); put(a, b'still here'); ok(cu.cuMemRelease(h))")
    assert job("says('cuMemRelease', h)") == "INVALID_VALUE"
    assert job("says('cuMemMap', reserve(4), 4 * MIB, 0, h, 0)") == "INVALID_VALUE"
    assert job("text(a, 10)") == "still here"
    assert job("int(ok(cu.cuMemRetainAllocationHandle(a + MIB))) == int(h)")
    job("ok(cu.cuMemUnmap(a, 4 * MIB))")
    assert job("free()") == before - 4 * MIB
    job("b = mapped(4, h)")
    assert job("text(b, 10)") == "still here"
    job("ok(cu.cuMemRelease(h)); ok(cu.cuMemUnmap(b, 4 * MIB))")
    assert job("free()") == before


def test_many_handles_take_no_descriptors(job: Far, node: Any) -> None:
    before = len(os.listdir(f"/proc/{job.pid}/fd"))
    job("for i in range(25): mapped(2, create(2, handles=POSIX))")
    assert len(os.listdir(f"/proc/{job.pid}/fd")) == before
    assert len(node.blocks()) == 26


# --- several processes -----------------------------------------------------------------------------------------------


def test_a_descriptor_carries_memory_to_another_process(job: Far, other: Far, tmp_path: Any) -> None:
    job("h = create(4); a = mapped(4, h); put(a, b'from the job'); fd = export(h)")
    passed(job, other, tmp_path / "door")
    other("h = ok(cu.cuMemImportFromShareableHandle(fd, POSIX)); os.close(fd); a = mapped(4, h)")
    assert other("text(a, 12)") == "from the job"
    other("put(a, b'from another')")
    assert job("text(a, 12)") == "from another"
    assert other("says('cuMemExportToShareableHandle', h, POSIX, 0)") == "INVALID_VALUE"
    assert other("ok(cu.cuMemGetAllocationPropertiesFromHandle(h)).location.id") == 0


@pytest.mark.parametrize(("field", "wrong"), [("gpu", 8), ("gpu", 30000), ("gpu", -1), ("bytes", 1 << 62)])
def test_memory_of_which_a_stranger_says_nonsense_is_not_imported(
    job: Far, other: Far, node: Any, tmp_path: Any, field: str, wrong: int
) -> None:
    """Everybody in the node may write there."""
    job("h = create(4); fd = export(h)")
    passed(job, other, tmp_path / "door")
    with opened(node.folder) as state:
        (place,) = [i for i in range(state.n_blocks) if state.blocks[i].id and state.blocks[i].bytes == 4 * MIB]
        setattr(state.blocks[place], field, wrong)
        del state
    assert other("says('cuMemImportFromShareableHandle', fd, POSIX)") == "UNKNOWN"


@pytest.mark.parametrize("held", ["descriptor", "handle", "mapping"])
def test_memory_outlives_whoever_made_it(start: Callable[..., Far], held: str, tmp_path: Any) -> None:
    maker, keeper, watcher = start(), start(), start()
    before = watcher("free()")
    maker("h = create(8); a = mapped(8, h); put(a, b'the last copy'); fd = export(h)")
    passed(maker, keeper, tmp_path / "door")
    maker.process.kill()
    maker.died()
    if held != "descriptor":
        keeper("h = ok(cu.cuMemImportFromShareableHandle(fd, POSIX)); os.close(fd)")
    if held == "mapping":
        keeper("a = mapped(8, h); ok(cu.cuMemRelease(h))")
    context = watcher("free()") - before  # what the maker's context gave back
    if held == "descriptor":
        keeper("h = ok(cu.cuMemImportFromShareableHandle(fd, POSIX)); os.close(fd)")
    if held != "mapping":
        keeper("a = mapped(8, h); ok(cu.cuMemRelease(h))")
    assert keeper("text(a, 13)") == "the last copy"
    keeper("ok(cu.cuMemUnmap(a, 8 * MIB))")
    assert watcher("free()") == before + context + 8 * MIB


def test_a_gpu_that_the_importer_does_not_see(job: Far, node: Any, tmp_path: Any) -> None:
    blind = Far(node, env={"CUDA_VISIBLE_DEVICES": "1"})
    blind("start()")
    blind(WORDS)
    job("h = create(2); fd = export(h)")
    passed(job, blind, tmp_path / "door")
    assert blind("says('cuMemImportFromShareableHandle', fd, POSIX)") == "NOT_INITIALIZED"


# --- a checkpoint ----------------------------------------------------------------------------------------------------


def test_handles_mappings_and_reservations_come_back(job: Far, controller: Far) -> None:
    job("h = create(6); whole = mapped(6, h); twin = mapped(6, h); put(twin, b'in the twin')")
    job("loose = create(2); a = mapped(2, loose); put(a, b'mapped nowhere'); ok(cu.cuMemUnmap(a, 2 * MIB))")
    job("empty = reserve(4); closed = mapped(2, create(2), flags=None)")
    job("sealed = mapped(2, create(2)); put(sealed, b'sealed')")
    job("ok(cu.cuMemSetAccess(sealed, 2 * MIB, access(READ), 1))")
    before = job("free()")
    controller.suspend(job.pid)
    controller.resume(job.pid)
    assert job("free()") == before
    with open(f"/proc/{job.pid}/maps") as maps:
        rights = {line.split("-")[0]: line.split()[1] for line in maps}
    assert [rights[f"{job(name):x}"] for name in ("whole", "closed", "sealed")] == ["rw-s", "---s", "r--s"]
    assert job("text(whole, 11)") == "in the twin"
    job("put(whole + 4 * MIB, b'still one')")
    assert job("text(twin + 4 * MIB, 9)") == "still one"
    assert job("text(mapped(2, loose), 14)") == "mapped nowhere"
    assert job("says('cuMemcpyHtoD', closed, b'12345678', 8)") == "INVALID_VALUE"
    assert job("text(sealed, 6)") == "sealed"
    assert job("int(ok(cu.cuMemGetAccess(prop().location, sealed)))") == 1
    job("ok(cu.cuMemMap(empty + 2 * MIB, 2 * MIB, 0, loose, 0))")
    assert job("says('cuMemAddressFree', empty, 4 * MIB)") == "INVALID_VALUE"


def test_whoever_has_a_descriptor_keeps_the_old_memory(job: Far, other: Far, controller: Far, tmp_path: Any) -> None:
    job("h = create(4); a = mapped(4, h); put(a, b'one'); fd = export(h)")
    passed(job, other, tmp_path / "door")
    job("os.close(fd)")
    other("h = ok(cu.cuMemImportFromShareableHandle(fd, POSIX)); os.close(fd); a = mapped(4, h)")
    controller.suspend(job.pid)
    assert other("text(a, 3)") == "one"
    held = other("free()")
    controller.resume(job.pid)
    assert other("free()") < held - 4 * MIB  # it is there twice now
    other("put(a, b'two')")
    assert (job("text(a, 3)"), other("text(a, 3)")) == ("one", "two")
    job("fd = export(h)")
    passed(job, other, tmp_path / "door2")
    assert other("text(mapped(4, ok(cu.cuMemImportFromShareableHandle(fd, POSIX))), 3)") == "one"


def test_exported_descriptors_are_of_nvidiactl_while_the_job_is_checkpointed(
    job: Far, other: Far, controller: Far, tmp_path: Any
) -> None:
    job("h = create(4); a = mapped(4, h); put(a, b'one'); fd = export(h); gone = export(h); low = os.dup(fd)")
    job("os.set_inheritable(low, True)")
    fds = job("[fd, gone, low]")
    before = other("free()")
    controller.suspend(job.pid)
    assert [os.readlink(f"/proc/{job.pid}/fd/{fd}") for fd in fds] == ["/dev/nvidiactl"] * 3
    assert other("free()") > before + 4 * MIB
    job("os.dup2(os.open('/etc/hostname', os.O_RDONLY), gone)")
    controller.resume(job.pid)
    assert job("[os.get_inheritable(one) for one in (fd, low)]") == [False, True]
    assert job("os.readlink(f'/proc/self/fd/{gone}')") == "/etc/hostname"
    job("put(a, b'two')")
    passed(job, other, tmp_path / "door")
    assert other("text(mapped(4, ok(cu.cuMemImportFromShareableHandle(fd, POSIX))), 3)") == "two"


def test_whoever_has_imported_memory_is_lost(job: Far, other: Far, controller: Far, tmp_path: Any) -> None:
    job("h = create(4); a = mapped(4, h); put(a, b'one'); fd = export(h)")
    passed(job, other, tmp_path / "door")
    other("h = ok(cu.cuMemImportFromShareableHandle(fd, POSIX)); os.close(fd); a = mapped(4, h)")
    controller.suspend(other.pid)
    assert [controller.restore(other.pid) for _ in range(2)] == ["NOT_SUPPORTED"] * 2
    assert controller.state(other.pid) == "checkpointed"
    controller.suspend(job.pid)  # whose own it is comes back
    controller.resume(job.pid)
    assert job("text(a, 3)") == "one"


def test_a_process_that_has_let_anothers_memory_go_is_restored(
    job: Far, other: Far, controller: Far, tmp_path: Any
) -> None:
    job("h = create(4); a = mapped(4, h); put(a, b'one'); fd = export(h)")
    passed(job, other, tmp_path / "door")
    other("h = ok(cu.cuMemImportFromShareableHandle(fd, POSIX)); a = mapped(4, h)")
    other("ok(cu.cuMemUnmap(a, 4 * MIB)); ok(cu.cuMemRelease(h))")
    controller.suspend(other.pid)
    controller.resume(other.pid)
    assert other("os.readlink(f'/proc/self/fd/{fd}')") == "/dev/nvidiactl"  # whose memory it was is not known any more


def test_ones_own_memory_imported_stays_one(job: Far, controller: Far) -> None:
    job("h = create(4); a = mapped(4, h); fd = export(h); i = ok(cu.cuMemImportFromShareableHandle(fd, POSIX))")
    job("b = mapped(4, i); put(a, b'one')")
    before = job("free()")
    for _ in range(2):
        controller.suspend(job.pid)
        controller.resume(job.pid)
    assert job("text(b, 3)") == "one"
    job("put(b, b'two')")
    assert job("text(a, 3)") == "two"
    assert job("free()") == before
    assert job("says('cuMemExportToShareableHandle', i, POSIX, 0)") == "INVALID_VALUE"


def test_what_answers_while_the_job_is_checkpointed(job: Far, controller: Far) -> None:
    job("h = create(2); a = int(ok(cu.cuMemAlloc(4096))); spare = reserve(2)")
    controller.suspend(job.pid)
    assert job("says('cuMemGetInfo')") == "OPERATING_SYSTEM"
    assert job("handle_of(a)") == 304
    assert job("says('cuMemExportToShareableHandle', h, POSIX, 0)") == "UNKNOWN"
    job("ok(cu.cuMemAddressFree(spare, 2 * MIB)); spare = reserve(2)")
    waiting = job.send("create(2) and says('cuMemMap', spare, 2 * MIB, 0, h, 0)")
    controller.resume(job.pid)
    assert waiting.value() == "SUCCESS"


# --- legacy IPC ------------------------------------------------------------------------------------------------------


def shared(pid: int) -> list[str]:
    """The files of legacy IPC that a process maps or has open."""
    with open(f"/proc/{pid}/maps") as maps:
        found = [line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/cuda.shm." in line]
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return [f"mapped {path}" for path in found] + [f"open {path}" for path in links if "cuda.shm" in path]


@pytest.fixture
def ipc(job: Far, other: Far) -> tuple[Far, Far]:
    """An exporter of 3 MiB at ``a``, and an importer that has it open at ``a``."""
    job("before = ok(cu.cuMemAlloc(5000)); small = int(ok(cu.cuMemAlloc(100)))")
    job("a = int(ok(cu.cuMemAlloc(3 * MIB))); put(a, b'exported')")
    handle = job("handle_of(a)")
    other(f"a = opened({handle!r})")
    return job, other


def test_nothing_shows_it_from_outside(ipc: tuple[Far, Far], node: Any) -> None:
    """Measured: only who shares an event beside the memory has a file in /dev/shm (test_shared_events.py)."""
    assert [shared(far.pid) for far in ipc] == [[], []]
    assert os.listdir(f"/proc/{node.pid}/root/dev/shm") == []


def test_the_content_is_one(ipc: tuple[Far, Far]) -> None:
    exporter, importer = ipc
    assert importer("text(a, 8)") == "exported"
    importer("put(a + 2 * MIB, b'imported')")
    assert exporter("text(a + 2 * MIB, 8)") == "imported"
    assert importer("says('cuMemcpyHtoD', a + 3 * MIB - 4, b'12345678', 8)") == "INVALID_VALUE"
    assert importer("says('cuMemFree', a)") == "INVALID_VALUE"


def test_a_small_allocation_is_opened_by_itself(ipc: tuple[Far, Far]) -> None:
    exporter, importer = ipc
    exporter("put(small, b'small')")
    importer(f"b = opened({exporter('handle_of(small)')!r})")
    assert importer("text(b, 5)") == "small"
    assert importer("says('cuMemcpyHtoD', b, bytes(101), 101)") == "INVALID_VALUE"


def test_opened_twice_it_is_closed_twice(ipc: tuple[Far, Far]) -> None:
    exporter, importer = ipc
    assert importer(f"opened({exporter('handle_of(a)')!r}) == a")
    closing = [importer("says('cuIpcCloseMemHandle', a)") for _ in range(3)]
    assert closing == ["SUCCESS", "SUCCESS", "INVALID_VALUE"]


def test_what_cannot_be_opened(ipc: tuple[Far, Far]) -> None:
    exporter, importer = ipc
    handle = exporter("handle_of(a)")
    assert exporter(f"opened({handle!r})") == -201  # one's own
    assert importer(f"opened({'00' * 64!r})") == -1
    assert importer(f"opened({handle!r}, 2)") == -1
    assert exporter("handle_of(12345)") == 1
    assert exporter("handle_of(vmm(2, 1))") == 1
    fresh = exporter("b = int(ok(cu.cuMemAlloc(4 * MIB)))") or exporter("handle_of(b)")
    exporter("ok(cu.cuMemFree(b))")
    assert importer(f"opened({fresh!r})") == -1
    exporter.process.kill()
    exporter.died()
    assert importer(f"opened({fresh!r})") == -400


def test_memory_that_is_open_elsewhere_lives_on(ipc: tuple[Far, Far]) -> None:
    exporter, importer = ipc
    exporter.process.kill()
    exporter.died()
    assert importer("text(a, 8)") == "exported"


def test_the_exporter_is_restored_and_the_importer_is_lost(ipc: tuple[Far, Far], controller: Far) -> None:
    exporter, importer = ipc
    for far in ipc:
        controller.suspend(far.pid)
    controller.resume(exporter.pid)
    assert exporter("text(a, 8)") == "exported"
    assert controller.restore(importer.pid) == "INVALID_VALUE"
    assert controller.state(importer.pid) == "checkpointed"
    assert controller.restore(importer.pid) == "OPERATING_SYSTEM"
    assert controller.state(importer.pid) == "checkpointed"


def test_an_importer_that_has_closed_is_restored(ipc: tuple[Far, Far], controller: Far) -> None:
    _, importer = ipc
    importer("ok(cu.cuIpcCloseMemHandle(a))")
    controller.suspend(importer.pid)
    controller.resume(importer.pid)

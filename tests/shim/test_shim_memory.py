"""Memory under the shim is as the driver's own: the same calls are made with and without it, and answer the same."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from soft_node import Node
from softgpu.far import Died, Far

from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

MIB = 1 << 20
pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
Both = tuple[Far, Far]


@pytest.fixture
def both(start: Callable[..., Far]) -> Both:
    """Two jobs that differ in nothing but the shim: with, without."""
    return start(), start(shim=False)


def same(both: Both, code: str) -> object:
    """What both answer."""
    ours, bare = (job(code) for job in both)
    assert ours == bare, code
    return ours


NUMBERS = ["BUFFER_ID", "MEMORY_BLOCK_ID"]
SIZES = [1, 4096, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3 * MIB, 8 * MIB + 12345]


@pytest.mark.parametrize("size", SIZES)
def test_attributes_and_ranges(both: Both, size: int) -> None:
    for job in both:
        job(f"address = int(ok(cu.cuMemAlloc({size})))")
    for offset in (0, min(1, size - 1), size // 2, size - 1):
        assert same(both, f"span(address + {offset})") == [-offset, size]
    ours, bare = (job("attributes(address)") for job in both)
    # What is a number of the process itself: address, context, identity.
    for which in ("DEVICE_POINTER", "CONTEXT", "RANGE_START_ADDR", "BUFFER_ID", "MEMORY_BLOCK_ID"):
        for found in (ours, bare):
            name = f"CU_POINTER_ATTRIBUTE_{which}"
            assert found[name][0] == "SUCCESS"
            assert found.pop(name)[1] is not None
    assert ours == bare
    starts = "int(ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.%s, address)))"
    for job in both:
        assert job((starts % "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR") + " == address")
        assert job(
            "int(ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT, address)))"
            " == int(ok(cu.cuCtxGetCurrent()))"
        )
    assert same(both, "says('cuMemFree', address)") == "SUCCESS"
    assert same(both, "span(address)") != [0, size]


def test_what_is_large_is_looked_after_and_what_is_small_is_not(job: Far, shim: Shim) -> None:
    for size in SIZES:
        job(f"ok(cu.cuMemAlloc({size}))")
    assert [memory.bytes for memory in shim.memories()] == [2 * MIB, 4 * MIB, 4 * MIB, 10 * MIB]
    assert shim.counts()["small"] == (3, sum(SIZES[:3]))


@pytest.mark.parametrize(("width", "height"), [(1000, 100), (1000, 5000), (65536, 64), (3, 1 << 17)])
def test_pitch(both: Both, width: int, height: int) -> None:
    for job in both:
        job(f"address, pitch = ok(cu.cuMemAllocPitch({width}, {height}, 4))")
    pitch = same(both, "pitch")
    assert same(both, "span(int(address))") == [0, pitch * height]
    assert same(both, f"says('cuMemsetD2D8', address, pitch, 7, {width}, {height})") == "SUCCESS"
    assert same(both, "says('cuMemFree', address)") == "SUCCESS"
    for job in both:  # asked again, and answered without the driver
        assert job(f"ok(cu.cuMemAllocPitch({width}, {height}, 4))[1]") == pitch


@pytest.mark.parametrize(
    "code",
    [
        "says('cuMemFree', address + 4096)",
        "says('cuMemFree', address + 2 * MIB)",
        "says('cuMemFree', address + 16 * MIB)",
        "says('cuMemFree', 0)",
        "says('cuMemAlloc', 0)",
        "says('cuMemAllocPitch', 0, 0, 4)",
        "says('cuMemAllocPitch', 4 * MIB, 4, 5)",
        "says('cuMemAllocPitch', 1, (1 << 55) + 4096, 4)",
        "says('cuMemAlloc', (1 << 64) - 4096)",
        "says('cuMemUnmap', address, 4 * MIB)",
        "says('cuMemSetAccess', address, 4 * MIB, [cu.CUmemAccessDesc()], 1)",
        "says('cuMemRetainAllocationHandle', address)",
        "says('cuMemAddressFree', address, 4 * MIB)",
        "says('cuMemAlloc', 1 << 60)",
        "(says('cuMemFreeAsync', address, 0), ok(cu.cuCtxSynchronize()))[0]",
        "(says('cuMemFree', address), says('cuMemFree', address))",
        "(ok(cu.cuCtxSetCurrent(0)), says('cuMemFree', address), says('cuMemAlloc', 4 * MIB), context())[1:3]",
        "says('cuMemcpyDtoD', address + 3 * MIB, address, 2 * MIB)",
        "says('cuMemsetD8', address + 3 * MIB, 1, 2 * MIB)",
        "says('cuMemRelease', 12345)",
        "says('cuMemHostRegister', address, 4096, 0)",
    ],
)
def test_wrong_calls(both: Both, code: str) -> None:
    for job in both:
        job("address = large(4)")
    same(both, code)
    same(both, "span(address)")
    same(both, "says('cuMemFree', address)")


def test_out_of_memory(both: Both) -> None:
    """The same answer, and all of it is to be had again after."""
    for job in both:
        assert job("says('cuMemAlloc', 300 * MIB)") == "OUT_OF_MEMORY"
        assert (
            job(
                """
def fill():
    got = []
    while True:
        code, address = cu.cuMemAlloc(16 * MIB)
        if int(code):
            return word(code), [ok(cu.cuMemFree(one)) for one in got]
        got.append(address)
"""
            )
            is None
        )
        result, freed = job("fill()")
        assert result == "OUT_OF_MEMORY"
        assert len(freed) >= 14
        assert job("fill()") == [result, freed]


def test_free_memory_counts_it(both: Both) -> None:
    for job in both:
        before = job("free()")
        job("address = ok(cu.cuMemAlloc(32 * MIB))")
        assert before - job("free()") == 32 * MIB
        job("ok(cu.cuMemFree(address))")
        assert job("free()") == before


PEER = """
def peers():
    global first, second, mine
    first = ok(cu.cuCtxGetCurrent())
    second = ok(cu.cuDevicePrimaryCtxRetain(1))
    ok(cu.cuCtxSetCurrent(second))
    mine = int(ok(cu.cuMemAlloc(4 * MIB)))
    ok(cu.cuMemsetD8(mine, 9, 4 * MIB))
    ok(cu.cuCtxSynchronize())
    ok(cu.cuCtxSetCurrent(first))

def fills(address):
    module = ok(cu.cuModuleLoadData(PTX.read_bytes() + b"\\0"))
    kernel = ok(cu.cuModuleGetFunction(module, b"fill"))
    arguments = ((address, 64, 5), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64))
    code = cu.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, arguments, 0)
    return [word(code[0]), word(cu.cuCtxSynchronize()[0])]
"""


def test_peer_access_before_and_after(both: Both) -> None:
    for job in both:
        job(PEER)
        job("peers()")
    assert same(both, "says('cuCtxEnablePeerAccess', second, 0)") == "SUCCESS"
    assert same(both, "says('cuCtxEnablePeerAccess', second, 0)") == "PEER_ACCESS_ALREADY_ENABLED"
    assert same(both, "fills(mine)") == ["SUCCESS", "SUCCESS"]
    for job in both:
        job("ok(cu.cuCtxSetCurrent(second)); later = int(ok(cu.cuMemAlloc(4 * MIB))); ok(cu.cuCtxSetCurrent(first))")
    assert same(both, "fills(later)") == ["SUCCESS", "SUCCESS"]
    assert same(both, "get(later, 8)") == "0500000000000000"
    assert same(both, "says('cuCtxDisablePeerAccess', second)") == "SUCCESS"
    assert same(both, "says('cuCtxDisablePeerAccess', second)") == "PEER_ACCESS_NOT_ENABLED"


ACROSS = """
def on_each(bytes_here, bytes_there):
    global here, mine
    here = int(ok(cu.cuMemAlloc(bytes_here)))
    ok(cu.cuCtxSetCurrent(second))
    mine = int(ok(cu.cuMemAlloc(bytes_there)))
    ok(cu.cuCtxSetCurrent(first))

def across(call, size=MIB // 2):
    ok(cu.cuMemsetD8(here, 77, size)); ok(cu.cuCtxSynchronize())
    ok(cu.cuCtxSetCurrent(second)); ok(cu.cuMemsetD8(mine, 9, 2 * size)); ok(cu.cuCtxSynchronize())
    ok(cu.cuCtxSetCurrent(first))
    stream = ok(cu.cuStreamCreate(1))
    flat, deep = cu.CUDA_MEMCPY2D(), cu.CUDA_MEMCPY3D()
    for copy in (flat, deep):
        copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.dstDevice, copy.srcPitch, copy.dstPitch = here, mine, 1024, 1024
        copy.WidthInBytes, copy.Height = 1024, size // 1024
    deep.srcHeight = deep.dstHeight = size // 1024
    deep.Depth = 1
    arguments = (flat,) if "2D" in call else (deep,) if "3D" in call else (mine, here, size)
    found = says(call, *arguments, *([stream] if call.endswith("Async") else []))
    ok(cu.cuCtxSynchronize()); ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuCtxSetCurrent(second))
    end = get(mine + size - 8, 16)
    ok(cu.cuCtxSetCurrent(first))
    return [found, end]
"""
COPIED = ["SUCCESS", "4d" * 8 + "09" * 8]


@pytest.mark.parametrize(("here", "there"), [(4, 4), (4, 1), (1, 4)])
@pytest.mark.parametrize("how", ["", "Async"])
@pytest.mark.parametrize("call", ["cuMemcpy", "cuMemcpyDtoD", "cuMemcpy2D", "cuMemcpy3D"])
def test_copies_between_gpus_need_no_peer_access(both: Both, call: str, how: str, here: int, there: int) -> None:
    """Either end may be what is left to the driver."""
    for job in both:
        job(PEER + ACROSS)
        job(f"peers(); on_each({here} * MIB, {there} * MIB)")
    assert same(both, f"across({call + how!r})") == COPIED


def test_copies_of_the_other_gpus_memory(both: Both) -> None:
    """Another GPU's context is current: with the host, and within that memory."""
    for job in both:
        job(PEER + ACROSS)
        job("peers(); on_each(4 * MIB, 4 * MIB); back = bytearray(64)")
    assert same(both, "says('cuMemcpyDtoH', back, mine, 64)") == "SUCCESS"
    for job in both:
        job("on_each(4 * MIB, 4 * MIB)")
    assert same(both, "says('cuMemcpyHtoD', mine, b'x' * 64, 64)") == "SUCCESS"
    for job in both:
        job("on_each(4 * MIB, 4 * MIB)")
    assert same(both, "says('cuMemcpyDtoD', mine + MIB, mine, 64)") == "SUCCESS"


def test_a_copy_that_cannot_be_right_is_not_made_right(both: Both) -> None:
    for job in both:
        job(PEER)
        job("peers(); here = int(ok(cu.cuMemAlloc(4 * MIB)))")
    assert same(both, "says('cuMemcpyDtoD', mine, here, 5 * MIB)") == "INVALID_VALUE"
    assert same(both, "says('cuMemcpyDtoD', here, 4096, 64)") == "INVALID_VALUE"


@pytest.mark.parametrize("lost", [False, True])
def test_what_another_gpu_has_copied_from_is_found_there_after_it_was_parked(
    node: Node, start: Callable[..., Far], lost: bool
) -> None:
    """Or, where it has come to GPUs that do not reach one another, it is back all the same."""
    job = start()
    job(PEER + ACROSS)
    job("peers(); on_each(4 * MIB, 4 * MIB)")
    assert job("across('cuMemcpyDtoD')") == COPIED
    with Shim(Identity.of(job.pid)) as shim:
        shim.close_gate(60)
        ids = [piece.id for piece in shim.memories()]
        fds = shim.export(ids)
        shim.unmap()
        if lost:  # one piece's own access, another's, then what a copy has added to that
            node.switches.add(f"function=cuMemSetAccess nth=3 caller={job.pid} result=1")
        assert shim.map(ids, fds) == Stand.CLOSED
        shim.open_gate()
    for fd in fds:
        os.close(fd)
    assert job("across('cuMemcpyDtoD')") == COPIED


def test_a_contexts_end_frees(both: Both) -> None:
    for job in both:
        before = job("free()")
        job("made = ok(cu.cuCtxCreate(None, 0, 0))")
        job("inside = ok(cu.cuMemAlloc(8 * MIB))")
        job("ok(cu.cuCtxDestroy(made)); context()")
        assert job("free()") == before
    assert same(both, "says('cuMemFree', inside)") == "INVALID_VALUE"
    with Shim(Identity.of(both[0].pid)) as shim:
        assert shim.memories() == []


OLD = """
library = ctypes.CDLL("libcuda.so.1")
def old(name, *arguments):
    return word(cu.CUresult(getattr(library, name)(*arguments)))
"""


@pytest.mark.parametrize("how", ["cuCtxDestroy", "cuCtxDetach"])
def test_a_contexts_end_by_old_functions(both: Both, how: str) -> None:
    """With its last use; what was in it is freed, and whoever closes the gate does not ask it."""
    for job in both:
        job(OLD)
        before = job("free()")
        job("made = ok(cu.cuCtxCreate(None, 0, 0)); handle = ctypes.c_void_p(int(made)); again = ctypes.c_void_p()")
        job("inside = int(ok(cu.cuMemAlloc(8 * MIB)))")
        if how == "cuCtxDetach":
            assert job("old('cuCtxAttach', ctypes.byref(again), 0)") == "SUCCESS"
            assert job("old('cuCtxDetach', handle)") == "SUCCESS"
            assert job("span(inside)") == [0, 8 * MIB]
        assert job(f"old('{how}', handle)") == "SUCCESS"
        job("context()")
        assert job("free()") == before
        assert job("says('cuMemFree', inside)") == "INVALID_VALUE"
    with Shim(Identity.of(both[0].pid)) as shim:
        assert shim.memories() == []
        shim.close_gate(60)
        shim.open_gate()


@pytest.mark.parametrize("answer", [201, 709])
def test_a_context_that_ended_unseen_keeps_no_gate_open(node: Node, job: Far, shim: Shim, answer: int) -> None:
    job("made = ok(cu.cuCtxCreate(None, 0, 0)); context()")
    rule = node.switches.add(f"function=cuCtxSynchronize every=1 caller={job.pid} result={answer}")
    shim.close_gate(60)
    node.switches.remove(rule)
    shim.open_gate()


def test_numbers_of_memory_stay(job: Far, shim: Shim) -> None:
    """Whoever keeps registrations by them (UCX) finds the same memory, however often it has been away."""
    job("plain_one = large(4); handle = ok(cu.cuMemCreate(4 * MIB, made_of(), 0))")
    job("own = int(ok(cu.cuMemAddressReserve(8 * MIB, 0, 0, 0)))")
    job("[ok(cu.cuMemMap(own + at, 4 * MIB, 0, handle, 0)) for at in (0, 4 * MIB)]")
    which = "[int(ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_%s, one)))"
    ask = " + ".join(f"{which % name} for one in (plain_one, plain_one + 5, own, own + 4 * MIB)]" for name in NUMBERS)
    before = job(ask)
    assert len(set(before[:4])) == 3
    assert len(set(before[4:])) == 2
    shim.close_gate(60)
    ids = [memory.id for memory in {memory.id: memory for memory in shim.memories()}.values()]
    fds = shim.export(ids)
    shim.unmap()
    shim.map(ids, fds)
    shim.open_gate()
    for fd in fds:
        os.close(fd)
    assert job(ask) == before
    job("ok(cu.cuMemFree(plain_one)); plain_one = large(4)")
    assert job(ask)[0] not in before


@pytest.mark.parametrize("how", ["cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset"])
def test_a_primary_contexts_end_frees(both: Both, how: str) -> None:
    for job in both:
        job("large(8)")
    assert same(both, f"says('{how}', 0)") == "SUCCESS"
    for job in both:
        job("context()")
    assert same(both, "span(blocks[0][0])") != [0, 8 * MIB]
    with Shim(Identity.of(both[0].pid)) as shim:
        assert shim.memories() == []


def test_freed_with_another_context_current(both: Both) -> None:
    for job in both:
        job("address = large(4)")
        job("context(1)")
    assert same(both, "says('cuMemFree', address)") == "SUCCESS"


def test_the_applications_own_mappings(both: Both) -> None:
    """Handles that it sees are the shim's; all that can be done with them is as before."""
    for job in both:
        job(
            "handle = ok(cu.cuMemCreate(4 * MIB, made_of(), 0)); at = int(ok(cu.cuMemAddressReserve(8 * MIB, 0, 0, 0)))"
        )
        job(
            "access = cu.CUmemAccessDesc(); access.location = made_of().location;"
            " access.flags = cu.CUmemAccess_flags(3)"
        )
    steps = [
        "says('cuMemMap', at, 4 * MIB, 0, handle, 0)",
        "says('cuMemMap', at, 4 * MIB, 0, handle, 0)",
        "says('cuMemMap', at + 4 * MIB, 4 * MIB, 0, handle, 0)",
        "says('cuMemsetD8', at, 3, 4 * MIB)",
        "says('cuMemSetAccess', at, 8 * MIB, [access], 1)",
        "says('cuMemsetD8', at, 3, 4 * MIB)",
        "(ok(cu.cuCtxSynchronize()), get(at + 4 * MIB, 4))[1]",
        "span(at + 5)",
        "ok(cu.cuMemGetAllocationPropertiesFromHandle(handle)).requestedHandleTypes.name",
        "says('cuMemExportToShareableHandle', handle, cu.CUmemAllocationHandleType(1), 0)",
        "again = ok(cu.cuMemRetainAllocationHandle(at))",
        "(int(again) == int(handle), says('cuMemRelease', again))",
        "says('cuMemRelease', handle)",
        "says('cuMemRelease', handle)",
        "get(at, 4)",
        "says('cuMemUnmap', at, 2 * MIB)",
        "says('cuMemUnmap', at, 4 * MIB)",
        "get(at + 4 * MIB, 4)",
        "says('cuMemUnmap', at + 4 * MIB, 4 * MIB)",
        "says('cuMemAddressFree', at, 8 * MIB)",
    ]
    for step in steps:
        same(both, step)
    with Shim(Identity.of(both[0].pid)) as shim:
        assert shim.memories() == []


def test_memory_that_was_away_can_still_be_exported(job: Far, shim: Shim) -> None:
    """The application exports what has come back by import, and from then on it stays where it is."""
    job("handle = ok(cu.cuMemCreate(4 * MIB, made_of(exportable=True), 0))")
    job("at = int(ok(cu.cuMemAddressReserve(4 * MIB, 0, 0, 0))); ok(cu.cuMemMap(at, 4 * MIB, 0, handle, 0))")
    shim.close_gate(60)
    ids = [memory.id for memory in shim.memories()]
    fds = shim.export(ids)
    shim.unmap()
    shim.map(ids, fds)
    shim.open_gate()
    for fd in fds:
        os.close(fd)
    assert job("says('cuMemExportToShareableHandle', handle, cu.CUmemAllocationHandleType(1), 0)") == "SUCCESS"
    (memory,) = shim.memories()
    assert memory.shared
    assert memory.imported
    assert shim.hello().bytes == 0


def test_what_is_the_drivers_is_counted_while_it_is_there(job: Far, shim: Shim) -> None:
    job("pool = ok(cu.cuMemAllocAsync(4 * MIB, 0)); managed = ok(cu.cuMemAllocManaged(3 * MIB, 1))")
    job("small = [ok(cu.cuMemAlloc(5000)) for _ in range(3)]")
    assert {kind: n for kind, n in shim.counts().items() if n[0]} == {
        "pool": (1, 4 * MIB),
        "managed": (1, 3 * MIB),
        "small": (3, 15000),
    }
    assert shim.memories() == []
    job("ok(cu.cuMemFreeAsync(pool, 0)); ok(cu.cuMemFree(managed)); ok(cu.cuMemFree(small.pop()))")
    assert job("says('cuMemFree', int(small[0]) + 8)") == "INVALID_VALUE"
    assert {kind: n for kind, n in shim.counts().items() if n[0]} == {"small": (2, 10000)}
    job("made = ok(cu.cuCtxCreate(None, 0, 0)); ok(cu.cuMemAlloc(7000))")
    assert shim.counts()["small"] == (3, 17000)
    job("ok(cu.cuCtxDestroy(made)); context()")
    assert shim.counts()["small"] == (2, 10000)


def test_counts_under_threads(job: Far, shim: Shim) -> None:
    """Small, large and pooled pieces, made and freed by eight threads at once: what is left is what is counted."""
    left = job(
        """
def churn(seed, left):
    context()
    chance, mine = random.Random(seed), []
    for _ in range(300):
        if chance.random() < 0.55:
            size = chance.choice([1000, 70000, 2 * MIB])
            mine.append((int(ok(cu.cuMemAlloc(size) if size < MIB else cu.cuMemAllocAsync(size, 0))), size))
        elif mine:
            address, size = mine.pop(chance.randrange(len(mine)))
            ok(cu.cuMemFree(address) if size < MIB else cu.cuMemFreeAsync(address, 0))
            if len(mine) > 3:
                address, size = mine.pop()
                ok(cu.cuMemFree(address))
    left += [size for _, size in mine]

def churned():
    left = []
    threads = [threading.Thread(target=churn, args=(seed, left)) for seed in range(8)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    return left
"""
    )
    left = job("churned()", 60)
    counts = shim.counts()
    small, pool = [n for n in left if n < MIB], [n for n in left if n >= MIB]
    assert len(small) > 5
    assert counts["small"] == (len(small), sum(small))
    assert counts["pool"] == (len(pool), sum(pool))


def test_memory_of_others_and_of_other_kinds_stays_and_is_counted(start: Callable[..., Far]) -> None:
    """A descriptor that another process exported: counted for as long as it is held, by handle or by mapping."""
    job, other = start(), start()
    job("handle = ok(cu.cuMemCreate(4 * MIB, made_of(exportable=True), 0))")
    job("fd = int(ok(cu.cuMemExportToShareableHandle(handle, cu.CUmemAllocationHandleType(1), 0)))")
    other(f"fd = os.open('/proc/{job.pid}/fd/' + str({job('fd')}), os.O_RDWR)")
    took = other("int(ok(cu.cuMemImportFromShareableHandle(fd, cu.CUmemAllocationHandleType(1))))")
    assert took > 0
    with Shim(Identity.of(other.pid)) as shim, Shim(Identity.of(job.pid)) as exporter:
        assert exporter.counts()["shared"] == (1, 4 * MIB)
        other(f"at = int(ok(cu.cuMemAddressReserve(4 * MIB, 0, 0, 0))); ok(cu.cuMemMap(at, 4 * MIB, 0, {took}, 0))")
        assert shim.counts()["shared"] == (1, 4 * MIB)
        assert other(f"says('cuMemRelease', {took})") == "SUCCESS"
        assert shim.counts()["shared"] == (1, 4 * MIB)
        assert shim.hello().bytes == 0
        other("ok(cu.cuMemUnmap(at, 4 * MIB))")
        assert shim.counts()["shared"] == (0, 0)
        assert shim.memories() == []


def test_what_cannot_be_had_falls_back_to_the_drivers_own(node: Node, job: Far, shim: Shim) -> None:
    for call in ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
        rule = node.switches.add(f"function={call} every=1 caller={job.pid} result=801")
        before = job("free()")
        address = job("int(ok(cu.cuMemAlloc(4 * MIB)))")
        node.switches.remove(rule)
        assert before - job("free()") == 4 * MIB, call
        assert shim.counts()["failed"] == (1, 4 * MIB)
        assert job(f"says('cuMemFree', {address})") == "SUCCESS"
        assert job("free()") == before
    assert shim.counts()["failed"] == (0, 0)
    assert shim.memories() == []


HANDLE = "ctypes.string_at(ok(cu.cuIpcGetMemHandle(address)).getPtr(), 64).hex()"
OPENED = """
def opens(raw, flags=1):
    handle = cu.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(raw), 64)
    code, address = cu.cuIpcOpenMemHandle(handle, flags)
    return word(code) if int(code) else int(address)
"""


@pytest.mark.parametrize("size", [4096, 4 * MIB])
def test_handles_of_legacy_ipc(start: Callable[..., Far], size: int) -> None:
    """Another process under the shim sees the same memory, small or looked after."""
    job, other = start(), start()
    job(f"address = filled(b'ours', {size})")
    raw = job(HANDLE)
    assert job(HANDLE) == raw
    for far in (job, other):
        far(OPENED)
    assert job(f"opens({raw!r})") == "INVALID_CONTEXT"
    assert other(f"opens({raw!r}, 0)") == "INVALID_VALUE"
    there = other(f"opens({raw!r})")
    assert other(f"opens({raw!r})") == there
    assert other(f"get({there}, 4)") == b"ours".hex()
    other(f"put({there}, b'both')")
    assert job("get(address, 4)") == b"both".hex()
    with Shim(Identity.of(job.pid)) as shim, Shim(Identity.of(other.pid)) as importer:
        mine, its = shim.memories(), importer.memories()
        assert len(mine) == len(its) == (size > 4096)
        for one, same_one in zip(mine, its, strict=True):
            assert one.share == same_one.share != 0
            assert (one.owner, same_one.owner) == (0, job.pid)
            assert not one.shared
            assert shim.sharers() == {one.share: {other.pid}}
        # Two handles were made, it was opened twice.
        assert shim.counts()["ipc"] == importer.counts()["ipc"] == ((0, 0) if size > 4096 else (2, 0))
    answers = [other(f"says('cuIpcCloseMemHandle', {there})") for _ in range(3)]
    assert answers == ["SUCCESS", "SUCCESS", "INVALID_VALUE"]
    assert job("says('cuMemFree', address)") == "SUCCESS"
    assert other(f"opens({raw!r})") == "INVALID_VALUE"


def test_a_handle_is_opened_once_the_memory_is_back(start: Callable[..., Far]) -> None:
    """While the exporter's memory is away nobody can open it; somebody who tries waits, also for hours."""
    job, other = start(), start()
    address = job("large(4)")
    job(f"address = {address}")
    raw = job(HANDLE)
    other(OPENED)
    with Shim(Identity.of(job.pid)) as shim:
        shim.close_gate(60)
        ids = [memory.id for memory in shim.memories()]
        fds = shim.export(ids)
        shim.unmap()
    pending = other.send(f"(context(), opens({raw!r}))[1]")
    with pytest.raises(TimeoutError):
        pending.value(0.7)
    with Shim(Identity.of(job.pid)) as shim:
        shim.map(ids, fds)
        with pytest.raises(TimeoutError):
            pending.value(0.3)
        shim.open_gate()
    there = pending.value()
    for fd in fds:
        os.close(fd)
    assert job("intact()")
    job("put(address, b'anew')")
    assert other(f"get({there}, 4)") == b"anew".hex()
    # A third one, while neither is asked by anybody else: the handle names what came back.
    third = start()
    third(OPENED)
    assert third(f"get(opens({raw!r}), 4)") == b"anew".hex()


def test_a_handle_of_a_process_that_has_ended(start: Callable[..., Far]) -> None:
    """Its number may be somebody else's by then, who is not taken for it."""
    job, other = start(), start()
    job("address = large(4)")
    raw = job(HANDLE)
    other(OPENED)
    forged = bytearray.fromhex(raw)
    forged[8] ^= 1  # the number that was drawn
    assert other(f"opens({forged.hex()!r})") == "INVALID_HANDLE"
    with pytest.raises(Died):
        job("os._exit(0)")
    assert other(f"opens({raw!r})") == "INVALID_HANDLE"


def test_a_free_while_a_stream_is_captured(both: Both) -> None:
    """It succeeds, breaks no capture, and the memory is given back later."""
    for job in both:
        job("address = large(4); stream = ok(cu.cuStreamCreate(1))")
    begin = "says('cuStreamBeginCapture', stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)"
    assert same(both, begin) == "SUCCESS"
    assert same(both, "says('cuMemFree', address)") == "SUCCESS"
    assert same(both, "said(cu.cuStreamEndCapture(stream))") == "SUCCESS"

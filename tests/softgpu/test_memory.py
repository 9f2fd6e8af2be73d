"""Plain, pitched, managed, pinned and pooled memory, pointer attributes; many threads; children; a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from softgpu.far import Far

MIB = 1 << 20
pytestmark = pytest.mark.timeout(300)

# What the far end needs beside what far.py gives it.
WORDS = """
A = cu.CUpointer_attribute
def alloc(size):
    return int(ok(cu.cuMemAlloc(size)))
def attribute(name, address):
    answer = cu.cuPointerGetAttribute(getattr(A, 'CU_POINTER_ATTRIBUTE_' + name), address)
    if int(answer[0]):
        return word(answer[0])
    value = answer[1]
    return int(value) if not isinstance(value, bool) else value
"""


# --- plain memory ----------------------------------------------------------------------------------------------------


def test_memory_is_taken_in_pieces_of_two_mebibytes(job: Far) -> None:
    before = job("free()")
    job("big = alloc(2 * MIB + 1)")
    assert job("free()") == before - 4 * MIB
    assert job("says('cuMemFree', big)") == "SUCCESS"
    assert job("free()") == before


def test_small_allocations_share_one(job: Far) -> None:
    before = job("free()")
    addresses = job("[alloc(size) for size in (1, 511, 512, 513, 100000, MIB)]")
    assert all(address % 512 == 0 for address in addresses)
    assert len({address // (2 * MIB) for address in addresses}) == 1
    assert job("free()") == before - 2 * MIB
    for address in addresses:
        assert job(f"says('cuMemFree', {address})") == "SUCCESS"
    assert job("free()") == before


def test_small_allocations_do_not_overlap(job: Far) -> None:
    job("sizes = [(i * 7919) % 5000 + 1 for i in range(2000)]")
    job("made = [(alloc(size), size) for size in sizes]")
    job("for i in range(0, 2000, 3): ok(cu.cuMemFree(made[i][0]))")
    job("live = [one for i, one in enumerate(made) if i % 3]")
    job("live += [(alloc(size), size) for size in sizes[::3]]")
    job("live.sort()")
    assert job("all(a + n <= b for (a, n), (b, _) in zip(live, live[1:]))")
    job("for i, (a, n) in enumerate(live): put(a, bytes([i % 251]) * n)")
    assert job("[i for i, (a, n) in enumerate(live) if get(a, n) != bytes([i % 251] * n).hex()]") == []


def test_a_freed_address_is_used_again(job: Far) -> None:
    first = job("alloc(4 * MIB)")
    job(f"ok(cu.cuMemFree({first}))")
    assert job("alloc(4 * MIB)") == first


def test_all_processes_share_what_there_is(start: Callable[..., Far]) -> None:
    one, two = start(), start()
    before = two("free()")
    one("big = alloc(16 * MIB)")
    assert two("free()") == one("free()") == before - 16 * MIB
    two(f"rest = alloc({before - 16 * MIB})")
    assert one("says('cuMemAlloc', 2 * MIB)") == "OUT_OF_MEMORY"
    assert one("says('cuMemAlloc', 1)") == "OUT_OF_MEMORY"
    two.process.kill()
    two.died()
    assert one("free()") > before - 20 * MIB
    assert one("says('cuMemAlloc', 8 * MIB)") == "SUCCESS"


def test_other_gpus_are_full_on_their_own(start: Callable[..., Far]) -> None:
    one, two = start(0), start(1)
    before = two("free()")
    one("alloc(free())")
    assert one("free()") == 0
    assert two("free()") == before


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("says('cuMemAlloc', 0)", "INVALID_VALUE"),
        ("says('cuMemAlloc', 1 << 40)", "OUT_OF_MEMORY"),
        ("says('cuMemAlloc', (1 << 64) - 1)", "OUT_OF_MEMORY"),
        ("says('cuMemAlloc', 2048 * MIB)", "OUT_OF_MEMORY"),
        ("says('cuMemFree', 0)", "SUCCESS"),
        ("says('cuMemFree', 4096)", "INVALID_VALUE"),
        ("says('cuMemFree', alloc(4096) + 512)", "INVALID_VALUE"),
        ("[says('cuMemFree', a) for a in [alloc(4096)] * 2][1]", "INVALID_VALUE"),
        ("says('cuMemAllocPitch', 0, 1, 4)", "INVALID_VALUE"),
        ("says('cuMemAllocPitch', 1, 0, 4)", "INVALID_VALUE"),
        ("says('cuMemAllocPitch', 1, 1, 3)", "INVALID_VALUE"),
        ("says('cuMemAllocPitch', 1 << 40, 1 << 40, 4)", "OUT_OF_MEMORY"),
        ("says('cuMemGetAddressRange', 4096)", "NOT_FOUND"),
        ("says('cuMemFreeHost', 0)", "SUCCESS"),
        ("says('cuMemFreeHost', alloc(4096))", "INVALID_VALUE"),
        ("says('cuMemFree', int(ok(cu.cuMemHostAlloc(4096, 0))))", "INVALID_VALUE"),
        ("[int(v) for v in cu.cuMemHostAlloc(0, 0)]", [0, 0]),
        ("[int(v) for v in cu.cuMemAllocAsync(0, 0)]", [0, 0]),
        ("says('cuMemHostAlloc', 4096, 8)", "INVALID_VALUE"),
        ("says('cuMemAllocManaged', 0, 1)", "INVALID_VALUE"),
        ("says('cuMemAllocManaged', 4096, 0)", "INVALID_VALUE"),
        ("says('cuMemAllocManaged', 4096, 4)", "INVALID_VALUE"),
        ("says('cuMemHostUnregister', 0)", "INVALID_VALUE"),
        ("says('cuMemHostUnregister', 4096)", "HOST_MEMORY_NOT_REGISTERED"),
        ("says('cuMemHostRegister', 0, 4096, 0)", "INVALID_VALUE"),
        ("says('cuMemHostRegister', 4096, 4096, 0)", "INVALID_VALUE"),
        ("says('cuMemHostRegister', alloc(4096), 4096, 0)", "INVALID_VALUE"),
    ],
)
def test_arguments(rules_job: Far, code: str, answer: Any) -> None:
    assert rules_job(code) == answer


def test_without_a_context(node: Any) -> None:
    job = Far(node)
    job(WORDS)
    assert job("says('cuMemAlloc', 4096)") == "NOT_INITIALIZED"
    job("ok(cu.cuInit(0))")
    for call in ("'cuMemAlloc', 4096", "'cuMemFree', 0", "'cuMemGetInfo'", "'cuMemHostAlloc', 4096, 0"):
        assert job(f"says({call})") == "INVALID_CONTEXT"


def test_rows_of_pitched_memory_begin_at_multiples_of_512(job: Far) -> None:
    address, pitch = job("[int(v) for v in ok(cu.cuMemAllocPitch(1000, 10, 4))]")
    assert (address % 512, pitch) == (0, 1024)
    assert job(f"[int(v) for v in ok(cu.cuMemGetAddressRange({address} + 5000))]") == [address, 10240]


def test_a_copy_stays_within_an_allocation(job: Far) -> None:
    job("a = alloc(1000); b = alloc(1000)")
    assert job("says('cuMemcpyHtoD', a, bytes(1000), 1000)") == "SUCCESS"
    assert job("says('cuMemcpyHtoD', a, bytes(1001), 1001)") == "INVALID_VALUE"
    assert job("says('cuMemcpyHtoD', a + 1, bytes(1000), 1000)") == "INVALID_VALUE"
    job("ok(cu.cuMemFree(a))")
    assert job("says('cuMemcpyHtoD', a, bytes(8), 8)") == "INVALID_VALUE"


def test_memory_goes_with_its_context(job: Far) -> None:
    job("context(1)")
    before = job("free()")
    job("c = ok(cu.cuCtxCreate(None, 0, cu.CUdevice(1)))")
    job("a = alloc(8 * MIB); b = alloc(100); h = int(ok(cu.cuMemHostAlloc(4096, 0)))")
    job("m = int(ok(cu.cuMemAllocManaged(4096, 1)))")
    assert job("free()") < before - 8 * MIB
    job("ok(cu.cuCtxDestroy(c)); context(1)")
    assert job("free()") == before
    for name in "abhm":
        assert job(f"says('cuMemGetAddressRange', {name})") == "NOT_FOUND"


# --- host and managed memory -----------------------------------------------------------------------------------------


def test_pinned_memory_is_host_memory_with_an_address_for_the_device(job: Far) -> None:
    job("h = int(ok(cu.cuMemHostAlloc(10000, 1)))")
    job("ctypes.memset(h, 7, 10000)")
    job("d = alloc(10000); ok(cu.cuMemcpyDtoD(d, h, 10000))")
    assert job("get(d, 10000)") == "07" * 10000
    assert job("int(ok(cu.cuMemHostGetDevicePointer(h + 5, 0))) - h") == 5
    assert job("int(ok(cu.cuMemHostGetFlags(h)))") == 3
    assert job("says('cuMemFreeHost', h + 5)") == "INVALID_VALUE"
    assert job("says('cuMemFreeHost', h)") == "SUCCESS"
    assert job("says('cuMemFreeHost', h)") == "INVALID_VALUE"


def test_registered_memory(job: Far) -> None:
    job("import mmap; m = mmap.mmap(-1, 1 << 16); a = ctypes.addressof(ctypes.c_char.from_buffer(m))")
    assert job("says('cuMemHostRegister', a, 1 << 15, 0)") == "SUCCESS"
    assert job("says('cuMemHostRegister', a, 1 << 15, 0)") == "HOST_MEMORY_ALREADY_REGISTERED"
    assert job("says('cuMemHostRegister', a + 4096, 1 << 15, 0)") == "HOST_MEMORY_ALREADY_REGISTERED"
    assert job("says('cuMemHostRegister', a + (1 << 15), 1 << 15, 0)") == "SUCCESS"
    assert job("attribute('MEMORY_TYPE', a + 100)") == 1
    assert job("says('cuMemHostUnregister', a + 4096)") == "INVALID_VALUE"
    assert job("says('cuMemHostUnregister', int(ok(cu.cuMemHostAlloc(4096, 0))))") == "INVALID_VALUE"
    assert job("says('cuMemHostUnregister', a)") == "SUCCESS"
    assert job("says('cuMemHostUnregister', a)") == "HOST_MEMORY_NOT_REGISTERED"


def test_managed_memory_is_one_more_mapping_of_nvidia_uvm_each(job: Far) -> None:
    def managed() -> int:
        from limosa.process.procfs import read_maps

        return read_maps(f"/proc/{job.pid}").managed

    assert managed() == 0
    job("a = int(ok(cu.cuMemAllocManaged(3 * MIB, 1)))")
    assert managed() == 1
    job("b = int(ok(cu.cuMemAllocManaged(100, 2)))")
    assert managed() == 2
    job("ctypes.memset(a, 5, 3 * MIB)")
    assert job("get(a + MIB, 16)") == "05" * 16
    assert job("attribute('IS_MANAGED', a)") == 1
    job("ok(cu.cuMemFree(a)); ok(cu.cuMemFree(b))")
    assert managed() == 0


# --- in stream order -------------------------------------------------------------------------------------------------


def test_memory_of_the_pool(job: Far) -> None:
    before = job("free()")
    job("s = ok(cu.cuStreamCreate(1)); pool = ok(cu.cuDeviceGetDefaultMemPool(0))")
    job(
        "kinds = cu.CUmemPool_attribute\n"
        "def pool_value(name):\n"
        "    return int(ok(cu.cuMemPoolGetAttribute(pool, getattr(kinds, 'CU_MEMPOOL_ATTR_' + name))))"
    )
    job("a = int(ok(cu.cuMemAllocAsync(3 * MIB, s)))")
    assert (job("pool_value('USED_MEM_CURRENT')"), job("pool_value('RESERVED_MEM_CURRENT')")) == (3 * MIB, 4 * MIB)
    job("ok(cu.cuMemsetD8Async(a, 9, 3 * MIB, s)); ok(cu.cuStreamSynchronize(s))")
    assert job("get(a, 8)") == "09" * 8
    assert job("int(ok(cu.cuDeviceGetMemPool(0))) == int(pool) == attribute('MEMPOOL_HANDLE', a)")
    job("ok(cu.cuMemFreeAsync(a, s)); ok(cu.cuStreamSynchronize(s))")
    assert (job("pool_value('USED_MEM_CURRENT')"), job("pool_value('RESERVED_MEM_CURRENT')")) == (0, 0)
    assert (job("pool_value('USED_MEM_HIGH')"), job("pool_value('RESERVED_MEM_HIGH')")) == (3 * MIB, 4 * MIB)
    assert job("free()") == before


def test_a_pool_keeps_what_its_threshold_says_until_it_is_trimmed_or_needed(job: Far) -> None:
    before = job("free()")
    job("s = ok(cu.cuStreamCreate(1)); pool = ok(cu.cuDeviceGetDefaultMemPool(0))")
    job(
        "kind = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD\n"
        "ok(cu.cuMemPoolSetAttribute(pool, kind, cu.cuuint64_t(1 << 40)))"
    )
    job("def use(size):\n    ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(size, s)), s)); ok(cu.cuStreamSynchronize(s))")
    job("use(8 * MIB)")
    assert job("free()") == before - 8 * MIB
    job("use(6 * MIB)")
    assert job("free()") == before - 8 * MIB
    job("ok(cu.cuMemPoolTrimTo(pool, 0))")
    assert job("free()") == before
    job("use(8 * MIB); whole = alloc(free() + 8 * MIB)")
    assert job("free()") == 0


def test_a_free_waits_for_its_turn_in_the_stream(job: Far) -> None:
    job("a = int(ok(cu.cuMemAllocAsync(4 * MIB, 0)))")
    held = job("free()")
    job("spin()")
    job("ok(cu.cuMemFreeAsync(a, 0))")
    assert job("says('cuMemFreeAsync', a, 0)") == "INVALID_VALUE"
    assert job("free()") == held
    job("release(); ok(cu.cuCtxSynchronize())")
    assert job("free()") == held + 4 * MIB


def test_a_pool_keeps_nothing_when_a_context_of_its_device_goes(start: Callable[..., Far]) -> None:
    job, other = start(), start()
    before = other("free()")
    job("pool = ok(cu.cuDeviceGetDefaultMemPool(0)); kind = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD")
    job("ok(cu.cuMemPoolSetAttribute(pool, kind, cu.cuuint64_t(1 << 40)))")
    job("ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(8 * MIB, 0)), 0)); ok(cu.cuCtxSynchronize())")
    assert other("free()") == before - 8 * MIB
    job("ok(cu.cuDevicePrimaryCtxReset(0))")
    assert other("free()") > before


def test_pools_of_ones_own(job: Far) -> None:
    job(
        "props = cu.CUmemPoolProps(); props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED\n"
        "props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; props.location.id = 0\n"
        "props.maxSize = 4 * MIB\n"
        "pool = ok(cu.cuMemPoolCreate(props)); before = free()"
    )
    job("a = int(ok(cu.cuMemAllocFromPoolAsync(4 * MIB, pool, 0)))")
    assert job("says('cuMemAllocFromPoolAsync', 1, pool, 0)") == "OUT_OF_MEMORY"
    assert job("says('cuDeviceSetMemPool', 1, pool)") == "INVALID_VALUE"
    assert job("says('cuDeviceSetMemPool', 0, pool)") == "SUCCESS"
    assert job("says('cuMemAllocAsync', 1, 0)") == "OUT_OF_MEMORY"
    assert job("says('cuMemPoolDestroy', ok(cu.cuDeviceGetDefaultMemPool(0)))") == "INVALID_VALUE"
    assert job("says('cuMemPoolDestroy', pool)") == "SUCCESS"
    assert job("says('cuMemPoolTrimTo', pool, 0)") == "INVALID_VALUE"
    assert job("says('cuMemAllocAsync', 1, 0)") == "SUCCESS"  # the default pool is the current one again
    assert job("says('cuMemcpyHtoD', a, b'12345678', 8)") == "SUCCESS"  # it lives as long as what came out of it
    job("ok(cu.cuMemFreeAsync(a, 0)); ok(cu.cuCtxSynchronize())")
    assert job("free()") == job("before") - 2 * MIB


# --- pointer attributes ----------------------------------------------------------------------------------------------


def test_attributes_of_plain_memory(job: Far) -> None:
    job("a = alloc(3 * MIB); b = alloc(100)")
    assert job("attribute('MEMORY_TYPE', a + 5)") == 2
    assert job("attribute('DEVICE_ORDINAL', a)") == 0
    assert job("attribute('DEVICE_POINTER', a + 5) - a") == 5
    assert job("attribute('HOST_POINTER', a)") == "INVALID_VALUE"
    assert job("attribute('IS_MANAGED', a)") == 0
    assert job("attribute('IS_LEGACY_CUDA_IPC_CAPABLE', a)") == 1
    assert job("attribute('RANGE_START_ADDR', a + 5) - a") == 0
    assert job("attribute('RANGE_SIZE', a + 5)") == 3 * MIB
    assert job("attribute('MAPPED', a)") == 1
    assert job("attribute('BUFFER_ID', a) != attribute('BUFFER_ID', b)")
    assert job("attribute('CONTEXT', a) == int(ok(cu.cuCtxGetCurrent()))")
    assert job("attribute('MEMORY_TYPE', a + 3 * MIB)") == "INVALID_VALUE"


def test_an_allocation_at_the_same_address_has_another_id(job: Far) -> None:
    job("a = alloc(4 * MIB); first = attribute('BUFFER_ID', a); ok(cu.cuMemFree(a)); again = alloc(4 * MIB)")
    assert job("again == a and attribute('BUFFER_ID', again) > first")


def test_nothing_has_no_attributes_but_may_be_asked_for_many(job: Far) -> None:
    assert job("attribute('MEMORY_TYPE', 4096)") == "INVALID_VALUE"
    names = "[A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, A.CU_POINTER_ATTRIBUTE_DEVICE_POINTER]"
    assert job(f"[int(v) for v in ok(cu.cuPointerGetAttributes(2, {names}, 4096))]") == [0, 0]
    job("a = alloc(100)")
    assert job(f"[int(v) for v in ok(cu.cuPointerGetAttributes(2, {names}, a))] == [2, a]")


def test_synchronous_operations_can_be_asked_for(job: Far) -> None:
    job("a = alloc(100); lib = ctypes.CDLL('libcuda.so.1')")
    assert job("attribute('SYNC_MEMOPS', a)") == 0
    assert job("lib.cuPointerSetAttribute(ctypes.byref(ctypes.c_uint(1)), 6, ctypes.c_uint64(a))") == 0
    assert job("attribute('SYNC_MEMOPS', a)") == 1
    assert job("lib.cuPointerSetAttribute(ctypes.byref(ctypes.c_uint(1)), 7, ctypes.c_uint64(a))") == 1


# --- many threads ----------------------------------------------------------------------------------------------------


def test_many_threads_allocate_and_free(job: Far) -> None:
    before = job("free()")
    job(
        "wrong = []\n"
        "def work(seed):\n"
        "    import random\n"
        "    luck, mine = random.Random(seed), []\n"
        "    context(0)\n"
        "    stream = ok(cu.cuStreamCreate(1))\n"
        "    try:\n"
        "        for turn in range(150):\n"
        "            size = luck.choice((100, 5000, 300000, 3 << 20))\n"
        "            later = luck.random() < 0.5\n"
        "            a = cu.cuMemAllocAsync(size, stream) if later else cu.cuMemAlloc(size)\n"
        "            if int(a[0]) == 2: continue\n"
        "            a = int(ok(a))\n"
        "            value = luck.randrange(256)\n"
        "            ok(cu.cuMemsetD8(a, value, size))\n"
        "            mine.append((a, size, value, later))\n"
        "            if len(mine) > 4:\n"
        "                a, size, value, later = mine.pop(luck.randrange(len(mine)))\n"
        "                if get(a, 64) != bytes([value] * 64).hex(): wrong.append((seed, turn))\n"
        "                ok(cu.cuMemFreeAsync(a, stream) if later else cu.cuMemFree(a))\n"
        "        for a, size, value, later in mine: ok(cu.cuMemFree(a))\n"
        "        ok(cu.cuStreamSynchronize(stream))\n"
        "    except Exception as error:\n"
        "        wrong.append(repr(error))\n"
        "threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]\n"
        "for thread in threads: thread.start()\n"
    )
    job("for thread in threads: thread.join(60)")
    assert job("wrong") == []
    assert job("free()") == before


# --- as if it were full ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "call"),
    [
        ("device", "'cuMemAlloc', 4096"),
        ("device", "'cuMemAllocPitch', 64, 64, 4"),
        ("device", "'cuMemAllocManaged', 4096, 1"),
        ("device", "'cuMemAllocAsync', 4096, 0"),
        ("host", "'cuMemHostAlloc', 4096, 0"),
        ("host", "'cuMemAllocHost', 4096"),
    ],
)
def test_a_rule_makes_memory_look_full(node: Any, job: Far, memory: str, call: str) -> None:
    job("before = free()")
    rule = node.switches.add(f"function=cuMem* memory={memory} every=1")
    assert job(f"says({call})") == "OUT_OF_MEMORY"
    if memory == "device":
        assert job("free()") == 0
    node.switches.remove(rule)
    assert job("free() == before")
    assert job(f"says({call})") == "SUCCESS"


# --- a child ---------------------------------------------------------------------------------------------------------


def test_a_child_holds_no_memory(job: Far, node: Any) -> None:
    before = job("free()")
    job("a = plain(8, 1); v = vmm(8, 2); fd = os.pipe()")
    job(
        "child = os.fork()\n"
        "if child == 0:\n"
        "    code = cu.cuMemAlloc(4096)[0]\n"
        "    os.write(fd[1], word(code).encode())\n"
        "    time.sleep(60)\n"
    )
    assert job("os.read(fd[0], 100).decode()") == "NOT_INITIALIZED"
    child = job("child")
    with open(f"/proc/{child}/maps") as maps:
        assert "/dev/nvidia-soft" not in maps.read()
    job("ok(cu.cuMemFree(a))")
    assert job("free()") == before - 8 * MIB
    job("os.kill(child, 9); os.waitpid(child, 0)")


# --- a checkpoint ----------------------------------------------------------------------------------------------------


def test_everything_is_back_at_its_address(job: Far, controller: Far, start: Callable[..., Far]) -> None:
    job("plain(5, 1); small = [alloc(1000) for _ in range(20)]")
    job("for i, a in enumerate(small): put(a, bytes([i]) * 1000)")
    job("s = ok(cu.cuStreamCreate(1)); written(int(ok(cu.cuMemAllocAsync(3 * MIB, s))), 3, 2); vmm(4, 3)")
    job("h = int(ok(cu.cuMemHostAlloc(5000, 0))); ctypes.memset(h, 6, 5000)")
    before = job("free()")
    other = start()
    controller.suspend(job.pid)
    assert other("free()") > before + 10 * MIB
    controller.resume(job.pid)
    assert job("intact()")
    assert job("[i for i, a in enumerate(small) if get(a, 1000) != bytes([i] * 1000).hex()]") == []
    assert job("get(h, 5000)") == "06" * 5000
    assert job("free()") == other("free()")
    for address in job("small"):
        assert job(f"says('cuMemFree', {address})") == "SUCCESS"


def test_a_restore_without_room_leaves_the_memory_to_the_others(
    job: Far, controller: Far, start: Callable[..., Far]
) -> None:
    job("plain(20, 1); vmm(10, 2)")
    other = start()
    controller.suspend(job.pid)
    other("big = alloc(free() - 12 * MIB)")
    assert controller.restore(job.pid) == "OUT_OF_MEMORY"
    assert other("free()") == 12 * MIB


def test_pools_and_ids_go_on_after_a_restore(job: Far, controller: Far) -> None:
    job("a = int(ok(cu.cuMemAllocAsync(3 * MIB, 0))); first = attribute('BUFFER_ID', a)")
    job("m = attribute('MEMPOOL_HANDLE', a)")
    controller.suspend(job.pid)
    controller.resume(job.pid)
    assert job("attribute('BUFFER_ID', a) == first and attribute('MEMPOOL_HANDLE', a) == m")
    before = job("free()")
    job("ok(cu.cuMemFreeAsync(a, 0)); ok(cu.cuCtxSynchronize())")
    assert job("free()") == before + 4 * MIB


def test_managed_memory_stops_a_checkpoint(job: Far, controller: Far) -> None:
    job("m = int(ok(cu.cuMemAllocManaged(4096, 1)))")
    assert controller.lock(job.pid) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "NOT_SUPPORTED"
    assert controller.unlock(job.pid) == "SUCCESS"
    job("ok(cu.cuMemFree(m))")
    # As the real driver: it runs on, and is not checkpointed any more.
    assert controller.lock(job.pid) == "SUCCESS"
    assert controller.checkpoint(job.pid) == "UNKNOWN"
    assert controller.unlock(job.pid) == "SUCCESS"
    job("ok(cu.cuCtxSynchronize())")


def test_a_large_allocation_and_peer_access_do_not_survive_where_the_hazard_is_on(
    new_node: Callable[..., Any],
) -> None:
    node = new_node(memory="1GiB", faults=["hazard=peer-large-allocation-lost"])
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    for size, peers, answer in ((512, True, "INVALID_VALUE"), (510, True, "SUCCESS"), (512, False, "SUCCESS")):
        job = Far(node)
        job("start()")
        job("one = ok(cu.cuCtxGetCurrent()); context(1); two = ok(cu.cuCtxGetCurrent()); ok(cu.cuCtxSetCurrent(one))")
        if peers:
            job("ok(cu.cuCtxEnablePeerAccess(two, 0))")
        job(f"a = int(ok(cu.cuMemAlloc({size} * MIB)))")
        controller.suspend(job.pid)
        assert controller.restore(job.pid) == answer, (size, peers)
        job.process.kill()
        job.died()

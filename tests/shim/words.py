"""What a job under test has beside ``softgpu/far.py``: source that is sent to its far end, whose names it uses."""

# ruff: noqa: F821
import ctypes
import random
import subprocess
import threading
import time

from cuda.bindings import driver as cu

working = True
rounds = [0]
bad: list[str] = []


def large(mib: int = 4, value: int = 1) -> int:
    """Plain memory, each word of which is its number times a value; remembered."""
    return plain(mib, value)


def attributes(address: int) -> dict[str, object]:
    """Every pointer attribute's answer."""
    found = {}
    for which in cu.CUpointer_attribute:
        try:
            code, value = cu.cuPointerGetAttribute(which, address)
        except (TypeError, ValueError, AttributeError) as error:
            found[which.name] = type(error).__name__
            continue
        value = None if int(code) else value
        try:
            value = int(value)
        except (TypeError, ValueError):
            value = repr(value)
        found[which.name] = [word(code), value]
    return found


def span(address: int) -> object:
    """cuMemGetAddressRange's answer, as a result or [offset of the base, size]."""
    code, *rest = cu.cuMemGetAddressRange(address)
    return word(code) if int(code) else [int(rest[0]) - address, int(rest[1])]


def work(seed: int, stop: float) -> None:
    """One thread's life: allocates, writes, waits, compares, frees, and ends."""
    context()
    chance = random.Random(seed)
    stream = ok(cu.cuStreamCreate(1))
    mine = []
    while working and time.time() < stop:
        if len(mine) < 4 and chance.random() < 0.5:
            size = chance.choice([4096, 2 << 20, (3 << 20) + 5, 4 << 20])
            address, value = int(ok(cu.cuMemAlloc(size))), chance.randrange(256)
            ok(cu.cuMemsetD8Async(address, value, size, stream))
            mine.append((address, size, value))
        elif mine:
            free_one(stream, *mine.pop(chance.randrange(len(mine))))
    for one in mine:
        free_one(stream, *one)
    ok(cu.cuStreamDestroy(stream))


def free_one(stream, address, size, value) -> None:
    back = bytearray(16)
    ok(cu.cuMemcpyDtoHAsync(back, address + size - 16, 16, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert back == bytes([value]) * 16, (back, value)
    ok(cu.cuMemFree(address))
    rounds[0] += 1


def guarded(seed: int, stop: float) -> None:
    try:
        work(seed, stop)
    except BaseException as error:
        bad.append(repr(error))


def crowd(threads: int = 6) -> None:
    """Keep so many threads alive, each for up to two seconds, until ``working`` is no longer set."""

    def keep() -> None:
        seed, alive = 0, []
        while working:
            alive = [one for one in alive if one.is_alive()]
            while len(alive) < threads:
                seed += 1
                alive.append(threading.Thread(target=guarded, args=(seed, time.time() + seed % 20 / 10)))
                alive[-1].start()
            time.sleep(0.01)
        for one in alive:
            one.join()
        rounds.append(seed)

    threading.Thread(target=keep).start()


def uncrowd() -> list:
    """End them; pieces freed, threads that there were, what went wrong."""
    global working
    working = False
    until(lambda: len(rounds) > 1)
    return [*rounds, bad]


def made_of(device: int = 0, *, exportable: bool = False):
    """Properties of device memory for cuMemCreate."""
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    if exportable:
        prop.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return prop


def stack_beneath() -> int:
    """The current context's stack limit, asked of the driver itself: the shim is not asked, whatever its gate does."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    base, path = next((int(one[0].split("-")[0], 16), one[5]) for one in lines if "/libcuda.so" in one[-1])
    names = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    offset = next(int(line.split()[0], 16) for line in names.splitlines() if line.split()[-1] == "cuCtxGetLimit")
    value = ctypes.c_size_t()
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_size_t), ctypes.c_int)(base + offset)
    assert call(ctypes.byref(value), 0) == 0
    return value.value

"""Copies and memsets: every direction and shape, which memory they accept, what is over when they return."""

from __future__ import annotations

import time
from typing import Any

import pytest
from softgpu.far import Far, quick_enough


@pytest.fixture
def job(node: Any) -> Far:
    program = Far(node)
    program("start()")
    program(
        "raw = ctypes.CDLL('libcuda.so.1')\n"
        "V, U, Z = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t\n"
        "def pinned(n=4096):\n"
        "    made = int(ok(cu.cuMemHostAlloc(n, 0)))\n"
        "    ctypes.memset(made, 0, n)\n"
        "    return made\n"
        "def call(name, *arguments):\n"
        "    return getattr(raw, name)(*arguments)\n"
    )
    return program


DATA = bytes(range(200))


@pytest.mark.parametrize("variant", ["cuMemcpy", "cuMemcpy_ptds", "cuMemcpyAsync", "cuMemcpyAsync_ptsz"])
@pytest.mark.parametrize("source", ["filled(DATA)", "host", "pin"])
@pytest.mark.parametrize("target", ["room()", "host2", "pin2"])
def test_any_to_any(job: Far, variant: str, source: str, target: str) -> None:
    """Unified addresses: what an address is, is found out."""
    job(f"DATA = {DATA!r}; buffers = [ctypes.create_string_buffer(DATA, 200), ctypes.create_string_buffer(200)]")
    job("host, host2 = map(ctypes.addressof, buffers); pin, pin2 = pinned(), pinned(); ctypes.memmove(pin, DATA, 200)")
    job(f"source, target = {source}, {target}")
    stream = ", V(0)" if "Async" in variant else ""
    assert job(f"call({variant!r}, U(target), U(source), Z(200){stream})") == 0
    job("ok(cu.cuCtxSynchronize())")
    where = "get(target, 200)" if target == "room()" else "ctypes.string_at(target, 200).hex()"
    assert job(where) == DATA.hex()


@pytest.mark.parametrize("suffix", ["", "_ptds"])
def test_host_to_device_to_device_to_host(job: Far, suffix: str) -> None:
    job(f"DATA = {DATA!r}; a, b = room(), room(); back = ctypes.create_string_buffer(200)")
    assert job(f"call('cuMemcpyHtoD_v2{suffix}', U(a), DATA, Z(200))") == 0
    assert job(f"call('cuMemcpyDtoD_v2{suffix}', U(b + 8), U(a), Z(200))") == 0
    assert job(f"call('cuMemcpyDtoH_v2{suffix}', back, U(b + 8), Z(200))") == 0
    assert job("bytes(back).hex()") == DATA.hex()
    assert job("get(b, 8)") == "00" * 8


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_the_same_asynchronously(job: Far, suffix: str) -> None:
    job(f"DATA = {DATA!r}; a, b = room(), room(); p = pinned(); s = V(int(ok(cu.cuStreamCreate(1))))")
    assert job(f"call('cuMemcpyHtoDAsync_v2{suffix}', U(a), DATA, Z(200), s)") == 0
    assert job(f"call('cuMemcpyDtoDAsync_v2{suffix}', U(b), U(a), Z(200), s)") == 0
    assert job(f"call('cuMemcpyDtoHAsync_v2{suffix}', V(p), U(b), Z(200), s)") == 0
    assert job(f"call('cuStreamSynchronize{suffix}', s)") == 0
    assert job("ctypes.string_at(p, 200).hex()") == DATA.hex()


def test_between_devices(job: Far) -> None:
    job(f"a, here = filled({DATA!r}), ok(cu.cuCtxGetCurrent())")
    job("context(1); there, b = ok(cu.cuCtxGetCurrent()), room()")
    job("ok(cu.cuMemcpyPeer(b, there, a, here, 100)); ok(cu.cuMemcpyPeerAsync(b + 100, there, a + 100, here, 100, 0))")
    job("ok(cu.cuCtxSynchronize())")
    assert job("get(b, 200)") == DATA.hex()
    job("c = room(); ok(cu.cuMemcpyDtoD(c, a, 200))")
    assert job("get(c, 200)") == DATA.hex()
    assert job("said(cu.cuMemcpyPeer(b, 4096, a, here, 100))") == "INVALID_CONTEXT"


def test_between_devices_in_order_with_both(job: Far) -> None:
    """A synchronous peer copy waits for what is submitted to either context, in whatever stream."""
    job("here = ok(cu.cuCtxGetCurrent()); a = room(); context(1); there = ok(cu.cuCtxGetCurrent()); b = room()")
    job("s = ok(cu.cuStreamCreate(1)); spin(); spinning = _keep.pop(); ok(cu.cuMemsetD8Async(b, 5, 8, 0))")
    job("ok(cu.cuCtxSetCurrent(here))")
    copying = job.send("ok(cu.cuCtxSetCurrent(here)), ok(cu.cuMemcpyPeer(a, here, b, there, 8))")
    time.sleep(0.2)
    assert not copying.done
    job("ctypes.c_uint32.from_address(spinning).value = 1")
    copying.value()
    assert job("get(a, 8)") == "05" * 8


def test_addresses_that_are_wrong(job: Far) -> None:
    """INVALID_VALUE at once, and the context goes on."""
    job("a = room(4096); gone = room(); ok(cu.cuMemFree(gone)); host = ctypes.create_string_buffer(1 << 22)")
    job("h = ctypes.addressof(host); far_off = (2 << 20) + 1")
    for call in (
        "call('cuMemcpyHtoD_v2', U(h), host, Z(64))",  # to pageable memory by a device's name
        "call('cuMemcpyDtoH_v2', host, U(h), Z(64))",
        "call('cuMemcpyHtoD_v2', U(0), host, Z(64))",
        "call('cuMemcpyHtoD_v2', U(16), host, Z(64))",
        "call('cuMemcpyDtoH_v2', host, U(gone), Z(64))",
        "call('cuMemcpy', U(h), U(gone), Z(64))",
        "call('cuMemcpyHtoD_v2', U(a), host, Z(far_off))",  # beyond its end
        "call('cuMemcpyDtoDAsync_v2', U(a), U(gone), Z(64), V(0))",
        "call('cuMemcpyHtoD_v2', U(a), host, Z(1 << 63))",
        "call('cuMemsetD8_v2', U(gone), 1, Z(64))",
        "call('cuMemsetD8_v2', U(h), 1, Z(64))",
        "call('cuMemsetD32_v2', U(a), 1, Z(1 << 62))",
        "call('cuMemsetD16_v2', U(a + 1), 1, Z(2))",  # not aligned
        "call('cuMemsetD32_v2', U(a + 2), 1, Z(2))",
        "call('cuMemsetD2D32_v2', U(a), Z(18), 1, Z(4), Z(2))",
        "call('cuMemsetD2D8_v2', U(a), Z(3), 1, Z(4), Z(2))",  # rows overlap
    ):
        assert job(call) == 1, call
    assert job("call('cuMemcpyHtoD_v2', U(a), host, Z(64))") == 0
    assert job("said(cu.cuCtxSynchronize())") == "SUCCESS"


def test_nothing_to_copy(job: Far) -> None:
    assert job("call('cuMemcpyHtoD_v2', U(0), None, Z(0))") == 0
    assert job("call('cuMemsetD8_v2', U(0), 1, Z(0))") == 0
    assert job("call('cuMemcpyHtoDAsync_v2', U(0), None, Z(0), V(4096))") == 400  # no such stream


@pytest.mark.parametrize(("bits", "element"), [(8, "ab"), (16, "cdab"), (32, "67452301")])
@pytest.mark.parametrize("suffix", ["_v2", "_v2_ptds", "Async", "Async_ptsz"])
def test_memsets(job: Far, bits: int, element: str, suffix: str) -> None:
    value = int.from_bytes(bytes.fromhex(element), "little")
    size = bits // 8
    stream = ", V(0)" if "Async" in suffix else ""
    job("a, b = room(), room()")
    assert job(f"call('cuMemsetD{bits}{suffix}', U(a + 8), {value}, Z(10){stream})") == 0
    assert job(f"call('cuMemsetD2D{bits}{suffix}', U(b), Z(16), {value}, Z(3), Z(4){stream})") == 0
    job("ok(cu.cuCtxSynchronize())")
    assert job(f"get(a, {16 + 10 * size})") == "00" * 8 + element * 10 + "00" * 8
    assert job("get(b, 64)") == (element * 3 + "00" * (16 - 3 * size)) * 4


def test_two_dimensions(job: Far) -> None:
    """A window of one pitched area into one of another pitch; asynchronously back to the host."""
    job(f"a, b, back = filled({DATA!r}), room(), bytearray(64)")
    job(
        "c = cu.CUDA_MEMCPY2D(); T = cu.CUmemorytype\n"
        "c.srcMemoryType, c.srcDevice, c.srcPitch, c.srcXInBytes, c.srcY = T.CU_MEMORYTYPE_DEVICE, a, 20, 3, 2\n"
        "c.dstMemoryType, c.dstDevice, c.dstPitch, c.dstXInBytes, c.dstY = T.CU_MEMORYTYPE_DEVICE, b, 16, 1, 1\n"
        "c.WidthInBytes, c.Height = 5, 4\n"
        "ok(cu.cuMemcpy2D(c))\n"
    )
    rows = [b"\0" * 16] + [b"\0" + DATA[43 + 20 * y : 48 + 20 * y] + b"\0" * 10 for y in range(4)]
    assert job("get(b, 80)") == b"".join(rows).hex()
    job(
        "d = cu.CUDA_MEMCPY2D(); p = pinned()\n"
        "d.srcMemoryType, d.srcDevice, d.srcPitch, d.srcXInBytes, d.srcY = T.CU_MEMORYTYPE_UNIFIED, b, 16, 1, 1\n"
        "d.dstMemoryType, d.dstHost, d.dstPitch = T.CU_MEMORYTYPE_HOST, p, 5\n"
        "d.WidthInBytes, d.Height = 5, 4\n"
        "ok(cu.cuMemcpy2DAsync(d, 0)); ok(cu.cuCtxSynchronize())\n"
    )
    assert job("ctypes.string_at(p, 21).hex()") == (b"".join(row[1:6] for row in rows[1:]) + b"\0").hex()
    job("c.srcPitch = 7")
    assert job("said(cu.cuMemcpy2D(c))") == "INVALID_VALUE"  # a row is wider than that
    job("c.srcPitch, c.Height = 20, 1 << 40")
    assert job("said(cu.cuMemcpy2D(c))") == "INVALID_VALUE"  # beyond the end
    job("c.Height, c.srcMemoryType = 4, T.CU_MEMORYTYPE_ARRAY")
    assert job("said(cu.cuMemcpy2D(c))") == "NOT_SUPPORTED"


# From a box of rows of 10 bytes, 5 a slice, to one of rows of 4, 3 a slice.
WINDOW = (
    "T = cu.CUmemorytype\n"
    "c.srcMemoryType, c.srcDevice, c.srcPitch, c.srcHeight = T.CU_MEMORYTYPE_DEVICE, a, 10, 5\n"
    "c.dstMemoryType, c.dstDevice, c.dstPitch, c.dstHeight = T.CU_MEMORYTYPE_DEVICE, b, 4, 3\n"
    "c.srcXInBytes, c.srcY, c.srcZ, c.WidthInBytes, c.Height, c.Depth = 1, 2, 1, 3, 2, 2\n"
)


def window() -> bytearray:
    """What is there afterwards, where nothing was."""
    expected = bytearray(24)
    for z in range(2):
        for y in range(2):
            at = 50 * (z + 1) + 10 * (y + 2) + 1
            expected[12 * z + 4 * y : 12 * z + 4 * y + 3] = DATA[at : at + 3]
    return expected


def test_three_dimensions(job: Far) -> None:
    job(f"a, b = filled({DATA!r}), room()")
    job("c = cu.CUDA_MEMCPY3D()\n" + WINDOW + "ok(cu.cuMemcpy3D(c))\n")
    assert job("get(b, 24)") == window().hex()
    job("c.srcHeight = 3")
    assert job("said(cu.cuMemcpy3D(c))") == "INVALID_VALUE"


@pytest.mark.parametrize(
    "kind", ["ok(cu.cuMemcpy3DPeer(c))", "ok(cu.cuMemcpy3DPeerAsync(c, s)), ok(cu.cuStreamSynchronize(s))"]
)
def test_three_dimensions_from_one_gpu_to_another(job: Far, kind: str) -> None:
    job(f"a = filled({DATA!r}); here = ok(cu.cuCtxGetCurrent()); s = ok(cu.cuStreamCreate(0))")
    job("context(1); there = ok(cu.cuCtxGetCurrent()); b = room(); ok(cu.cuCtxSetCurrent(here))")
    job("c = cu.CUDA_MEMCPY3D_PEER()\n" + WINDOW + "c.srcContext, c.dstContext = here, there\n")
    job(kind)
    assert job("get(b, 24)") == window().hex()
    assert job("ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, b))") == 1
    job("c.srcContext = cu.CUcontext(4096)")
    assert job("said(cu.cuMemcpy3DPeer(c))") == "INVALID_CONTEXT"
    job("c.srcContext, c.srcHeight = here, 3")
    assert job("said(cu.cuMemcpy3DPeer(c))") == "INVALID_VALUE"


def test_what_is_over_when_a_call_returns(job: Far) -> None:
    """Behind a kernel that spins: copies from pinned memory, small pageable ones, memsets and copies between devices
    return at once, and what was in a small source when it was named arrives. A big pageable one is waited for."""
    job("spin(); a, q = int(ok(cu.cuMemAlloc(1 << 20))), int(ok(cu.cuMemAlloc(64))); p = pinned(1 << 20)")
    job("source = bytearray(b'x' * 64); big = bytearray(1 << 20)")
    job("ok(cu.cuMemcpyHtoDAsync(a, bytes(source), 64, 0)); source[:] = b'y' * 64")
    job("ok(cu.cuMemcpyHtoDAsync(a + 64, p, 1000, 0))")
    job("ok(cu.cuMemcpyDtoHAsync(p, a, 64, 0)); ok(cu.cuMemcpyDtoD(q, a, 64)); ok(cu.cuMemsetD8(a, 7, 32))")
    waiting = job.send("context(), ok(cu.cuMemcpyHtoDAsync(a, big, len(big), 0))")
    time.sleep(0.2)
    assert not waiting.done
    assert job("ctypes.string_at(p, 64).hex()") == "00" * 64
    job("release()")
    waiting.value()
    assert job("ctypes.string_at(p, 64).decode()") == "x" * 64
    assert job("bytes.fromhex(get(q, 64)).decode()") == "x" * 64


def test_memory_freed_under_a_copy_is_the_contexts_end(job: Far) -> None:
    """ILLEGAL_ADDRESS from then on, not a crash."""
    job("s, t = [ok(cu.cuStreamCreate(1)) for _ in range(2)]; a = int(ok(cu.cuMemAllocAsync(64, t))); b = room()")
    job("ok(cu.cuStreamSynchronize(t)); spin(); ok(cu.cuMemcpyDtoDAsync(b, a, 64, 0))")
    job("ok(cu.cuMemFreeAsync(a, t)); ok(cu.cuStreamSynchronize(t))")
    job("release()")
    assert job("said(cu.cuCtxSynchronize())") == "ILLEGAL_ADDRESS"
    assert job("said(cu.cuMemAlloc(16))") == "ILLEGAL_ADDRESS"


def test_rates(new_node: Any) -> None:
    """A copy takes as long as the node's rates say."""
    node = new_node(rates={"host_to_device": 100e6, "device_to_host": 50e6, "device_to_device": 200e6, "peer": 25e6})
    job = Far(node)
    job("start(); mib = 10_000_000; a, b = [int(ok(cu.cuMemAlloc(mib))) for _ in range(2)]; host = bytearray(mib)")
    job(
        "here = ok(cu.cuCtxGetCurrent()); context(1); there = ok(cu.cuCtxGetCurrent()); c = int(ok(cu.cuMemAlloc(mib)))"
    )
    job("ok(cu.cuCtxSetCurrent(here))")
    job(
        "def timed(name, *arguments):\n"
        "    begin = time.monotonic()\n"
        "    ok(getattr(cu, name)(*arguments))\n"
        "    ok(cu.cuCtxSynchronize())\n"
        "    return time.monotonic() - begin\n"
    )
    for call, seconds in (
        ("'cuMemcpyHtoD', a, host, mib", 0.1),
        ("'cuMemcpyDtoH', host, a, mib", 0.2),
        ("'cuMemcpyDtoD', b, a, mib", 0.05),
        ("'cuMemsetD8', b, 1, mib", 0.05),
        ("'cuMemcpyPeer', c, there, a, here, mib", 0.4),
    ):
        quick_enough(lambda call=call: job(f"timed({call})"), seconds, seconds + 0.5)

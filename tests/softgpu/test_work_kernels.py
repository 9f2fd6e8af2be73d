"""Modules and the built-in kernels: what each computes, what a launch refuses, what a wrong address does."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from softgpu.far import Far

MASK = (1 << 64) - 1


@pytest.fixture
def job(node: Any) -> Far:
    program = Far(node)
    program("start(); u, h, r = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float")
    program("module = ok(cu.cuModuleLoadData(PTX.read_bytes() + b'\\0'))")
    program("names = ('fill', 'stamp', 'saxpy', 'hash', 'spin')")
    program("kernel = {n: ok(cu.cuModuleGetFunction(module, n.encode())) for n in names}")
    program(
        "types = {'fill': (u, u, u), 'stamp': (u, u, u, u), 'saxpy': (u, u, r, u), 'hash': (u, u, u), 'spin': (u, h)}\n"
        "def launch(name, *arguments, grid=(1, 1, 1), block=(32, 1, 1), shared=0, stream=0):\n"
        "    return cu.cuLaunchKernel(kernel[name], *grid, *block, shared, stream, (arguments, types[name]), 0)\n"
    )
    return program


def words(job: Far, where: str, n: int) -> list[int]:
    return list(struct.unpack(f"<{n}Q", bytes.fromhex(job(f"get({where}, {8 * n})"))))


SHAPES = [((1, 1, 1), (1, 1, 1)), ((3, 1, 1), (32, 1, 1)), ((4, 2, 1), (8, 4, 2)), ((200, 1, 1), (1024, 1, 1))]


@pytest.mark.parametrize(("grid", "block"), SHAPES)
def test_fill_and_stamp(job: Far, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    """The same with any grid and block; not a word beyond the range."""
    job("a, b = room(), room()")
    job(f"ok(launch('fill', a, 100, 0x1234567890ABCDEF, grid={grid}, block={block}))")
    job(f"ok(launch('stamp', b, 700, 5, 9, grid={grid}, block={block})); ok(cu.cuCtxSynchronize())")
    assert words(job, "a", 102) == [0x1234567890ABCDEF] * 100 + [0, 0]
    expected = [(5 * 0x9E3779B97F4A7C15 + (9 * 512 + i) * 0xD1B54A32D192ED03) & MASK for i in range(700)]
    assert words(job, "b", 701) == [*expected, 0]


def test_hash(job: Far) -> None:
    """Added to what is there."""
    data = random.Random(3).randbytes(8 * 513)
    job(f"a = filled({data!r}); out = filled({struct.pack('<Q', 41)!r}); ok(launch('hash', a, 513, out))")
    expected = 41
    for i, x in enumerate(struct.unpack("<513Q", data)):
        expected += (x ^ (x >> 29)) * (2 * i + 1)
    assert words(job, "out", 2) == [expected & MASK, 0]


def test_saxpy_rounds_twice(job: Far) -> None:
    """Bit-equal to single precision with a rounding after the product and one after the sum."""

    def single(value: float) -> float:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])

    numbers = random.Random(5)
    x = [single(numbers.uniform(-3, 3)) for _ in range(1000)]
    y = [single(numbers.uniform(-3, 3)) for _ in range(1000)]
    a = single(1.1)
    pack = struct.Struct("<1000f").pack
    job(f"x, y = filled({pack(*x)!r}), filled({pack(*y)!r}); ok(launch('saxpy', y, x, {a!r}, 1000))")
    expected = [single(v + single(a * w)) for v, w in zip(y, x, strict=True)]
    fused = [single(v + a * w) for v, w in zip(y, x, strict=True)]
    assert expected != fused  # the numbers can tell
    assert job("get(y, 4000)") == pack(*expected).hex()


def test_spin_reads_device_and_pinned_memory(job: Far) -> None:
    job("a = room(); s = ok(cu.cuStreamCreate(1)); ok(launch('spin', a, 3, stream=s))")
    assert job("said(cu.cuStreamQuery(s))") == "NOT_READY"
    job("t = ok(cu.cuStreamCreate(1)); ok(cu.cuMemsetD32Async(a, 2, 1, t)); ok(cu.cuStreamSynchronize(t))")
    assert job("said(cu.cuStreamQuery(s))") == "NOT_READY"
    job("ok(cu.cuMemsetD32Async(a, 3, 1, t)); ok(cu.cuStreamSynchronize(s))")
    job("p = int(ok(cu.cuMemHostAlloc(64, 0))); ctypes.memset(p, 0, 64); ok(launch('spin', p, 1, stream=s))")
    assert job("said(cu.cuStreamQuery(s))") == "NOT_READY"
    job("h.from_address(p).value = 2; ok(cu.cuStreamSynchronize(s))")


def test_parameters_in_one_buffer(job: Far) -> None:
    """`extra`: laid out as the compiler does, and described by cuFuncGetParamInfo."""
    job("import struct")
    job("x, y = filled(struct.pack('<2f', 1, 2)), filled(struct.pack('<2f', 10, 20))")
    job("buffer = ctypes.create_string_buffer(struct.pack('<QQfxxxxQ', y, x, 3.0, 2), 32); size = ctypes.c_size_t(32)")
    job("extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)")
    call = "said(cu.cuLaunchKernel(kernel['saxpy'], 1, 1, 1, 1, 1, 1, 0, 0, 0, ctypes.addressof(extra)))"
    assert job(call) == "SUCCESS"
    assert job("list(struct.unpack('<2f', bytes.fromhex(get(y, 8))))") == [13.0, 26.0]
    job("size.value = 24")
    assert job(call) == "INVALID_VALUE"
    info = "[[int(x) for x in ok(cu.cuFuncGetParamInfo(kernel['saxpy'], i))] for i in range(4)]"
    assert job(info) == [[0, 8], [8, 8], [16, 4], [24, 8]]
    assert job("said(cu.cuFuncGetParamInfo(kernel['saxpy'], 4))") == "INVALID_VALUE"


def test_launches_that_are_refused(job: Far) -> None:
    job("a = room()")
    for call, answer in {
        "launch('fill', a, 1, 1, grid=(0, 1, 1))": "INVALID_VALUE",
        "launch('fill', a, 1, 1, grid=(1, 65536, 1))": "INVALID_VALUE",
        "launch('fill', a, 1, 1, block=(0, 1, 1))": "INVALID_VALUE",
        "launch('fill', a, 1, 1, block=(1025, 1, 1))": "INVALID_VALUE",
        "launch('fill', a, 1, 1, block=(32, 33, 1))": "INVALID_VALUE",
        "launch('fill', a, 1, 1, block=(1, 1, 65))": "INVALID_VALUE",
        "launch('fill', a, 1, 1, shared=49153)": "INVALID_VALUE",
        "launch('fill', a, 1, 1, stream=4096)": "INVALID_HANDLE",
        "cu.cuLaunchKernel(kernel['fill'], 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)": "INVALID_VALUE",
        "cu.cuLaunchKernel(4096, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)": "INVALID_HANDLE",
        "cu.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)": "INVALID_HANDLE",
    }.items():
        assert job(f"said({call})") == answer, call
    assert job("said(cu.cuCtxSynchronize())") == "SUCCESS"
    job("context(1)")
    assert job("said(launch('fill', a, 1, 1))") == "INVALID_HANDLE"  # of another context


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("launch('fill', 0, 1, 1)", "ILLEGAL_ADDRESS"),
        ("launch('fill', 4096, 1, 1)", "ILLEGAL_ADDRESS"),
        ("launch('fill', a, 1 << 40, 1)", "ILLEGAL_ADDRESS"),
        ("launch('fill', a, 1 << 62, 1)", "ILLEGAL_ADDRESS"),
        ("launch('stamp', gone, 4, 1, 1)", "ILLEGAL_ADDRESS"),
        ("launch('hash', a, 4, gone)", "ILLEGAL_ADDRESS"),
        ("launch('saxpy', a, gone, 1.0, 4)", "ILLEGAL_ADDRESS"),
        ("launch('spin', gone, 1)", "ILLEGAL_ADDRESS"),
        ("launch('fill', ctypes.addressof(pageable), 1, 1)", "ILLEGAL_ADDRESS"),
        ("launch('fill', a + 4, 1, 1)", "MISALIGNED_ADDRESS"),
    ],
)
def test_wrong_addresses_end_the_context_not_the_program(job: Far, call: str, answer: str) -> None:
    """The launch succeeds; all that comes after answers the error, until the context is made anew."""
    job("a, gone = room(), room(); ok(cu.cuMemsetD8(a, 1, 64)); ok(cu.cuMemFree(gone)); pageable = (u * 64)()")
    assert job(f"said({call})") == "SUCCESS"
    assert job("said(cu.cuCtxSynchronize())") == answer
    assert job("[said(x) for x in (cu.cuMemAlloc(16), cu.cuStreamCreate(0), launch('fill', a, 1, 1))]") == [answer] * 3
    assert job("said(cu.cuDeviceGetCount())") == "SUCCESS"
    job("ok(cu.cuDevicePrimaryCtxReset(0)); context(0)")
    assert job("said(cu.cuMemAlloc(16))") == "SUCCESS"


def test_nothing_to_do_touches_nothing(job: Far) -> None:
    job("ok(launch('fill', 0, 0, 1)); ok(launch('hash', 0, 0, 0))")
    assert job("said(cu.cuCtxSynchronize())") == "SUCCESS"


def test_images(job: Far, node: Any) -> None:
    ptx = "b'.version 7.0\\n.target sm_70\\n.visible .entry fill(.param .u64 p)\\n.entry mine(\\n.global .u32 counter;'"
    job(f"other = ok(cu.cuModuleLoadData({ptx}))")
    assert job("said(cu.cuModuleGetFunction(other, b'fill'))") == "SUCCESS"
    assert job("said(cu.cuModuleGetFunction(other, b'stamp'))") == "NOT_FOUND"  # built in, not in the image
    assert job("said(cu.cuModuleGetFunction(other, b'fil'))") == "NOT_FOUND"
    assert job("said(cu.cuModuleGetFunction(other, b'mine'))") == "NOT_SUPPORTED"  # in the image, not built in
    assert any("mine" in line for line in node.log())
    assert job("ok(cu.cuModuleGetFunctionCount(other))") == 2
    assert job("said(cu.cuModuleLoadData(PTX.read_bytes()[:-40] + b'\\0'))") == "INVALID_PTX"  # cut off
    assert job("said(cu.cuModuleGetGlobal(other, b'nothing'))") == "NOT_FOUND"
    assert job("said(cu.cuModuleGetGlobal(other, b'counter'))") == "NOT_SUPPORTED"
    assert job("said(cu.cuModuleLoadData(b'no such thing'))") == "INVALID_IMAGE"
    assert job("said(cu.cuModuleLoadData(b'.version 7.0'))") == "INVALID_PTX"
    assert job("said(cu.cuModuleLoadData(bytes(64)))") == "INVALID_IMAGE"
    assert job("said(cu.cuModuleLoadData(b'\\xff' * 64))") == "INVALID_IMAGE"
    assert job("said(cu.cuModuleLoadData(b'\\x7fELF' + bytes(60)))") == "NOT_SUPPORTED"
    assert job("said(cu.cuModuleLoad(b'/nowhere/at/all'))") == "FILE_NOT_FOUND"
    assert job("said(cu.cuModuleGetFunction(ok(cu.cuModuleLoad(str(PTX).encode())), b'hash'))") == "SUCCESS"
    job("ok(cu.cuModuleUnload(other))")
    assert job("said(cu.cuModuleGetFunction(other, b'fill'))") == "INVALID_HANDLE"
    assert job("said(cu.cuModuleUnload(other))") == "INVALID_HANDLE"


def test_an_image_in_a_file(job: Far, tmp_path: Path) -> None:
    """A container of images is read whole, whatever bytes are in it, and never beyond what the file has."""
    ptx = b".version 7.0\n.target sm_70\n.visible .entry fill(.param .u64 p)\n"
    body = b"\xff" * 32 + ptx
    head = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body))
    wrapper = struct.pack("<IIQQ", 0x466243B1, 1, 16, 0)
    files = {"whole": head + body, "cut": head + body[:-8], "wrapper": wrapper + head + body}
    files["vast"] = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, MASK - 15) + body
    for name, image in files.items():
        (tmp_path / name).write_bytes(image)
    assert (
        job(f"said(cu.cuModuleGetFunction(ok(cu.cuModuleLoad({str(tmp_path / 'whole').encode()!r})), b'fill'))")
        == "SUCCESS"
    )
    for name in ("cut", "wrapper", "vast"):
        assert job(f"said(cu.cuModuleLoad({str(tmp_path / name).encode()!r}))") == "INVALID_IMAGE"
    assert job(f"said(cu.cuModuleLoadData({files['vast']!r}))") == "INVALID_IMAGE"


def test_libraries(job: Far) -> None:
    """A library's kernels run in any context."""
    job("library = ok(cu.cuLibraryLoadData(PTX.read_bytes() + b'\\0', [], [], 0, [], [], 0))")
    job("found = ok(cu.cuLibraryGetKernel(library, b'fill')); context(1); a = room()")
    job("ok(cu.cuLaunchKernel(ok(cu.cuKernelGetFunction(found)), 1, 1, 1, 1, 1, 1, 0, 0, ((a, 2, 6), (u, u, u)), 0))")
    assert words(job, "a", 3) == [6, 6, 0]
    job("ok(cu.cuLibraryUnload(library))")
    assert job("said(cu.cuLibraryGetKernel(library, b'fill'))") == "INVALID_HANDLE"


def test_launch_with_a_configuration(job: Far) -> None:
    job("config = cu.CUlaunchConfig(); a = room(); A = cu.CUlaunchAttributeID")
    job("config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = 1")
    job("config.blockDimZ = 1")
    job("ok(cu.cuLaunchKernelEx(config, kernel['fill'], ((a, 2, 8), (u, u, u)), 0))")
    assert words(job, "a", 3) == [8, 8, 0]
    job("attribute = cu.CUlaunchAttribute(); attribute.id = A.CU_LAUNCH_ATTRIBUTE_COOPERATIVE")
    job("config.attrs = [attribute]; config.numAttrs = 1")
    assert job("said(cu.cuLaunchKernelEx(config, kernel['fill'], ((a, 2, 8), (u, u, u)), 0))") == "SUCCESS"
    job("attribute.id = A.CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT; config.attrs = [attribute]")
    assert job("said(cu.cuLaunchKernelEx(config, kernel['fill'], ((a, 2, 8), (u, u, u)), 0))") == "NOT_SUPPORTED"


def test_what_a_function_says(job: Far) -> None:
    job("F = cu.CUfunction_attribute; shared = F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; a = room()")
    assert job("ok(cu.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel['fill']))") == 1024
    job("ok(cu.cuFuncSetAttribute(kernel['fill'], shared, 100000))")
    assert job("ok(cu.cuFuncGetAttribute(shared, kernel['fill']))") == 100000
    assert job("said(launch('fill', a, 1, 1, shared=100000))") == "SUCCESS"
    assert job("said(cu.cuFuncSetAttribute(kernel['fill'], shared, 232449))") == "INVALID_VALUE"
    assert job("ok(cu.cuFuncGetName(kernel['hash'])).decode()") == "hash"
    assert job("ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel['fill'], 256, 0))") == 8

"""How functions are found, what errors are called, and the rules of modules and functions."""

from __future__ import annotations

import pytest

from conformance.jobs import PTX, Job, enum, launching, number, plain, pointer, text

NAMES = {
    0: ("CUDA_SUCCESS", "no error"),
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    100: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    101: ("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    304: ("CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"),
    400: ("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
    401: (
        "CUDA_ERROR_ILLEGAL_STATE",
        "the operation cannot be performed in the present state",
    ),
    500: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    600: ("CUDA_ERROR_NOT_READY", "device not ready"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    800: ("CUDA_ERROR_NOT_PERMITTED", "operation not permitted"),
    801: ("CUDA_ERROR_NOT_SUPPORTED", "operation not supported"),
    999: ("CUDA_ERROR_UNKNOWN", "unknown error"),
}


@pytest.mark.parametrize("code", NAMES)
def test_error_name(code: int, work: Job) -> None:
    found = work.do("cuGetErrorName", {"r": code})
    assert bytes.fromhex(found).decode() == NAMES[code][0]


@pytest.mark.parametrize("code", NAMES)
def test_error_words(code: int, work: Job) -> None:
    found = work.do("cuGetErrorString", {"r": code})
    assert bytes.fromhex(found).decode() == NAMES[code][1]


@pytest.mark.parametrize("call", ["cuGetErrorName", "cuGetErrorString"])
def test_a_number_that_is_no_error(call: str, work: Job) -> None:
    assert work.raw(call, 12345, work.scratch) == "INVALID_VALUE"


def test_driver_version(work: Job) -> None:
    assert work.do("cuDriverGetVersion") == 13000


# --- cuGetProcAddress -------------------------------------------------------------------------------------------------

FOUND = [
    ("cuMemAlloc", 12000),
    ("cuMemAlloc", 2000),
    ("cuMemAlloc", 13000),
    ("cuCtxCreate", 13000),
    ("cuCtxCreate", 12000),
    ("cuStreamSynchronize", 12000),
    ("cuGetProcAddress", 12000),
    ("cuCheckpointProcessLock", 12080),
    ("cuMemCreate", 10020),
]


@pytest.mark.parametrize(("name", "version"), FOUND)
def test_a_function_is_found(name: str, version: int, work: Job) -> None:
    address, status = work.do("cuGetProcAddress", text(name), version, 0)
    assert address
    assert status == 0


MISSING = {
    "unknown": ("cuNoSuchFunction", 13000, 1),
    "with-its-suffix": ("cuMemAlloc_v2", 13000, 1),
    "empty": ("", 13000, 1),
    "too-new": ("cuCheckpointProcessLock", 12000, 2),
    "much-too-new": ("cuMemCreate", 10000, 2),
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_function_that_is_not_there_is_told_by_the_status(kind: str, work: Job) -> None:
    name, version, status = MISSING[kind]
    symbol, found, told = work.scratch, work.scratch + 256, work.scratch + 264
    work.poke(symbol, name.encode().ljust(256, b"\0") + b"\xff" * 16)
    assert work.raw("cuGetProcAddress_v2", symbol, found, version, 0, told) == "SUCCESS"
    assert work.peek(found, 12) == bytes(8) + status.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("function", "result"), [("cuGetProcAddress", "NOT_FOUND"), ("cuGetProcAddress_v2", "SUCCESS")]
)
def test_a_function_that_is_not_there_where_no_status_is_asked_for(function: str, result: str, work: Job) -> None:
    work.poke(work.scratch, b"cuNoSuchFunction".ljust(256, b"\0"))
    assert work.raw(function, work.scratch, work.scratch + 256, 13000, 0, None) == result


def test_a_function_that_is_not_there_is_a_null_pointer_also_without_a_status(work: Job) -> None:
    work.poke(work.scratch, b"cuNoSuchFunction".ljust(256, b"\0") + b"\xff" * 8)
    work.raw("cuGetProcAddress_v2", work.scratch, work.scratch + 256, 13000, 0, None)
    assert work.peek(work.scratch + 256, 8) == bytes(8)


def test_the_per_thread_variant_is_another_function(work: Job) -> None:
    legacy, per_thread = (work.do("cuGetProcAddress", text("cuStreamSynchronize"), 12000, flags)[0] for flags in (1, 2))
    assert legacy != per_thread


def test_a_function_without_variants_is_the_same(work: Job) -> None:
    legacy, per_thread = (work.do("cuGetProcAddress", text("cuDeviceGetCount"), 12000, flags)[0] for flags in (1, 2))
    assert legacy == per_thread


@pytest.mark.parametrize("name", ["cuCtxCreate", "cuGetProcAddress", "cuEventElapsedTime", "cuMemAlloc"])
def test_the_version_asked_for_decides_which_one(name: str, work: Job) -> None:
    old = {"cuCtxCreate": 3020, "cuGetProcAddress": 11030, "cuEventElapsedTime": 12000, "cuMemAlloc": 3000}[name]
    found = [work.do("cuGetProcAddress", text(name), version, 0)[0] for version in (old, 13000)]
    assert found[0] != found[1]


EXPORTED = ["cuMemAlloc", "cuMemAlloc_v2", "cuMemFree_v2", "cuCtxCreate_v2", "cuCtxCreate_v4", "cuGetProcAddress"]
EXPORTED += ["cuGetProcAddress_v2", "cuStreamSynchronize_ptsz", "cuMemcpyHtoD_v2_ptds", "cuCheckpointProcessLock"]
EXPORTED += ["cuGetExportTable", "cuMemCreate", "cuLaunchKernel", "cuLaunchKernelEx", "cuMemAllocAsync_ptsz"]


@pytest.mark.parametrize("name", EXPORTED)
def test_the_library_exports(name: str, work: Job) -> None:
    assert work.run("exported", name) is True


@pytest.mark.parametrize("name", ["cuNoSuchFunction", "cuCheckpointOperationComplete", "cudaMalloc"])
def test_the_library_does_not_export(name: str, work: Job) -> None:
    assert work.run("exported", name) is False


# --- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "result"), [("nothing", "NOT_FOUND"), ("fil", "NOT_FOUND"), ("", "INVALID_VALUE")])
def test_a_kernel_that_a_module_does_not_have(name: str, result: str, work: Job) -> None:
    assert work.says("cuModuleGetFunction", work.module, text(name)) == result


@pytest.mark.parametrize(
    ("kind", "result"), [("nonsense", "INVALID_IMAGE"), ("empty", "INVALID_IMAGE"), ("cut-off", "INVALID_PTX")]
)
def test_an_image_that_is_none(kind: str, result: str, work: Job) -> None:
    data = {"nonsense": b"this is no program\0", "empty": b"\0", "cut-off": PTX.read_bytes()[:1000] + b"\0"}[kind]
    assert work.says("cuModuleLoadData", {"b": data.hex()}) == result


def test_a_module_is_unloaded(work: Job) -> None:
    module = work.do("cuModuleLoadData", {"b": PTX.read_bytes().hex() + "00"})
    assert work.says("cuModuleUnload", module) == "SUCCESS"


def test_the_name_of_a_function(work: Job) -> None:
    assert plain(work.do("cuFuncGetName", work.functions["stamp"])) == "stamp"


def test_the_module_of_a_function(work: Job) -> None:
    assert work.do("cuFuncGetModule", work.functions["stamp"]) == work.module


def test_how_many_functions_a_module_has(work: Job) -> None:
    assert work.do("cuModuleGetFunctionCount", work.module) == 5


def test_a_global_that_a_module_does_not_have(work: Job) -> None:
    assert work.says("cuModuleGetGlobal", work.module, text("nothing")) == "NOT_FOUND"


@pytest.mark.parametrize(
    ("grid", "block"),
    [((0, 1, 1), (64, 1, 1)), ((1, 1, 1), (0, 1, 1)), ((1, 1, 1), (2048, 1, 1)), ((1, 70000, 1), (1, 1, 1))],
)
def test_a_launch_of_a_wrong_size(grid: tuple[int, ...], block: tuple[int, ...], memory: int, work: Job) -> None:
    call = launching(work.functions["fill"], pointer(memory), number(1), number(0))
    call[2:8] = [*grid, *block]
    assert work.says(*call) == "INVALID_VALUE"


def test_a_launch_with_more_shared_memory_than_there_is(memory: int, work: Job) -> None:
    call = launching(work.functions["fill"], pointer(memory), number(1), number(0))
    call[8] = 1 << 20
    assert work.says(*call) == "INVALID_VALUE"


@pytest.mark.parametrize(("grid", "block"), [(1, 1), (1, 1024), (1000, 32), (3, 7)])
def test_a_kernel_is_right_on_any_grid(grid: int, block: int, memory: int, work: Job) -> None:
    call = launching(work.functions["stamp"], pointer(memory), number(1000), number(3), number(0))
    call[2], call[5] = grid, block
    work.do("cuMemsetD8", memory, 0, 16384)
    assert work.says(*call) == "SUCCESS"
    work.check_stamps(memory, 1000, 3)
    assert work.words(memory + 8000) == (0,)


def test_max_threads_of_a_function(work: Job) -> None:
    name = enum("CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
    assert work.do("cuFuncGetAttribute", name, work.functions["fill"]) == 1024

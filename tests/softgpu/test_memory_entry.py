"""How programs find the driver's functions: cuGetProcAddress, versions, names of errors, what is not implemented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from softgpu.far import Far

from limosa.native.build import DRIVER, compilers
from limosa_softgpu.build import SOFTGPU

pytestmark = pytest.mark.timeout(300)
LINE = re.compile(r"FUNCTION\((\w+), (\w+), (\d+), ([01]), \w+\)")


def listed() -> list[tuple[str, str, int, bool]]:
    """symbol, base name, version, per-thread variant; of every function in functions.list."""
    found = LINE.findall((DRIVER / "functions.list").read_text())
    return [(symbol, base, int(version), variant == "1") for symbol, base, version, variant in found]


@pytest.fixture(scope="module")
def exported(libraries: None) -> set[str]:
    told = subprocess.run(
        ["nm", "-D", "--defined-only", str(SOFTGPU / "libcuda.so.1")],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return {line.split()[-1] for line in told.stdout.splitlines()}


@pytest.fixture
def job(node: Any) -> Far:
    """A process that has asked for nothing yet."""
    far = Far(node)
    far(
        "import ctypes\n"
        "lib = ctypes.CDLL('libcuda.so.1')\n"
        "def find(name, version, flags=0):\n"
        "    at, status = ctypes.c_void_p(), ctypes.c_int(-1)\n"
        "    code = lib.cuGetProcAddress_v2(name.encode(), ctypes.byref(at), version, ctypes.c_uint64(flags),\n"
        "                                   ctypes.byref(status))\n"
        "    return [code, name_of(at.value), status.value]\n"
        "def name_of(at):\n"
        "    if not at: return None\n"
        "    class Info(ctypes.Structure):\n"
        "        _fields_ = [('file', ctypes.c_char_p), ('base', ctypes.c_void_p), ('name', ctypes.c_char_p),\n"
        "                    ('start', ctypes.c_void_p)]\n"
        "    info = Info()\n"
        "    assert ctypes.CDLL(None).dladdr(ctypes.c_void_p(at), ctypes.byref(info))\n"
        "    return info.name.decode()\n"
    )
    return far


# --- the list --------------------------------------------------------------------------------------------------------


def test_every_function_of_the_list_is_exported(exported: set[str]) -> None:
    functions = listed()
    assert len(functions) > 600
    assert {symbol for symbol, *_ in functions} - exported == set()


def test_nothing_else_is_exported(exported: set[str]) -> None:
    assert exported - {symbol for symbol, *_ in listed()} == set()


def test_the_list_is_sorted_and_holds_nothing_twice() -> None:
    functions = listed()
    assert len({symbol for symbol, *_ in functions}) == len(functions)
    keys = [(base, version, variant) for _, base, version, variant in functions]
    assert keys == sorted(keys)


# --- cuGetProcAddress ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "flags", "symbol"),
    [
        ("cuInit", 2000, 0, "cuInit"),
        ("cuMemAlloc", 2000, 0, "cuMemAlloc"),
        ("cuMemAlloc", 3010, 0, "cuMemAlloc"),
        ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"),
        ("cuMemAlloc", 13000, 0, "cuMemAlloc_v2"),
        ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ("cuMemcpyHtoD", 7000, 0, "cuMemcpyHtoD_v2"),
        ("cuMemcpyHtoD", 7000, 1, "cuMemcpyHtoD_v2"),
        ("cuMemcpyHtoD", 7000, 2, "cuMemcpyHtoD_v2_ptds"),
        ("cuMemcpyHtoD", 3020, 2, "cuMemcpyHtoD_v2"),
        ("cuMemAllocAsync", 11020, 2, "cuMemAllocAsync_ptsz"),
        ("cuMemAlloc", 13000, 2, "cuMemAlloc_v2"),
        ("cuCheckpointProcessLock", 12080, 0, "cuCheckpointProcessLock"),
    ],
)
def test_the_newest_function_that_is_old_enough(job: Far, name: str, version: int, flags: int, symbol: str) -> None:
    assert job(f"find({name!r}, {version}, {flags})") == [0, symbol, 0]


def test_every_function_is_found_under_its_own_version(job: Far) -> None:
    wanted = [[0, symbol, 0] for symbol, *_ in listed()]
    asked = [(base, version, 2 if variant else 1) for _, base, version, variant in listed()]
    assert job(f"[find(*one) for one in {asked!r}]") == wanted


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [("cuNoSuchThing", 13000, 1), ("cuMemAlloc_v2", 13000, 1), ("", 13000, 1), ("cuMemCreate", 10010, 2)],
)
def test_what_is_not_there_is_told_by_the_status_alone(job: Far, name: str, version: int, status: int) -> None:
    job("at = ctypes.c_void_p()")
    assert job(f"find({name!r}, {version})") == [0, None, status]
    assert (
        job(f"lib.cuGetProcAddress_v2({name.encode()!r}, ctypes.byref(at), {version}, ctypes.c_uint64(0), None)") == 0
    )
    assert job("at.value") is None


@pytest.mark.parametrize(("version", "flags"), [(13010, 0), (13000, 3), (13000, 4)])
def test_versions_and_flags_that_the_driver_does_not_know(job: Far, version: int, flags: int) -> None:
    assert job(f"find('cuInit', {version}, {flags})")[0] == 1


def test_missing_arguments(job: Far) -> None:
    assert job("lib.cuGetProcAddress_v2(None, ctypes.byref(ctypes.c_void_p()), 13000, ctypes.c_uint64(0), None)") == 1
    assert job("lib.cuGetProcAddress_v2(b'cuInit', None, 13000, ctypes.c_uint64(0), None)") == 1


def test_the_older_form(job: Far) -> None:
    job("at = ctypes.c_void_p()")
    assert job("lib.cuGetProcAddress(b'cuMemAlloc', ctypes.byref(at), 11030, ctypes.c_uint64(0))") == 0
    assert job("name_of(at.value)") == "cuMemAlloc_v2"
    assert job("lib.cuGetProcAddress(b'cuNoSuchThing', ctypes.byref(at), 11030, ctypes.c_uint64(0))") == 500
    assert job("at.value") is None


def test_a_preloaded_library_does_not_come_in_between(node: Any, tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int cuMemAlloc_v2(void) { return 77; }\n")
    compiler = compilers()[0]
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    job = Far(node, env={"LD_PRELOAD": str(library)})
    job("import ctypes; lib = ctypes.CDLL('libcuda.so.1'); at = ctypes.c_void_p()")
    assert job("ctypes.CDLL(None).cuMemAlloc_v2()") == 77
    assert job("lib.cuGetProcAddress(b'cuMemAlloc', ctypes.byref(at), 12000, ctypes.c_uint64(0))") == 0
    assert job("ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(at.value)(None, 4096)") == 3


# --- names of errors -------------------------------------------------------------------------------------------------


def test_every_error_of_the_bindings_has_its_name_and_words(job: Far) -> None:
    # Names that are newer than this driver have none, as on a real driver of that version.
    names = job(
        "[(int(e), e.name, word(cu.cuGetErrorName(e)[0]), (cu.cuGetErrorName(e)[1] or b'').decode(),"
        " (cu.cuGetErrorString(e)[1] or b'').decode()) for e in cu.CUresult]"
    )
    known = [one for one in names if one[2] == "SUCCESS"]
    assert len(known) >= 95
    assert [one[1] for one in known] == [one[3] for one in known]
    assert all(one[4] for one in known)
    assert {one[2] for one in names} <= {"SUCCESS", "INVALID_VALUE"}


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "no error"), (1, "invalid argument"), (2, "out of memory"), (201, "invalid device context"),
     (801, "operation not supported"), (999, "unknown error")],
)  # fmt: skip
def test_the_drivers_words(job: Far, code: int, words: str) -> None:
    assert job(f"cu.cuGetErrorString(cu.CUresult({code}))[1].decode()") == words


def test_a_code_that_is_none(job: Far) -> None:
    job("p = ctypes.c_char_p(b'something')")
    assert job("lib.cuGetErrorName(998, ctypes.byref(p))") == 1
    assert job("p.value") is None
    assert job("lib.cuGetErrorString(0, None)") == 1


# --- what there is not -----------------------------------------------------------------------------------------------


def test_what_is_not_implemented_says_so_and_is_logged_once(job: Far, node: Any) -> None:
    job("ok(cu.cuInit(0))")
    for _ in range(3):
        assert job("lib.cuArrayCreate_v2(None, None)") == 801
    assert job("lib.cuMulticastCreate(None, None)") == 801
    said = [line.split(" ", 2)[2] for line in node.log() if "not implemented" in line]
    assert said == ["cuArrayCreate_v2 is not implemented", "cuMulticastCreate is not implemented"]


def test_there_are_no_private_tables(job: Far) -> None:
    job("table = ctypes.c_void_p(1)")
    assert job("lib.cuGetExportTable(ctypes.byref(table), bytes(16))") == 500
    assert job("table.value") is None
    assert job("lib.cuGetExportTable(None, bytes(16))") == 1


def test_without_a_node_there_is_a_version_and_no_device() -> None:
    code = (
        "import ctypes; lib = ctypes.CDLL(%r); v = ctypes.c_int();"
        "print(lib.cuDriverGetVersion(ctypes.byref(v)), v.value, lib.cuInit(0), lib.cuDeviceGetCount(ctypes.byref(v)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code % str(SOFTGPU / "libcuda.so.1")],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert told.stdout.split() == ["0", "13000", "100", "3"], told.stderr

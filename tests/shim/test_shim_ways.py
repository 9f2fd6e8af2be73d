"""Every way to the driver leads through the shim, whatever is asked for arrives as it was meant, and where there is no
driver the shim is not there either."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from soft_node import Node

from limosa.native import build
from limosa.native.build import SHIM, SHIM_LIBRARY, build_shim, compilers
from limosa_softgpu.build import SOFTGPU

DRIVER = "libcuda.so.1"


def under(library: Path, *argv: object, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run(
        [str(word) for word in argv],
        env={**os.environ, "LD_PRELOAD": str(library), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout


# --- where there is no driver ----------------------------------------------------------------------------------------


def test_programs_without_a_driver_are_as_they_were(library: Path) -> None:
    argv = ["ls", "-l", str(SOFTGPU)]
    bare = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert under(library, *argv) == bare


def test_nobody_finds_a_driver_that_is_not_there(library: Path) -> None:
    code = """
import ctypes
program = ctypes.CDLL(None)
for name in ("cuInit", "cuMemAlloc_v2", "cuGetProcAddress", "cuNoSuchFunction"):
    try:
        getattr(program, name)
    except AttributeError as error:
        print("undefined symbol" in str(error))
print(program.getpid() > 0, [line for line in open("/proc/self/maps") if "libcuda" in line])
import os
print(len(os.listdir("/proc/self/task")))
"""
    assert under(library, sys.executable, "-c", code) == "True\n" * 4 + "True []\n1\n"


def test_a_program_that_calls_without_a_driver_is_told_so(library: Path, tmp_path: Path) -> None:
    """A weak reference finds the shim, and the shim says that there is no GPU."""
    source = tmp_path / "weak.c"
    source.write_text(
        "__attribute__((weak)) int cuInit(unsigned); __attribute__((weak)) int cuCtxSynchronize(void);"
        'int printf(const char *, ...);\nint main(void) { printf("%d %d\\n", cuInit(0), cuCtxSynchronize()); }\n'
    )
    subprocess.run([*compilers()[0], "-w", "-o", tmp_path / "weak", source], check=True)
    assert under(library, tmp_path / "weak") == "100 100\n"


@pytest.mark.root
def test_a_call_before_there_is_a_driver_decides_nothing(
    new_node: Callable[..., Node], library: Path, tmp_path: Path
) -> None:
    """The program loads one later, and has it."""
    source = tmp_path / "later.c"
    source.write_text(
        "#include <dlfcn.h>\n#include <stdio.h>\n__attribute__((weak)) int cuInit(unsigned);"
        "__attribute__((weak)) int cuMemAlloc_v2(unsigned long *, unsigned long);\n"
        "int main(void) { unsigned long p; int before = cuInit(0), alloc = cuMemAlloc_v2(&p, 4 << 20);"
        'void *library = dlopen("libcuda.so.1", RTLD_NOW); int (*init)(unsigned) = dlsym(library, "cuInit");'
        'void *context; int (*retain)(void **, int) = dlsym(library, "cuDevicePrimaryCtxRetain");'
        'int (*current)(void *) = dlsym(library, "cuCtxSetCurrent"); int after = init(0);'
        'retain(&context, 0); current(context); printf("%d %d %d %d\\n", before, alloc, after,'
        "cuMemAlloc_v2(&p, 4 << 20)); }\n"
    )
    subprocess.run([*compilers()[0], "-w", "-o", tmp_path / "later", source, "-ldl"], check=True)
    said = new_node().run([tmp_path / "later"], env={"LD_PRELOAD": str(library)})
    assert said.stdout == "100 100 0 0\n"


@pytest.mark.root
def test_switched_off_it_hands_everything_on(new_node: Callable[..., Node], library: Path) -> None:
    """A legacy handle, too, is the driver's own."""
    code = """
from cuda.bindings import driver as cu
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
print(int(cu.cuIpcGetMemHandle(cu.cuMemAlloc(4 << 20)[1])[0]))
"""
    said = new_node().python(code, env={"LD_PRELOAD": str(library), "LIMOSA_SHIM": "off"})
    assert said.stdout == "0\n"


# --- built ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_is_built_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    assert (build_shim(tmp_path) or "").partition(":")[0].endswith("false")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("CC")
    assert build_shim(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [SHIM_LIBRARY]
    before = (tmp_path / SHIM_LIBRARY).stat().st_mtime_ns
    assert build_shim(tmp_path) is None
    assert (tmp_path / SHIM_LIBRARY).stat().st_mtime_ns == before


def test_what_it_exports_is_the_driver_and_what_finds_it(library: Path) -> None:
    ran = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in ran.stdout.splitlines()}
    lists = (build.DRIVER / "functions.list").read_text() + (SHIM / "newer.list").read_text()
    listed = set(re.findall(r"^FUNCTION\((\w+)", lists, flags=re.M))
    nccl = (build.NCCL / "functions.list").read_text()
    listed |= set(re.findall(r"^NCCL\((\w+), (?!PASS)", nccl, flags=re.M))
    clock = {name for name in names if name.startswith("_ZNSt") and "steady" in name} | {"pthread_cond_clockwait"}
    assert len(clock) == 3
    assert names - listed == {"dlsym", "dlvsym", "mmap", "mmap64", "syscall"} | clock
    assert listed - names == set()


# --- every way --------------------------------------------------------------------------------------------------------


def lines(said: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in said.splitlines())


@pytest.mark.root
def test_every_way_leads_through_it(
    new_node: Callable[..., Node], library: Path, compiled: Callable[..., Path]
) -> None:
    node = new_node()
    program = compiled("ways.c", SOFTGPU / DRIVER, "-ldl")
    bare = lines(node.run([program]).stdout)
    ours = lines(node.run([program], env={"LD_PRELOAD": str(library)}).stdout)
    assert len(bare) > 30
    assert bare["linked"] == f"cuMemAlloc_v2 in {DRIVER}"
    assert {way: found.replace(DRIVER, SHIM_LIBRARY) for way, found in bare.items()} == ours
    found = {way: value for way, value in ours.items() if "NoSuch" not in way and " in " in value}
    assert found["one cuMemcpyHtoD 13000 2"].startswith("cuMemcpyHtoD_v2_ptds in")
    assert all(value.endswith(SHIM_LIBRARY) for value in found.values())
    assert len(found) > 24
    assert ours["rand"] == "1 1"
    assert ours["qsort"] == "1"


BINDINGS = """
from cuda.bindings import driver as cu
import ctypes
from cuda.bindings._internal import driver as internal
found = internal._inspect_function_pointers()
spans = {}
for line in open("/proc/self/maps"):
    span, _, _, _, _, *path = line.split()
    start, end = (int(one, 16) for one in span.split("-"))
    if path:
        spans[range(start, end)] = path[0]
print({path.rpartition("/")[2] for address in found.values() if address for s, path in spans.items() if address in s})
print(sum(1 for address in found.values() if address) > 300)
"""


@pytest.mark.root
def test_cuda_bindings_find_nothing_else(new_node: Callable[..., Node], library: Path) -> None:
    said = new_node().python(
        "from cuda.bindings import driver\ndriver.cuInit(0)\n" + BINDINGS, env={"LD_PRELOAD": str(library)}
    )
    assert said.stdout == f"{{'{SHIM_LIBRARY}'}}\nTrue\n"


# --- what is handed on ------------------------------------------------------------------------------------------------


def test_arguments_arrive(library: Path, compiled: Callable[..., Path], tmp_path: Path) -> None:
    """Eleven of them, a structure by value, floating point; also of a function that is newer than the list."""
    driver = compiled("fake_driver.c", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", name=DRIVER)
    program = compiled("arguments.c", "-ldl", "-lpthread")
    said = under(library, program, env={"LD_LIBRARY_PATH": str(driver.parent)}).split()
    assert said == ["506", "3019", "41", "52", "11", "42", str(library)]

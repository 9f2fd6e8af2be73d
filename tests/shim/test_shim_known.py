"""One list says what becomes of each function of the driver; programs ask for none about memory that is not in it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from soft_node import Node
from softgpu.far import Far

from limosa.native.build import DRIVER, SHIM, compilers
from limosa.parking.protocol import Role
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

sys.path.insert(0, str(Path(__file__).parent))
import known

DEMO = Path(known.__file__).parents[2] / "src" / "limosa" / "demo"
LISTED = re.compile(r"^FUNCTION\((\w+), \w+, \d+, [01], (\w+)\)", re.M)


def roles() -> dict[str, Role]:
    return {name: Role[role] for name, role in LISTED.findall((DRIVER / "functions.list").read_text())}


def test_every_function_of_memory_has_a_role() -> None:
    found = roles()
    assert len(found) > 600
    assert [name for name, role in found.items() if role is Role.PASS and known.MEMORY.search(name)] == []


def test_what_is_own_is_defined_and_nothing_else(library: Path, tmp_path: Path) -> None:
    """The hooks come from the list: what it calls OWN is defined in another file than theirs."""
    made = tmp_path / "hooks.o"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-fPIC", "-mgeneral-regs-only", "-c"]
    subprocess.run([*compilers()[0], *flags, "-o", made, SHIM / "hooks.c"], check=True, timeout=120)
    said = subprocess.run(["nm", "--defined-only", "-g", made], capture_output=True, text=True, check=True).stdout
    hooks = {line.split()[-1] for line in said.splitlines() if re.search(r" [TW] cu[A-Z]", line)}
    assert hooks == {name for name, role in roles().items() if role is not Role.OWN}


@pytest.mark.root
def test_what_was_called_and_asked_for(job: Far, shim: Shim) -> None:
    job("large(4); ok(cu.cuMemAllocAsync(4096, 0)); handle = ok(cu.cuMemCreate(4 * MIB, made_of(), 0))")
    called = {one.name: one for one in shim.called()}
    for name in ("cuInit", "cuMemAlloc_v2", "cuMemAllocAsync", "cuMemCreate", "cuCtxSetCurrent", "cuGetProcAddress_v2"):
        assert called[name].called, name
    assert called["cuMemAlloc_v2"].role is Role.OWN
    assert called["cuCtxSetCurrent"].role is Role.PASS
    assert called["cuMulticastBindMem"].asked_for
    assert not called["cuMulticastBindMem"].called
    assert len(called) > 300, "the bindings ask for everything that they have"
    assert known.not_known(called.values()) == []


@pytest.mark.root
def test_a_function_that_nobody_knows_is_told(
    new_node: Callable[..., Node], library: Path, compiled: Callable[..., Path], tmp_path: Path
) -> None:
    """A driver of the year after has a way to allocate; the program that finds it is told to use it."""
    newer = compiled("newer_driver.c", f"-I{SHIM}", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", name="libcuda.so.1")
    program = compiled("newer.c", "-ldl")
    env = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(newer.parent)}
    job = subprocess.Popen([program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout
        assert job.stdout.readline() == "42\n"
        with Shim(Identity.of(job.pid)) as shim:
            assert known.not_known(shim.called()) == ["cuMemAllocOfTheYearAfter"]
    finally:
        job.communicate("", timeout=60)


@pytest.mark.root
@pytest.mark.parametrize(
    ("by_handle", "by_address"),
    [
        ("cuMulticastBindMem_v2", "cuMulticastBindAddr_v2"),
        ("cuLogicalEndpointBindMem", "cuLogicalEndpointBindAddr"),
    ],
)
def test_newer_functions_get_the_drivers_handles(
    library: Path, compiled: Callable[..., Path], by_handle: str, by_address: str
) -> None:
    """The program has a number of ours; what it binds is seen by somebody from then on, so it stays."""
    newer = compiled("newer_driver.c", f"-I{SHIM}", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", name="libcuda.so.1")
    program = compiled("binding.c", f"-I{SHIM}", "-ldl")
    env = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(newer.parent)}
    argv = [program, by_handle, by_address]
    job = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout
        assert job.stdout.readline() == "0 0 0\n"
        with Shim(Identity.of(job.pid)) as shim:
            assert [piece.shared for piece in shim.memories()] == [True]
            assert known.not_known(shim.called()) == []
    finally:
        job.communicate("", timeout=60)


@pytest.mark.timeout(300)
def test_children_find_functions_that_nobody_knows(library: Path, compiled: Callable[..., Path]) -> None:
    """Forked while another thread is looking one up."""
    newer = compiled("newer_driver.c", f"-I{SHIM}", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", name="libcuda.so.1")
    program = compiled("looking.c", "-ldl", "-lpthread")
    env = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(newer.parent)}
    ran = subprocess.run([program], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "400 of 400\n"

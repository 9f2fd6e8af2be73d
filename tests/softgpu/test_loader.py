"""The dynamic loader in a node: the cache that leads it to the software GPU's libraries, whatever its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from softgpu.far import Far

from limosa_softgpu import build, loader

LDCONFIG = "/sbin/ldconfig"
OURS = {name: str(build.SOFTGPU / name) for name in build.LIBRARIES}
LOADED = (
    "import ctypes, sys\n"
    "library = ctypes.CDLL(sys.argv[1])\n"
    "print({line.split()[-1] for line in open('/proc/self/maps') if '/' + sys.argv[1] in line})\n"
)


def said(cache: Path | None = None) -> list[str]:
    """What glibc's own tool reads in a cache, in its order."""
    argv = [LDCONFIG, "-p", *(["-C", cache] if cache else [])]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    return [line.strip() for line in ran.stdout.splitlines() if "=>" in line]


@pytest.fixture
def machines() -> bytes:
    return Path(loader.CACHE).read_bytes()


def test_it_reads_what_the_loaders_own_tool_reads(machines: bytes) -> None:
    found = [(os.fsdecode(entry.name), os.fsdecode(entry.path)) for entry in loader.entries(machines)]
    assert found == [(line.split()[0], line.split("=> ")[1]) for line in said()]
    assert len(found) > 10


def test_all_is_there_again_and_ours_in_its_place(machines: bytes, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(loader.with_libraries(machines, OURS))
    found, before = said(tmp_path / "cache"), said()
    assert [line for line in found if not line.startswith(build.LIBRARIES)] == before
    mine = {line.split()[0]: line for line in found if line.startswith(build.LIBRARIES)}
    assert {name: line.split("=> ")[1] for name, line in mine.items()} == OURS
    kind = next(line for line in before if line.startswith("libc.so.6")).split(" (")[1].split(")")[0].split(",")[:2]
    assert all(" (" + ",".join(kind) in line for line in mine.values())


def test_another_driver_is_listed_no_more(machines: bytes) -> None:
    real = loader.with_libraries(machines, OURS)
    other = loader.with_libraries(real, dict.fromkeys(OURS, sys.executable))
    found = {os.fsdecode(entry.path) for entry in loader.entries(other) if os.fsdecode(entry.name) in OURS}
    assert found == {sys.executable}
    assert len(loader.entries(other)) == len(loader.entries(real))


def test_names_are_sorted_as_the_loader_searches() -> None:
    names = [b"libb.so", b"liba.so.10", b"liba.so.9.1", b"liba.so.9", b"liba.so", b"lib"]
    assert sorted(set(names), key=loader._order, reverse=True) == names


@pytest.mark.parametrize("cut", [0, 30, 200])
def test_what_is_no_cache(machines: bytes, cut: int) -> None:
    with pytest.raises(ValueError, match="cache"):
        loader.entries(machines[:cut])


def test_a_library_for_a_machine_that_the_cache_has_nothing_for(machines: bytes, tmp_path: Path) -> None:
    odd = tmp_path / "libodd.so"
    odd.write_bytes(b"\x7fELF\x01\x01" + b"\xee" * 60)
    with pytest.raises(ValueError, match="this kind of machine"):
        loader.with_libraries(machines, {"libodd.so": str(odd)})


@pytest.mark.parametrize("name", [name for real in build.LIBRARIES for name in (real, real.rpartition(".")[0])])
def test_a_program_without_an_environment_finds_them(node: Any, name: str) -> None:
    real = next(build.SOFTGPU / real for real in build.LIBRARIES if real.startswith(name))
    told = node.run(["env", "-i", sys.executable, "-c", LOADED, name]).stdout
    assert told == f"{{{str(real)!r}}}\n"


def test_outside_the_cache_is_what_it_was(machines: bytes, node: Any) -> None:
    node.run(["env", "-i", sys.executable, "-c", LOADED, "libcuda.so.1"])
    assert Path(loader.CACHE).read_bytes() == machines
    assert not [line for line in said() if line.startswith("libcuda.so.1") and str(build.SOFTGPU) in line]


def test_a_job_without_an_environment_computes(node: Any) -> None:
    job = Far(node, "env", "-i")
    assert "LD_LIBRARY_PATH" not in job("dict(os.environ)")
    job("start(); plain(2, 1)")
    assert job("intact()")


def test_the_drivers_of_the_machines_cache_are_covered(tmp_path: Path) -> None:
    """A real driver that lies where only the cache says so."""
    real = tmp_path / "odd place" / "libcuda.so.580.1"
    real.parent.mkdir()
    real.write_text("the real one")
    (real.parent / "libcuda.so.1").symlink_to(real.name)
    cache = tmp_path / "cache"
    listing = {"libcuda.so.1": str(real.parent / "libcuda.so.1")}
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from limosa_softgpu import build, kernel, loader, node\n"
        "kernel.unshare(kernel.CLONE_NEWNS)\n"
        "kernel.mount('none', '/', None, kernel.MS_REC | kernel.MS_PRIVATE)\n"
        "loader._machine = lambda path: b'all alike'\n"
        f"Path({str(cache)!r}).write_bytes(loader.with_libraries(Path(loader.CACHE).read_bytes(), {listing!r}))\n"
        f"kernel.mount({str(cache)!r}, loader.CACHE, None, kernel.MS_BIND)\n"
        f"assert loader.listed(['libcuda.so.1']) == {list(listing.items())!r}\n"
        "node._cover_driver([])\n"
        f"assert os.path.samefile({str(real)!r}, build.SOFTGPU / 'libcuda.so.1')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert real.read_text() == "the real one"

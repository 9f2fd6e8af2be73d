"""What the frameworks that are installed here call of NCCL is in the shim's list: a name that it lacks is refused."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from limosa.native import build

pytestmark = pytest.mark.gpu_core

LIST = Path(build.__file__).parent / "nccl" / "functions.list"
FUNCTION = re.compile("nccl[A-Z]")
BY_NAME = re.compile(rb"\0(nccl(?:[A-Z][a-z0-9]+)+)(?=\0)")
"""How XLA names what it looks for once NCCL is there; types are named in the same way."""
TYPES = re.compile(r"nccl(Comm|UniqueId|Config|DataType|RedOp|Result|Window|Team|DevComm\w*)(_t)?")


def listed() -> set[str]:
    return set(re.findall(r"^NCCL\((\w+)", LIST.read_text(), re.M))


def libraries(*patterns: str) -> Iterator[Path]:
    for folder in filter(None, dict.fromkeys(sys.path)):
        for pattern in patterns:
            yield from Path(folder).glob(pattern)


def linked(path: Path) -> set[str]:
    said = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
    return {name for line in said.splitlines() if FUNCTION.match(name := line.split()[-1].partition("@")[0])}


def named(path: Path) -> set[str]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = {name.decode() for name in BY_NAME.findall(text)}
    return {name for name in found if not TYPES.fullmatch(name)}


def test_what_pytorch_and_cupy_are_linked_with() -> None:
    called = {path.name: linked(path) for path in libraries("torch/lib/libtorch*.so", "cupy*/**/*nccl*.so")}
    assert "ncclAllReduce" in set().union(*called.values())
    assert {name: unknown for name, there in called.items() if (unknown := there - listed())} == {}


def test_what_xla_looks_for() -> None:
    called = {path.name: named(path) | linked(path) for path in libraries("jax_plugins/xla_cuda*/*.so")}
    assert "ncclAllReduce" in set().union(*called.values())
    assert {name: unknown for name, there in called.items() if (unknown := there - listed())} == {}

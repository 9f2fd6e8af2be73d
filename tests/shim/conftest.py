"""Fixtures of the shim's tests: jobs under it on software GPUs, and its own end of the control socket."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from soft_node import Node, several
from softgpu.far import Far

from limosa.native.build import SHIM, SHIM_LIBRARY, build_shim, compilers
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

HERE = Path(__file__).parent
# What jobs here have beside far.py: results of calls by name, and threads that work without an end.
WORDS = (HERE / "words.py").read_text()


@pytest.fixture(scope="session")
def library() -> Path:
    """The shim, built from its source as it is."""
    assert build_shim() is None
    return SHIM / SHIM_LIBRARY


@pytest.fixture
def new_node() -> Iterator[Callable[..., Node]]:
    """Starts nodes: ``new_node(gpus=4, memory="128MiB")``; ended at the end of the test."""
    with several(Node) as start:
        yield start


@pytest.fixture
def node(new_node: Callable[..., Node]) -> Node:
    """A node of two GPUs."""
    return new_node(memory="256MiB")


@pytest.fixture
def start(node: Node, library: Path) -> Callable[..., Far]:
    """Starts a job with a context: ``start()``, ``start(shim=False)``, ``start(LIMOSA_SHIM_WITHOUT="ranks")``."""

    def go(*prefix: str, shim: bool = True, device: int = 0, **more: str) -> Far:
        far = Far(node, *prefix, env={"LD_PRELOAD": str(library), **more} if shim else None)
        far(WORDS)
        far(f"start({device})")
        return far

    return go


@pytest.fixture
def job(start: Callable[..., Far]) -> Far:
    """A job under the shim."""
    return start()


@pytest.fixture
def shim(job: Far) -> Iterator[Shim]:
    """The job's control socket."""
    with Shim(Identity.of(job.pid)) as shim:
        yield shim


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Path]:
    """Compiles a program of this folder: ``compiled("ways.c", "-lfoo")``."""

    def go(source: str, *options: object, name: str = "program") -> Path:
        program = tmp_path / name
        argv: list[Any] = [*compilers()[0], "-std=gnu11", "-O2", "-w", "-o", program, HERE / source, *options]
        subprocess.run([str(word) for word in argv], check=True, timeout=60)
        return program

    return go

"""Fixtures of the tests on software GPUs: ``node`` (two small GPUs), ``new_node`` (any), processes in them.

A module whose jobs need more than ``far.py`` gives them says so in ``WORDS``, source for the far end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from soft_node import Node, several
from softgpu.far import Far


@pytest.fixture
def new_node() -> Iterator[Callable[..., Node]]:
    """Starts nodes: ``new_node(gpus=4, memory="128MiB")``; ended at the end of the test."""
    with several(Node) as start:
        yield start


@pytest.fixture
def node(new_node: Callable[..., Node]) -> Node:
    """A node of two GPUs with 64 MiB each."""
    return new_node()


@pytest.fixture
def start(node: Node, request: pytest.FixtureRequest) -> Callable[..., Far]:
    """Starts jobs: ``start()``, ``start(device=1)``."""

    def go(device: int = 0) -> Far:
        far = Far(node)
        far(f"start({device})")
        far(request.module.WORDS)
        return far

    return go


@pytest.fixture
def job(start: Callable[..., Far]) -> Far:
    """A process with a context."""
    return start()


@pytest.fixture
def other(start: Callable[..., Far]) -> Far:
    """Another one."""
    return start()


@pytest.fixture(scope="module")
def rules_job(request: pytest.FixtureRequest) -> Iterator[Far]:
    """One job for many questions: on a GPU that their leavings do not fill."""
    with Node(memory="1GiB") as node:
        far = Far(node)
        far("start()")
        far(request.module.WORDS)
        yield far


@pytest.fixture
def controller(node: Node) -> Far:
    """A process that has initialised the driver and has no context."""
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    return controller

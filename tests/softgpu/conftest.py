"""Fixtures of the tests on software GPUs: ``node`` (two small GPUs) and ``new_node`` (any)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from soft_node import Node

from limosa.native.build import build_softgpu


@pytest.fixture(scope="session", autouse=True)
def libraries() -> None:
    """Build both libraries where they are missing or older than their source."""
    assert build_softgpu() is None


@pytest.fixture
def new_node(libraries: None) -> Iterator[Callable[..., Node]]:
    """Starts nodes: ``new_node(gpus=4, memory="128MiB")``; ended at the end of the test."""
    if os.geteuid() != 0:
        pytest.skip("a node has mounts of its own, which only root can make")
    nodes: list[Node] = []

    def go(**options: Any) -> Node:
        nodes.append(Node(**options))
        return nodes[-1]

    try:
        yield go
    finally:
        for node in nodes:
            node.close()


@pytest.fixture
def node(new_node: Callable[..., Node]) -> Node:
    """A node of two GPUs with 64 MiB each."""
    return new_node()

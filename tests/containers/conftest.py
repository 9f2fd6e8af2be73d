"""Fixtures of the tests with containers: real runtimes (Debian's own) on a node of software GPUs.

``podman``, ``runc`` and ``containerd`` are runtimes with the tests' image; ``container`` starts one with either of the
first two::

    def test_it(container):                  # runs twice: in podman and in runc
        one = container("/job", 16, gpus=(0,))
        one.goes_on(3)                       # steps that it computes on its GPU
        container.node.limosa("ps")          # the host's view; one.pid is its pid there

All that is started is ended with the test. ``engines`` fetches the programs into build/engines, once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from containers.engines import Engines
from containers.engines import engines as fetch
from containers.images import make_image, make_rootfs
from containers.runtimes import (
    Container,
    Containerd,
    Podman,
    Runc,
    Runtime,
    cgroup_layouts,
    lay_out_cgroups,
    own_cgroups,
)
from soft_node import Node, several

from limosa_softgpu.build import SOFTGPU


@pytest.fixture(scope="session")
def engines() -> Engines:
    """The runtimes' programs."""
    return fetch()


@pytest.fixture(scope="session")
def rootfs(engines: Engines, libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root folder of the image."""
    return make_rootfs(tmp_path_factory.mktemp("image") / "rootfs", engines, SOFTGPU / "libcuda.so.1")


@pytest.fixture(scope="session")
def image(rootfs: Path) -> Path:
    """The image as an archive."""
    return make_image(rootfs.with_name("image.tar"), rootfs)


@pytest.fixture
def new_node() -> Iterator[Callable[..., Node]]:
    """Starts nodes of software GPUs; ended at the end of the test."""
    with several(Node) as start:
        yield start


@pytest.fixture
def node(new_node: Callable[..., Node]) -> Node:
    """A node of two GPUs."""
    made = new_node(gpus=2, memory="256MiB")
    made.warm = True
    return made


@pytest.fixture
def cgroups(node: Node, request: pytest.FixtureRequest) -> Iterator[str]:
    """The version of cgroups that the node shows; a test asks for one by ``indirect`` (cgroup_layouts())."""
    layout = str(getattr(request, "param", cgroup_layouts()[0]))
    with own_cgroups(f"limosa-tests-{os.getpid()}"):
        lay_out_cgroups(node, layout)
        yield layout


@pytest.fixture
def podman(node: Node, cgroups: str, engines: Engines, image: Path, tmp_path: Path) -> Iterator[Podman]:
    """podman with the image in its store."""
    # crun has no way with cgroups of both versions, nor to load its device filter where limits cannot be raised.
    with contextlib.closing(Podman(node, engines, tmp_path / "podman", runtime="runc")) as made:
        made.load(image)
        yield made


@pytest.fixture
def runc(node: Node, cgroups: str, engines: Engines, rootfs: Path, tmp_path: Path) -> Iterator[Runc]:
    """runc with the image's root folder."""
    with contextlib.closing(Runc(node, engines, tmp_path / "runc", rootfs)) as made:
        yield made


@pytest.fixture
def containerd(node: Node, cgroups: str, engines: Engines, image: Path, tmp_path: Path) -> Iterator[Containerd]:
    """containerd with the image in its store."""
    with contextlib.closing(Containerd(node, engines, tmp_path / "containerd")) as made:
        made.load(image)
        yield made


class Start:
    """Starts containers of one runtime."""

    def __init__(self, runtime: Podman | Runc):
        self.runtime: Runtime = runtime
        self.node = runtime.node
        self._start = runtime.start

    def __call__(self, *command: object, **options: Any) -> Container:
        return self._start(*command, **options)


@pytest.fixture(params=["podman", "runc"])
def container(request: pytest.FixtureRequest) -> Start:
    """Starts a container, in one test with podman and in one with runc."""
    return Start(request.getfixturevalue(request.param))


def pytest_configure(config: pytest.Config) -> None:
    """Marks that only these tests have."""
    config.addinivalue_line("markers", "long: with $LIMOSA_LONG_TESTS only (make test-long)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is long is left out elsewhere, and counted as deselected."""
    away = [item for item in items if item.get_closest_marker("long") and not os.environ.get("LIMOSA_LONG_TESTS")]
    if away:
        items[:] = [item for item in items if item not in away]
        config.hook.pytest_deselected(items=away)

"""A job computes on a software GPU in a container of podman and of runc, as it does outside; nothing of it stays."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from containers.engines import Engines
from containers.runtimes import Podman, cgroup_layouts, steps_of

STEPS = 8


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
def test_a_job_computes_in_a_container_what_it_computes_outside(cgroups: str, container: Any, rootfs: Path) -> None:
    one = container("/job", 16, 5, STEPS)
    one.wait_for("done")
    twin = steps_of(container.node.run([rootfs / "job", 16, 5, STEPS]).stdout)
    assert one.steps() == twin
    assert len(set(twin.values())) == STEPS


@pytest.mark.parametrize("cgroups", cgroup_layouts()[:1], indirect=True)
def test_crun_below_podman(cgroups: str, node: Any, engines: Engines, image: Path, tmp_path: Path) -> None:
    with contextlib.closing(Podman(node, engines, tmp_path / "podman", runtime="crun")) as podman:
        podman.load(image)
        podman.start("/job", 16, 5).goes_on()


def test_a_container_has_its_own_pids_mounts_and_cgroup_and_only_its_gpu(container: Any) -> None:
    one = container("/job", 16, 5, gpus=(1,))
    one.goes_on()
    status = Path(f"/proc/{one.pid}/status").read_text().splitlines()
    assert next(line for line in status if line.startswith("NSpid:")).split() == ["NSpid:", str(one.pid), "1"]
    assert one.runtime.parent in Path(f"/proc/{one.pid}/cgroup").read_text()
    seen = one.run("ls", "/dev").stdout.split()
    assert "nvidia1" in seen
    assert "nvidia0" not in seen


def test_nothing_is_left_of_a_container(container: Any) -> None:
    one = container("/job", 16, 5)
    one.goes_on()
    one.remove()
    one.runtime.close()
    assert not one.lives()
    assert one.runtime.parent not in Path("/proc/self/mounts").read_text()
    assert not list(Path("/sys/fs/cgroup").glob(f"**{one.runtime.parent}"))

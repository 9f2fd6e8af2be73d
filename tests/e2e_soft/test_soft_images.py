"""Images of jobs on software GPUs: onto which GPUs they come back, and onto which they do not."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soft_command import Held

from limosa.image import Draft, GpuRecord, JobRecord, Manifest, TreeProcess

pytestmark = pytest.mark.criu

FREE_PID = 4194301  # nobody gets there
REAL = "GPU-6b1fbd7e-0000-1111-2222-333344445555"


@pytest.fixture
def image(node: Any, tmp_path: Path) -> tuple[Any, Any, Path]:
    """A node, a job that has ended, and its image."""
    job = node.job("--mib", 32)
    node.limosa("checkpoint", job.pid, "--output", tmp_path / "image")
    assert not job.alive()
    return node, job, tmp_path / "image"


def test_there_and_back_again(image: tuple[Any, Any, Path]) -> None:
    """Restored onto the other GPU, suspended, resumed, written once more, restored: the memory is what it was."""
    node, job, first = image
    said = node.says(0, "", "restore", first, "--to", 1)
    assert said["pid"] == job.pid
    assert node.where(job) == [1]
    job.goes_on()
    node.limosa("suspend", job.pid)
    assert node.where(job) == []
    node.limosa("resume", job.pid, "--to", 0)
    job.goes_on()
    node.limosa("checkpoint", job.pid, "--output", first.with_name("second"))
    node.limosa("restore", first.with_name("second"))
    assert node.where(job) == [0]
    job.goes_on()
    job.finish()


def test_an_image_says_that_its_gpus_were_software(image: tuple[Any, Any, Path]) -> None:
    node, job, path = image
    said = node.says(0, "", "inspect", path)
    assert said["software_gpu"] is True
    assert [g["name"] for g in said["gpus"]] == ["Soft GPU H200"] * 2
    assert [g["bytes"] >= 32 << 20 for g in said["gpus"]] == [True, False]
    assert "the driver in software" in node.limosa("inspect", path).stdout
    assert node.says(0, "", "verify", path)["ok"] is True
    plan = node.says(0, "", "plan", "restore", path, "--to", "1")
    assert plan["way"] == "driver"
    assert plan["estimate"]["bytes"] > 32 << 20
    del job


def test_it_is_not_restored_without_a_gpu_or_on_real_ones(image: tuple[Any, Any, Path], limosa: Any) -> None:
    node, job, path = image
    outside = limosa("restore", path, "-o", "json", rc=12)
    assert outside.json["error"]["message"] == "the image is from a software GPU, and there are no GPUs here"
    rule = node.switches.add("function=nvmlDeviceGetName every=1 lie=name:NVIDIA-H200")  # NVML tells a real machine
    said = node.says(12, "chip", "restore", path)
    assert said["error"]["message"] == "the image is from a software GPU, and the GPUs here are real"
    node.switches.remove(rule)
    node.limosa("restore", path)
    job.goes_on()
    job.finish()


def test_an_image_of_a_real_gpu_is_not_restored_on_software_ones(node: Any, tmp_path: Path) -> None:
    root = TreeProcess(
        pid=FREE_PID, ppid=1, start_time=990, command=["python"], cuda=True, openable=[REAL], held={REAL: 1 << 20}
    )
    manifest = Manifest(
        created="2026-11-20T10:11:12Z",
        criu="4.0",
        kernel=platform.release(),
        machine=platform.machine(),
        driver="580.159.04",
        job=JobRecord(pid=FREE_PID, uid=os.geteuid()),
        tree=[root],
        gpus=[GpuRecord(index=0, uuid=REAL, name="NVIDIA H200", bytes=1 << 20, memory_total=141 << 30)],
    )
    with Draft.create(tmp_path / "image") as draft:
        (tmp_path / draft.path.name / "criu" / "inventory.img").write_bytes(b"as CRIU has it")
        draft.commit(manifest).close()
    for how in ("restore", "plan"):
        command = ["restore", tmp_path / "image"] if how == "restore" else ["plan", "restore", str(tmp_path / "image")]
        said = node.says(12, "chip", *command)
        reason = (said.get("error") or said)["reasons"][0]
        assert reason["text"] == "the image is from a real GPU, and the GPUs here are software"


def test_another_node_is_another_machine(soft: Callable[..., Any], image: tuple[Any, Any, Path]) -> None:
    """Its GPUs have other UUIDs: where the job goes has to be told; another chip, or less memory, will not do."""
    _, job, path = image
    node = soft()
    said = node.says(2, "invalid-map", "restore", path)
    assert "is not in this machine" in said["error"]["message"]
    node.limosa("restore", path, "--to", 1)
    assert node.where(job) == [1]
    job.goes_on()
    job.finish()


@pytest.mark.parametrize("other", [{"chip": "A100"}, {"memory": "128MiB"}])
def test_another_chip_is_refused(soft: Callable[..., Any], image: tuple[Any, Any, Path], other: dict[str, str]) -> None:
    _, job, path = image
    said = soft(**other).says(12, "chip", "restore", path, "--to", 0)
    assert "Soft GPU" in said["error"]["message"]
    assert not job.alive()


def test_another_driver_version_is_refused_unless_forced(
    soft: Callable[..., Any], image: tuple[Any, Any, Path]
) -> None:
    _, job, path = image
    node = soft(driver="590.10.01")
    node.says(12, "driver-version", "restore", path, "--to", 0)
    node.limosa("restore", path, "--to", 0, "--force=driver-version")
    job.goes_on()
    job.finish()


def test_no_room_for_it_is_seen_before_anything_starts(image: tuple[Any, Any, Path]) -> None:
    node, job, path = image
    with node.switches.fill(0, leave=16 << 20):
        node.says(14, "gpu-room", "restore", path)
        assert not job.alive()
        node.limosa("restore", path, "--to", 1)
    job.goes_on()
    job.finish()


def test_room_that_is_lost_while_criu_works_ends_the_tree_again(image: tuple[Any, Any, Path]) -> None:
    """Restore is not called where the memory does not fit: the image is the copy, and comes back later."""
    node, job, path = image
    held = Held(node, "cuCheckpointProcessGetState", "restore", path)
    with node.switches.fill(0, leave=16 << 20):
        said = node.judge(node.ends(held.let_go()), 14, "no-room-on-gpu")
    assert "is the copy" in said["error"]["hint"]
    job.until_gone()
    node.limosa("restore", path)
    job.goes_on()
    job.finish()

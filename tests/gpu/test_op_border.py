"""Images stay on their side of the border between real GPUs and software ones, on a machine that has both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from op_support import limits, on, reaped
from soft_node import Node

from limosa_softgpu.build import build_softgpu

pytestmark = [*limits, pytest.mark.gpu_core]

JOB = Path(__file__).parents[1] / "e2e_soft" / "job.py"


@pytest.fixture
def node():
    assert build_softgpu() is None
    with Node(gpus=2, memory="256MiB") as made:
        yield made


def test_an_image_of_real_gpus_is_not_restored_on_software_ones(stamping, do, node, tmp_path):
    victim = stamping("--gb", 0.1)
    reaped(victim)
    do("checkpoint", victim.pid, "--output", tmp_path / "image")
    said = node.limosa("restore", tmp_path / "image", "-o", "json", rc=12).json
    assert said["error"]["id"] == "chip"
    assert said["error"]["message"] == "the image is from a real GPU, and the GPUs here are software"
    do("restore", tmp_path / "image")  # where it is at home it comes back
    assert on(victim.pid) == {0}
    victim.goes_on()
    victim.finish()


def test_an_image_of_software_gpus_is_not_restored_on_real_ones(do, node, tmp_path):
    folder, image = tmp_path / "job", tmp_path / "image"
    folder.mkdir()
    start_job = ("run", "--name", "soft", "--detach", "--log", folder / "log", "--", sys.executable, JOB, folder)
    node.limosa(*start_job, "--mib", 16)
    node.python(f"import time\nwhile 'READY' not in open({str(folder / 'log')!r}).read(): time.sleep(0.05)")
    written = node.limosa("checkpoint", "soft", "--output", image, "-o", "json").json
    said = do("restore", image, rc=12)
    assert said["error"]["id"] == "chip"
    assert said["error"]["message"] == "the image is from a software GPU, and the GPUs here are real"
    assert do("inspect", image)["software_gpu"]
    restored = node.limosa("restore", image, "-o", "json").json
    assert restored["id"] == written["id"]
    (folder / "stop").touch()

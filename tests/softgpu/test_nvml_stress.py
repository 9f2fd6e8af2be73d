"""NVML from many threads under the sanitizers, while the node changes below them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from limosa.native.build import SOFTGPU, compilers

HERE = Path(__file__).parent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress(new_node: Any, tmp_path: Path, sanitizer: str) -> None:
    node = new_node()
    program = tmp_path / "stress"
    files = [HERE / "stress_nvml.c", *(SOFTGPU / name for name in ("nvml.c", "nvml_stubs.c", "node.c", "fault.c"))]
    flags = ["-std=gnu11", "-g", "-O1", f"-fsanitize={sanitizer}", f"-I{SOFTGPU}"]
    subprocess.run([*compilers()[0], *flags, "-o", program, *files, "-lpthread"], check=True, timeout=90)
    job = node.popen([program, 4, 3], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while job.poll() is None:
        rule = node.switches.add("function=nvmlDeviceGet* result=NVML_ERROR_NO_DATA every=1")
        node.switches.lose(1)
        with node.switches.fill(0, 2 << 20):
            node.switches.remove(rule)
            node.switches.mps()
            node.switches.lose(1, False)
        node.switches.mps(False)
    assert job.communicate(timeout=10) == ("done\n", "")
    assert job.returncode == 0

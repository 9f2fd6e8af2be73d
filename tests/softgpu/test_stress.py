"""Many threads at once, under the sanitizers: no race, no wrong access, no leak, and every answer right."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from limosa.native.build import compilers
from limosa_softgpu.build import SOFTGPU, sources_of

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(180)
Build = Callable[..., Path]


def can(argv: list[str], scratch: Path) -> bool:
    """Whether a compiler makes programs with these options."""
    probe = scratch / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    return (
        subprocess.run([*argv, probe, "-o", scratch / "probe"], capture_output=True, timeout=60, check=False).returncode
        == 0
    )


@pytest.fixture(params=["thread", "address,undefined"])
def build(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """``build("stress_work.c", "libcuda.so.1")``: a program and the libraries that it calls, all with a sanitizer."""
    monkeypatch.setenv("TSAN_OPTIONS", f"suppressions={HERE / 'tsan.supp'}")
    flags = ["-std=gnu11", "-g", "-O1", f"-fsanitize={request.param}", f"-I{SOFTGPU}"]
    compile_ = next(([*name, *flags] for name in compilers() if can([*name, *flags], tmp_path)), None)
    assert compile_, f"no C compiler here has -fsanitize={request.param}: install gcc"

    def go(source: str, *names: str) -> Path:
        # A library of its name: a process without one is no target for a checkpoint. The run path comes before the
        # node's.
        program, libraries = tmp_path / "stress", [tmp_path / name for name in names]
        for library in libraries:
            argv = ["-fPIC", "-shared", f"-Wl,-soname,{library.name}", "-o", library, *sources_of(library.name)]
            subprocess.run([*compile_, *argv, "-lpthread"], check=True, timeout=120)
        argv = ["-o", program, HERE / source, *libraries, f"-Wl,-rpath,{tmp_path},--disable-new-dtags", "-lpthread"]
        subprocess.run([*compile_, *argv], check=True, timeout=120)
        return program

    return go


def test_work(new_node: Any, build: Build) -> None:
    """Streams, events, copies, kernels, contexts, children, and a gate that closes meanwhile."""
    answer = new_node(memory="512MiB").run([build("stress_work.c", "libcuda.so.1"), 4, 20], limit=120)
    assert (answer.stdout, answer.stderr) == ("done\n", "")


def test_memory(new_node: Any, build: Build) -> None:
    """Memory of every kind, while children are forked and checkpoints come."""
    answer = new_node(memory="512MiB").run([build("stress_memory.c", "libcuda.so.1"), 4, 10, 5], limit=120)
    assert (answer.stdout, answer.stderr) == ("done\n", "")


def test_nccl(new_node: Any, build: Build) -> None:
    """Ranks as threads: communicators that come and go, split, are watched, and aborted in the middle."""
    argv = [build("stress_nccl.c", "libnccl.so.2", "libcuda.so.1"), 3, 6]
    answer = new_node(gpus=3, memory="128MiB").run(argv, limit=120)
    assert (answer.stdout, answer.stderr) == ("done\n", "")


def test_nvml(new_node: Any, build: Build) -> None:
    """NVML, while the node changes below its callers."""
    node = new_node()
    argv = [build("stress_nvml.c", "libnvidia-ml.so.1"), 4, 3]
    job = node.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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

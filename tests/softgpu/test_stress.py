"""Many threads at once, under the sanitizers: no race, no wrong access, no leak, and every answer right."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from limosa.native.build import compilers
from limosa_softgpu.build import SOFTGPU, sources_of

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(900)  # one builds for the others
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
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Build:
    """``build("stress_work.c", "libcuda.so.1")``: a program and the libraries that it calls, all with a sanitizer.

    A library is built once in a run: it takes most of the time.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    shared /= "sanitized-" + request.param.partition(",")[0]
    shared.mkdir(exist_ok=True)
    flags = ["-std=gnu11", "-g", "-O1", f"-fsanitize={request.param}", f"-I{SOFTGPU}"]
    compile_ = next(([*name, *flags] for name in compilers() if can([*name, *flags], tmp_path)), None)
    assert compile_, f"no C compiler here has -fsanitize={request.param}: install gcc"

    def library(name: str) -> Path:
        # A library of its name: a process without one is no target for a checkpoint.
        made, new = shared / name, shared / f"{name}.new"
        with FileLock(shared / f"{name}.lock"):
            if not made.exists():
                argv = ["-fPIC", "-shared", f"-Wl,-soname,{name}", "-o", new, *sources_of(name)]
                subprocess.run([*compile_, *argv, "-lpthread"], check=True, timeout=280)
                new.rename(made)
        return made

    def go(source: str, *names: str) -> Path:
        program, libraries = tmp_path / "stress", [library(name) for name in names]
        # The run path comes before the node's.
        argv = ["-o", program, HERE / source, *libraries, f"-Wl,-rpath,{shared},--disable-new-dtags", "-lpthread"]
        subprocess.run([*compile_, *argv], check=True, timeout=280)
        return program

    return go


@pytest.fixture(autouse=True)
def known_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of the sanitizer's is no fault of ours."""
    monkeypatch.setenv("TSAN_OPTIONS", f"suppressions={HERE / 'tsan.supp'}")


def test_work(new_node: Any, build: Build) -> None:
    """Streams, events, copies, kernels, contexts, children, and a gate that closes meanwhile."""
    answer = new_node(memory="512MiB").run([build("stress_work.c", "libcuda.so.1"), 4, 20], limit=280)
    assert (answer.stdout, answer.stderr) == ("done\n", "")


def test_memory(new_node: Any, build: Build) -> None:
    """Memory of every kind, while children are forked and checkpoints come."""
    answer = new_node(memory="512MiB").run([build("stress_memory.c", "libcuda.so.1"), 4, 10, 5], limit=280)
    assert (answer.stdout, answer.stderr) == ("done\n", "")


def test_nccl(new_node: Any, build: Build) -> None:
    """Ranks as threads: communicators that come and go, split, are watched, and aborted in the middle."""
    argv = [build("stress_nccl.c", "libnccl.so.2", "libcuda.so.1"), 3, 6]
    answer = new_node(gpus=3, memory="128MiB").run(argv, limit=280)
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
    assert job.communicate(timeout=60) == ("done\n", "")
    assert job.returncode == 0

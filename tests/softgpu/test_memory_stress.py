"""Memory from many threads, while children are forked and checkpoints come, under the sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from limosa.native.build import SOFTGPU, compilers

HERE = Path(__file__).parent


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress(new_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sanitizer: str) -> None:
    monkeypatch.setenv("TSAN_OPTIONS", f"suppressions={HERE / 'tsan.supp'}")
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    build = [*compilers()[0], "-std=gnu11", "-g", "-O1", f"-fsanitize={sanitizer}", f"-I{SOFTGPU}"]
    try:
        subprocess.run([*build, probe, "-o", tmp_path / "probe"], capture_output=True, check=True, timeout=60)
    except subprocess.CalledProcessError:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    # A library of its name: a process without one is no target for a checkpoint. The run path comes before the node's.
    library, program = tmp_path / "libcuda.so.1", tmp_path / "stress"
    sources = [path for path in sorted(SOFTGPU.glob("*.c")) if not path.name.startswith("nvml")]
    subprocess.run(
        [*build, "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, *sources, "-lpthread"],
        check=True,
        timeout=120,
    )
    subprocess.run(
        [*build, "-o", program, HERE / "stress_memory.c", library, f"-Wl,-rpath,{tmp_path},--disable-new-dtags"],
        check=True,
        timeout=120,
    )
    answer = new_node(memory="512MiB").run([program, 4, 10, 5], limit=120)
    assert (answer.stdout, answer.stderr) == ("done\n", "")

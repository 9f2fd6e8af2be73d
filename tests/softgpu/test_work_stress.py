"""Many threads at once, under the sanitizers: no race, no wrong access, no leak, and every answer right."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from limosa.native.build import SOFTGPU, compilers

HERE = Path(__file__).parent


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress(new_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sanitizer: str) -> None:
    monkeypatch.setenv("TSAN_OPTIONS", f"suppressions={HERE / 'tsan.supp'}")
    compiler = compilers()[0]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    flags = ["-std=gnu11", "-g", "-O1", f"-fsanitize={sanitizer}"]
    try:
        subprocess.run(
            [*compiler, *flags, probe, "-o", tmp_path / "probe"], capture_output=True, check=True, timeout=60
        )
    except subprocess.CalledProcessError:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    sources = [path for path in sorted(SOFTGPU.glob("*.c")) if path.name != "nvml.c"]
    program = tmp_path / "stress"
    subprocess.run(
        [*compiler, *flags, f"-I{SOFTGPU}", "-o", program, HERE / "stress_work.c", *sources, "-lpthread"],
        check=True,
        timeout=300,
    )
    node = new_node(memory="512MiB")
    answer = node.run([program, 4, 20], limit=120)
    assert answer.stdout == "done\n"
    assert answer.stderr == ""

"""Makes ``chunk_hash.ptx`` of ``chunk_hash.cu``; needs nvcc.

    python src/limosa/native/hash/make_ptx.py

The compiler writes the newest PTX version that it knows and the oldest GPU that it still serves. The kernel uses
neither: both lines are lowered, so that drivers from before the compiler, and GPUs of compute capability 7.0, take it.
The first line names the source that it was made of, the second one what follows it.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE, PTX = HERE / "chunk_hash.cu", HERE / "chunk_hash.ptx"
ARCHITECTURE = "compute_75"
VERSION, TARGET = "6.4", "sm_70"


def stamp() -> str:
    """Return the line that says what source the PTX is of."""
    digest = hashlib.sha256(SOURCE.read_bytes() + (HERE / "chunk_hash.h").read_bytes()).hexdigest()
    return f"// chunk_hash.cu and chunk_hash.h, SHA-256 {digest}\n"


def belongs(text: str) -> bool:
    """Return whether a PTX is of the source as it is, and nothing in it has been changed since it was made."""
    first, _, rest = text.partition("\n")
    second, _, body = rest.partition("\n")
    return first + "\n" == stamp() and second + "\n" == _sealed(body)


def _sealed(body: str) -> str:
    return f"// what follows, SHA-256 {hashlib.sha256(body.encode()).hexdigest()}\n"


def compile_ptx(nvcc: str = "nvcc") -> str:
    """Return the PTX of the source as it is.

    Raises:
        OSError: there is no nvcc.
        subprocess.CalledProcessError: it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / PTX.name
        argv = [nvcc, "-ptx", f"-arch={ARCHITECTURE}", "-O3", "-o", str(made), str(SOURCE)]
        subprocess.run(argv, check=True, timeout=120)
        text = made.read_text()
    text = re.sub(r"(?m)^\.version .*$", f".version {VERSION}", text)
    text = re.sub(r"(?m)^\.target .*$", f".target {TARGET}", text)
    return stamp() + _sealed(text) + text


if __name__ == "__main__":
    PTX.write_text(compile_ptx(*sys.argv[1:]))

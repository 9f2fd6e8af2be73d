"""Compiles the software GPU: with everything else that is in C, or when ``limosa softgpu`` is first used.

As in :mod:`limosa.native.build`, nothing that has to be installed is imported here.
"""

from __future__ import annotations

from pathlib import Path

from limosa.native.build import DRIVER, FLAGS, HASH, compile_library

SOFTGPU = Path(__file__).resolve().parent / "native"
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2")
_NVML_ONLY = ("nvml.c", "nvml_stubs.c")
_NODE = ("node.c", "fault.c")
# A product and a sum are rounded each by itself on every machine: tests compare bits. cuGetProcAddress answers with the
# library's own functions, whoever else has some of their names (-Bsymbolic-functions), as a driver does.
_FLAGS = [*FLAGS, "-pthread", "-ffp-contract=off", "-Wl,-Bsymbolic-functions"]


def build_softgpu(folder: Path = SOFTGPU) -> str | None:
    """Compile the libraries of the software GPU, each unless it is newer than its sources and all headers.

    Args:
        folder: where they are put, each whole or not at all.

    Returns:
        None where all are there afterwards, else why not.
    """
    headers = [*SOFTGPU.glob("*.h"), *SOFTGPU.glob("*.list"), *SOFTGPU.glob("api/*.h"), *SOFTGPU.glob("nccl/*.h")]
    shared = [DRIVER / "functions.list", *HASH.glob("*.h")]
    problems = []
    for name in LIBRARIES:
        sources = sources_of(name)
        flags = [*_FLAGS, f"-Wl,-soname,{name}"]
        problem = compile_library(folder / name, sources, flags, [*sources, *headers, *shared], ["-ldl", "-lrt"])
        if problem is not None:
            problems.append(problem)
    return "\n".join(problems) or None


def sources_of(library: str) -> list[Path]:
    """Return the source files of one of the software GPU's libraries."""
    if library == "libnvidia-ml.so.1":
        return [SOFTGPU / name for name in _NVML_ONLY + _NODE]
    if library == "libnccl.so.2":
        return [*sorted((SOFTGPU / "nccl").glob("*.c")), *(SOFTGPU / name for name in _NODE)]
    own = sorted(path for path in SOFTGPU.glob("*.c") if path.name not in _NVML_ONLY)
    return [*own, HASH / "chunk_hash.c"]  # a built-in kernel of it

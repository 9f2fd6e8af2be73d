"""Compiles what is in C: the CRIU plugin and the software GPU. A build hook of hatchling, and a program for a checkout.

``python native_build.py`` builds beside the source. With no C compiler the rest of Limosa is installed all the same:
only jobs whose children inherited GPU device mappings cannot be checkpointed then, and there is no ``limosa softgpu``;
``limosa doctor`` says so.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program, where hatchling need not be
    BuildHookInterface = None  # type: ignore[assignment,misc]

NATIVE = Path(__file__).resolve().parent / "src" / "limosa" / "native"
FOLDER = NATIVE / "criu"
SOURCE = FOLDER / "limosa_plugin.c"
LIBRARY = FOLDER / "limosa_plugin.so"
# No fortified or checked variants of C library functions: the plugin is loaded by CRIU builds with other C libraries.
FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE"]

SOFTGPU = NATIVE / "softgpu"
SOFTGPU_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
NVML_ONLY = ("nvml.c", "nvml_stubs.c")
NVML_SHARED = ("node.c", "fault.c")
# A product and a sum are rounded each by itself on every machine: tests compare bits.
SOFTGPU_FLAGS = [*FLAGS, "-pthread", "-ffp-contract=off"]


def compilers() -> list[list[str]]:
    """Return the C compilers to try: $CC alone where it is set, else those found."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        return [chosen]
    return [[name] for name in ("cc", "gcc", "clang", "tcc") if shutil.which(name)]


def build(library: Path = LIBRARY) -> str | None:
    """Compile the plugin, unless what is there is newer than its source.

    Args:
        library: where it is put, whole or not at all.

    Returns:
        None where the plugin is there afterwards, else why not.
    """
    return _compile(library, [SOURCE], FLAGS, [SOURCE])


def build_softgpu(folder: Path = SOFTGPU) -> str | None:
    """Compile the software GPU's two libraries, each unless it is newer than its sources and all headers.

    Args:
        folder: where they are put, each whole or not at all.

    Returns:
        None where both are there afterwards, else why not.
    """
    headers = [*SOFTGPU.glob("*.h"), *SOFTGPU.glob("*.list"), *SOFTGPU.glob("api/*.h")]
    problems = []
    for name in SOFTGPU_LIBRARIES:
        sources = sorted(path for path in SOFTGPU.glob("*.c") if _belongs(path.name, name))
        problem = _compile(
            folder / name, sources, [*SOFTGPU_FLAGS, f"-Wl,-soname,{name}"], [*sources, *headers], ["-ldl", "-lrt"]
        )
        if problem is not None:
            problems.append(problem)
    return "\n".join(problems) or None


def _belongs(source: str, library: str) -> bool:
    """Return whether a source file is part of a library."""
    if library == "libnvidia-ml.so.1":
        return source in NVML_ONLY + NVML_SHARED
    return source not in NVML_ONLY


def _compile(
    library: Path, sources: Sequence[Path], flags: Sequence[str], depends: Sequence[Path], links: Sequence[str] = ()
) -> str | None:
    """Compile sources with the first compiler that can; None where the library is there afterwards, else why not."""
    if library.exists() and library.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in depends):
        return None
    problem = "there is no C compiler (cc, gcc, clang or tcc)"
    for compiler in compilers():
        new = library.with_name(f"{library.name}.{os.getpid()}")
        try:
            argv = [*compiler, *flags, "-o", str(new), *map(str, sources), *links]
            done = subprocess.run(argv, capture_output=True, timeout=120, check=False)
            if done.returncode == 0:
                new.replace(library)
                return None
            problem = f"{compiler[0]}: {done.stderr.decode(errors='replace').strip()}"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"{compiler[0]}: {error}"
        finally:
            new.unlink(missing_ok=True)
    return problem


if BuildHookInterface is not None:

    class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """What hatchling calls (pyproject.toml names this file)."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Build, and put what was built into a wheel (it is ignored by git, which hatchling follows)."""
            built: list[Path] = []
            for what, problem, libraries in (
                ("the CRIU plugin", build(), [LIBRARY]),
                ("the software GPU", build_softgpu(), [SOFTGPU / name for name in SOFTGPU_LIBRARIES]),
            ):
                if problem is None:
                    built += libraries
                else:
                    self.app.display_warning(f"{what} was not built: {problem}")
            if built and self.target_name == "wheel":
                # What is compiled runs on this kind of machine only.
                build_data["pure_python"] = False
                build_data["infer_tag"] = False
                build_data["tag"] = f"py3-none-{_platform()}"
                if version != "editable":
                    for library in built:
                        build_data["force_include"][str(library)] = str(library.relative_to(NATIVE.parents[1]))


def _platform() -> str:
    """Return the wheel tag of this machine."""
    import sysconfig

    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def main() -> int:
    """Build beside the source; say what happened; 0 also without a compiler."""
    for what, problem, place in (
        ("the CRIU plugin", build(), LIBRARY),
        ("the software GPU", build_softgpu(), SOFTGPU),
    ):
        sys.stderr.write(f"{place}: built\n" if problem is None else f"{what} was not built: {problem}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles what is in C: the CRIU plugin and the software GPU. A build hook of hatchling, and a program for a checkout.

``python native_build.py`` builds beside the source. With no C compiler the rest of Limosa is installed all the same:
only jobs whose children inherited GPU device mappings cannot be checkpointed then, and ``limosa doctor`` says so;
``limosa softgpu`` builds what it needs when it is first used.
"""

from __future__ import annotations

import importlib.util
import sys
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


def _softgpu() -> Any:
    """Return ``limosa.softgpu.build``, by its file: nothing that Limosa needs is installed yet when it is built."""
    path = NATIVE.parent / "softgpu" / "build.py"
    spec = importlib.util.spec_from_file_location("limosa_softgpu_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


softgpu = _softgpu()
SOFTGPU: Path = softgpu.SOURCE
build_softgpu = softgpu.build
compilers = softgpu.compilers


def build(library: Path = LIBRARY) -> str | None:
    """Compile the plugin, unless what is there is newer than its source.

    Args:
        library: where it is put, whole or not at all.

    Returns:
        None where the plugin is there afterwards, else why not.
    """
    problem: str | None = softgpu.compile_library(library, [SOURCE], FLAGS, [SOURCE])
    return problem


if BuildHookInterface is not None:

    class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """What hatchling calls (pyproject.toml names this file)."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Build, and put what was built into a wheel (it is ignored by git, which hatchling follows)."""
            built: list[Path] = []
            for what, problem, libraries in (
                ("the CRIU plugin", build(), [LIBRARY]),
                ("the software GPU", build_softgpu(), [SOFTGPU / name for name in softgpu.LIBRARIES]),
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

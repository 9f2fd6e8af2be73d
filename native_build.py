"""Compiles what is in C: the CRIU plugin. A build hook of hatchling, and a program for an editable checkout.

``python native_build.py`` builds beside the source. With no C compiler the rest of Limosa is installed all the same:
only jobs whose children inherited GPU device mappings cannot be checkpointed then, and ``limosa doctor`` says so.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program, where hatchling need not be
    BuildHookInterface = None  # type: ignore[assignment,misc]

FOLDER = Path(__file__).resolve().parent / "src" / "limosa" / "native" / "criu"
SOURCE = FOLDER / "limosa_plugin.c"
LIBRARY = FOLDER / "limosa_plugin.so"
# No fortified or checked variants of C library functions: the plugin is loaded by CRIU builds with other C libraries.
FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE"]


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
    if library.exists() and library.stat().st_mtime_ns > SOURCE.stat().st_mtime_ns:
        return None
    problem = "there is no C compiler (cc, gcc, clang or tcc)"
    for compiler in compilers():
        new = library.with_name(f"{library.name}.{os.getpid()}")
        try:
            done = subprocess.run(
                [*compiler, *FLAGS, "-o", str(new), str(SOURCE)], capture_output=True, timeout=120, check=False
            )
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
            """Build, and put the plugin into a wheel (``*.so`` is ignored by git, which hatchling follows)."""
            problem = build()
            if problem is not None:
                self.app.display_warning(f"the CRIU plugin was not built: {problem}")
                return
            if self.target_name == "wheel":
                # What is compiled runs on this kind of machine only.
                build_data["pure_python"] = False
                build_data["infer_tag"] = False
                build_data["tag"] = f"py3-none-{_platform()}"
                if version != "editable":
                    place = LIBRARY.relative_to(FOLDER.parents[2])
                    build_data["force_include"][str(LIBRARY)] = str(place)


def _platform() -> str:
    """Return the wheel tag of this machine."""
    import sysconfig

    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def main() -> int:
    """Build beside the source; say what happened; 0 also without a compiler."""
    problem = build()
    sys.stderr.write(f"{LIBRARY}: built\n" if problem is None else f"the CRIU plugin was not built: {problem}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

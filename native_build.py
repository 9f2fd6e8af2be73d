"""Compiles what is in C: the CRIU plugin, the software GPU, the libraries that jobs run under and the hash of chunks.

A build hook of hatchling, and a program for a checkout.

``python native_build.py`` builds beside the source. With no C compiler the rest of Limosa is installed all the same:
only jobs whose children inherited GPU device mappings cannot be checkpointed then, and ``limosa doctor`` says so;
``limosa softgpu`` builds what it needs when it is first used, and jobs take the driver's way without the shim.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program, where hatchling need not be
    BuildHookInterface = None  # type: ignore[assignment,misc]

NATIVE = Path(__file__).resolve().parent / "src" / "limosa" / "native"
sys.path.insert(0, str(NATIVE.parents[1]))  # nothing of Limosa is installed yet when it is built
try:
    from limosa.native import build as native
finally:
    del sys.path[0]
PARTS = (
    ("the CRIU plugin", native.build_plugin, native.CRIU, [native.PLUGIN]),
    ("the software GPU", native.build_softgpu, native.SOFTGPU, native.LIBRARIES),
    ("the shim", native.build_shim, native.SHIM, [native.SHIM_LIBRARY]),
    ("what keeps GPUs out of a job's sight", native.build_sight, native.SIGHT, [native.SIGHT_LIBRARY]),
    ("the hash of chunks", native.build_hash, native.HASH, [native.HASH_LIBRARY]),
)

if BuildHookInterface is not None:

    class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """What hatchling calls (pyproject.toml names this file)."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Build, and put what was built into a wheel (it is ignored by git, which hatchling follows)."""
            built: list[Path] = []
            for what, build, folder, libraries in PARTS:
                problem = build()
                if problem is None:
                    built += [folder / name for name in libraries]
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
    for what, build, folder, _ in PARTS:
        problem = build()
        sys.stderr.write(f"{folder}: built\n" if problem is None else f"{what} was not built: {problem}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

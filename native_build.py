"""Compiles what is in C: the CRIU plugin, the software GPU, the libraries that jobs run under and the hash of chunks.

A build hook of hatchling, and a program for a checkout.

``python native_build.py`` builds beside the source. With no C compiler the rest of Limosa is installed all the same:
only jobs whose children inherited GPU device mappings cannot be checkpointed then, and ``limosa doctor`` says so;
``limosa softgpu`` builds what it needs when it is first used, and jobs take the driver's way without the shim.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program, where hatchling need not be
    BuildHookInterface = None  # type: ignore[assignment,misc]

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "src"
sys.path.insert(0, str(SOURCE))  # nothing of Limosa is installed yet when it is built
try:
    from limosa.native import build as native
    from limosa.native import wheel_tag
    from limosa_softgpu import build as softgpu
finally:
    del sys.path[0]
PARTS = (
    (native.build_plugin, native.CRIU, [native.PLUGIN], "jobs with forked GPU children cannot be checkpointed"),
    (softgpu.build_softgpu, softgpu.SOFTGPU, softgpu.LIBRARIES, "there are no software GPUs"),
    (native.build_shim, native.SHIM, [native.SHIM_LIBRARY], "jobs move at the driver's speed"),
    (native.build_sight, native.SIGHT, [native.SIGHT_LIBRARY], "limosa run --gpus hides nothing"),
    (native.build_preload_hook, native.CDI, [native.PRELOAD_HOOK], "limosa cdi cannot bring the shim into containers"),
    (native.build_hash, native.HASH, [native.HASH_LIBRARY], "device memory is not copied while a job runs"),
)
RELEASE = bool(os.environ.get("LIMOSA_RELEASE"))
MAN = ROOT / "build" / "man"

if BuildHookInterface is not None:

    class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """What hatchling calls (pyproject.toml names this file)."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Build, and put what was built into a wheel (it is ignored by git, which hatchling follows)."""
            if self.target_name != "wheel":
                return
            built, problems = build()
            if problems:
                self.app.display_warning(without(problems))
            if RELEASE and (found := [*problems, *wheel_tag.too_new(built)]):
                raise SystemExit(f"this wheel is no release: {'; '.join(found)}")
            if built:
                # What is compiled runs on this kind of machine only, with a C library that is new enough.
                build_data["pure_python"] = False
                build_data["infer_tag"] = False
                build_data["tag"] = f"py3-none-{wheel_tag.platform_tag(built)}"
            if version != "editable":
                for library, place in built.items():
                    build_data["force_include"][str(library)] = place
                for page in sorted(MAN.glob("*.1")):
                    build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"


def build() -> tuple[dict[Path, str], list[str]]:
    """Compile all parts; a release in a folder of its own, as nothing that lies beside the source is one.

    Returns:
        Library → its place in a wheel, and what could not be compiled.
    """
    built: dict[Path, str] = {}
    problems = []
    for compile_, folder, libraries, lacking in PARTS:
        made = ROOT / "build" / "release" / folder.name if RELEASE else folder
        made.mkdir(parents=True, exist_ok=True)
        if RELEASE:
            made.chmod(0o755)
        problem = compile_(made)
        if problem is None:
            built |= {made / name: str((folder / name).relative_to(SOURCE)) for name in libraries}
        else:
            problems.append(f"{lacking} ({problem.splitlines()[0]})")
    return built, problems


def without(problems: list[str]) -> str:
    """Say once, in words, what Limosa lacks that could not be compiled."""
    if all(native.NO_COMPILER in problem for problem in problems):
        problems = [problem.partition(" (")[0] for problem in problems]
        return (
            f"there is no C compiler, so what is in C was not built. Limosa works, but: {'; '.join(problems)}. "
            "Install gcc, then type: limosa doctor --fix"
        )
    return f"not all that is in C was built. Limosa works, but: {'; '.join(problems)}. limosa doctor says more"


def main() -> int:
    """Build beside the source; say what happened; 0 also without a compiler."""
    built, problems = build()
    for library in built:
        sys.stderr.write(f"{library}: built\n")
    if problems:
        sys.stderr.write(without(problems) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the CRIU plugin where pip could not (no compiler at the time); ``limosa doctor --fix`` calls it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import limosa

FOLDER = Path(limosa.__file__).parent / "native" / "criu"
# As in native_build.py, which is not part of the package.
FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE"]


def build(folder: Path = FOLDER) -> str:
    """Compile ``limosa_plugin.c`` beside its source, whole or not at all.

    Args:
        folder: that of the source.

    Returns:
        "" where the plugin is there afterwards, else why not.
    """
    source, library = folder / "limosa_plugin.c", folder / "limosa_plugin.so"
    if not source.is_file():
        return f"{source} is missing: Limosa is not installed whole"
    if not os.access(folder, os.W_OK):
        return f"{folder} cannot be written to by uid {os.geteuid()}"
    chosen = shlex.split(os.environ.get("CC", ""))
    compilers = [chosen] if chosen else [[name] for name in ("cc", "gcc", "clang", "tcc") if shutil.which(name)]
    problem = "there is no C compiler (cc, gcc, clang or tcc)"
    for compiler in compilers:
        new = library.with_name(f"{library.name}.{os.getpid()}")
        try:
            argv = [*compiler, *FLAGS, "-o", str(new), str(source)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode == 0:
                new.replace(library)
                return ""
            problem = f"{compiler[0]}: {(done.stderr.strip().splitlines() or ['?'])[0]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"{compiler[0]}: {error}"
        finally:
            new.unlink(missing_ok=True)
    return problem

"""Whether what was compiled can be loaded here: a wheel may come from a system with a newer C library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from limosa import start

_TRY = """
import ctypes, os, sys
for path in sys.argv[1:]:
    try:
        ctypes.CDLL(path, os.RTLD_LAZY)
        print("ok")
    except OSError as error:
        print(str(error).replace("\\n", " "))
"""


def load_problems(libraries: Sequence[Path]) -> dict[Path, str]:
    """Return those that cannot be loaded, each with what the loader says; a process of its own tries them.

    Root loads none that others can change, not to try it either: those are told as such.

    Raises:
        OSError: one is not there.
    """
    found = {path: text for path in libraries if (text := start.changeable(path))}
    libraries = [path for path in libraries if path not in found]
    if not libraries:
        return found
    argv = [sys.executable, "-I", "-S", "-c", _TRY, *map(str, libraries)]
    try:
        ran = start.run(argv, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**found, libraries[0]: str(error)}
    said = ran.stdout.decode(errors="replace").splitlines()
    said += [f"loading it ends a process ({ran.returncode})"] * (len(said) < len(libraries))
    return found | {path: text for path, text in zip(libraries, said, strict=False) if text != "ok"}

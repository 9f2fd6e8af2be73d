"""Which systems a wheel fits: by the newest symbol of the C library that what was compiled needs (PEP 600)."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from limosa import start

NEWEST = (2, 17)
"""What a release may need: CentOS 7 has it, the oldest system of CUDA 12's images."""

_ALLOWED = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux[-a-z0-9_]*\.so\.\d+")
_NEEDED = re.compile(r"^\s*NEEDED\s+(\S+)", re.MULTILINE)
_VERSION = re.compile(r"GLIBC_(\d+)\.(\d+)")
# What a loader has to be able to do: versions that are no numbers.
_ABI = re.compile(r"\bGLIBC_(?:ABI_\w+|PRIVATE)\b")
_ABIS = {"GLIBC_ABI_DT_RELR": (2, 36)}
_PACKED = re.compile(r"^\s*(?:RELR|0x0*24)\s", re.MULTILINE)  # not always with the version above


def needs(library: Path) -> tuple[tuple[int, int], list[str]] | None:
    """Return the newest version of the C library that a library refers to, and what it needs that is not part of it.

    Returns:
        None where that cannot be seen (there is no objdump, or no library).
    """
    objdump = start.program("objdump")
    if objdump is None:
        return None
    ran = start.run([objdump, "-p", str(library.resolve())], capture_output=True, timeout=60)
    if ran.returncode:
        return None
    told = ran.stdout.decode(errors="replace")
    versions = [(int(a), int(b)) for a, b in _VERSION.findall(told)]
    abis = set(_ABI.findall(told))
    abis |= {"GLIBC_ABI_DT_RELR"} if _PACKED.search(told) else set()
    versions += [_ABIS[name] for name in abis if name in _ABIS]
    strangers = [name for name in _NEEDED.findall(told) if not _ALLOWED.fullmatch(name)] + sorted(abis - {*_ABIS})
    return max(versions, default=(2, 17)), strangers


def platform_tag(libraries: Iterable[Path]) -> str:
    """Return the platform part of a wheel's name: manylinux where it is known what it needs, else this very system."""
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    found = [needs(library) for library in libraries]
    if not here.startswith("linux_") or any(one is None or one[1] for one in found):
        return here
    major, minor = max([(2, 17), *(one[0] for one in found if one is not None)])
    return f"manylinux_{major}_{minor}_{here.removeprefix('linux_')}"


def too_new(libraries: Iterable[Path]) -> list[str]:
    """Return, in words, what of these a release must not need."""
    told = []
    for library in libraries:
        found = needs(library)
        if found is None:
            told.append(f"{library.name}: there is no objdump to look with")
        elif found[1]:
            told.append(f"{library.name} needs {', '.join(found[1])}")
        elif found[0] > NEWEST:
            told.append(f"{library.name} needs the C library {found[0][0]}.{found[0][1]}")
    return told

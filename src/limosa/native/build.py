"""Compiles what is in C. ``native_build.py`` does so when Limosa is installed or checked out.

Where there was no compiler then, ``limosa doctor --fix`` does it later. Nothing that has to be installed is imported
here: a build has nothing but Python and a C compiler. The software GPU is compiled by ``limosa_softgpu.build``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from limosa import start

CRIU = Path(__file__).resolve().parent / "criu"
PLUGIN = "limosa_plugin.so"
DRIVER = CRIU.with_name("driver")
NCCL = CRIU.with_name("nccl")
SHIM = CRIU.with_name("shim")
SHIM_LIBRARY = "liblimosa_shim.so"
SIGHT = CRIU.with_name("sight")
SIGHT_LIBRARY = "liblimosa_sight.so"
HASH = CRIU.with_name("hash")
HASH_LIBRARY = "liblimosa_hash.so"
CDI = CRIU.with_name("cdi")
PRELOAD_HOOK = "preload_hook"
FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
# No fortified or checked variants of C library functions: the plugin is loaded by CRIU builds with other C libraries.
_PLUGIN_FLAGS = [*FLAGS, "-U_FORTIFY_SOURCE"]
# Hooks hand on what they do not know: floating point registers must come through them untouched.
_SHIM_FLAGS = [*(flag for flag in FLAGS if not flag.startswith("-std")), "-std=c11", "-D_GNU_SOURCE", "-pthread"]
_SIGHT_FLAGS = [*FLAGS, "-std=c11", "-D_GNU_SOURCE", "-U_FORTIFY_SOURCE"]
_HASH_FLAGS = [*FLAGS, "-O3", "-DHASH_LIBRARY"]
# A program, with a start of its own where that of the C library would ask for a new one.
_HOOK_FLAGS = [*(flag for flag in FLAGS if flag not in ("-fPIC", "-shared")), "-fPIE", "-pie", "-U_FORTIFY_SOURCE"]
_STARTS = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
# What is compiled here is loaded with other C libraries: a wheel's in other systems, the shim in containers. So all of
# it asks for old symbols only; the functions of threads are those that lie in libpthread and libdl on older systems.
_OLD_HEADER = CRIU.with_name("old_glibc.h")
_OLD_LINKS = ["-Wl,--no-as-needed", "-l:libpthread.so.0", "-l:libdl.so.2", "-Wl,--as-needed"]
_OLD_RELOCATIONS = "-Wl,-z,nopack-relative-relocs"  # the packed ones are not known before 2.36
_MODE = 0o755
_HOOKS = "hooks.c"
_HOOKS_FLAGS = ["-mgeneral-regs-only"]


NO_COMPILER = "there is no C compiler (cc, gcc, clang or tcc)"


def compilers() -> list[list[str]]:
    """Return the C compilers to try: $CC alone where it is set, else those found."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        found = start.program(chosen[0])
        return [[found, *chosen[1:]]] if found else []
    return [[found] for name in ("cc", "gcc", "clang", "tcc") if (found := start.program(name))]


def build_plugin(folder: Path = CRIU) -> str | None:
    """Compile the CRIU plugin, unless it is newer than its sources.

    Args:
        folder: where it is put, whole or not at all.

    Returns:
        None where it is there afterwards, else why not.
    """
    sources = [CRIU / "limosa_plugin.c", CRIU / "locks.c", CRIU / "guard.c"]
    return compile_library(folder / PLUGIN, sources, _PLUGIN_FLAGS, [*sources, *CRIU.glob("*.h")])


def build_shim(folder: Path = SHIM) -> str | None:
    """Compile the shim, unless it is newer than its sources and the lists of the driver's and NCCL's functions.

    Args:
        folder: where it is put, whole or not at all.

    Returns:
        None where it is there afterwards, else why not.
    """
    hooks = SHIM / _HOOKS
    sources = sorted(path for path in SHIM.glob("*.c") if path != hooks)
    lists = [*SHIM.glob("*.list"), DRIVER / "functions.list", NCCL / "functions.list"]
    depends = [*sources, hooks, *SHIM.glob("*.h"), *lists]
    apart = [(hooks, _HOOKS_FLAGS)]
    return compile_library(folder / SHIM_LIBRARY, sources, _SHIM_FLAGS, depends, ["-ldl"], apart=apart)


def build_sight(folder: Path = SIGHT) -> str | None:
    """Compile the library that keeps GPUs out of a job's sight, unless it is newer than its source.

    Args:
        folder: where it is put, whole or not at all.

    Returns:
        None where it is there afterwards, else why not.
    """
    source = SIGHT / "sight.c"
    return compile_library(folder / SIGHT_LIBRARY, [source], _SIGHT_FLAGS, [source])


def build_hash(folder: Path = HASH) -> str | None:
    """Compile the hash of chunks for the host, unless it is newer than its source.

    Args:
        folder: where it is put, whole or not at all.

    Returns:
        None where it is there afterwards, else why not.
    """
    source = HASH / "chunk_hash.c"
    return compile_library(folder / HASH_LIBRARY, [source], _HASH_FLAGS, [source, *HASH.glob("*.h")])


def build_preload_hook(folder: Path = CDI) -> str | None:
    """Compile the hook that keeps an image's own list of preloaded libraries, unless it is newer than its source.

    Args:
        folder: where it is put, whole or not at all.

    Returns:
        None where it is there afterwards, else why not.
    """
    source = CDI / f"{PRELOAD_HOOK}.c"
    start_version = _STARTS.get(os.uname().machine) if _is_glibc() else None
    own_start = ["-nostartfiles", f'-DLIMOSA_OWN_START="{start_version}"'] if start_version else []
    return compile_library(folder / PRELOAD_HOOK, [source], [*_HOOK_FLAGS, *own_start], [source])


def compile_library(
    library: Path,
    sources: Sequence[Path],
    flags: Sequence[str],
    depends: Sequence[Path],
    links: Sequence[str] = (),
    *,
    apart: Sequence[tuple[Path, Sequence[str]]] = (),
) -> str | None:
    """Compile sources with the first compiler that can, unless the library is newer than what it depends on.

    Args:
        library: what is made.
        sources: what it is made from.
        flags: options for all of it.
        depends: files that it has to be newer than.
        links: what comes last on the command line.
        apart: sources with more options, compiled each by itself.

    Returns:
        None where the library is there afterwards, else why not.
    """
    missing = [path for path in depends if not path.is_file()]
    if missing or not depends:
        return f"{library.name}: its source is missing ({', '.join(map(str, missing))}): Limosa is not installed whole"
    if library.exists() and library.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in depends):
        if library.stat().st_uid == os.geteuid() and library.stat().st_mode & 0o022:  # built so by an older version
            library.chmod(_MODE)
        return None
    if not os.access(library.parent, os.W_OK):
        return f"{library.parent} cannot be written to by uid {os.geteuid()}"
    problem = NO_COMPILER
    given = flags, links
    for compiler, old in _tries():
        flags, links = _for_old_systems(*given) if old else given
        new = library.with_name(f"{library.name}.{os.getpid()}")
        objects = [new.with_name(f"{new.name}.{source.stem}.o") for source, _ in apart]
        commands = [
            [*compiler, *(flag for flag in flags if flag != "-shared"), *more, "-c", "-o", str(made), str(source)]
            for made, (source, more) in zip(objects, apart, strict=True)
        ]
        commands.append([*compiler, *flags, "-o", str(new), *map(str, sources), *map(str, objects), *links])
        try:
            for argv in commands:
                done = start.run(argv, capture_output=True, timeout=120)
                if done.returncode:
                    if old or problem == NO_COMPILER:  # what a second try says is of less use
                        problem = f"{compiler[0]}: {done.stderr.decode(errors='replace').strip()}"
                    break
            else:
                new.chmod(_MODE)  # the compiler asks the umask; root loads it later
                new.replace(library)
                return None
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"{compiler[0]}: {error}"
        finally:
            for path in (new, *objects):
                path.unlink(missing_ok=True)
    return problem


def _tries() -> list[tuple[list[str], bool]]:
    """Return the compilers, each with whether to compile for older systems: a release must, others try to."""
    old = [(compiler, True) for compiler in compilers()]
    return old if os.environ.get("LIMOSA_RELEASE") else [*old, *((compiler, False) for compiler in compilers())]


def _for_old_systems(flags: Sequence[str], links: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return options and what is linked, so that the library loads with older C libraries as well."""
    made = [*(f for f in flags if f != "-D_GNU_SOURCE"), "-D_GNU_SOURCE=", "-include", str(_OLD_HEADER)]
    return made, [*links, _OLD_RELOCATIONS, *(_OLD_LINKS if _is_glibc() and "-pthread" in flags else [])]


def _is_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):
        return False

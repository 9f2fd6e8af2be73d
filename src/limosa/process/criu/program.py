"""A CRIU on this machine: how it is started, where it came from, what belongs to it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import threading
from pathlib import Path

import msgspec

from limosa import start
from limosa.errors import NoWorkingCriu

PLUGIN = "limosa_plugin.so"
VERSIONS_FILE = "VERSIONS"  # in a private folder: one line "package version" for each package
_LOADERS = "usr/lib*/ld-linux-*.so.*"
_LIBRARIES = ("usr/lib/{arch}-linux-gnu", "lib/{arch}-linux-gnu", "usr/lib")


class Criu(msgspec.Struct, frozen=True):
    """A CRIU that may be started.

    Attributes:
        argv: what to start, before CRIU's own arguments (with a private folder: its loader first).
        version: e.g. "4.2.1".
        private: whether it lies in a private folder of ours.
        plugin_dir: the folder of Limosa's plugin (``criu -L``), or None where it was not built.
        nft: how to start ``nft``, or None where there is none.
        path: the program file (for messages and for what identifies the build).
        network_lock: how CRIU keeps packets away from connected sockets while it works: "nftables" or "skip",
            as the trial found.
    """

    argv: list[str]
    version: str
    private: bool = False
    plugin_dir: str | None = None
    nft: list[str] | None = None
    path: str = ""
    network_lock: str = "nftables"

    @property
    def asks_retry(self) -> bool:
        """Whether this CRIU hands plugins a place for "ask me again" (after 4.2; ``native/criu/DESIGN.md``)."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2]) > (4, 2)


def plugin_dir() -> str | None:
    """Return the folder of Limosa's CRIU plugin where it has been built, else None."""
    place = Path(__file__).parents[2] / "native" / "criu"
    return str(place) if start.loadable(place / PLUGIN) else None


def from_folder(place: Path) -> Criu:
    """Return the CRIU of a private folder (:mod:`limosa.process.criu.fetch` makes them).

    Args:
        place: the folder.

    Raises:
        NoWorkingCriu: it lacks CRIU, the loader or a library.
    """
    place = place.absolute()
    program = next((path for path in (place / "usr/sbin/criu", place / "usr/bin/criu") if path.is_file()), None)
    machine = os.uname().machine
    loaders = [
        path
        for pattern in (f"usr/lib/{machine}-linux-gnu/ld-linux-*.so.*", _LOADERS, "lib*/ld-linux-*.so.*")
        for path in sorted(place.glob(pattern))
        if path.is_file()
    ]
    if program is None or not loaders:
        raise NoWorkingCriu(detail=f"{place} is not a folder with CRIU, its libraries and their loader")
    libraries = [str(place / name.format(arch=machine)) for name in _LIBRARIES]
    start = [str(loaders[0]), "--inhibit-cache", "--library-path", ":".join(filter(os.path.isdir, libraries))]
    nft = next((path for path in (place / "usr/sbin/nft", place / "sbin/nft") if path.is_file()), None)
    argv = [*start, str(program)]
    return Criu(
        argv=argv,
        version=_version(argv),
        private=True,
        plugin_dir=plugin_dir(),
        nft=[*start, str(nft)] if nft else system_nft(),
        path=str(program),
    )


def from_program(path: str) -> Criu:
    """Return a CRIU that the system's own loader starts.

    Args:
        path: the program file.

    Raises:
        NoWorkingCriu: it cannot be started or is not CRIU.
    """
    path = os.path.abspath(path)
    return Criu(argv=[path], version=_version([path]), plugin_dir=plugin_dir(), nft=system_nft(), path=path)


def system_program(name: str) -> str | None:
    """Find a program of the system, in the folders for administration too, which a user's PATH may lack."""
    return start.program(name)


def system_nft() -> list[str] | None:
    """Return how to start the system's ``nft``, or None where it has none."""
    path = system_program("nft")
    return [path] if path else None


def build_identity(criu: Criu) -> str:
    """Return what tells one build of CRIU from another: version, and place, size and time of its file.

    A private folder counts with its ``VERSIONS``, as its libraries belong to the build. The plugin counts too: it is
    loaded into every run.
    """
    parts = [criu.version, *criu.argv]
    files = [criu.path]
    if criu.private:
        files.append(str(Path(criu.path).parents[2] / VERSIONS_FILE))
    if criu.plugin_dir:
        files.append(os.path.join(criu.plugin_dir, PLUGIN))
    for file in files:
        with contextlib.suppress(OSError):
            info = os.stat(file)
            parts.append(f"{file}:{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}")
    return "\n".join(parts)


def _version(argv: list[str]) -> str:
    """Return what ``criu --version`` says; raises NoWorkingCriu where it cannot be started."""
    try:
        info = os.stat(argv[-1])
    except OSError as error:
        raise NoWorkingCriu(detail=f"{argv[-1]} cannot be started: {error}") from None
    with _asking:  # who comes meanwhile has the answer of the one before
        return _asked_version(tuple(argv), (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns))


_asking = threading.Lock()


@functools.lru_cache(maxsize=16)
def _asked_version(argv: tuple[str, ...], _build: tuple[int, ...]) -> str:
    """Ask once for each file: every operation wants to know, and asking takes 10 ms."""
    try:
        done = start.run([*argv, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoWorkingCriu(detail=f"{argv[-1]} cannot be started: {error}") from None
    text = done.stdout.decode(errors="replace")
    match = re.search(r"^Version:\s*(\S+)", text, re.MULTILINE)
    if match is None:
        raise NoWorkingCriu(
            detail=f"{argv[-1]} is not CRIU: --version says {text.strip().partition(chr(10))[0][:200]!r}"
        )
    return match.group(1)

"""Debian's own podman, crun, runc, conmon and containerd, fetched once into ``build/engines``; nothing is installed.

apt gets list, state and cache folders of its own (``limosa.process.criu.fetch``), and checks the packages' signatures.
What runs gets the folder's own loader and libraries written into it (patchelf), so that the machine's C library does
not matter. The folder appears whole or not at all, and is made anew where it was moved or this list has changed.

``python -m containers.engines`` (in ``tests``) fetches them beforehand.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from limosa.process.criu.fetch import signed_lists

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "build" / "engines"
SUITE = "bookworm"
PACKAGES = (
    "podman",
    "crun",
    "runc",
    "conmon",
    "catatonit",
    "containerd",
    "netavark",
    "iptables",
    "tar",
    "busybox-static",
    "musl-dev",
    "patchelf",
)
# What podman's packages ask for and nothing here starts.
_NEEDLESS = ("gnupg", "gpg", "perl", "libperl", "dirmngr", "pinentry", "debconf", "adduser", "passwd", "dpkg")
_PROGRAMS = {
    "podman": "usr/bin/podman",
    "crun": "usr/bin/crun",
    "runc": "usr/sbin/runc",
    "conmon": "usr/bin/conmon",
    "catatonit": "usr/bin/catatonit",
    "netavark": "usr/lib/podman/netavark",
    "containerd": "usr/bin/containerd",
    "containerd-shim-runc-v2": "usr/bin/containerd-shim-runc-v2",
    "ctr": "usr/bin/ctr",
    "iptables": "usr/sbin/xtables-nft-multi",
    "tar": "bin/tar",
    "busybox": "bin/busybox",
}
_LIBRARIES = ("usr/lib/{}-linux-gnu", "lib/{}-linux-gnu")


class Engines:
    """The folder of programs; ``engines["runc"]`` is the path of one."""

    def __init__(self, folder: Path = ENGINES):
        self.folder = folder
        self.bin = folder / "bin"
        self.root = folder / "root"
        self.seccomp = self.root / "usr/share/containers/seccomp.json"

    def __getitem__(self, name: str) -> str:
        return str(self.bin / name)


def engines() -> Engines:
    """Fetch what is missing; many processes may ask at once."""
    stamp = hashlib.sha256(Path(__file__).read_bytes() + str(ENGINES).encode()).hexdigest()
    ENGINES.parent.mkdir(exist_ok=True)
    with open(ENGINES.with_name("engines.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = ENGINES / "stamp"
        if not made.is_file() or made.read_text() != stamp:
            _fetch(stamp)
    return Engines()


def _fetch(stamp: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".engines-", dir=ENGINES.parent) as scratch:
        os.chmod(scratch, 0o755)  # apt downloads as user _apt
        apt = signed_lists(Path(scratch), lambda _: None, SUITE)
        apt.run("install", "--download-only", *PACKAGES)
        shutil.rmtree(ENGINES, ignore_errors=True)
        root = ENGINES / "root"
        root.mkdir(parents=True)
        for package in sorted(apt.archives.glob("*.deb")):
            if not package.name.startswith(_NEEDLESS):
                subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    for needless in ("usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(root / needless, ignore_errors=True)
    (ENGINES / "bin").mkdir()
    for name, path in _PROGRAMS.items():
        _bind(root, root / path)
        (ENGINES / "bin" / name).symlink_to(f"../root/{path}")
    (ENGINES / "bin" / "iptables-restore").symlink_to(f"../root/{_PROGRAMS['iptables']}")
    (ENGINES / "stamp").write_text(stamp)


def _bind(root: Path, program: Path) -> None:
    """Write into a program where its loader and its libraries are."""
    if b"ld-linux" not in program.read_bytes()[:4096]:
        return  # a static one
    machine = os.uname().machine
    folders = ":".join(str(root / one.format(machine)) for one in _LIBRARIES)
    loader = next(root.glob(f"lib/{machine}-linux-gnu/ld-linux-*.so.*"))
    patchelf = [loader, "--library-path", folders, root / "usr/bin/patchelf"]
    new = program.with_name(f"{program.name}.new")  # a program that is started by its own loader cannot change itself
    shutil.copy2(program, new)
    options = ["--force-rpath", "--set-rpath", folders, "--set-interpreter", loader]
    subprocess.run([*patchelf, *options, new], check=True)
    new.replace(program)


if __name__ == "__main__":
    sys.stdout.write(f"{engines().folder}\n")

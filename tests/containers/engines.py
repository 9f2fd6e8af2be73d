"""Debian's runtimes and checkpointctl, fetched once into ``build/engines``; nothing is installed.

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
import urllib.request
from pathlib import Path

from limosa.process.criu.fetch import signed_lists

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "build" / "engines"
# containerd knows CDI from 1.7.2 on, Docker from 25.
PACKAGES = {
    "bookworm": [
        *("podman", "crun", "runc", "conmon", "catatonit", "netavark"),
        *("iptables", "tar", "busybox-static", "musl-dev", "patchelf"),
    ],
    "forky": ["containerd", "docker.io", "docker-cli", "checkpointctl"],
}
# What podman's packages ask for and nothing here starts.
_NEEDLESS = ("gnupg", "gpg", "perl", "libperl", "dirmngr", "pinentry", "debconf", "adduser", "passwd", "dpkg")
_PROGRAMS = {
    "podman": "usr/bin/podman",
    "crun": "usr/bin/crun",
    "runc": "usr/sbin/runc",
    "conmon": "usr/bin/conmon",
    "catatonit": "usr/bin/catatonit",
    "netavark": "usr/lib/podman/netavark",
    "tar": "bin/tar",
    "busybox": "bin/busybox",
}
_OF_FORKY = {
    **{name: f"usr/bin/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr", "docker", "checkpointctl")},
    "dockerd": "usr/sbin/dockerd",
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
    shutil.rmtree(ENGINES, ignore_errors=True)
    first, second = ENGINES / "root", ENGINES / "newer"
    _unpack("bookworm", first)
    _unpack("forky", second)
    (ENGINES / "bin").mkdir()
    for name, path in _PROGRAMS.items():
        _link(first, first, path, name)
    for name, path in _OF_FORKY.items():
        _link(first, second, path, name)
    _tables(first)
    (ENGINES / "stamp").write_text(stamp)


def _unpack(suite: str, root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".engines-", dir=ENGINES.parent) as scratch:
        os.chmod(scratch, 0o755)  # apt downloads as user _apt
        apt = signed_lists(Path(scratch), lambda _: None, suite)
        apt.run("install", "--download-only", *PACKAGES[suite])
        root.mkdir(parents=True)
        for link in ("bin", "lib", "lib64", "sbin"):  # newer packages lie below /usr only
            (root / "usr" / link).mkdir(parents=True, exist_ok=True)
            (root / link).symlink_to(f"usr/{link}")
        for package in sorted(apt.archives.glob("*.deb")):
            if not package.name.startswith(_NEEDLESS):
                # tar keeps links that are there for the folders of a package: dpkg-deb alone would replace them.
                made = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
                subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", root], stdin=made.stdout, check=True)
                assert made.wait() == 0
    for needless in ("usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(root / needless, ignore_errors=True)


def _link(tools: Path, root: Path, path: str, name: str) -> None:
    """Make a program run from its folder, and known by its name."""
    _bind(tools, root, root / path)
    (ENGINES / "bin" / name).symlink_to(f"../{root.name}/{path}")


def _tables(root: Path) -> None:
    """iptables and its sisters, which netavark starts: one program, whose extensions it looks for in the system."""
    program = root / "usr/sbin/xtables-nft-multi"
    _bind(root, root, program)
    extensions = next(root.glob("usr/lib/*-linux-gnu/xtables"))
    for name in ("iptables", "iptables-restore", "ip6tables", "ip6tables-restore"):
        script = ENGINES / "bin" / name
        script.write_text(f'#!/bin/sh\nXTABLES_LIBDIR={extensions} exec {program} {name} "$@"\n')
        script.chmod(0o755)


def _loading(root: Path) -> tuple[Path, str]:
    """The loader of a folder, and where its libraries are."""
    machine = os.uname().machine
    folders = ":".join(str(root / one.format(machine)) for one in _LIBRARIES)
    return next(root.glob(f"lib/{machine}-linux-gnu/ld-linux-*.so.*")), folders


def _bind(tools: Path, root: Path, program: Path) -> None:
    """Write into a program where its loader and its libraries are; ``tools`` is where patchelf is."""
    if b"ld-linux" not in program.read_bytes()[:4096]:
        return  # a static one
    own, of_tools = _loading(tools)
    loader, folders = _loading(root)
    patchelf = [own, "--library-path", of_tools, tools / "usr/bin/patchelf"]
    new = program.with_name(f"{program.name}.new")  # a program that is started by its own loader cannot change itself
    shutil.copy2(program, new)
    options = ["--force-rpath", "--set-rpath", folders, "--set-interpreter", loader]
    subprocess.run([*patchelf, *options, new], check=True)
    new.replace(program)


# Ubuntu's C libraries, as files of one content: its keys are not Debian's.
_ARCHIVE = "http://archive.ubuntu.com/ubuntu/pool/main/g/glibc"
OLD = {
    "2.23": ("libc6_2.23-0ubuntu11.3_amd64.deb", "d7825ca7a85a2a5c12ff653b9acf7218a86413c79dfe4e52035d63fe1285d642"),
    "2.27": ("libc6_2.27-3ubuntu1.6_amd64.deb", "5b813d4512491cd8fb30b2eb9192349ee75ffe3c9f21ae136cc7b2429f70c3b2"),
    "2.31": ("libc6_2.31-0ubuntu9.18_amd64.deb", "1b2281aac4935dfea1f89dfc19e445fdbb45303202af60679ccb8bf035f081a0"),
    "2.35": ("libc6_2.35-0ubuntu3_amd64.deb", "ea9a27e0ebdd0cfc9c750d94f8074f3a35d1f97dcc77ae04c370fb498a6b6db2"),
}


def old_c_library(version: str) -> Path:
    """Return the root folder of a C library of an older system, fetched where it is missing."""
    name, digest = OLD[version]
    place = ENGINES.with_name("glibc") / digest
    with open(ENGINES.with_name("engines.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            with urllib.request.urlopen(f"{_ARCHIVE}/{name}", timeout=60) as answer:
                data = answer.read()
            assert hashlib.sha256(data).hexdigest() == digest, name
            place.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
                package = Path(scratch, name)
                package.write_bytes(data)
                subprocess.run(["dpkg-deb", "-x", package, Path(scratch, "root")], check=True)
                Path(scratch, "root").rename(place)
    return place


if __name__ == "__main__":
    sys.stdout.write(f"{engines().folder}\n")

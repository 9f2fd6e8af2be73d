"""CRIU's source of the version in use, and its tests built from it, in a private folder beside the CRIU itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from limosa import start
from limosa.errors import NoWorkingCriu
from limosa.process.criu import fetch
from limosa.process.criu.find import find

LIMIT = 900  # seconds for the build of everything
HEADERS = {"libaio.h": "libaio-dev", "sys/capability.h": "libcap-dev", "bpf/bpf.h": "libbpf-dev"}
"""What a few of the tests need beyond a C compiler, make and pkg-config, and the package that has it."""


_SIGNATURE = ("NO_PUBKEY", "couldn't be verified", "is not signed", "Clearsigned", "Hash Sum mismatch")


class NoSource(NoWorkingCriu):
    """There is no apt, or the mirror cannot be reached or does not have it: nothing is wrong with us, or with CRIU."""

    template = "the source of CRIU cannot be fetched: {detail}"


def folder() -> Path:
    """Where the sources lie: beside the private folder of CRIU."""
    return fetch.folder().with_name("zdtm")


def suite(say: Callable[[str], None] = lambda _: None) -> Path:
    """Returns ``test/zdtm`` of CRIU's source of the version in use; fetches it where it is not there yet.

    Raises:
        NoSource: it is not there and cannot be fetched; says how.
        NoWorkingCriu: there is none whose source it could be, or what came is not what Debian has signed.
    """
    version = find().version
    place = folder() / version / "test/zdtm"
    if not (place / "static/Makefile").exists():
        _fetch(version, folder() / version, say)
    return place


def _fetch(version: str, place: Path, say: Callable[[str], None]) -> None:
    if start.program("apt-get") is None:
        raise NoSource(detail="this system has no apt-get")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".source-", dir=place.parent) as scratch:
        os.chmod(scratch, 0o755)  # apt downloads as user _apt
        try:
            apt = fetch.signed_lists(Path(scratch), say, kind="deb-src")
            say(f"fetching the source of CRIU {version}")
            apt.run("source", "--download-only", "--tar-only", "criu", cwd=Path(scratch))
        except NoWorkingCriu as error:
            if any(words in error.message for words in _SIGNATURE):
                raise
            raise NoSource(detail=error.fields.get("detail", error.message)) from error
        (archive,) = Path(scratch).glob("criu_*.orig.tar.*")
        if archive.name.split("_")[1].split(".orig")[0] != version:
            say(f"Debian has {archive.name} now: the tests are those of another version than {version}")
        unpacked = Path(scratch, "unpacked")
        unpacked.mkdir()
        subprocess.run(["tar", "-xf", archive, "-C", unpacked, "--no-same-owner"], check=True, timeout=120)
        (top,) = unpacked.iterdir()
        shutil.rmtree(place, ignore_errors=True)
        os.rename(top, place)
    say(f"the source of CRIU {version} is in {place}")


def build(zdtm: Path, kind: str, names: Collection[str], jobs: int = 2) -> dict[str, str]:
    """Builds tests by CRIU's own Makefile.

    Returns:
        Those that could not be built, with the compiler's first error.
    """
    make = ["make", "--no-print-directory", f"-j{jobs}"]
    subprocess.run([*make, "-C", zdtm / "lib"], check=True, capture_output=True, timeout=LIMIT)
    missing = [name for name in names if not os.access(zdtm / kind / name, os.X_OK)]
    if not missing:
        return {}
    done = subprocess.run(
        [*make, "-k", "-C", zdtm / kind, *missing], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    errors = [line for line in done.stderr.splitlines() if "error:" in line or "cannot find" in line]
    return {
        name: next((e for e in errors if e.startswith((f"{name}.c", "/usr/bin/ld"))), "see make")
        for name in missing
        if not os.access(zdtm / kind / name, os.X_OK)
    }


def install_headers(say: Callable[[str], None]) -> None:
    """Installs by apt-get what some tests need to be built, as root on Debian and its like; says so where it cannot."""
    wanted = [package for header, package in HEADERS.items() if not _has(header)]
    if not wanted:
        return
    if os.geteuid() or shutil.which("apt-get") is None:
        say(f"a few tests cannot be built without {', '.join(wanted)}")
        return
    say(f"installing {', '.join(wanted)} by apt-get")
    for command in (["update", "-q"], ["install", "-qy", "--no-install-recommends", *wanted]):
        done = subprocess.run(
            ["apt-get", *command],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            say(f"apt-get {command[0]}: {done.stderr.strip().splitlines()[-1:]}")


def _has(header: str) -> bool:
    asked = subprocess.run(
        ["cc", "-E", "-include", header, "-x", "c", os.devnull], capture_output=True, timeout=60, check=False
    )
    return asked.returncode == 0


def built(zdtm: Path, kind: str, names: Iterable[str]) -> list[str]:
    """Those that have been built."""
    return [name for name in names if os.access(zdtm / kind / name, os.X_OK)]


__all__ = ["NoSource", "NoWorkingCriu", "build", "built", "folder", "install_headers", "suite"]

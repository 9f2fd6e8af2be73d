"""The private folder: a CRIU of Debian's suite "forky", fetched and checked by apt, unpacked beside the system.

Distributions ship CRIU versions that fail on the kernels they meet (``docs/criu.md``). The one that works is a Debian
package, and every machine this runs on has an apt that can check Debian's signatures. apt gets list, state and cache
folders of its own, so that nothing of the system changes and no right is needed; an empty package database makes it
name every library down to the C library, and the programs are later started through that folder's own loader. The
suite moves on: Limosa trusts its signature and a trial run, never a version or a hash written down here.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from limosa import start
from limosa.errors import NoWorkingCriu
from limosa.process import settings
from limosa.process.criu.program import VERSIONS_FILE, Criu, from_folder

SUITE = "forky"
PACKAGES = ("criu", "nftables")
DEFAULT_MIRROR = "http://ftp.debian.org/debian"
KEYRINGS = (
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
)
KEYRING_PACKAGE = "debian-archive-keyring"
LIMIT = 600.0  # seconds for one apt-get call: a slow mirror, not a hung one
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
FREE_BYTES = 250 << 20  # lists (20 MB), packages (10 MB) and the unpacked folder (30 MB), with a margin

# Hooks in apt.conf act on the system (container images remove /var/cache/apt/*.deb in one): cleared for our calls.
APT_CONF = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
Debug::NoLocking "1";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
Acquire::Retries "3";
APT::Get::List-Cleanup "0";
APT::Install-Recommends "0";
APT::Install-Suggests "0";
APT::Get::Assume-Yes "1";
"""


def folder() -> Path:
    """Return where the private folder is made: in the environment's ``share`` where we may write, else the user's.

    Returns:
        ``sys.prefix/share/limosa/criu`` or ``$XDG_DATA_HOME/limosa/criu``; it need not exist.
    """
    prefix = Path(sys.prefix, "share", "limosa", "criu")
    nearest = next(parent for parent in (prefix.parent, *prefix.parent.parents) if parent.exists())
    return prefix if os.access(nearest, os.W_OK | os.X_OK) else user_folder()


def user_folder() -> Path:
    """Return the user's own private folder, ``$XDG_DATA_HOME/limosa/criu``."""
    return start.user_folder("XDG_DATA_HOME", ".local/share") / "limosa" / "criu"


def folders() -> list[Path]:
    """Return every place where a private folder may lie, the one of this installation first."""
    return list(dict.fromkeys([Path(sys.prefix, "share", "limosa", "criu"), user_folder()]))


def fetch(log: Callable[[str], None] = lambda _: None, *, target: Path | None = None, suite: str = SUITE) -> Criu:
    """Fetch forky's CRIU and nft with all their libraries into the private folder, replacing what was there.

    The folder appears whole or not at all: it is unpacked beside its place and renamed. Needs about 250 MB while it
    works, 30 MB afterwards, and no right beyond writing there.

    Args:
        log: called with a sentence at each step.
        target: the folder to make; :func:`folder` where None.
        suite: another of Debian's suites (tests fetch a CRIU that is too old).

    Returns:
        The CRIU in it. It has not been tried (:func:`limosa.process.criu.trial.trial` does that).

    Raises:
        NoWorkingCriu: there is no apt, the mirror or the signature failed, or there is no room; says which.
    """
    for program in ("apt-get", "dpkg-deb"):
        if start.program(program) is None:
            raise NoWorkingCriu(detail=f"this system has no {program} to fetch Debian's packages with")
    place = target or folder()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(place.parent).free < FREE_BYTES:
            raise NoWorkingCriu(detail=f"{place.parent} has less than {FREE_BYTES >> 20} MiB free")
        with tempfile.TemporaryDirectory(prefix=".criu-", dir=place.parent) as scratch:
            os.chmod(scratch, 0o755)  # apt downloads as user _apt, who must get into it
            unpacked = _fetch_into(Path(scratch), log, suite)
            _replace(unpacked, place)
    except OSError as error:
        raise NoWorkingCriu(detail=f"the private folder {place} cannot be made: {error}") from None
    criu = from_folder(place)
    log(f"CRIU {criu.version} is in {place}")
    return criu


def _fetch_into(scratch: Path, log: Callable[[str], None], suite: str) -> Path:
    """Fetch and unpack into ``scratch/new`` and return that."""
    apt = signed_lists(scratch, log, suite)
    log("fetching CRIU and its libraries")
    apt.run("install", "--download-only", *PACKAGES)
    packages = sorted(apt.archives.glob("*.deb"))
    log(f"unpacking {len(packages)} packages")
    unpacked = scratch / "new"
    unpacked.mkdir(mode=0o755)
    versions = []
    for package in packages:
        _run(["dpkg-deb", "-x", str(package), str(unpacked)], "unpacking a package")
        fields = _run(["dpkg-deb", "-f", str(package), "Package", "Version"], "reading a package").splitlines()
        versions.append(" ".join(line.partition(": ")[2] for line in fields))
    for needless in ("usr/share", "etc", "var", "usr/lib/systemd", "usr/libexec"):
        shutil.rmtree(unpacked / needless, ignore_errors=True)
    (unpacked / VERSIONS_FILE).write_text("".join(f"{line}\n" for line in versions))
    from_folder(unpacked)  # refuses a folder that lacks something, before the old one is replaced
    return unpacked


def signed_lists(scratch: Path, log: Callable[[str], None], suite: str = SUITE, kind: str = "deb") -> Apt:
    """Return an apt-get of its own that has read a suite's lists, checked by Debian's keys.

    Args:
        scratch: an empty folder for it.
        log: called with a sentence at each step.
        suite: which of Debian's.
        kind: "deb" for packages, "deb-src" for sources.

    Raises:
        NoWorkingCriu: the mirror or the signature failed.
    """
    mirror = mirror_of_this_machine()
    keyring = next((path for path in KEYRINGS if os.path.exists(path)), None)
    keyring = keyring or str(_fetch_keyring(scratch, log))
    line = f"{kind} [arch={_architecture()} signed-by={{}}] {mirror} {suite} main\n"
    apt = Apt(scratch / "apt", line.format(keyring))
    log(f"reading the package lists of Debian {suite} from {mirror}")
    try:
        apt.run("update", "--error-on=any")
    except NoWorkingCriu as error:
        if "NO_PUBKEY" not in error.message and "couldn't be verified" not in error.message:
            raise
        # The keyring of an old system does not know the keys of a new suite; a newer keyring package does.
        apt = Apt(scratch / "apt2", line.format(_fetch_keyring(scratch, log)))
        apt.run("update", "--error-on=any")
    return apt


def _replace(new: Path, place: Path) -> None:
    """Put ``new`` at ``place``; what was there is moved aside first and removed last."""
    old = Path(tempfile.mkdtemp(prefix=".criu-old-", dir=place.parent))
    try:
        with contextlib.suppress(FileNotFoundError):
            os.rename(place, old / "criu")
        os.rename(new, place)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def mirror_of_this_machine() -> str:
    """Return the Debian mirror to use: the setting, on Debian the machine's own by its apt settings, else the default.

    Settings: ``debian_mirror`` (:mod:`limosa.process.settings`).
    """
    setting = settings.text("debian_mirror")
    if setting:
        return setting
    apt = start.program("apt-get")
    if _os_release().get("ID") == "debian" and apt is not None:
        listing = start.run(
            [apt, "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            timeout=60,
        ).stdout.decode(errors="replace")
        mirror = debian_mirror(listing, _os_release().get("VERSION_CODENAME", ""))
        if mirror:
            return mirror
    return DEFAULT_MIRROR


def debian_mirror(listing: str, codename: str) -> str | None:
    """Find the main Debian archive in what ``apt-get indextargets`` lists.

    Args:
        listing: lines of "URI suite component".
        codename: the installed system's code name; its line is preferred, as third parties use suites of their own.

    Returns:
        The archive's URI, or None. Archives of security updates hold no full suites and are passed over.
    """
    suites = [codename, "stable", "testing", "unstable", "sid", SUITE]
    found: dict[str, str] = {}
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[2] == "main" and "security" not in fields[0] and fields[1] in suites:
            found.setdefault(fields[1], fields[0].rstrip("/"))
    return next((found[suite] for suite in suites if suite in found), None)


def _fetch_keyring(scratch: Path, log: Callable[[str], None]) -> Path:
    """Fetch Debian's keyring package from the system's own sources, which the system's own keys vouch for."""
    log("fetching Debian's archive keyring from this system's own packages")
    apt = Apt(scratch / "keyring", None)
    apt.run("update")
    place = scratch / "keyring"
    apt.run("download", KEYRING_PACKAGE, cwd=place)
    packages = sorted(place.glob(f"{KEYRING_PACKAGE}_*.deb"))
    if not packages:
        raise NoWorkingCriu(detail=f"this system's package sources have no {KEYRING_PACKAGE}")
    _run(["dpkg-deb", "-x", str(packages[-1]), str(place / "root")], "unpacking the keyring")
    for path in KEYRINGS:
        inside = place / "root" / path.lstrip("/")
        if inside.is_file():
            return inside
    raise NoWorkingCriu(detail=f"the package {KEYRING_PACKAGE} holds no keyring")


class Apt:
    """apt-get with folders of its own.

    Args:
        place: where its folders are made.
        sources: the one line of sources it sees; None for the system's own sources.
    """

    def __init__(self, place: Path, sources: str | None):
        self.archives = place / "cache" / "archives"
        for path in (place / "lists" / "partial", self.archives / "partial", place / "state"):
            path.mkdir(parents=True)
        (place / "status").touch()
        config = place / "apt.conf"
        config.write_text(APT_CONF)
        self._options = ["-q", "-c", str(config)]
        values = {
            "Dir::State": place / "state",
            "Dir::State::lists": place / "lists",
            "Dir::State::status": place / "status",  # nothing is installed: every library is named
            "Dir::Cache": place / "cache",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
        }
        if sources is not None:
            (place / "sources.list").write_text(sources)
            values["Dir::Etc::sourcelist"] = place / "sources.list"
            values["Dir::Etc::sourceparts"] = "/dev/null"
        for name, value in values.items():
            self._options += ["-o", f"{name}={value}"]

    def run(self, *arguments: str, cwd: Path | None = None) -> None:
        """Run one apt-get command; raises NoWorkingCriu with its first error."""
        _run(["apt-get", *self._options, *arguments], f"apt-get {arguments[0]}", cwd)


def _run(argv: list[str], what: str, cwd: Path | None = None) -> str:
    """Run a program to its end and return its output; raises NoWorkingCriu with its error lines."""
    try:
        program = start.program(argv[0]) or argv[0]
        where = start.FOLDER if cwd is None else str(cwd)
        done = start.run([program, *argv[1:]], cwd=where, env=_environment(), capture_output=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise NoWorkingCriu(detail=f"{what} has not ended after {LIMIT:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("E:") or "NO_PUBKEY" in line] or lines[-3:]
        raise NoWorkingCriu(detail=f"{what}: {'; '.join(errors) or f'ended with {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def _environment() -> dict[str, str]:
    """Return an environment with English messages, with the proxies that are set and no other apt configuration."""
    proxies = {name: value for name, value in os.environ.items() if name.lower() in _PROXIES}
    made = start.environment({**proxies, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"})
    return {name: value for name, value in made.items() if name not in ("LANGUAGE", "LD_LIBRARY_PATH")}


def _architecture() -> str:
    """Return Debian's name of this machine's architecture."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64el"}.get(machine, machine)


def _os_release() -> dict[str, str]:
    """Return what ``/etc/os-release`` says; empty where there is none."""
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release()
    return {}

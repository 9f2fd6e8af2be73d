"""Where the libraries lie that containers mount: a folder of root's that outlives an update of Limosa.

``/usr/local/lib/limosa/HASH``, named by what is in it. A container that runs goes on with what it has mounted, and one
whose runtime has written the paths down finds them when it is started again: an older folder stays until
``limosa cdi --remove``, and then as long as any process has it mounted. Below ``/usr`` since SELinux lets containers
read what lies there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from limosa.errors import NoLibrary, PermissionDenied
from limosa.native import build
from limosa.start import changeable, untrusted_part

PLACE = Path("/usr/local/lib/limosa")
LIST = "ld.so.preload"
HOOK_FOLDER = "mnt"
_FILES = (
    (build.SHIM / build.SHIM_LIBRARY, 0o755),
    (build.SIGHT / build.SIGHT_LIBRARY, 0o755),
    (build.CDI / build.PRELOAD_HOOK, 0o755),
)
_PRELOADED = (build.SHIM_LIBRARY, build.SIGHT_LIBRARY)
_LOOK_SECONDS = 20.0
_OCTAL = re.compile(rb"\\([0-7]{3})")
_NAME = re.compile(r"[0-9a-f]{16}")


class Libraries(NamedTuple):
    """A folder of libraries as containers mount it.

    Attributes:
        folder: absolute, the same outside and inside.
        there: whether it was there already.
    """

    folder: Path
    there: bool

    @property
    def list(self) -> Path:
        """What is laid over a container's ``/etc/ld.so.preload``."""
        return self.folder / LIST

    @property
    def hook(self) -> Path:
        """The program that keeps an image's own list."""
        return self.folder / build.PRELOAD_HOOK


def current(place: Path = PLACE) -> Path:
    """Return the folder that this Limosa's libraries belong in, there or not.

    Raises:
        NoLibrary: they were not compiled, or others can change them.
    """
    digest = hashlib.sha256()
    for path, _ in _FILES:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(_read(path)).digest())
    return place / digest.hexdigest()[:16]


def install(place: Path = PLACE) -> Libraries:
    """Put this Limosa's libraries where containers find them, whole or not at all.

    Raises:
        NoLibrary: they were not compiled, or others can change them.
        PermissionDenied: the caller is not root, or others can change the place.
        OSError: no room.
    """
    folder = current(place)
    if os.geteuid() != 0:
        raise PermissionDenied(detail="what containers mount is root's", hint="sudo limosa cdi")
    if (part := untrusted_part(place)) is not None:
        raise PermissionDenied(detail=f"{part} can be changed by others than root", hint=f"chown root: {part}")
    if complete(folder):
        return Libraries(folder, there=True)
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    place.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=place) as scratch:
        new = Path(scratch, folder.name)
        new.mkdir()
        for path, mode in _FILES:
            _write(new / path.name, _read(path), mode)
        _write(new / LIST, "".join(f"{folder / name}\n" for name in _PRELOADED).encode(), 0o644)
        (new / HOOK_FOLDER).mkdir()
        new.chmod(0o755)
        (new / HOOK_FOLDER).chmod(0o755)
        if folder.exists():  # half of it is gone: somebody has cleaned up
            shutil.rmtree(folder)
        new.rename(folder)
    return Libraries(folder, there=False)


def complete(folder: Path) -> bool:
    """Return whether a folder of this place has all that belongs in it."""
    names = [*(path.name for path, _ in _FILES), LIST]
    return all((folder / name).is_file() for name in names) and (folder / HOOK_FOLDER).is_dir()


def remove(place: Path = PLACE) -> list[Path]:
    """Remove all folders of libraries that no process has mounted; what stays is returned.

    Raises:
        OSError: one cannot be removed.
    """
    used, kept = mounted(place), []
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(place.iterdir()):
            if _NAME.fullmatch(folder.name):
                if folder in used:
                    kept.append(folder)
                else:
                    shutil.rmtree(folder)
        if not kept:
            with contextlib.suppress(OSError):
                place.rmdir()
    return kept


def take_back(folder: Path) -> None:
    """Remove a folder of libraries that was just installed, unless a process has it mounted already."""
    if folder not in mounted(folder.parent):
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # that of others stays


def mounted(place: Path = PLACE) -> set[Path]:
    """Return the folders of libraries that are mounted in some process's namespace.

    Users' namespaces can have any number of mounts: what cannot be looked at in time counts as mounted.
    """
    try:
        there = {one for one in place.iterdir() if _NAME.fullmatch(one.name)}
        where = _in_mountinfo(place)
    except FileNotFoundError:
        return set()
    if where is None:
        return there
    # By the path in the file system, or, since NFS tells none of that, by the place that containers have it at.
    paths = b"|".join(re.escape(path) for path in (where[1], os.fsencode(place)))
    pattern = re.compile(rb" %s .*?(?:%s)/([0-9a-f]{16})[/ ]" % (re.escape(where[0]), paths))
    found: set[Path] = set()
    seen: set[str] = set()
    end = time.monotonic() + _LOOK_SECONDS
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in seen:
                with open(f"/proc/{pid}/mountinfo", "rb") as lines:
                    for line in lines:
                        if time.monotonic() > end:
                            return there
                        found |= {place / name.decode() for name in pattern.findall(line)}
                seen.add(namespace)
    return found


def _in_mountinfo(place: Path) -> tuple[bytes, bytes] | None:
    """Return the number of the place's file system and the path in that, as mountinfo has them ("8:1", "/usr/local…").

    The number is not ``st_dev`` on btrfs, and the path not the place's own where a file system is mounted above it.
    ``None``: that mount is not shown, as in a chroot, or is called in some strange way.

    Raises:
        FileNotFoundError: there is no place.
    """
    fd = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        info = Path(f"/proc/self/fdinfo/{fd}").read_bytes()
    finally:
        os.close(fd)
    mount = next(line.split()[1] for line in info.splitlines() if line.startswith(b"mnt_id:"))
    lines = (line.split(b" ") for line in Path("/proc/self/mountinfo").read_bytes().splitlines())
    for number, root, point in (fields[2:5] for fields in lines if fields[0] == mount):
        below = os.path.relpath(os.fsencode(path), _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), point))
        if not below.startswith(b"..") and not any(one in below for one in b" \t\n\\"):
            return number, os.path.normpath(os.path.join(root, below))
    return None


def _read(path: Path) -> bytes:
    try:
        if why := changeable(path):
            raise NoLibrary(detail=f"containers get no {path.name}: {why}", hint="chown root:, chmod go-w")
        return path.read_bytes()
    except OSError as error:
        raise NoLibrary(
            detail=f"{path.name} was not built, or cannot be read ({error.strerror})", hint="limosa doctor --fix"
        ) from error


def _write(path: Path, data: bytes, mode: int) -> None:
    with open(path, "xb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

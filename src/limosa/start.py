"""How Limosa starts programs: the one place, so that none of them takes code from where a stranger can put it.

Root calls Limosa in any user's folder, and with variables that came from anywhere. What is started therefore

- works in ``/``, and is named by an absolute path;
- gets a small environment that is written down here. Of ``PATH`` and ``LD_LIBRARY_PATH`` those folders are kept that
  are absolute and, for root, :func:`trusted`; nothing that makes an interpreter, a loader or a compiler load more
  (``PYTHON…``, ``LD_PRELOAD``, ``GCC_EXEC_PREFIX``, ``CUDA_INJECTION64_PATH``, …);
- is, where it is Python, ``python -I`` with this very package (:mod:`limosa.boot`).

A job is its user's own business: it gets the environment and the folder of whoever starts it (``process/launch.py``).
"""

from __future__ import annotations

import ctypes
import functools
import os
import pwd
import re
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "/"
SYSTEM = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_PACKAGE = Path(__file__).resolve().parent
_SOFTGPU = _PACKAGE.with_name("limosa_softgpu")  # installed with it
_BOOT = _PACKAGE / "boot.py"
_FOLDERS = ("PATH", "LD_LIBRARY_PATH")
_XDG = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
_KEPT = frozenset(
    {"HOME", "LANG", "LANGUAGE", "LOGNAME", "SUDO_UID", "TMPDIR", "TZ", "USER", *_XDG}
    | {"CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE", "CUDA_CACHE_PATH", "CUDA_MODULE_LOADING"}
    | {"CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_PIPE_DIRECTORY"}
)
_KEPT_FOR_USERS = frozenset({"LANG"})
_MOST_LINKS = 40
_SYSTEM_GROUPS = 100  # below that are groups like Debian's staff, whose members are as good as root
_KEPT_BEGINNINGS = ("LC_", "LIMOSA_")
_FUSE = 0x65735546  # statfs(2)
_UNKNOWN_SERVER = -1  # nobody's uid
_LOOKED_SECONDS = 0.5
_DEVICE = re.compile(rb"(\d{1,9}):(\d{1,9})")
_libc = ctypes.CDLL(None, use_errno=True)
_looked: dict[tuple[int, str], tuple[float, list[str]]] = {}
"""Which folders of such a value may be used, and when that was looked at: an operation asks ten times."""


def python(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``main(arguments)`` of a module of Limosa in a Python of its own.

    Args:
        module: e.g. ``limosa.operation.orphan``.
        arguments: as texts.
    """
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *flags, str(_BOOT), _search_path(), module, *arguments]


def environment(more: Mapping[str, str] | None = None, *, for_user: bool = False) -> dict[str, str]:
    """Return the environment for a program that Limosa starts.

    Args:
        more: variables besides.
        for_user: the program will be another user's, who may read its environment: nothing of ours that is not needed.
    """
    kept = _KEPT_FOR_USERS if for_user else _KEPT
    made = {k: v for k, v in os.environ.items() if k in kept or k.startswith(_KEPT_BEGINNINGS)}
    for name in _FOLDERS:
        if value := ":".join(folders(name)):
            made[name] = value
    made["PATH"] = ":".join(dict.fromkeys([*filter(None, made.get("PATH", "").split(":")), *SYSTEM]))
    for name in ("TMPDIR", *_XDG):
        if name in made and not (os.path.isabs(made[name]) and _usable(made[name])):
            del made[name]
    if "HOME" in made:
        made["HOME"] = str(home())
    return made | dict(more or {})


def folders(variable: str) -> list[str]:
    """Return the folders that a variable of ours names, with colons, and from which programs may be started."""
    value, now = os.environ.get(variable, ""), time.monotonic()
    since, found = _looked.get((os.geteuid(), value), (0.0, []))
    if now - since > _LOOKED_SECONDS:
        found = [entry for entry in value.split(":") if os.path.isabs(entry) and _usable(entry)]
        _looked[os.geteuid(), value] = now, found
    return list(found)


def clean(variable: str) -> bool:
    """Return whether all of the folders that a variable names may be used."""
    return not (value := os.environ.get(variable, "")) or folders(variable) == value.split(":")


def program(name: str) -> str | None:
    """Return the absolute path of a program of the system: on ``PATH``, else where the system has them; None for none.

    Args:
        name: e.g. "nft"; a path only where it is absolute.
    """
    if "/" in name:
        return name if os.path.isabs(name) and os.access(name, os.X_OK) and _usable(name) else None
    for folder in dict.fromkeys([*folders("PATH"), *SYSTEM]):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK) and _usable(path):
            return path
    return None


def run(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = FOLDER, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, as ``subprocess.run`` does.

    Args:
        argv: its first is an absolute path.
        env: its environment; :func:`environment` where None.
        cwd: its working folder, one of ours.
        options: as of ``subprocess.run``.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it has not ended in time.
    """
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    made = environment() if env is None else env
    return subprocess.run(_absolute(argv), env=made, cwd=cwd, check=False, **options)


def popen(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = FOLDER, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a program, as ``subprocess.Popen`` does; see :func:`run`.

    Not with ``user=``: before the program is there, that user could look into our copy, and stop it while we wait for
    it. What is to be another user's becomes it by itself (:func:`limosa.rights.become`).

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(_absolute(argv), env=environment() if env is None else env, cwd=cwd, **options)


def home() -> Path:
    """Return the caller's home folder: for root that of the password file where ``HOME`` is another user's (sudo)."""
    try:
        found = Path.home()
        return found if _usable(str(found)) else Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except (KeyError, RuntimeError):  # nobody knows this user
        return Path("/nonexistent")


def user_folder(variable: str, usual: str) -> Path:
    """Return a folder of the caller's by the XDG rules: the variable's, else the usual one in his home.

    Args:
        variable: e.g. ``XDG_DATA_HOME``; what is not absolute does not count, nor another user's where we are root.
        usual: below the home folder, e.g. ``.local/share``.
    """
    base = os.environ.get(variable, "")
    return Path(base) if os.path.isabs(base) and _usable(base) else home() / usual


@functools.lru_cache(maxsize=1)
def installer() -> int:
    """Return who installed Limosa: a uid."""
    return _BOOT.stat().st_uid


def sudo_user() -> int:
    """Return who called ``sudo``, where we are root by it: a uid; else 0."""
    said = os.environ.get("SUDO_UID", "")
    return int(said) if os.geteuid() == 0 and said.isascii() and said.isdigit() else 0


def file_system(fd: int) -> int:
    """The type of the file system that something open is on (fstatfs(2)), 0 where it cannot be asked."""
    found = ctypes.create_string_buffer(256)  # struct statfs, whose first field is the type
    return 0 if _libc.fstatfs(fd, found) else ctypes.c_long.from_buffer(found).value


def server_of(fd: int) -> int:
    """Return whose process serves the file system that something open is on (FUSE): a uid; 0: root's, or the kernel.

    What such a one says of owners and modes is his word alone. -1 where it is not known whose it is: it was unmounted
    since, say, or is another namespace's. While ``fd`` is open nothing else has its device number.

    Raises:
        OSError: it cannot be asked.
    """
    if file_system(fd) not in (_FUSE, 0):  # 0: whoever serves it may have refused to say
        return 0
    return served_by().get(os.fstat(fd).st_dev, _UNKNOWN_SERVER)


def served_by() -> dict[int, int]:
    """Return who serves the FUSE file systems that are mounted now: device number → uid."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return parse_served(file.read())
    except FileNotFoundError:  # no /proc
        return {}


def parse_served(mountinfo: bytes) -> dict[int, int]:
    """``/proc/self/mountinfo`` (proc_pid_mountinfo(5)) to {st_dev: user id}; virtiofs is the machine's own, so root's.

    The kernel escapes blanks and line ends of names, and no other character that Python takes for one: those of a
    user's mount must not hide it. Who serves what a line that is not understood tells of is not known.
    """
    served: dict[int, int] = {}
    for line in mountinfo.split(b"\n"):
        left, _, right = line.partition(b" - ")
        fields, super_fields = left.split(b" "), right.split(b" ")
        found = _DEVICE.fullmatch(fields[2]) if len(fields) > 2 else None
        if found is None or len(super_fields) < 3:
            continue
        device, kind = os.makedev(int(found[1]), int(found[2])), super_fields[0].partition(b".")[0]
        users = [option[8:] for option in super_fields[2].split(b",") if option.startswith(b"user_id=")]
        if kind == b"virtiofs":
            served[device] = 0
        elif kind in (b"fuse", b"fuseblk") and len(users) == 1 and users[0].isdigit():
            served[device] = int(users[0])
    return served


def real_path(path: str | os.PathLike[str]) -> str | None:
    """Return where an absolute path leads over links that root, we, who called sudo or who installed Limosa made.

    None: it leads over another's.

    A user cannot make a link that is root's: what is reached so is what its name says, whoever's folders are passed.
    """
    owners = {0, os.geteuid(), installer(), sudo_user()}
    pending = deque(part for part in os.fspath(path).split("/") if part not in ("", "."))
    at, links = "/", 0
    while pending:
        name = pending.popleft()
        if name == "..":
            at = os.path.dirname(at)
            continue
        step = os.path.join(at, name)
        try:
            info, link, server = _held(step)
        except _Untold:
            return None
        except OSError:  # nothing there
            link = None
        if link is None:
            at = step
            continue
        if not {info.st_uid, server} <= owners or (links := links + 1) > _MOST_LINKS:
            return None
        pending.extendleft(reversed([part for part in link.split("/") if part not in ("", ".")]))
        at = "/" if link.startswith("/") else at
    return at


class _Untold(OSError):
    """Something is there, and whoever serves it does not say what: he may say of his own that it is not there."""


def _held(path: str | os.PathLike[str]) -> tuple[os.stat_result, str | None, int]:
    """Whose something is, of a link where to, and who serves it: of the very same, whatever gets its name meanwhile.

    Raises:
        _Untold: that is not said.
        OSError: it is not there.
    """
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        return info, os.readlink("", dir_fd=fd) if stat.S_ISLNK(info.st_mode) else None, server_of(fd)
    except OSError as error:
        raise _Untold(*error.args) from error
    finally:
        os.close(fd)


def trusted(path: str | os.PathLike[str]) -> bool:
    """Return whether nobody but root, we and whoever installed Limosa can change what is at a path.

    The file or folder, every folder above it, and those that links lead to. What is not there yet is as its folder is:
    in one that others can write to as well (``/tmp``), anybody may make it a moment later.
    """
    try:
        return untrusted_part(path) is None
    except OSError:
        return False


def loadable(library: Path) -> bool:
    """Return whether a library of ours is there and, for root, neither it nor its folder is for others to change."""
    try:
        return library.is_file() and not changeable(library)
    except OSError:
        return False


def changeable(library: Path) -> str:
    """Return why root must not load a library, in words: others can change it, or its folder; "" for no reason.

    Raises:
        OSError: it cannot be looked at.
    """
    for path in (library, library.parent) if os.geteuid() == 0 else ():
        info = os.stat(path)
        if info.st_uid not in {0, installer()} or _others_write(info, path):
            mode = stat.S_IMODE(info.st_mode)
            return f"others can change {path} (mode {mode:o}, uid {info.st_uid}, gid {info.st_gid})"
    return ""


def untrusted_part(path: str | os.PathLike[str]) -> str | None:
    """Return which file or folder on the way to a path somebody else can change; None for none.

    Raises:
        OSError: it cannot be looked at.
    """
    if _ours(os.path.abspath(path)):
        return None
    owners = {0, os.geteuid(), installer()}
    pending = deque(part for part in os.path.abspath(path).split("/") if part)
    at, links = Path("/"), 0
    while True:
        info, _, server = _held(at)
        sticky = pending and info.st_mode & stat.S_ISVTX
        if not {info.st_uid, server} <= owners or (_others_write(info, at) and not sticky):
            return str(at)
        if not pending:
            return None
        name = pending.popleft()
        if name == "..":
            at = at.parent
            continue
        try:
            info, link, server = _held(at / name)
        except FileNotFoundError:
            return str(at) if _others_write(info, at) else None  # sticky: nobody replaces what is there, anybody adds
        if link is None:
            at /= name
            continue
        if not {info.st_uid, server} <= owners or (links := links + 1) > _MOST_LINKS:
            return str(at / name)
        pending.extendleft(reversed([part for part in link.split("/") if part not in ("", ".")]))
        at = Path("/") if link.startswith("/") else at


def _others_write(info: os.stat_result, path: Path) -> bool:
    """Whether more than the owner may write: others, a list of some (acl(5)), a group of people but his own."""
    group = info.st_mode & stat.S_IWGRP
    people = info.st_gid >= _SYSTEM_GROUPS and info.st_gid != info.st_uid
    return not stat.S_ISLNK(info.st_mode) and bool(
        info.st_mode & stat.S_IWOTH or (group and (people or _has_list(path)))
    )


def _has_list(path: Path) -> bool:
    """Whether it has an access control list; the group's bits are the most that it grants then."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    except OSError:
        return False


def _usable(path: str) -> bool:
    """Whether what lies there may be started: for root where it is trusted; else it is the caller's own choice."""
    return os.geteuid() != 0 or trusted(path)


def _ours(path: str) -> bool:
    """Whether it is of this Limosa, or of the Python that runs it: code from there runs already."""
    places = (*_packages(), os.path.normpath(sys.prefix), os.path.normpath(sys.base_prefix))
    return any(path == place or path.startswith(f"{place}/") for place in places if place not in ("/", "/usr"))


def _packages() -> tuple[str, ...]:
    """The folders of this Limosa's code; one beside it that somebody else has put there is not of it."""
    try:
        beside = os.lstat(_SOFTGPU).st_uid in {0, installer()}
    except OSError:
        beside = False
    return (os.fspath(_PACKAGE), os.fspath(_SOFTGPU)) if beside else (os.fspath(_PACKAGE),)


def _search_path() -> str:
    """Where else than in Python's own folders our dependencies may be: by what we found them, if no stranger's."""
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    found = [entry for entry in sys.path if os.path.isabs(entry) and entry != here and ":" not in entry]
    return ":".join(entry for entry in dict.fromkeys(found) if _usable(entry))


def _absolute(argv: Sequence[str]) -> list[str]:
    if not os.path.isabs(argv[0]):
        raise FileNotFoundError(2, "not an absolute path", argv[0])
    return list(argv)

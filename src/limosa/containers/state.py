"""What OCI runtimes note of their containers: runc's ``state.json`` and crun's ``status``, below the folders they use.

Only root, or the caller, can have written what is read here. Each file is opened by one name in a folder that nobody
else can change, is bounded, and is decoded as what it should be. Nothing in it is believed of a process but what the
kernel says as well.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from limosa.process.openat import closing, open_in
from limosa.start import trusted
from limosa.structs import ready

_MOST_BYTES = 8 << 20
_MOST_CONTAINERS = 4096
_SETTING = "LIMOSA_CONTAINER_STATE"
_FOLDERS = (
    "/run/runc",
    "/run/crun",
    "/run/docker/runtime-runc/moby",
    "/run/docker/runtime-crun/moby",
)
OF_CONTAINERD = "/run/containerd/runc"
"""Where the shim of containerd has runc note its containers, in a folder for each namespace."""
MADE_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)
"""An id that a runtime has made; with runc and ctr people choose them."""
_T = TypeVar("_T")


class State(msgspec.Struct, frozen=True):
    """What a runtime notes of one container."""

    id: str
    folder: str  # of the runtime: where its containers' states are
    pid: int  # of its first process, as the runtime calls it
    start_time: int  # of that
    cgroups: tuple[str, ...]  # folders, or paths of the hierarchy
    bundle: str
    notes: dict[str, str]  # annotations of its specification
    by: str = "runc"  # whose form the note has: "runc", "crun"


class _RuncConfig(msgspec.Struct):
    labels: list[str] | None = None


class _Runc(msgspec.Struct):
    """``state.json``: runc's libcontainer."""

    init_process_pid: int
    init_process_start: int
    cgroup_paths: dict[str, str] = {}
    config: _RuncConfig = msgspec.field(default_factory=_RuncConfig)


class _Crun(msgspec.Struct, rename={"start_time": "process-start-time", "cgroup": "cgroup-path"}):
    """``status``: crun's libcrun."""

    pid: int
    start_time: int = 0
    cgroup: str = ""
    bundle: str = ""


class _Spec(msgspec.Struct):
    """``config.json`` (OCI runtime specification)."""

    annotations: dict[str, str] | None = None


def states(besides: Sequence[str] = ()) -> Iterator[State]:
    """Yield what the runtimes of this machine, or of the caller, note of their containers.

    Args:
        besides: further folders of notes.
    """
    for folder in folders(besides):
        with contextlib.suppress(OSError), closing(open_folder(folder)) as fd, os.scandir(fd) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_CONTAINERS)]
            for name in sorted(names):
                found = _state(folder, fd, name)
                if found is not None:
                    yield found


def namespace_of(state: State | None) -> str:
    """Return the namespace of containerd's whose containers are noted there; "" where it is not containerd's."""
    above, _, name = (state.folder if state is not None else "").rpartition("/")
    return name if above == OF_CONTAINERD else ""


def noted_in() -> list[str]:
    """Return the folders of notes that the caller's setting names."""
    return [folder for folder in os.environ.get(_SETTING, "").split(":") if os.path.isabs(folder)]


def folders(besides: Sequence[str] = ()) -> list[str]:
    """Return the folders in which runtimes note their containers.

    Args:
        besides: such that come first.
    """
    found = [*besides, *noted_in()]
    if os.geteuid():
        found += [f"/run/user/{os.geteuid()}/{name}" for name in ("runc", "crun")]
    found += _FOLDERS
    with contextlib.suppress(OSError):
        found += [f"{OF_CONTAINERD}/{name}" for name in sorted(os.listdir(OF_CONTAINERD))[:_MOST_CONTAINERS]]
    return list(dict.fromkeys(found))


def open_folder(folder: str) -> int:
    """Open a folder that nobody but root and the caller can change, nor the way to it.

    Raises:
        OSError: there is none, or somebody else can.
    """
    if not trusted(folder):
        raise PermissionError(folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _is_trusted(os.fstat(fd)):
        os.close(fd)
        raise PermissionError(folder)
    return fd


def _is_trusted(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def _state(folder: str, above: int, name: str) -> State | None:
    with contextlib.suppress(OSError), closing(open_in(above, name, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        if not _is_trusted(os.fstat(fd)):
            return None
        runc = decoded(fd, "state.json", _Runc)
        if runc is not None:
            notes = dict(label.split("=", 1) for label in runc.config.labels or [] if "=" in label)
            cgroups, bundle = tuple(runc.cgroup_paths.values()), notes.pop("bundle", "")
            return State(name, folder, runc.init_process_pid, runc.init_process_start, cgroups, bundle, notes)
        crun = decoded(fd, "status", _Crun)
        if crun is not None:
            spec = read(crun.bundle, "config.json", _Spec)
            notes = (spec.annotations if spec else None) or {}
            cgroups = (f"/{crun.cgroup.lstrip('/')}",)
            return State(name, folder, crun.pid, crun.start_time, cgroups, crun.bundle, notes, "crun")
    return None


def read(folder: str, name: str, type_: type[_T]) -> _T | None:
    """Read a file of a folder that only root or the caller can change.

    Args:
        folder: an absolute path, which a runtime has noted.
        name: of the file.
        type_: what is in it.

    Returns:
        None where it is not there, is somebody else's, is too large, or says something else.
    """
    if not os.path.isabs(folder):
        return None
    with contextlib.suppress(OSError), closing(open_folder(folder)) as fd:
        return decoded(fd, name, type_)
    return None


def decoded(folder: int, name: str, type_: type[_T]) -> _T | None:
    """Read a file in an open folder; see :func:`read`."""
    with contextlib.suppress(OSError), closing(open_in(folder, name, os.O_RDONLY)) as fd:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not _is_trusted(found) or found.st_size > _MOST_BYTES:
            return None
        data = b""
        while len(data) <= _MOST_BYTES and (more := os.read(fd, _MOST_BYTES + 1 - len(data))):
            data += more
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(data, type=ready(type_))
    return None

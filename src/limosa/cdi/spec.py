"""The CDI spec: what a container runtime does to a container that asks for ``limosa.dev/job=shim``.

https://github.com/cncf-tags/container-device-interface has the format. The oldest version of it that says all of this
is written, since a runtime refuses a file of a version that it does not know.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from limosa.cdi.place import HOOK_FOLDER, Libraries
from limosa.start import untrusted_part
from limosa.structs import ready

VERSION = "0.3.0"
KIND = "limosa.dev/job"
DEVICE = f"{KIND}=shim"
FOLDERS = ("/etc/cdi", "/var/run/cdi")
"""Where runtimes look if nobody has told them otherwise: for files that stay, and for files of this boot."""
FILE = "limosa.dev-job.json"
_MOST = 1 << 20

# libuv (Node.js, uvloop, PyTorch's store) asks for an io_uring, which no CRIU can write to disk; so it uses epoll.
# Newer ones need the shim for that (native/shim/rings.c), which looks at this.
# NCCL's RAS service would keep ports that a restore needs to be free.
_ENVIRONMENT = ("UV_USE_IO_URING=0", "NCCL_RAS_ENABLE=0")


class Mount(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A bind mount."""

    host_path: str
    container_path: str
    options: list[str] = []


class DeviceNode(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A device node that the container gets, and may open."""

    path: str
    host_path: str = ""
    type: str = ""
    major: int = 0
    minor: int = 0
    file_mode: int = 0
    permissions: str = ""


class Hook(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A program that the runtime starts."""

    hook_name: str
    path: str
    args: list[str] = []


class Edits(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What is done to a container."""

    env: list[str] = []
    device_nodes: list[DeviceNode] = []
    mounts: list[Mount] = []
    hooks: list[Hook] = []


class Device(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What a container asks for by name."""

    name: str
    container_edits: Edits


class Spec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A whole spec."""

    cdi_version: str
    kind: str
    devices: list[Device]
    container_edits: Edits = Edits()


def read_only(path: str | os.PathLike[str], inside: str = "") -> Mount:
    """Return a mount of a file or folder of the host's that the container cannot change."""
    name = os.fspath(path)
    return Mount(host_path=name, container_path=inside or name, options=["ro", "nosuid", "nodev", "bind"])


def shim_spec(libraries: Libraries) -> Spec:
    """Return the spec that brings the shim into a container.

    Args:
        libraries: where it lies.
    """
    edits = Edits(
        env=list(_ENVIRONMENT),
        mounts=[read_only(libraries.folder), read_only(libraries.list, "/etc/ld.so.preload")],
        hooks=[
            Hook(
                hook_name="createContainer",
                path=str(libraries.hook),
                args=[libraries.hook.name, str(libraries.list), str(libraries.folder / HOOK_FOLDER)],
            )
        ],
    )
    name = DEVICE.partition("=")[2]
    return Spec(cdi_version=VERSION, kind=KIND, devices=[Device(name=name, container_edits=edits)])


def text_of(spec: Spec) -> bytes:
    """Return a spec as the file has it."""
    return (json.dumps(msgspec.to_builtins(spec), indent=2) + "\n").encode()


def spec_path(folder: str = FOLDERS[0]) -> Path:
    """Return the file of ours in a folder of specs."""
    return Path(folder, FILE)


def check_place(path: Path) -> None:
    """Refuse a file whose specs root's runtimes would follow though others could change them.

    Raises:
        OSError: they could, or could change where it lies; or it cannot be looked at.
    """
    if os.geteuid() == 0 and (theirs := untrusted_part(path)) is not None:
        raise PermissionError(errno.EPERM, "others can change that, and runtimes do as root what is in a spec", theirs)


def write_spec(spec: Spec, path: Path) -> bool:
    """Write a spec, whole or not at all, for everybody to read; its folder is made where it is missing.

    Returns:
        Whether that changed anything.

    Raises:
        OSError: it cannot be written, or others than root could change it, or where it lies.
    """
    check_place(path)
    text = text_of(spec)
    if _content(path) == text:
        return False
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")  # runtimes read what ends in .json
    part.unlink(missing_ok=True)  # of a process that was killed
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o644)
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return True


def installed_spec(folders: Iterable[str] = FOLDERS) -> tuple[Path, Spec | None] | None:
    """Return our spec as the runtimes find it, and where; None for none, no Spec where it is not one.

    Args:
        folders: those that the runtimes look into; a file in a later one counts.
    """
    for folder in reversed(list(folders)):
        path = spec_path(folder)
        if _content(path) is not None:
            return path, read_spec(path)
    return None


def read_spec(path: Path) -> Spec | None:
    """Return the spec in a file; None where there is none, or something else."""
    try:
        return msgspec.json.decode(_content(path) or b"", type=ready(Spec))
    except msgspec.MsgspecError:
        return None


def _content(path: Path) -> bytes | None:
    """What a file has; None where there is none, or something else."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
            return file.read(_MOST)
    except OSError:
        return None

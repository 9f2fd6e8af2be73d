"""Folders of unfinished checkpoints: their marker, and finding them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from limosa.image.files import Files, no_more_files, open_folder, read_file
from limosa.image.manifest import now
from limosa.image.read import MARKER_NAME, is_partial_name
from limosa.image.trust import open_named
from limosa.structs import ready

_LIMIT = 1 << 16
_Short = Annotated[str, msgspec.Meta(max_length=1024)]


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What ``unfinished.json`` says.

    Attributes:
        owner: identity (``pid@start_time``) of the process that writes the image.
        operation: the operation's id, or "".
        dest: where the image was to be: its path's bytes in hexadecimal.
        since: when it was begun, RFC 3339.
        host, boot, pid_namespace: where the owner's pid means something.
    """

    owner: _Short
    operation: _Short = ""
    dest: Annotated[str, msgspec.Meta(max_length=16384)] = ""
    since: _Short = msgspec.field(default_factory=now)
    host: _Short = msgspec.field(default_factory=socket.gethostname)
    boot: _Short = msgspec.field(default_factory=_boot_id)
    pid_namespace: _Short = msgspec.field(default_factory=_pid_namespace)


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that a checkpoint has not finished, or not yet.

    Attributes:
        path: of the folder.
        dest: where the image was to be, or None where the folder does not say.
        owner: identity of the process that writes (or wrote) it, or "" where the folder does not say.
        operation: the operation's id, or "".
        since: when it was begun, RFC 3339, or "".
        state: "alive" while the owner runs; "dead": nobody will finish it; "elsewhere": its owner belongs to another
            machine or pid namespace and cannot be asked.
    """

    path: Path
    dest: Path | None
    owner: str
    operation: str
    since: str
    state: Literal["alive", "dead", "elsewhere"]


def write_marker(dir_fd: int, files: Files, marker: Marker) -> None:
    """Write ``unfinished.json`` into the temporary folder."""
    files.write(MARKER_NAME, msgspec.json.encode(marker) + b"\n", dir_fd)


def unfinished(parent: str | os.PathLike[str], *, only_look: bool = False) -> list[Unfinished]:
    """The unfinished folders in a folder, in the order of their names.

    Args:
        parent: the folder.
        only_look: nothing will be removed: whatever link leads there is followed.

    Raises:
        OSError: ``parent`` cannot be read, or one of them, because this process can open no file more.
        PermissionDenied: for root, it is behind a link of another user's.
    """
    base = Path(os.path.abspath(parent))
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if only_look else open_named(base)
    try:
        found = (describe(base / name, name, fd) for name in sorted(os.listdir(fd)) if is_partial_name(name))
        return [one for one in found if one is not None]
    finally:
        os.close(fd)


def describe(path: Path, name: str, parent_fd: int) -> Unfinished | None:
    """What the folder ``name`` says of itself, or None where there is no such folder (any more).

    Without a readable marker (a crash before or while it was written, or ``remove`` at work) nobody owns it.

    Raises OSError: this process can open no file more, and so cannot tell.
    """
    try:
        fd = open_folder(name, parent_fd)
    except OSError as error:
        if no_more_files(error):
            raise  # it is there all the same, and may be a living operation's
        return None
    try:
        marker = msgspec.json.decode(read_file(MARKER_NAME, fd, _LIMIT), type=ready(Marker))
        dest = Path(os.fsdecode(bytes.fromhex(marker.dest))) if marker.dest else None
    except (OSError, ValueError) as error:
        if no_more_files(error):
            raise
        return Unfinished(path=path, dest=None, owner="", operation="", since="", state="dead")
    finally:
        os.close(fd)
    return Unfinished(
        path=path,
        dest=dest,
        owner=marker.owner,
        operation=marker.operation,
        since=marker.since,
        state=_state(marker),
    )


def this_process() -> str:
    """This process's identity, ``pid@start_time``."""
    return f"{os.getpid()}@{_start_time(os.getpid())}"


def _state(marker: Marker) -> Literal["alive", "dead", "elsewhere"]:
    if marker.host != socket.gethostname():
        return "elsewhere"
    if marker.boot != _boot_id():  # the same machine, started again since
        return "dead"
    if marker.pid_namespace != _pid_namespace():
        return "elsewhere"
    pid, _, start = marker.owner.partition("@")
    if not (pid.isascii() and pid.isdigit()):
        return "dead"
    return "alive" if _start_time(int(pid)) == start else "dead"


def _start_time(pid: int) -> str:
    """Field 22 of ``/proc/PID/stat``; "" where the process is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")

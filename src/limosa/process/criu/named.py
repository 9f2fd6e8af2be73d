"""What CRIU opens by name at a restore, and as what: read from its images (CRIU's ``images/*.proto`` has the fields).

Everything that has a name in the file system is in ``files.img``: files, folders, FIFOs, devices. Descriptors,
mappings, working and root folders and programs refer to it by number.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from limosa.process.criu.stats import fields

FILES_IMAGE = "files.img"
_RECORD_LIMIT = 256 << 20  # the mappings of one process are one record: hundreds of bytes each
_HEAD = 8  # bytes of two magic numbers
_REGULAR, _FIFO = 1, 3  # enum fd_types
_GHOST, _LINKED, _PROC = 1, 0, 2  # enum remap_type
_FILE_MAPPING = 1 << 6 | 1 << 7  # VMA_FILE_PRIVATE, VMA_FILE_SHARED
_NO_FILE = 1 << 10 | 1 << 11 | 1 << 14  # System V memory, a packet socket, a memfd
_OUTSIDE = 1  # USK_EXTERN, of a socket


class Remapped(msgspec.Struct, frozen=True):
    """A file whose name was gone: CRIU makes it anew ("ghost"), or it has another name ("linked", in ``name``).

    Attributes:
        kind: these, or "proc".
        name: see above.
        owner: uid and gid of one that is made anew.
    """

    kind: str
    name: str = ""
    owner: tuple[int, int] = (0, 0)


class Socket(NamedTuple):
    """A unix socket with a name in the file system.

    Attributes:
        name: its path; what its user has written, and no more true than that.
        owner, group: whose it was; -1 where that was not noted.
        outside: it is not the job's: a socket of the job's is connected to it.
    """

    name: str
    owner: int
    group: int
    outside: bool


class Uses(msgspec.Struct):
    """What one process has of named files, each by its number.

    Attributes:
        fds: descriptor → file.
        maps: address of a mapping → file.
        links: "cwd", "root", "exe" → file.
    """

    fds: dict[int, int] = {}
    maps: dict[int, int] = {}
    links: dict[str, int] = {}


class Named(msgspec.Struct):
    """The named files of an image, by number, and what each process has of them.

    Attributes:
        names: files, by number.
        remapped: those whose name was gone.
        processes: what each has.
        sockets: unix sockets with a name in the file system, each once.
    """

    names: dict[int, str] = {}
    remapped: dict[int, Remapped] = {}
    processes: dict[int, Uses] = {}
    sockets: list[Socket] = []


def named(images_fd: int, pids: list[int]) -> Named:
    """Read an image.

    Args:
        images_fd: the open folder with CRIU's images.
        pids: the processes.

    Raises:
        ValueError: it is not what CRIU writes.
        OSError: it cannot be read.
    """
    found = Named()
    fifos: dict[int, int] = {}
    for record in _records(images_fd, FILES_IMAGE):
        _one_file(record, found, fifos)
    for record in _records(images_fd, "remap-fpath.img", needed=False):
        numbers = _numbers(record)
        kind = {_GHOST: "ghost", _LINKED: "linked", _PROC: "proc"}.get(numbers.get(3, _LINKED), "ghost")
        name = found.names.get(numbers.get(2, 0), "") if kind == "linked" else ""
        owner = _ghost_owner(images_fd, numbers.get(2, 0)) if kind == "ghost" else (0, 0)
        found.remapped[numbers.get(1, 0)] = Remapped(kind, name, owner)
    tables: dict[int, dict[int, int]] = {}
    for pid in pids:
        uses = found.processes[pid] = Uses()
        table = next((_numbers(r).get(2, 0) for r in _records(images_fd, f"ids-{pid}.img", needed=False)), 0)
        if table not in tables:
            tables[table] = _descriptors(images_fd, table, fifos)
        uses.fds = tables[table]
        for record in _records(images_fd, f"fs-{pid}.img", needed=False):
            numbers = _numbers(record)
            uses.links |= {name: numbers[at] for name, at in (("cwd", 1), ("root", 2)) if at in numbers}
        for record in _records(images_fd, f"mm-{pid}.img", needed=False):
            _mappings(record, uses)
    return found


def sockets(images_fd: int) -> list[Socket]:
    """Read the unix sockets of an image that have a name in the file system, each once.

    Args:
        images_fd: as for :func:`named`, which raises the same.
    """
    found: list[Socket] = []
    for record in _records(images_fd, FILES_IMAGE):
        for number, value in fields(record):
            if number == 16 and isinstance(value, bytes):
                _socket(value, found)
    return found


def _one_file(record: bytes, found: Named, fifos: dict[int, int]) -> None:
    for number, value in fields(record):
        if isinstance(value, int):
            continue
        if number == 3:  # RegFileEntry
            key = -1
            for inner, part in fields(value):
                if inner == 1 and isinstance(part, int):
                    key = part
                elif inner == 6 and isinstance(part, bytes):
                    found.names[key] = os.fsdecode(part)
                    break
        elif number == 17:  # FifoEntry
            numbers = _numbers(value)
            fifos[numbers.get(1, -1)] = numbers.get(3, -1)
        elif number == 16:  # UnixSkEntry
            _socket(value, found.sockets)


def _socket(record: bytes, sockets: list[Socket]) -> None:
    parts = {number: value for number, value in fields(record) if isinstance(value, bytes)}
    name, _, _ = parts.get(11, b"").partition(b"\0")  # as the kernel reads it; an abstract one is nothing then
    if not name:
        return
    perms = _numbers(parts.get(13, b""))
    path = os.fsdecode(os.path.join(parts.get(14, b"").rstrip(b"\0") or b"/", name))
    found = Socket(path, perms.get(2, -1), perms.get(3, -1), bool(_numbers(record).get(6, 0) & _OUTSIDE))
    if found not in sockets:
        sockets.append(found)


def _ghost_owner(images_fd: int, key: int) -> tuple[int, int]:
    record = next(iter(_records(images_fd, f"ghost-file-{key:x}.img")), b"")
    numbers = _numbers(record)
    return numbers.get(1, 0), numbers.get(2, 0)


def _descriptors(images_fd: int, table: int, fifos: dict[int, int]) -> dict[int, int]:
    found = {}
    for record in _records(images_fd, f"fdinfo-{table}.img", needed=False):
        numbers = _numbers(record)
        key, kind, fd = numbers.get(1, 0), numbers.get(3, 0), numbers.get(4, -1)
        if kind == _REGULAR:
            found[fd] = key
        elif kind == _FIFO and key in fifos:
            found[fd] = fifos[key]
    return found


def _mappings(record: bytes, uses: Uses) -> None:
    for number, value in fields(record):
        if number == 12 and isinstance(value, int):
            uses.links["exe"] = value
        elif number == 14 and isinstance(value, bytes):
            vma = _numbers(value)
            if vma.get(7, 0) & _FILE_MAPPING and not vma.get(7, 0) & _NO_FILE:
                uses.maps[vma.get(1, 0)] = vma.get(4, 0)


def _numbers(record: bytes) -> dict[int, int]:
    return {number: value for number, value in fields(record) if isinstance(value, int)}


def _records(images_fd: int, name: str, *, needed: bool = True) -> Iterator[bytes]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=images_fd)
    except FileNotFoundError:
        if needed:
            raise
        return
    with open(fd, "rb") as file:
        file.read(_HEAD)
        while head := file.read(4):
            size = struct.unpack("<I", head)[0] if len(head) == 4 else _RECORD_LIMIT + 1
            if size > _RECORD_LIMIT:
                raise ValueError(f"{name} is cut off")
            record = file.read(size)
            if len(record) != size:
                raise ValueError(f"{name} is cut off")
            yield record

"""What CRIU wrote down about a run: its ``stats-dump`` and ``stats-restore`` files, and the inventory of an image.

A CRIU image file is a few 32-bit little-endian magic numbers, then records of a length (32 bits) and a protobuf
message. The few numbers needed here are not worth a protobuf library: a reader of its wire format takes thirty lines.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator

import msgspec

_SERVICE_MAGIC = 0x55105940  # first word of stats files …
_INVENTORY_MAGIC = 0x58313116  # … and of inventory.img, which has this one word only
_COMMON_MAGIC = 0x54564319  # first word of all other images; the second says which
_LIMIT = 1 << 20  # these files have a few hundred bytes


class DumpStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a dump did and how long its steps took.

    Attributes:
        freezing_time: seconds from the first process stopped to the last.
        frozen_time: seconds that the job stood still (until it was released, or CRIU was done with its memory).
        memdump_time: seconds for reading its memory.
        memwrite_time: seconds for writing it.
        pages: pages written.
        bytes: bytes of them.
        seconds: of the whole run as the caller saw it, its own actions included.
        action_seconds: of these, in the caller's actions.
        run_id: CRIU's name of this run, or "".
        nft_table: the nftables table ("inet CRIU-…") that was made to keep packets away and is still there, or None.
    """

    freezing_time: float = 0.0
    frozen_time: float = 0.0
    memdump_time: float = 0.0
    memwrite_time: float = 0.0
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    action_seconds: float = 0.0
    run_id: str = ""
    nft_table: str | None = None


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Read a protobuf message: yield each field's number and value (a number, or bytes for text and messages).

    Raises:
        ValueError: it is cut off or not protobuf.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(message) or shift > 63:
                raise ValueError("protobuf message is cut off")
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"protobuf wire type {kind} is unknown")
        length = {1: 8, 5: 4}.get(kind) or varint()
        if at + length > len(message):
            raise ValueError("protobuf message is cut off")
        raw = message[at : at + length]
        at += length
        yield key >> 3, raw if kind == 2 else int.from_bytes(raw, "little")


def first_record(raw: bytes) -> bytes:
    """Return the first message of a CRIU image file.

    Raises:
        ValueError: it is not one, or cut off.
    """
    words = 1 if raw[:4] == struct.pack("<I", _INVENTORY_MAGIC) else 2
    if raw[:4] not in {struct.pack("<I", magic) for magic in (_SERVICE_MAGIC, _INVENTORY_MAGIC, _COMMON_MAGIC)}:
        raise ValueError("not a CRIU image file")
    start = words * 4 + 4
    if len(raw) < start:
        raise ValueError("CRIU image file is cut off")
    (size,) = struct.unpack("<I", raw[start - 4 : start])
    if size > _LIMIT or len(raw) < start + size:
        raise ValueError("CRIU image file is cut off")
    return raw[start : start + size]


def read_at(folder_fd: int, name: str, limit: int = _LIMIT) -> bytes:
    """Read a small file of a folder that is open; ``b""`` where it is not there, or no file.

    Args:
        folder_fd: the folder.
        name: the file's name in it; a link is not followed.
        limit: bytes read at most.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder_fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return b""
    except OSError:
        return b""
    with open(fd, "rb") as file:
        return file.read(limit)


def dump_stats(work_fd: int) -> DumpStats:
    """Read ``stats-dump`` of a work folder; all zero where there is none or it is cut off (statistics fail no dump)."""
    names = {1: "freezing_time", 2: "frozen_time", 3: "memdump_time", 4: "memwrite_time"}  # in microseconds
    found: dict[str, float] = {}
    pages = 0
    try:
        for number, entry in fields(first_record(read_at(work_fd, "stats-dump"))):
            if number != 1 or not isinstance(entry, bytes):
                continue
            for field, value in fields(entry):
                if isinstance(value, int) and field in names:
                    found[names[field]] = value / 1e6
                elif isinstance(value, int) and field in (7, 14):  # private and shared pages written
                    pages += value
    except ValueError:
        return DumpStats()
    return DumpStats(
        freezing_time=found.get("freezing_time", 0.0),
        frozen_time=found.get("frozen_time", 0.0),
        memdump_time=found.get("memdump_time", 0.0),
        memwrite_time=found.get("memwrite_time", 0.0),
        pages=pages,
        bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )


def restore_stats(work_fd: int) -> dict[str, float]:
    """Read ``stats-restore`` of a work folder: times in seconds and ``pages_restored``; empty where there is none."""
    names = {3: "forking_time", 4: "restore_time"}  # in microseconds
    found: dict[str, float] = {}
    try:
        for number, entry in fields(first_record(read_at(work_fd, "stats-restore"))):
            if number != 2 or not isinstance(entry, bytes):
                continue
            for field, value in fields(entry):
                if isinstance(value, int) and field in names:
                    found[names[field]] = value / 1e6
                elif isinstance(value, int) and field == 5:
                    found["pages_restored"] = value
    except ValueError:
        return {}
    return found


def run_id(images_fd: int) -> str:
    """Return the name CRIU gave the dump that made these images (its inventory, field 13); "" before CRIU 4.2."""
    try:
        for number, value in fields(first_record(read_at(images_fd, "inventory.img"))):
            if number == 13 and isinstance(value, bytes):
                return value.decode("ascii", errors="replace")
    except ValueError:
        pass
    return ""

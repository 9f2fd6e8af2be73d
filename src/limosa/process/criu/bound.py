"""What CRIU will bind again at a restore: the sockets of ``files.img``."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import msgspec

from limosa.process.criu.stats import fields

_MAGIC = struct.pack("<II", 0x54564319, 0x56303138)  # an image file; of open files
_RECORD_LIMIT = 1 << 20  # one open file takes tens of bytes
_INET = b"\x08\x04"  # how the record of an inet socket begins: field 1, its type, is 4 (INETSK)
_UNIX = b"\x08\x05"  # likewise, 5 (UNIXSK)
_LISTEN = 10
_PROTOCOLS = {6: "tcp", 17: "udp"}


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """One socket that a restore binds.

    Attributes:
        family: ``AF_INET`` or ``AF_INET6``.
        protocol: "tcp" or "udp".
        address: as text, "0.0.0.0" or "::" for all of them.
        port: the port.
        listening: whether it listens.
        v6only: whether an IPv6 one leaves IPv4 alone.
        device: the interface that a link-local address is of, or "".
    """

    family: int
    protocol: str
    address: str
    port: int
    listening: bool = False
    v6only: bool = False
    device: str = ""

    def __str__(self) -> str:
        """The port as people write it: "tcp 127.0.0.1:8080", "tcp [::1]:8080"."""
        where = f"[{self.address}]" if self.family == socket.AF_INET6 else self.address
        return f"{self.protocol} {where}:{self.port}"


def bound_sockets(images_fd: int) -> list[Bound]:
    """Return the TCP and UDP sockets of an image that CRIU will bind, each once.

    Connected TCP sockets are left out: CRIU binds them in repair mode, where nothing is in the way.

    Args:
        images_fd: the open folder with the images. What cannot be read there is left out: whoever restores compares
            the hashes, and CRIU reads it all.
    """
    found: dict[Bound, None] = {}
    try:
        for message in _records(images_fd):
            if message.startswith(_INET) and (bound := _decode(message)) is not None:
                found[bound] = None
    except (OSError, ValueError):
        pass
    return list(found)


def listening_names(images_fd: int) -> dict[int, bytes]:
    """Return the names of the unix sockets of an image that listen, by their inodes when it was taken.

    Args:
        images_fd: as for :func:`bound_sockets`.
    """
    found: dict[int, bytes] = {}
    try:
        for message in _records(images_fd):
            record = dict(fields(message)).get(16) if message.startswith(_UNIX) else None
            if isinstance(record, bytes):
                values = dict(fields(record))  # CRIU's images/sk-unix.proto
                inode, name = values.get(2), values.get(11)
                if isinstance(inode, int) and isinstance(name, bytes) and values.get(4) == _LISTEN:
                    found[inode] = name
    except (OSError, ValueError):
        pass
    return found


def _records(images_fd: int) -> Iterator[bytes]:
    fd = os.open("files.img", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=images_fd)
    with open(fd, "rb") as file:
        if file.read(8) != _MAGIC:
            return
        while len(head := file.read(4)) == 4:
            (size,) = struct.unpack("<I", head)
            if size > _RECORD_LIMIT:
                return
            yield file.read(size)


def _decode(message: bytes) -> Bound | None:
    """One record: field 4 is the inet socket (CRIU's ``images/sk-inet.proto`` has its fields)."""
    for number, value in fields(message):
        if number == 4 and isinstance(value, bytes):
            return _socket(value)
    return None


def _socket(message: bytes) -> Bound | None:
    numbers: dict[int, int] = {}
    words: list[int] = []
    device = ""
    for number, value in fields(message):
        if isinstance(value, int):
            if number == 11:
                words.append(value)
            numbers[number] = value
        elif number == 11:  # packed
            words += _varints(value)
        elif number == 17:
            device = value.decode(errors="replace")
    family, protocol, port = numbers.get(3), _PROTOCOLS.get(numbers.get(5, 0)), numbers.get(7, 0)
    if family not in (socket.AF_INET, socket.AF_INET6) or protocol is None or not 0 < port < 1 << 16:
        return None
    if protocol == "tcp" and numbers.get(8, 0):
        return None
    count = 1 if family == socket.AF_INET else 4
    if len(words) < count:
        return None
    raw = b"".join(struct.pack("=I", word & 0xFFFFFFFF) for word in words[:count])
    return Bound(
        family=family,
        protocol=protocol,
        address=socket.inet_ntop(family, raw),
        port=port,
        listening=protocol == "tcp" and numbers.get(6) == _LISTEN,
        v6only=bool(numbers.get(15)),
        device=device,
    )


def _varints(raw: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in raw:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            yield value
            value = shift = 0

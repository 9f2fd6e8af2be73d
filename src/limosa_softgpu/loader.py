"""Where the dynamic loader finds the driver in a node, also for programs that are started without LD_LIBRARY_PATH.

``/etc/ld.so.cache`` says for each library by its name where it lies. A node has one of its own, the machine's with the
software GPU's libraries in place of any other of their names. (``ldconfig`` could write it, but it takes a third of a
second and writes a cache of its own, outside of the node.)

The format is glibc's, "new": a header, entries of 24 bytes, strings. Entries are sorted by name, the greatest first,
numbers in names as numbers.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CACHE = "/etc/ld.so.cache"
_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("=20sIIB3xI12x")
_ENTRY = struct.Struct("=iIIIQ")
_TOKEN = re.compile(rb"\d+|\D")
_LIBC = b"libc.so.6"


class Entry(NamedTuple):
    """A library of a cache.

    Attributes:
        flags: what kind of machine it is for.
        hwcap: what it asks of the processor.
        name: as programs ask for it.
        path: where it is.
    """

    flags: int
    hwcap: int
    name: bytes
    path: bytes


def entries(cache: bytes) -> list[Entry]:
    """Return what a cache lists.

    Raises:
        ValueError: it is none of this format.
    """
    if len(cache) < _HEADER.size or not cache.startswith(_MAGIC):
        raise ValueError("no cache of the dynamic loader in a format that is known")
    count = _HEADER.unpack_from(cache)[1]
    if _HEADER.size + count * _ENTRY.size > len(cache):
        raise ValueError("the cache of the dynamic loader ends in the middle")
    found = []
    for place in range(count):
        flags, name, path, _, hwcap = _ENTRY.unpack_from(cache, _HEADER.size + place * _ENTRY.size)
        found.append(Entry(flags, hwcap, _string(cache, name), _string(cache, path)))
    return found


def with_libraries(cache: bytes, libraries: Mapping[str, str]) -> bytes:
    """Return a cache in which names lead to these libraries and nowhere else.

    Args:
        cache: the machine's.
        libraries: path by name.

    Raises:
        ValueError: it is no cache, or lists nothing for the machine that these libraries are for.
    """
    before = entries(cache)
    flags = _flags_like(before, next(iter(libraries.values())))
    ours = [Entry(flags, 0, os.fsencode(name), os.fsencode(path)) for name, path in libraries.items()]
    named = {entry.name for entry in ours}
    # Without the section that says what extended capabilities mean: the loader passes over those who ask for them.
    kept = [entry for entry in before if entry.name not in named]
    everything = sorted([*kept, *ours], key=lambda entry: _order(entry.name), reverse=True)
    strings = bytearray()
    places: dict[bytes, int] = {}
    begin = _HEADER.size + len(everything) * _ENTRY.size
    for text in (text for entry in everything for text in (entry.name, entry.path)):
        if text not in places:
            places[text] = begin + len(strings)
            strings += text + b"\0"
    endian = cache[_HEADER.size - 20]  # the byte that says in which order the others are
    made = bytearray(_HEADER.pack(_MAGIC, len(everything), len(strings), endian, 0))
    for entry in everything:
        made += _ENTRY.pack(entry.flags, places[entry.name], places[entry.path], 0, entry.hwcap)
    return bytes(made + strings)


def listed(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return where the machine's cache has libraries of these names: name and path. Nothing where there is no cache."""
    wanted = {os.fsencode(name) for name in names}
    try:
        with open(CACHE, "rb") as file:
            found = entries(file.read())
    except (OSError, ValueError):
        return []
    return [(os.fsdecode(entry.name), os.fsdecode(entry.path)) for entry in found if entry.name in wanted]


def _string(cache: bytes, at: int) -> bytes:
    end = cache.find(b"\0", at)
    if end < 0:
        raise ValueError("the cache of the dynamic loader ends in the middle")
    return cache[at:end]


def _order(name: bytes) -> list[tuple[int, int]]:
    """Sort as the loader searches: numbers as numbers, and after every letter."""
    return [(1, int(token)) if token.isdigit() else (0, token[0]) for token in _TOKEN.findall(name)]


def _flags_like(before: list[Entry], library: str) -> int:
    kind = _machine(library)
    for entry in before:
        if entry.name == _LIBC and _machine(os.fsdecode(entry.path)) == kind:
            return entry.flags
    raise ValueError("the cache of the dynamic loader lists no C library for this kind of machine")


def _machine(library: str) -> bytes:
    """Return what an ELF file says of the machine it is for."""
    try:
        with open(library, "rb") as file:
            head = file.read(20)
    except OSError:
        return b""
    return head[4:6] + head[18:20]

"""Structs that several threads may be the first to read.

msgspec learns what a Struct is made of when the first message of it is read, and holds no lock meanwhile: a second
thread that reads one then finds half of it, and the process dies (SIGSEGV; msgspec 0.22, half of the times with four).
``msgspec.json.decode(data, type=ready(Header))`` is safe; a test finds what is read without.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_lock = threading.Lock()
_ready: set[Any] = set()


def ready(type_: type[T]) -> type[T]:
    """The type itself, once msgspec knows it and all that it is made of."""
    if type_ not in _ready:
        with _lock:
            msgspec.json.Decoder(type_)
            _ready.add(type_)
    return type_

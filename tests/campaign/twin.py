"""The undisturbed twin: the same computation on the host, epoch by epoch, and what it would say of its memory.

The blocks of an epoch follow from its number. The float array does not: it carries the rounding of every epoch since
the start, so the twin computes as many epochs as the victim has (and keeps every 512th).
"""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import numpy as np

from campaign import computed
from campaign.shapes import FLOATS, SHAPES, Part, factor, page_of

_A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


class Proof(NamedTuple):
    """What a process says of its memory: at which epoch, the kernel's hash, the bytes' CRC, the floats' CRC."""

    epoch: int
    hash: int
    bytes: int
    floats: int


def expected(shape: str, slot: int, epoch: int) -> Proof:
    """What process ``slot`` of a victim of that class has to say at the end of an epoch."""
    if SHAPES[shape].ranks is not None and slot:
        return Proof(epoch, 0, computed.crc_of(shape, slot - 1, epoch), 0)
    parts = SHAPES[shape].processes[slot]
    total, crc, floats = 0, 0, 0
    for p, part in enumerate(parts):
        for b, words in enumerate(part.blocks):
            block = stamped(words, epoch, page_of(slot, p, b))
            total = (total + _hash(block) * (2 * (100 * p + b) + 1)) % (1 << 64)
            crc = zlib.crc32(block.tobytes(), crc)
        floats = zlib.crc32(_floats(epoch).tobytes(), floats)
    return Proof(epoch, total, crc, floats)


def stamped(words: int, epoch: int, page: int) -> np.ndarray:
    """A block as the kernel ``stamp`` leaves it."""
    with np.errstate(over="ignore"):
        index = np.arange(page * 512, page * 512 + words, dtype=np.uint64)
        return np.uint64(epoch) * _A + index * _B


def _hash(block: np.ndarray) -> int:
    with np.errstate(over="ignore"):
        odd = np.arange(len(block), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        return int(np.sum((block ^ (block >> np.uint64(29))) * odd, dtype=np.uint64))


def first_floats() -> np.ndarray:
    """What the float array is multiplied from."""
    return (np.arange(FLOATS, dtype=np.float32) + np.float32(0.5)) * np.float32(0.37)


_kept: dict[int, np.ndarray] = {0: np.zeros(FLOATS, dtype=np.float32)}


@functools.lru_cache(maxsize=64)
def _floats(epoch: int) -> np.ndarray:
    start = max(e for e in _kept if e <= epoch)
    y, x = _kept[start].copy(), first_floats()
    for e in range(start + 1, epoch + 1):
        y += np.float32(factor(e)) * x
        if e % 512 == 0:
            _kept[e] = y.copy()
    return y


def bytes_of(part: Part) -> int:
    """Device bytes of a part's blocks."""
    return 8 * sum(part.blocks)

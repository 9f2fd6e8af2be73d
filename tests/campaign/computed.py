"""What ranks compute together, and what an undisturbed twin says that they have computed.

All is modulo 2^32, and can be undone: one wrong number in any epoch shows in all later ones. A rank's numbers repeat,
and each repetition is more than the one before by the same amount, so that the twin needs one repetition only.
"""

from __future__ import annotations

import functools
import zlib

import numpy as np

from campaign.shapes import SHAPES, Ranks

PERIOD = 500
_EVERY = 256  # epochs that are kept


class Numbers:
    """One repetition, and by how much each is more than the one before (the last number)."""

    @staticmethod
    def first(rank: int) -> np.ndarray:
        return np.random.default_rng(rank).integers(0, 1 << 32, PERIOD + 1, dtype=np.uint32)

    @staticmethod
    def whole(numbers: np.ndarray, count: int) -> np.ndarray:
        """All that a rank has."""
        index = np.arange(count, dtype=np.uint32)
        return numbers[index % PERIOD] + numbers[PERIOD] * (index // PERIOD)


def after(
    own: np.ndarray, sums: np.ndarray, parity: np.ndarray, ring: np.ndarray | None, step: np.uint32 | np.ndarray
) -> np.ndarray:
    """The next numbers of a rank: from its own, those of all, of those of the same parity, of the rank before."""
    found = 5 * own + 2 * sums + 4 * parity + step
    return found if ring is None else found + 2 * ring


_kept: dict[str, dict[int, np.ndarray]] = {}


def crc_of(shape: str, rank: int, epoch: int) -> int:
    """The CRC of a rank's numbers after that epoch."""
    ranks = SHAPES[shape].ranks
    assert ranks is not None
    return zlib.crc32(Numbers.whole(_at(shape, epoch)[rank], ranks.numbers).tobytes())


@functools.lru_cache(maxsize=64)
def _at(shape: str, epoch: int) -> np.ndarray:
    n = len(SHAPES[shape].processes) - 1
    ranks = SHAPES[shape].ranks
    assert isinstance(ranks, Ranks)
    kept = _kept.setdefault(shape, {0: np.array([Numbers.first(rank) for rank in range(n)])})
    start = max(e for e in kept if e <= epoch)
    now = kept[start]
    step = np.ones(PERIOD + 1, dtype=np.uint32)
    step[PERIOD] = 0
    for e in range(start + 1, epoch + 1):
        sums = np.broadcast_to(now.sum(axis=0, dtype=np.uint32), now.shape)
        parity = np.array([now[rank % 2 :: 2].sum(axis=0, dtype=np.uint32) for rank in range(n)])
        ring = np.roll(now, 1, axis=0) if ranks.p2p else None
        now = after(now, sums, parity, ring, step * np.uint32(e))
        if e % _EVERY == 0:
            kept[e] = now
    return now

"""What is hashed of a file is what is in it, by however many threads and whatever its size."""

from __future__ import annotations

import os
import random
from pathlib import Path

import blake3
import pytest

from limosa.image.hashing import hash_fd

PAGE = 4096  # of one that is cut in its middle the kernel clears the rest, and a read may meet that
PART, MANY = 2 << 20, 8 << 20  # what one thread reads, and what is hashed at once
SIZES = [0, 1, 64 << 10, (1 << 20) + 1, PART, PART + 1, MANY - 1, MANY, MANY + 1, 2 * MANY, 2 * MANY + PART + 7]


@pytest.mark.parametrize("threads", [1, 2, None])
@pytest.mark.parametrize("size", SIZES)
def test_all_of_it_is_hashed(tmp_path: Path, size: int, threads: int | None) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    told: list[int] = []
    fd = os.open(path, os.O_RDONLY)
    try:
        assert hash_fd(fd, threads=threads, advance=told.append) == (blake3.blake3(data).hexdigest(), size)
    finally:
        os.close(fd)
    assert sum(told) == size


@pytest.mark.parametrize("left", [0, PART + PAGE, MANY, MANY + PART + PAGE])
def test_one_that_is_cut_short_meanwhile_ends_there(tmp_path: Path, left: int) -> None:
    """What was read before may be of it as it was; what is hashed is no more than that, and nothing fails."""
    data = random.Random(left).randbytes(3 * MANY)
    path = tmp_path / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDWR)
    try:
        found, size = hash_fd(fd, threads=2, advance=lambda _: os.ftruncate(fd, left))
    finally:
        os.close(fd)
    assert left <= size <= 2 * MANY
    assert found == blake3.blake3(data[:size]).hexdigest()

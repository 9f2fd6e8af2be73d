"""The arena's segments: how large, which are used again, how far they may grow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from limosa.errors import FailedUndone
from limosa.parking.mover_saving import Aside
from limosa.parking.segments import (
    LARGE,
    SMALL,
    NoRoom,
    Pool,
    exactly,
    is_segment,
    layout_file,
    make,
    room_for,
    sizes_for,
)

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    for fd, _, _ in found.free:
        os.close(fd)


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    ("wanted", "sizes"),
    [
        (0, []),
        (1, [SMALL]),
        (SMALL, [SMALL]),
        (SMALL + 1, [2 * SMALL]),
        (LARGE, [LARGE]),
        (LARGE + 2 * MIB, [LARGE, SMALL]),
        (3 * LARGE - 1, [LARGE, LARGE, LARGE]),
    ],
)
def test_all_but_the_last_are_large(wanted: int, sizes: list[int]) -> None:
    assert sizes_for(wanted) == sizes
    assert room_for(wanted) >= wanted


def test_what_was_given_back_is_taken_first(pool: Pool) -> None:
    first = pool.take([64 * MIB], 0, 1 << 40)
    pool.give_back([os.dup(first[0])])
    again = pool.take([64 * MIB], 0, 1 << 40)
    assert os.fstat(again[0]).st_ino == os.fstat(first[0]).st_ino
    assert pool.bytes() == 0
    close(first + again)


def test_the_smallest_that_does_is_taken(pool: Pool) -> None:
    pool.give_back([make(LARGE), make(64 * MIB), make(128 * MIB)])
    found = pool.take([64 * MIB], 0, 1 << 40)
    assert os.fstat(found[0]).st_size == 64 * MIB
    found += pool.take([64 * MIB], 64 * MIB, 1 << 40)
    assert os.fstat(found[1]).st_size == 128 * MIB
    close(found)


def test_it_does_not_grow_past_its_cap(pool: Pool) -> None:
    with pytest.raises(NoRoom):
        pool.take([LARGE, SMALL], 0, LARGE)
    pool.give_back([make(512 * MIB)])
    close(pool.take([LARGE], 0, LARGE))
    assert pool.bytes() == 0, "what nobody uses makes way"
    with pytest.raises(NoRoom):
        pool.reserve(2 * LARGE, time.monotonic() + 60, 0, LARGE)


@pytest.mark.parametrize("free", [[], [LARGE], [256 * MIB, 512 * MIB], [SMALL] * 3 + [LARGE, LARGE]])
@pytest.mark.parametrize("used", [0, SMALL, 3 * SMALL, LARGE])
def test_what_is_asked_for_is_used_and_free_together(pool: Pool, free: list[int], used: int) -> None:
    pool.give_back([make(size) for size in free])
    for wanted in (LARGE + 5 * SMALL, 2 * LARGE, 4 * SMALL, 0):
        pool.reserve(wanted, time.monotonic() + 60, used, 1 << 40)
        assert pool.bytes() == max(0, wanted - used)


def test_what_does_not_fit_does_not_come_on_top(pool: Pool) -> None:
    pool.reserve(LARGE, time.monotonic() + 60, 0, 1 << 40)
    found = pool.take([LARGE, SMALL], 0, 1 << 40)
    close(found)
    pool.reserve(SMALL, time.monotonic() + 60, 0, 1 << 40)
    found = pool.take([LARGE], 0, 1 << 40)
    assert pool.bytes() == 0
    close(found)


def test_so_many_bytes_exactly() -> None:
    assert sum(exactly(0)) == 0
    assert exactly(1) == [SMALL]
    for n in (1, 3, 17, 31, 32, 33, 63, 200):
        sizes = exactly(n * SMALL)
        assert sum(sizes) == n * SMALL
        assert all(size <= LARGE and size & (size - 1) == 0 for size in sizes)


def test_what_is_reserved_stays_and_the_rest_goes(pool: Pool) -> None:
    pool.give_back([make(64 * MIB)])
    pool.reserve(128 * MIB, time.monotonic() + 60, 0, 1 << 40)
    assert pool.bytes() == 128 * MIB
    pool.give_back([make(64 * MIB)])
    pool.trim(0, 0.0)
    assert pool.bytes() == 128 * MIB
    pool.trim(64 * MIB, 0.0)
    assert pool.bytes() == 64 * MIB, "what is in use counts as well"
    pool.until = time.monotonic() - 1
    pool.trim(0, 3600.0)
    assert pool.bytes() == 64 * MIB, "it was used lately"
    pool.trim(0, 0.0)
    assert pool.bytes() == 0


def test_what_says_where_things_are_cannot_be_changed() -> None:
    fd = layout_file(b"text")
    try:
        assert not is_segment(fd)
        assert os.pread(fd, 10, 0) == b"text"
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"else", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_it_is_closed_and_not_given_to_the_next(pool: Pool) -> None:
    pool.give_back([layout_file(b"text"), make(SMALL)])
    assert [size for _, size, _ in pool.free] == [SMALL]


def unsealed() -> int:
    fd = os.memfd_create("limosa-arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SMALL)
    return fd


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("made", "offset", "bytes_"),
    [
        (lambda: os.pipe()[0], 0, 1),
        (lambda: os.open("/dev/zero", os.O_RDWR), 0, 1),
        (lambda: os.open("/", os.O_RDONLY), 0, 1),
        (unsealed, 0, 1),
        (lambda: layout_file(bytes(MIB)), 0, MIB),
        (lambda: make(SMALL), 0, SMALL + 1),
        (lambda: make(SMALL), SMALL, 1),
        (lambda: make(SMALL), LARGE, 1),
        (lambda: make(SMALL), 1 << 62, 1 << 62),
    ],
    ids=["pipe", "device", "folder", "unsealed", "sealed", "too small", "behind", "next", "far"],
)
def test_the_mover_reads_no_other_users_memory_from_what_may_shrink_or_have_it_wait(
    made: Callable[[], int], offset: int, bytes_: int
) -> None:
    fd = made()
    try:
        with pytest.raises(FailedUndone, match="behind the end"):
            Aside([fd], offset, bytes_)
    finally:
        os.close(fd)


def test_the_mover_reads_what_is_in_a_segment() -> None:
    fd = make(SMALL)
    os.pwrite(fd, b"there", SMALL - 5)
    piece = Aside([fd], SMALL - 5, 5)
    os.close(fd)
    found = bytearray(3)
    piece.read(memoryview(found), 2)
    piece.close()
    assert found == b"ere"

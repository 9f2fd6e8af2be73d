"""Reading CRIU's statistics and inventory: what they say, and nothing where they are damaged."""

from __future__ import annotations

import os
import struct

import pytest

from limosa.process.criu import stats

# dump_stats_entry: freezing 1500 µs, frozen 2 s, memdump 300 µs, memwrite 4 µs, 700 pages and 24 shared ones written
ENTRY = bytes([8, 0xDC, 0x0B, 16, 0x80, 0x89, 0x7A, 24, 0xAC, 0x02, 32, 4, 40, 5, 48, 0, 56, 0xBC, 0x05, 112, 24])


def image(message: bytes, magic: tuple[int, ...] = (0x55105940, 0x57093306)) -> bytes:
    return struct.pack(f"<{len(magic)}I", *magic) + struct.pack("<I", len(message)) + message


@pytest.fixture
def folder(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    yield tmp_path, fd
    os.close(fd)


def test_times_and_pages_of_a_dump(folder):
    path, fd = folder
    (path / "stats-dump").write_bytes(image(bytes([10, len(ENTRY)]) + ENTRY))
    found = stats.dump_stats(fd)
    assert (found.freezing_time, found.frozen_time, found.memdump_time) == (0.0015, 2.0, 0.0003)
    assert found.pages == 724
    assert found.bytes == 724 * os.sysconf("SC_PAGE_SIZE")


def test_statistics_cut_off_anywhere_fail_no_dump(folder):
    path, fd = folder
    whole = image(bytes([10, len(ENTRY)]) + ENTRY)
    for length in range(len(whole)):
        (path / "stats-dump").write_bytes(whole[:length])
        assert stats.dump_stats(fd) == stats.DumpStats()


def test_no_statistics_are_all_zero(folder):
    assert stats.dump_stats(folder[1]) == stats.DumpStats()


def test_the_run_id_is_in_the_inventory(folder):
    path, fd = folder
    (path / "inventory.img").write_bytes(image(bytes([8, 2, 0x6A, 4]) + b"abcd", (0x54564319, 0x58313116)))
    assert stats.run_id(fd) == "abcd"
    (path / "inventory.img").write_bytes(b"junk" * 10)
    assert stats.run_id(fd) == ""


def test_a_link_in_an_image_is_not_followed(folder):
    path, fd = folder
    (path / "real").write_bytes(image(bytes([8, 2, 0x6A, 4]) + b"abcd", (0x54564319, 0x58313116)))
    (path / "inventory.img").symlink_to("real")
    assert stats.run_id(fd) == ""

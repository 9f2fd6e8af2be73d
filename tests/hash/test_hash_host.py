"""The hash of chunks: what it computes, that it sees every change, that its PTX is of its source."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from limosa.errors import InvalidArgument
from limosa.native.build import HASH, build_hash
from limosa.native.hash import make_ptx
from limosa.parking import hashes
from limosa.parking.hashes import MOST_CHUNK, PTX, Key, host, table_bytes

KEY = Key(bytes(range(32)))
M64 = (1 << 64) - 1
# One word; a row and a bit; a tile less a word, and more; several tiles.
SIZES = (16, 32, 112, 128, 144, 4080, 4096, 4112, 8192, 12288 + 1040, 65536)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    assert build_hash() is None


def by_the_book(data: bytes, key: Key) -> bytes:
    """The formula at the head of chunk_hash.h."""
    table = key.table(len(data))
    k = struct.unpack_from("<512I", table)
    start, length = struct.unpack_from("<4Q", table, 2048), struct.unpack_from("<4Q", table, 2080)
    size, data = len(data), data + bytes(-len(data) % 4096)
    digest = b""
    for lane in range(4):
        total = start[lane] + length[lane] * size
        for strip in range(len(data) // 512):
            v = 0
            for row in range(32):
                w = struct.unpack_from("<4I", data, strip // 8 * 4096 + row * 128 + strip % 8 * 16)
                w = [(a + b) % 2**32 for a, b in zip(w, k[row * 16 + lane * 4 :], strict=False)]
                v += w[0] * w[1] + w[2] * w[3]
            v &= M64
            low, high = (struct.unpack_from("<Q", table, 2112 + strip * 64 + lane * 8 + part)[0] for part in (0, 32))
            total += low * (v & 0xFFFFFFFF) + high * (v >> 32)
        digest += struct.pack("<I", (total & M64) >> 32)
    return digest


@pytest.mark.parametrize("size", SIZES[:-1])
def test_is_what_its_header_says(size: int) -> None:
    """Also by each way that a processor may have."""
    data = random.Random(size).randbytes(size)
    expected = by_the_book(data, KEY)
    assert [host(data, size, KEY, MOST_CHUNK, newest) for newest in range(4)] == [[expected]] * 4


@pytest.mark.parametrize("content", [b"\0", b"\xff", b"\x80\0\0\0"])
def test_every_way_is_the_same_at_the_ends_of_numbers(content: bytes) -> None:
    data = content * (65536 // len(content))
    assert len({host(data, 65536, KEY, 65536, newest)[0] for newest in range(4)}) == 1


def test_chunks_of_a_range() -> None:
    """Each by itself, the last one shorter; wherever they lie."""
    data = random.Random(1).randbytes(5 * 65536 + 48)
    alone = [host(data[i : i + 65536], len(data[i : i + 65536]), KEY, 65536)[0] for i in range(0, len(data), 65536)]
    assert len(alone) == 6
    assert host(data, len(data), KEY, 65536) == alone
    room = bytearray(len(data) + 64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for shift in (0, 1, 16, 33):
        room[shift : shift + len(data)] = data
        assert host(address + shift, len(data), KEY, 65536) == alone
    assert host(data, 0, KEY) == []


@pytest.mark.parametrize(
    ("bytes_", "chunk"), [(8, 4096), (4096, 0), (4096, 24), (4096, MOST_CHUNK + 16), (-16, 4096), (8192, 4096)]
)
def test_sizes_that_cannot_be(bytes_: int, chunk: int) -> None:
    with pytest.raises(InvalidArgument):
        host(bytes(4096), bytes_, KEY, chunk)


def test_each_bit_counts() -> None:
    """Every bit of two tiles, one after the other."""
    data = bytearray(random.Random(3).randbytes(8192))
    seen = {host(data, 8192, KEY)[0]}
    for bit in range(8192 * 8):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(host(data, 8192, KEY)[0])
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8192 * 8 + 1


@given(some.data())
@settings(max_examples=300, deadline=None)
def test_each_change_counts(data: some.DataObject) -> None:
    """Words swapped, moved, set to zero, added to here and taken off there, all of them by a constant."""
    size = 16 * data.draw(some.integers(2, 3 * 256))
    old = data.draw(some.sampled_from([bytes(size), b"\xff" * size, random.Random(size).randbytes(size)]))
    new = bytearray(old)
    width = data.draw(some.sampled_from([1, 4, 8, 16, 128, 512, 4096]))
    place = some.integers(0, max(0, size // width - 2)).map(lambda i: i * width)
    a, b = data.draw(place), data.draw(place)
    what = data.draw(some.sampled_from(["swap", "zero", "move", "value", "corners", "reverse"]))
    if what == "swap":
        new[a : a + width], new[b : b + width] = new[b : b + width], new[a : a + width]
    elif what == "zero":
        new[a : a + width] = bytes(len(new[a : a + width]))
    elif what == "move":
        new[width:] = old[:-width]
    elif what == "value":
        new[a : a + width] = data.draw(some.binary(min_size=1, max_size=1)) * len(new[a : a + width])
    elif what == "corners":  # a sum of words or of columns would stay what it is
        for at, step in ((a, 1), (a + 16, -1), (b, -1), (b + 16, 1)):
            if at < size:
                new[at] = (new[at] + step) % 256
    else:
        new.reverse()
    assert (host(new, len(new), KEY) == host(old, size, KEY)) == (bytes(new) == old)


def test_length_counts() -> None:
    """Zeroes behind the end are no change of what lies in a tile, but of the length."""
    assert len({host(bytes(size), size, KEY)[0] for size in range(16, 3 * 4096, 16)}) == 3 * 256 - 1


def test_keys_differ() -> None:
    data = bytes(4096)
    assert len({host(data, 4096, Key.fresh())[0] for _ in range(100)}) == 100
    assert Key.fresh().raw != Key.fresh().raw
    with pytest.raises(InvalidArgument):
        Key(b"short")


def test_a_key_is_the_same_for_all_sizes() -> None:
    """The digest does not depend on what had been hashed with the key before."""
    data = random.Random(4).randbytes(4096)
    first, later = Key(KEY.raw), Key(KEY.raw)
    later.table(MOST_CHUNK)
    assert host(data, 4096, first) == host(data, 4096, later)
    assert len(first.table(4096)) == table_bytes(4096) == 2112 + 8 * 64


def test_lanes_and_bits_are_even() -> None:
    """One bit of difference turns half of a digest's bits, in every lane."""
    rng = random.Random(5)
    turned = [0] * 128
    for _ in range(2000):
        data = bytearray(rng.randbytes(4096))
        before = int.from_bytes(host(data, 4096, KEY)[0], "little")
        data[rng.randrange(4096)] ^= 1 << rng.randrange(8)
        difference = before ^ int.from_bytes(host(data, 4096, KEY)[0], "little")
        for bit in range(128):
            turned[bit] += difference >> bit & 1
    assert 800 < min(turned) <= max(turned) < 1200


def test_other_threads_run_meanwhile() -> None:
    """The interpreter is not held: a thread counts while another one hashes."""
    data = bytearray(256 << 20)
    KEY.table(hashes.CHUNK)

    def ticks() -> int:
        counted, done = 0, threading.Event()
        worker = threading.Thread(target=lambda: (host(data, len(data), KEY), done.set()))
        worker.start()
        while not done.is_set():
            time.sleep(0.0005)
            counted += 1
        worker.join()
        return counted

    assert any(ticks() > 3 for _ in range(20))  # on a busy machine this thread may have had no turn


def test_the_ptx_is_of_the_source_and_as_it_was_made() -> None:
    """Neither the source nor what was made of it has been changed since; a change of either is seen."""
    assert PTX.parent == HASH
    text = PTX.read_text()
    assert make_ptx.belongs(text)
    at = text.index("mul.wide.u32")
    for changed in (text.replace("sm_70", "sm_80"), text[:at] + "add.s64" + text[at + 7 :], text[:-1], text + "\n"):
        assert not make_ptx.belongs(changed)
    assert not make_ptx.belongs(text.replace(make_ptx.stamp()[-9:-1], "0" * 8))


def test_a_compiler_makes_the_same_ptx() -> None:
    """The compiler that made it makes it again, another one makes another text; without any: it is as it was made."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    shipped = PTX.read_text()
    made = make_ptx.compile_ptx(nvcc) if os.access(nvcc, os.X_OK) else shipped
    assert make_ptx.belongs(made)
    assert ".entry chunk_hash" in made
    release = next(line for line in shipped.splitlines() if "release" in line)
    assert (made == shipped) is (release in made)

"""The hash of chunks on a GPU, as the mover uses it: the same as on the host, of many ranges in one launch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from softgpu.far import Far

from limosa.native.build import build_hash
from limosa.parking.hashes import Key, host

KEY = Key(bytes(range(32)))
WORDS = f"""
from limosa.gpu.vmm import Contexts, Piece, call
from limosa.gpu.names import uuid_of_bytes
from limosa.parking.hashes import GpuHash, Key
ok(cu.cuInit(0))
key, contexts = Key({KEY.raw!r}), Contexts()
uuid = [uuid_of_bytes(bytes(ok(cu.cuDeviceGetUuid(i)).bytes)) for i in range(2)]
hasher = GpuHash(contexts, uuid[0])
"""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    assert build_hash() is None


@pytest.fixture
def mover(node: Any) -> Far:
    far = Far(node)
    far(WORDS)
    return far


def put(mover: Far, name: str, data: bytes, uuid: int = 0) -> None:
    """Memory with that in it, at its beginning."""
    mover(f"contexts.use(uuid[{uuid}])")
    mover(f"{name} = int(ok(cu.cuMemAlloc({len(data)}))); _data = bytes.fromhex({data.hex()!r})")
    mover(f"put({name}, _data)")


def digests(mover: Far, ranges: str, chunk: int, key: str = "key") -> list[list[str]]:
    found: list[list[str]] = mover(f"[[d.hex() for d in r] for r in hasher.digests({ranges}, {key}, {chunk})]")
    return found


def expected(data: bytes, chunk: int, key: Key = KEY) -> list[str]:
    return [digest.hex() for digest in host(data, len(data), key, chunk)]


def test_the_same_as_on_the_host(mover: Far) -> None:
    """Odd sizes, odd chunks, several ranges; none and empty ones."""
    data = random.Random(1).randbytes(300_000 // 16 * 16)
    put(mover, "a", data)
    for chunk in (16, 48, 4096, 4112, 65536, 16 << 20):
        sizes = (16, 1040, 70_000, len(data)) if chunk > 48 else (16, 1040)
        ranges = [(4096 * i, size // 16 * 16) for i, size in enumerate(sizes) if 4096 * i + size <= len(data)]
        asked = f"[(a + at, size) for at, size in {ranges}]"
        assert digests(mover, asked, chunk) == [expected(data[at : at + n], chunk) for at, n in ranges]
    assert digests(mover, "[(a, 0), (a, 16), (a, 0)]", 4096) == [[], expected(data[:16], 4096), []]
    assert digests(mover, "[]", 4096) == []


def test_memory_that_was_made_to_be_moved(mover: Far) -> None:
    mover("contexts.use(uuid[0]); piece = Piece.make(4 << 20, 0, [0])")
    data = random.Random(2).randbytes(4 << 20)
    mover("import random; put(piece.at, random.Random(2).randbytes(4 << 20))")
    assert digests(mover, "[(piece.at, piece.bytes)]", 1 << 20) == [expected(data, 1 << 20)]
    mover("stream = call('cuStreamCreate', 1)")
    found = mover("[d.hex() for d in hasher.digests([(piece.at, piece.bytes)], key, 1 << 20, stream)[0]]")
    assert found == expected(data, 1 << 20)


def test_other_keys_and_larger_chunks(mover: Far) -> None:
    """One after the other, each with what was there before too small, too large or of another key."""
    data = random.Random(3).randbytes(65536)
    put(mover, "a", data)
    mover("keys = [key, Key(bytes(32)), Key(b'x' * 32)]; keys[2].table(1 << 20)")
    keys = [KEY, Key(bytes(32)), Key(b"x" * 32)]
    for which, chunk in ((0, 4096), (1, 4096), (0, 32768), (2, 4096), (1, 65536), (2, 16), (0, 16)):
        assert digests(mover, "[(a, 65536)]", chunk, f"keys[{which}]") == [expected(data, chunk, keys[which])]


def test_the_same_ranges_again(mover: Far) -> None:
    """The list of chunks is there already; what lies in them is looked at anew."""
    data = random.Random(5).randbytes(65536)
    put(mover, "a", data)
    asked = "[(a, 65536)]"
    for chunk in (4096, 4096, 8192):
        assert digests(mover, asked, chunk) == [expected(data, chunk)]
    mover("put(a + 5000, b'changed')")
    now = data[:5000] + b"changed" + data[5007:]
    assert digests(mover, asked, 8192) == [expected(now, 8192)]
    assert digests(mover, "[(a, 65536), (a + 4096, 4096)]", 8192) == [
        expected(now, 8192),
        expected(now[4096:8192], 8192),
    ]
    mover("hasher.close()")
    assert digests(mover, asked, 8192) == [expected(now, 8192)]


def test_nothing_stays(mover: Far) -> None:
    """Device memory is as it was when it has let go, and it can be used again."""
    put(mover, "a", bytes(4096))
    before = mover("free()")
    mover("hasher.prepare(key, 16 << 20, 1000)")
    prepared = mover("free()")
    assert prepared < before
    digests(mover, "[(a, 4096)] * 1000", 4096)
    assert mover("free()") == prepared
    mover("hasher.close()")
    assert mover("free()") == before
    assert digests(mover, "[(a, 4096)]", 4096) == [expected(bytes(4096), 4096)]


def test_two_gpus(mover: Far) -> None:
    """Each with its own; the calling thread's context follows."""
    data = random.Random(4).randbytes(65536)
    put(mover, "a", data)
    put(mover, "b", data[::-1], 1)
    mover("other = GpuHash(contexts, uuid[1])")
    for _ in range(2):
        assert digests(mover, "[(a, 65536)]", 4096) == [expected(data, 4096)]
        found = mover("[d.hex() for d in other.digests([(b, 65536)], key, 4096)[0]]")
        assert found == expected(data[::-1], 4096)


@pytest.mark.parametrize("bad", ["(a + 8, 4096)", "(a, 24)", "(a, -16)"])
def test_sizes_that_cannot_be(mover: Far, bad: str) -> None:
    put(mover, "a", bytes(8192))
    with pytest.raises(Exception, match="InvalidArgument"):
        digests(mover, f"[{bad}]", 4096)
    assert digests(mover, "[(a, 8192)]", 4096) == [expected(bytes(8192), 4096)]


def test_wrong_memory_is_an_error(mover: Far, new_node: Callable[..., Any]) -> None:
    """As with any kernel: the context has failed, and says so."""
    put(mover, "a", bytes(4096))
    mover("ok(cu.cuMemFree(a))")
    with pytest.raises(Exception, match="DriverError"):
        digests(mover, "[(a, 4096)]", 4096)

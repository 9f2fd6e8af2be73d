"""The hash that tells which chunks of memory have changed: on a GPU, and on the host for what arrived there.

What it guarantees. Let two contents of a chunk be given, and let the key be drawn after them and without regard to
them. If they differ, their digests are equal with a probability of at most 2**-124. There are four lanes with
independent keys. In each, first, the columns of each tile (512 bytes) are hashed by NH with 32-bit words (Black and
others, UMAC, 1999): two that differ get the same 64 bits for at most one key in 2**32. Second, all those 64-bit values
and the length are hashed by multiply-shift (Dietzfelbinger, 1996): two different lists get the same 32 bits for one key
in 2**32. So a lane misses a change with a probability of at most 2**-31, and all four with (2**-31)**4. The position of
a strip has a key of its own, so what has been moved has changed. Keys are BLAKE3's output for 256 random bits: as good
as drawn, for anybody who does not know those.

What it does not. Whoever knows the key can make contents with the same digest, so a key is drawn for each operation, is
not written anywhere, and digests name nothing: chunks in an image are named by BLAKE3. It is for finding changes.

A chunk is a multiple of 16 bytes, at most 64 MiB; the last one of a range may be shorter.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3

from limosa.errors import FailedUndone, InvalidArgument
from limosa.start import loadable

if TYPE_CHECKING:
    from limosa.gpu.vmm import Contexts

CHUNK = 16 << 20
MOST_CHUNK = 64 << 20
DIGEST = 16
KERNEL = "chunk_hash"
_NATIVE = Path(__file__).resolve().parents[1] / "native" / "hash"
LIBRARY, PTX = _NATIVE / "liblimosa_hash.so", _NATIVE / "chunk_hash.ptx"
# chunk_hash.h
_WORD, _TILE, _LANES = 16, 4096, 4
_FIXED, _STRIP, _COLUMNS = 2048 + 64, 64, 8
_NEWEST = 3
_THREADS = 256
_CONTEXT = "limosa 2026-11 chunk hash: keys of rows, lanes and strips"


class Key:
    """What a chunk's digest depends on beside the chunk: 32 bytes, secret as long as such digests are compared."""

    def __init__(self, raw: bytes):
        if len(raw) != 32:
            raise InvalidArgument("a key has 32 bytes")
        self.raw = raw
        self._lock = threading.Lock()
        self._table = b""

    @classmethod
    def fresh(cls) -> Key:
        """Draw one."""
        return cls(os.urandom(32))

    def table(self, chunk: int) -> bytes:
        """Return at least what hashing chunks of that many bytes needs (``table_bytes``); kept."""
        bytes_ = table_bytes(chunk)
        with self._lock:
            if len(self._table) < bytes_:
                self._table = blake3.blake3(self.raw, derive_key_context=_CONTEXT).digest(length=bytes_)
            return self._table


def table_bytes(chunk: int) -> int:
    """Return how many bytes of a key's table hashing chunks of that many bytes needs: an eighth, and two thousand."""
    return _FIXED + _tiles(chunk) * _COLUMNS * _STRIP


def host(
    data: int | bytes | bytearray, bytes_: int, key: Key, chunk: int = CHUNK, newest: int = _NEWEST
) -> list[bytes]:
    """Hash so much of host memory (an address, or the bytes themselves); returns the digest of each chunk.

    Other threads run meanwhile, and may do the same. ``newest``: the newest of the processor's ways that is used.
    Raises InvalidArgument: sizes that cannot be; FailedUndone: the library has not been built.
    """
    _check(bytes_, chunk)
    if not isinstance(data, int) and bytes_ > len(data):
        raise InvalidArgument(f"{bytes_} bytes of {len(data)}")
    at = (ctypes.c_char * len(data)).from_buffer(data) if isinstance(data, bytearray) else data
    count = -(-bytes_ // chunk)
    digests = ctypes.create_string_buffer(count * DIGEST)
    _library().limosa_chunk_hash(at, bytes_, chunk, key.table(min(chunk, bytes_)), digests, newest)
    return _split(digests.raw)


class GpuHash:
    """Hashes memory of one GPU (a UUID) on that GPU, for a process with contexts (the mover).

    What is asked for by several threads is done one after the other. What it needs there (keys: an eighth of a chunk's
    bytes; 48 bytes for each chunk) is allocated when first needed, or by :meth:`prepare`, and kept.
    """

    def __init__(self, contexts: Contexts, gpu: str):
        self._contexts, self._gpu = contexts, gpu
        self._lock = threading.Lock()
        self._module: Any = None
        self._function: Any = None
        self._key: tuple[Key, int] | None = None
        self._table = self._work = 0
        self._room = 0
        self._listed: tuple[tuple[tuple[int, int], ...], int] | None = None

    def prepare(self, key: Key, chunk: int, chunks: int) -> None:
        """Have all in place for that many chunks: then :meth:`digests` allocates nothing.

        Raises DriverError: CUDA_ERROR_OUT_OF_MEMORY above all.
        """
        with self._lock:
            self._contexts.use(self._gpu)
            self._prepare(key, chunk, chunks)

    def digests(
        self, ranges: Sequence[tuple[int, int]], key: Key, chunk: int = CHUNK, stream: Any = 0
    ) -> list[list[bytes]]:
        """Hash ranges of device memory (address, bytes) in one launch; returns the digest of each chunk of each range.

        It is done on ``stream``, after what is there; the context is the calling thread's afterwards. Raises
        InvalidArgument: sizes that cannot be; DriverError: the driver refuses.
        """
        from limosa.gpu.vmm import call

        with self._lock:
            counts = [-(-bytes_ // chunk) for at, bytes_ in ranges if _check(bytes_, chunk, at)]
            n = sum(counts)
            if n:
                self._contexts.use(self._gpu)
                self._prepare(key, chunk, n)
                self._list(ranges, chunk, n)
                sums, back = self._work + self._room * 16, bytearray(n * _LANES * 8)
                call("cuMemsetD8Async", sums, 0, len(back), stream)
                u64 = ctypes.c_uint64
                parameters = ((self._work, n, self._table, sums), (u64, u64, u64, u64))
                blocks = _blocks(chunk, n), min(n, 65535)
                call("cuLaunchKernel", self._function, *blocks, 1, _THREADS, 1, 1, 0, stream, parameters, 0)
                call("cuMemcpyDtoHAsync", back, sums, len(back), stream)
                call("cuStreamSynchronize", stream)
        found = iter(_split(memoryview(back).cast("I")[1::2].tobytes()) if n else [])
        return [list(itertools.islice(found, count)) for count in counts]

    def close(self) -> None:
        """Let go of what it took of the GPU's memory."""
        from limosa.gpu.binding import find

        with self._lock:
            self._contexts.use(self._gpu)
            for at in (self._table, self._work):
                if at:
                    find().cuMemFree(at)
            if self._module is not None:
                find().cuModuleUnload(self._module)
            self._module = self._function = self._key = self._listed = None
            self._table = self._work = self._room = 0

    def _list(self, ranges: Sequence[tuple[int, int]], chunk: int, n: int) -> None:
        """Write the list of chunks there, unless it is what was asked for the last time."""
        from limosa.gpu.vmm import call

        if self._listed == (tuple(ranges), chunk):
            return
        self._listed = None
        table = array.array("Q")
        for at, bytes_ in ranges:
            for start in range(0, bytes_, chunk):
                table.extend((at + start, min(chunk, bytes_ - start)))
        call("cuMemcpyHtoD", self._work, table.buffer_info()[0], 16 * n)
        self._listed = tuple(ranges), chunk

    def _prepare(self, key: Key, chunk: int, chunks: int) -> None:
        from limosa.gpu.binding import find
        from limosa.gpu.vmm import call

        if self._function is None:
            self._module = call("cuModuleLoadData", PTX.read_bytes() + b"\0")
            self._function = call("cuModuleGetFunction", self._module, KERNEL.encode())
        if self._key is None or self._key[0] is not key or self._key[1] < chunk:
            if self._key is None or self._key[1] < chunk:
                if self._table:
                    find().cuMemFree(self._table)
                self._table, self._key = 0, None
            most = self._key[1] if self._key else chunk
            table = key.table(most)[: table_bytes(most)]
            self._table = self._table or int(call("cuMemAlloc", len(table)))
            self._key = None
            call("cuMemcpyHtoD", self._table, table, len(table))
            self._key = key, most
        if self._room < chunks:
            if self._work:
                find().cuMemFree(self._work)
                self._work = self._room = 0
            self._listed = None
            self._work = int(call("cuMemAlloc", chunks * (16 + _LANES * 8)))
            self._room = chunks


def _tiles(bytes_: int) -> int:
    return -(-bytes_ // _TILE)


def _split(digests: bytes) -> list[bytes]:
    return [digests[i : i + DIGEST] for i in range(0, len(digests), DIGEST)]


def _blocks(chunk: int, chunks: int) -> int:
    """How many blocks share a chunk: few that do much each are a little faster, where all of the GPU has work."""
    most = -(-_tiles(chunk) * _COLUMNS // (2 * _THREADS))
    return max(1, most // 4) if chunks * most >= 1 << 14 else most


def _check(bytes_: int, chunk: int, at: int = 0) -> bool:
    if not 0 < chunk <= MOST_CHUNK or chunk % _WORD or bytes_ < 0 or bytes_ % _WORD or at % _WORD:
        raise InvalidArgument(f"chunks are multiples of {_WORD} bytes and at most {MOST_CHUNK >> 20} MiB")
    return True


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        if LIBRARY.is_file() and not loadable(LIBRARY):
            raise OSError("others can change it")
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        detail = f"{LIBRARY.name}, which is built when Limosa is installed, cannot be loaded ({error})"
        raise FailedUndone(detail, hint="install a C compiler (gcc), and Limosa again") from error
    u64, pointer = ctypes.c_uint64, ctypes.c_void_p
    library.limosa_chunk_hash.argtypes = [pointer, u64, u64, ctypes.c_char_p, pointer, ctypes.c_int]
    library.limosa_chunk_hash.restype = None
    return library

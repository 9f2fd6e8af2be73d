"""Hashes memory on every GPU as the mover does, and a copy of it on the host; prints what differs, as JSON.

    python chunk_hashes.py MIB

The exit code says nothing. ``{"wrong": […], "compared": N, "seconds": S}``
"""

import json
import random
import sys
import time

from cuda.bindings import driver as cu

from limosa.gpu.names import uuid_of_bytes
from limosa.gpu.vmm import Contexts, call
from limosa.parking.hashes import GpuHash, Key, host

MIB = 1 << 20
# Chunk; then where a range begins and how long it is: words, tiles and rows begun, none, a whole one and a bit.
ASKED = [
    (16, [(0, 16), (16, 48), (4080, 32)]),
    (4096, [(0, 4096), (16, 4096), (4096, 4112), (112, 1040), (0, 0), (65536 - 16, 3 * 4096 + 16)]),
    (65536, [(0, 65536), (32, 5 * 65536 + 48), (131072 + 512, 65536 - 16)]),
    (MIB, [(0, 3 * MIB), (MIB - 16, 2 * MIB + 16)]),
    (16 * MIB, [(0, 0), (0, 40 * MIB), (2 * MIB + 16, 33 * MIB + 4112)]),
    (64 * MIB, [(0, 64 * MIB + 32)]),
]


def main() -> None:
    size = int(sys.argv[1]) * MIB
    begin, wrong, compared = time.monotonic(), [], 0
    call("cuInit", 0)
    contexts, key, chance = Contexts(), Key.fresh(), random.Random(1)
    for gpu in range(call("cuDeviceGetCount")):
        uuid = uuid_of_bytes(bytes(call("cuDeviceGetUuid", gpu).bytes))
        contexts.use(uuid)
        at, data = int(call("cuMemAlloc", size)), bytearray(chance.randbytes(size))
        call("cuMemcpyHtoD", at, bytes(data), size)
        hasher = GpuHash(contexts, uuid)
        for chunk, all_ranges in ASKED:
            ranges = [(start, n) for start, n in all_ranges if start + n <= size]
            found = hasher.digests([(at + start, n) for start, n in ranges], key, chunk)
            for (start, n), there in zip(ranges, found, strict=True):
                here = host(data[start : start + n], n, key, chunk)
                compared += len(here)
                if there != here:
                    wrong.append(f"GPU {gpu}: chunks of {chunk}, {n} bytes at {start}")
        # One bit: of the first word, the last one, and some between. That chunk has another digest, no other one has.
        chunk, n = 65536, 2 * MIB + 4112
        before = hasher.digests([(at, n)], key, chunk)[0]
        for bit in (0, n * 8 - 1, *(chance.randrange(n * 8) for _ in range(20))):
            data[bit // 8] ^= 1 << bit % 8
            call("cuMemcpyHtoD", at + bit // 8, bytes(data[bit // 8 : bit // 8 + 1]), 1)
            after = hasher.digests([(at, n)], key, chunk)[0]
            compared += 1
            changed = [i for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
            if changed != [bit // 8 // chunk] or after != host(data[:n], n, key, chunk):
                wrong.append(f"GPU {gpu}: bit {bit} is turned, and chunks {changed} have changed")
            before = after
        hasher.close()
        cu.cuMemFree(at)
    print(json.dumps({"wrong": wrong, "compared": compared, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()

"""How quick the chunk hash is on a GPU: 32 GB of its memory, the best of five; compared with the host's hash first."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from limosa.gpu.names import uuid_of_bytes
from limosa.gpu.vmm import Contexts, Piece, call
from limosa.parking.hashes import CHUNK, GpuHash, Key, host

GIB = 1 << 30


def main() -> int:
    """Print bytes and seconds as JSON."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    contexts = Contexts()
    call("cuInit", 0)
    uuid = uuid_of_bytes(bytes(call("cuDeviceGetUuid", 0).bytes))
    contexts.use(uuid)
    pieces = [Piece.make(GIB, 0, [0]) for _ in range(size)]
    for number, piece in enumerate(pieces):
        call("cuMemsetD8", piece.at, number % 251 + 1, piece.bytes)
    key = Key.fresh()
    hashes = GpuHash(contexts, uuid)
    hashes.prepare(key, CHUNK, size * GIB // CHUNK)
    data = os.urandom(2 * CHUNK)
    call("cuMemcpyHtoD", pieces[0].at, data, len(data))
    if hashes.digests([(pieces[0].at, len(data))], key, CHUNK)[0] != host(data, len(data), key, CHUNK):
        print("the hash on the GPU is not the host's", file=sys.stderr)
        return 1
    ranges = [(piece.at, piece.bytes) for piece in pieces]
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        hashes.digests(ranges, key, CHUNK)
        took.append(time.perf_counter() - begun)
    print(json.dumps({"bytes": size * GIB, "seconds": sorted(took)[2], "best": min(took)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

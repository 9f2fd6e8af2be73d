"""A job for CRIU: works on device memory, with a child that was forked after cuInit; led through files.

    checkpoint_victim.py FOLDER [--child] [--vmm] [--exported] [--streams] [--pinned]

It counts rounds in FOLDER/rounds, each a fill of every block with a pattern of the round and a check of the last one's,
and ends with FOLDER/verdict once FOLDER/finish is there.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import far

SIZE = 4 << 20


def main(folder: Path, options: list[str]) -> int:
    from cuda.bindings import driver as cu

    far.cu = cu
    ok = far.ok
    far.start()
    child = os.fork() if "--child" in options else -1
    if child == 0:
        (folder / "child").write_text(str(os.getpid()))
        while not (folder / "finish").exists():
            time.sleep(0.05)
        os._exit(0)
    blocks = [int(ok(cu.cuMemAlloc(SIZE))) for _ in range(2)]
    if "--vmm" in options:
        blocks.append(far.vmm(SIZE >> 20, 1))
    streams = [ok(cu.cuStreamCreate(1)) for _ in range(3 if "--streams" in options else 1)]
    host = (ctypes.c_uint8 * SIZE)()
    if "--exported" in options:
        blocks.append(far.vmm(SIZE >> 20, 2, exported=True))
    kept = far.pattern(SIZE, 7)
    pinned = int(ok(cu.cuMemHostAlloc(SIZE, 0))) if "--pinned" in options else 0
    if pinned:
        ctypes.memmove(pinned, kept, SIZE)
    rounds, verdict = 0, "right"
    rounds_file = folder / "rounds"
    while verdict == "right" and not ((folder / "finish").exists() and rounds > 3):
        for i, block in enumerate(blocks):
            ok(cu.cuMemsetD8Async(block, (rounds + i) % 251, SIZE, streams[i % len(streams)]))
        for stream in streams:
            ok(cu.cuStreamSynchronize(stream))
        for i, block in enumerate(blocks):
            ok(cu.cuMemcpyDtoH(host, block, SIZE))
            if bytes(host).count((rounds + i) % 251) != SIZE:
                verdict = f"block {i} is wrong in round {rounds}"
        if pinned and ctypes.string_at(pinned, SIZE) != kept:
            verdict = f"host memory is wrong in round {rounds}"
        rounds += 1
        (folder / "rounds.new").write_text(str(rounds))
        os.replace(folder / "rounds.new", rounds_file)
        time.sleep(0.005)
    if child > 0:
        os.waitpid(child, 0)
    (folder / "verdict").write_text(verdict)
    return 0 if verdict == "right" else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

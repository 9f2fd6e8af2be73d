"""One rank of two jobs that meet by a unique id in a file: nobody is the ancestor of both.

    nccl_apart.py FOLDER RANK N [--also]

FOLDER/id is written by rank 0; FOLDER/rank-R gets a line for each step: which it is, and the sum of all ranks' numbers.
With --also it has another communicator, of itself alone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import nccl

PAUSE = 0.02


def unique(folder: Path, rank: int) -> bytes:
    path = folder / "id"
    if rank == 0:
        new = folder / "id.new"
        new.write_bytes(nccl.unique_id())
        new.replace(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_bytes()


def main(folder: Path, rank: int, n: int) -> None:
    nccl.device(rank)
    comm = nccl.init(n, unique(folder, rank), rank)
    if "--also" in sys.argv:
        nccl.init(1, nccl.unique_id(), 0)
    numbers, stream = np.full(1024, rank + 1, np.uint32), nccl.stream()
    own, to = nccl.memory(numbers.nbytes), nccl.memory(2 << 20)
    nccl.put(own, numbers.tobytes())
    with open(folder / f"rank-{rank}", "a", buffering=1) as lines:
        step = 0
        while not (folder / "end").exists() or step % 10:
            step += 1
            nccl.nccl("ncclAllReduce", own, to, len(numbers), nccl.TYPES["u4"], nccl.SUM, comm, stream)
            nccl.synchronize(stream)
            lines.write(f"{step} {np.frombuffer(nccl.get(to, numbers.nbytes), np.uint32)[0]}\n")
            time.sleep(PAUSE)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

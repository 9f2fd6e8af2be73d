"""Starts the ranks of a job and waits for them, as torchrun does: each with RANK, LOCAL_RANK, WORLD_SIZE and a store.

    nccl_agent.py FOLDER --ranks N [options of nccl_rank.py]

Ranks write FOLDER/rank-R (nccl_rank.py), and what they say to FOLDER/rank-R.out. FOLDER/ranks has their pids, a line
each. When one of them fails the others are killed. FOLDER/verdict says how it ended: "right", or who failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def start(folder: Path, rank: int, n: int, port: int, options: list[str]) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OPENBLAS_NUM_THREADS": "1",
    }
    with open(folder / f"rank-{rank}.out", "ab") as out:
        argv = [sys.executable, str(HERE / "nccl_rank.py"), str(folder / f"rank-{rank}"), *options]
        return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def tell(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def numbers(path: Path) -> list[list[str]]:
    """The lines of a rank without their times."""
    return [line.split()[:2] for line in path.read_text().splitlines()]


def main(folder: Path, n: int, options: list[str]) -> int:
    from nccl_store import Store

    store = Store()
    ranks = [start(folder, rank, n, store.port, options) for rank in range(n)]
    tell(folder / "ranks", "".join(f"{rank.pid}\n" for rank in ranks))
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        if failed or all(code == 0 for code in codes):
            break
        time.sleep(0.02)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
            rank.wait()
    tell(folder / "verdict", ", ".join(failed) or "right")
    return 1 if failed else 0


if __name__ == "__main__":
    place = sys.argv.index("--ranks")
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[place + 1]), sys.argv[2:place] + sys.argv[place + 2 :]))

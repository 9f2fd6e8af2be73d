"""Several ranks in one process: they sum up in groups, and the program says whether the sums are right.

    nccl_inside.py FOLDER RANKS PROCESSES ELEMENTS [--threads] [--ring]

Each process has as many ranks. One makes its communicators by ncclCommInitAll, several by ncclCommInitRank in a group.
With --threads each rank has a thread of its own instead, calls ncclCommInitRank by itself, and those with odd numbers
come late to every sum. With --ring each rank also sends what it has to the next one.

FOLDER/steps gets a line for each step whose sums were right. FOLDER/end ends it, and FOLDER/ended is there then. A
wrong sum ends it with 3.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import nccl

PAUSE, LATE = 0.02, 0.1


def tell(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


class Rank:
    """Memory, a stream and a communicator on one GPU."""

    def __init__(self, number: int, elements: int):
        nccl.device(number)
        self.number, self.stream, self.comm = number, nccl.stream(), ctypes.c_void_p()
        self.own, self.sums, self.came = (nccl.memory(4 * elements) for _ in range(3))
        self.bytes = 4 * elements

    def join(self, ranks: int, unique: bytes) -> None:
        nccl.device(self.number)
        unique_id = nccl.UniqueId.of(unique)
        nccl.nccl("ncclCommInitRank", ctypes.byref(self.comm), ranks, unique_id, self.number)

    def all_reduce(self, late: float) -> None:
        time.sleep(late * (self.number % 2))
        words = self.own, self.sums, self.bytes // 4, nccl.TYPES["u4"], nccl.SUM
        nccl.nccl("ncclAllReduce", *words, self.comm, self.stream)

    def pass_on(self, late: float, ranks: int) -> None:
        time.sleep(late * (self.number % 2))
        count, kind = self.bytes // 4, nccl.TYPES["u4"]
        nccl.nccl("ncclGroupStart")
        nccl.nccl("ncclSend", self.own, count, kind, (self.number + 1) % ranks, self.comm, self.stream)
        nccl.nccl("ncclRecv", self.came, count, kind, (self.number - 1) % ranks, self.comm, self.stream)
        nccl.nccl("ncclGroupEnd")

    def has(self, address: int, expected: np.ndarray) -> bool:
        nccl.device(self.number)
        nccl.synchronize(self.stream)
        return np.array_equal(np.frombuffer(nccl.get(address, self.bytes), np.uint32), expected)

    def put(self, numbers: np.ndarray) -> None:
        nccl.device(self.number)
        nccl.put(self.own, numbers.tobytes())


class Job:
    """The ranks of one process. It knows the numbers of all others, too: they follow from each other."""

    def __init__(self, folder: Path, ranks: int, processes: int, elements: int, options: list[str]):
        self.folder, self.n, self.threads, self.ring = folder, ranks, "--threads" in options, "--ring" in options
        self.process, each = int(os.environ.get("PROCESS", "0")), ranks // processes
        self.ranks = [Rank(number, elements) for number in range(self.process * each, (self.process + 1) * each)]
        self.numbers = [
            np.random.default_rng(number).integers(0, 1 << 32, elements, dtype=np.uint32) for number in range(ranks)
        ]
        for rank in self.ranks:
            rank.put(self.numbers[rank.number])
        if processes == 1 and not self.threads:
            self.join_all()
        else:
            self.together(lambda rank, unique: rank.join(self.n, unique), self.unique_id())

    def join_all(self) -> None:
        comms = (ctypes.c_void_p * self.n)()
        nccl.nccl("ncclCommInitAll", comms, self.n, None)
        for rank, comm in zip(self.ranks, comms, strict=True):
            rank.comm = ctypes.c_void_p(comm)

    def unique_id(self) -> bytes:
        path = self.folder / "unique-id"
        if self.process == 0:
            tell(path, nccl.unique_id().hex())
        while not path.exists():
            time.sleep(0.01)
        return bytes.fromhex(path.read_text())

    def together(self, what: Callable[..., None], *arguments: Any) -> None:
        """All ranks do something: each in its thread, or in a group of this one."""
        if self.threads:
            threads = [threading.Thread(target=what, args=(rank, *arguments)) for rank in self.ranks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return
        nccl.nccl("ncclGroupStart")
        for rank in self.ranks:
            what(rank, *arguments)
        nccl.nccl("ncclGroupEnd")

    def step(self) -> bool:
        """One all-reduce; what each rank has next is from what came out of it."""
        late = LATE if self.threads else 0
        self.together(Rank.all_reduce, late)
        if self.ring:
            self.together(Rank.pass_on, late, self.n)
        sums = np.sum(self.numbers, axis=0, dtype=np.uint32)
        right = all(rank.has(rank.sums, sums) and rank.has(rank.own, self.numbers[rank.number]) for rank in self.ranks)
        if self.ring:
            right = right and all(rank.has(rank.came, self.numbers[rank.number - 1]) for rank in self.ranks)
        self.numbers = [5 * own + 2 * sums + np.uint32(number) for number, own in enumerate(self.numbers)]
        for rank in self.ranks:
            rank.put(self.numbers[rank.number])
        return right

    def run(self) -> bool:
        """Steps until the last one, which the first process names: no other is beyond it by then."""
        step, last = 0, self.folder / "last"
        with open(self.folder / "steps", "a", buffering=1) as lines:
            while not last.exists() or step < int(last.read_text()):
                if not self.step():
                    return False
                step += 1
                if self.process == 0:
                    lines.write("right\n")
                    if (self.folder / "end").exists() and not last.exists():
                        tell(last, str(step + 1))
                time.sleep(PAUSE)
        return True

    def end(self) -> None:
        for rank in self.ranks:
            nccl.nccl("ncclCommDestroy", rank.comm)


def main(folder: str, ranks: str, processes: str, elements: str, *options: str) -> int:
    others = []
    if "PROCESS" not in os.environ:
        for process in range(1, int(processes)):
            env = {**os.environ, "PROCESS": str(process)}
            others.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    job = Job(Path(folder), int(ranks), int(processes), int(elements), list(options))
    if not job.run():
        return 3
    job.end()
    if any(other.wait() for other in others):
        return 4
    if job.process == 0:
        (job.folder / "ended").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""A victim of several ranks that compute together over NCCL, and the process that starts and ends them.

The control page has what an agent's store has: the unique id, and who has come how far.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from campaign.computed import Numbers, after
from campaign.shapes import Shape, Slot
from campaign.victim import Page

PAUSE = 0.008
ID = 7 * 8 * Slot.WORDS
"""Where the unique id is, behind a word that says that it is there."""
UINT32 = 3


def main(shape: Shape, memory: mmap.mmap, slot: int, first: int) -> None:
    """Is the agent, or a rank; does not return."""
    page = Page(memory, slot)
    page.set(Slot.PID, os.getpid())
    if slot == 0:
        agent(page, len(shape.processes) - 1)
    Rank(shape, memory, slot, first).run()


def agent(page: Page, n: int) -> None:
    """Waits until a rank has ended, and ends the others."""
    while True:
        page.set(Slot.EPOCH, page.get(Slot.EPOCH) + 1)
        request = page.get(Slot.REQUEST)
        if request != page.get(Slot.ANSWER):
            for word in (Slot.HASH, Slot.BYTES, Slot.FLOATS):
                page.set(word, 0)
            page.set(Slot.ANSWER_EPOCH, page.get(Slot.EPOCH))
            page.set(Slot.ANSWER, request)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            sys.stderr.write(f"rank {ended} has ended: {os.waitstatus_to_exitcode(status)}\n")
            sys.stderr.flush()
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            for _ in range(n - 1):
                os.waitpid(-1, 0)
            os._exit(3)
        time.sleep(0.005)


class Rank:
    """One rank: its communicators, its numbers on the GPU."""

    def __init__(self, shape: Shape, memory: mmap.mmap, slot: int, first: int):
        sys.path.insert(0, str(Path(__file__).parents[1] / "softgpu"))
        import nccl

        assert shape.ranks is not None
        self.nccl: Any = nccl
        self.ranks, self.rank, self.n = shape.ranks, slot - 1, len(shape.processes) - 1
        self.memory, self.page = memory, Page(memory, slot)
        self.pages = [Page(memory, 1 + rank) for rank in range(self.n)]
        self.comms: list[int] = []
        nccl.device(first + self.rank)
        self.config = nccl.Config(0 if self.ranks.nonblocking else 1)
        self.world = self.made("ncclCommInitRankConfig", self.n, nccl.UniqueId.of(self.unique()), self.rank)
        self.parity = self.made("ncclCommSplit", self.world, self.rank % 2, self.rank)
        self.stream = nccl.stream()
        self.bytes = 4 * self.ranks.numbers
        self.own, self.sums, self.par, self.ring = (nccl.memory(self.bytes) for _ in range(4))
        nccl.put(self.own, Numbers.whole(Numbers.first(self.rank), self.ranks.numbers).tobytes())
        threading.Thread(target=self.watch, daemon=True).start()

    def unique(self) -> bytes:
        """The unique id that rank 0 has made."""
        if self.rank == 0:
            self.memory[ID + 8 : ID + 136] = self.nccl.unique_id()
            self.memory[ID] = 1
        while not self.memory[ID]:
            time.sleep(0.001)
        return bytes(self.memory[ID + 8 : ID + 136])

    def made(self, name: str, *words: Any) -> int:
        """A communicator, ready."""
        comm = ctypes.c_void_p()
        more = (ctypes.byref(comm), ctypes.byref(self.config))
        code = self.nccl.raw(name, more[0], *words, more[1]) if "Init" in name else self.nccl.raw(name, *words, *more)
        while code == self.nccl.IN_PROGRESS:
            time.sleep(0.001)
            code = self.nccl.async_error(comm.value)
        if code:
            raise RuntimeError(f"{name}: {code}")
        self.comms.append(int(comm.value or 0))
        return self.comms[-1]

    def watch(self) -> None:
        """Ends the process when a communicator has an error."""
        while True:
            for comm in self.comms:
                error = self.nccl.async_error(comm)
                if error not in (self.nccl.SUCCESS, self.nccl.IN_PROGRESS):
                    sys.stderr.write(f"watchdog: {error}\n")
                    sys.stderr.flush()
                    os._exit(3)
            time.sleep(0.01)

    def all_reduce(self, to: int, comm: int, begin: int = 0, end: int | None = None) -> None:
        count = (self.ranks.numbers if end is None else end) - begin
        at = (self.own + 4 * begin, to + 4 * begin)
        self.nccl.nccl("ncclAllReduce", *at, count, UINT32, self.nccl.SUM, comm, self.stream)

    def talk(self) -> None:
        """What all have, what those of the same parity have, what the rank before has."""
        nccl, half = self.nccl, self.ranks.numbers // 2
        if self.ranks.groups:
            nccl.nccl("ncclGroupStart")
            self.all_reduce(self.sums, self.world, 0, half)
            self.all_reduce(self.par, self.parity)
            self.all_reduce(self.sums, self.world, half)
            nccl.nccl("ncclGroupEnd")
        else:
            self.all_reduce(self.sums, self.world)
            self.all_reduce(self.par, self.parity)
        if self.ranks.p2p:
            next_, last = (self.rank + 1) % self.n, (self.rank - 1) % self.n
            more = (self.world, self.stream)
            nccl.nccl("ncclGroupStart")
            nccl.nccl("ncclSend", self.own, self.ranks.numbers, UINT32, next_, *more)
            nccl.nccl("ncclRecv", self.ring, self.ranks.numbers, UINT32, last, *more)
            nccl.nccl("ncclGroupEnd")

    def read(self, address: int) -> np.ndarray:
        return np.frombuffer(self.nccl.get(address, self.bytes), np.uint32)

    def run(self) -> None:
        """Computes for ever."""
        ranks, epoch = self.ranks, 0
        step = np.ones(ranks.numbers, dtype=np.uint32)
        while True:
            epoch += 1
            if ranks.late:
                time.sleep(random.Random(f"{self.rank} {epoch}").random() * ranks.late / 1000)
            self.talk()
            self.nccl.synchronize(self.stream)
            ring = self.read(self.ring) if ranks.p2p else None
            numbers = after(
                self.read(self.own), self.read(self.sums), self.read(self.par), ring, step * np.uint32(epoch)
            )
            self.nccl.put(self.own, numbers.tobytes())
            self.page.set(Slot.EPOCH, epoch)
            request = self.page.get(Slot.REQUEST)
            if request != self.page.get(Slot.ANSWER):
                self.answer(request, epoch)
            while ranks.meets and epoch % ranks.meets == 0 and min(p.get(Slot.EPOCH) for p in self.pages) < epoch:
                time.sleep(0.001)
            time.sleep(PAUSE)

    def answer(self, request: int, epoch: int) -> None:
        """Proves the memory: what is on the GPU now."""
        self.page.set(Slot.ANSWER_EPOCH, epoch)
        self.page.set(Slot.BYTES, zlib.crc32(self.nccl.get(self.own, self.bytes)))
        self.page.set(Slot.ANSWER, request)

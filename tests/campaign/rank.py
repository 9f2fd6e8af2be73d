"""A victim of several ranks that compute together over NCCL, and the process that starts and ends them.

The agent has a store, to which each rank has a connection: it gives all of them the unique id, and is where those that
meet on the host wait for each other. It can be lost; who needs it then ends with an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from campaign.computed import Numbers, after
from campaign.shapes import COMMANDS, Shape, Slot
from campaign.victim import Page

PAUSE = 0.008
UINT32 = 3
WORDS = 128
"""Bytes that a rank gives the store, and gets from it: all those of who has given some."""


Ends = list[tuple[socket.socket, socket.socket]]


def connections(n: int) -> Ends:
    """Of each rank to the store: the agent's end and its own. Before they are forked."""
    return [socket.socketpair() for _ in range(n)]


def main(
    shape: Shape, memory: mmap.mmap, slot: int, first: int, ends: list[tuple[socket.socket, socket.socket]]
) -> None:
    """Is the agent, or a rank; does not return."""
    page = Page(memory, slot)
    page.set(Slot.PID, os.getpid())
    for number, (theirs, own) in enumerate(ends, 1):
        if slot != 0:
            theirs.close()
        if slot != number:
            own.close()
    if slot == 0:
        agent(page, Store([theirs for theirs, _ in ends]))
    Rank(shape, memory, slot, first, ends[slot - 1][1]).run()


class Store:
    """The agent's side: when every rank has come, each gets what one of them has brought."""

    def __init__(self, ends: list[socket.socket]):
        self.n, self.ends = len(ends), ends
        self.come: dict[socket.socket, bytes] = {}

    def serve(self, seconds: float) -> None:
        """Hears whoever comes; one rank that ends is the agent's matter."""
        for end in select.select([end for end in self.ends if end not in self.come], [], [], seconds)[0]:
            if brought := end.recv(WORDS, socket.MSG_WAITALL):
                self.come[end] = brought
            else:
                self.ends.remove(end)
        if len(self.come) == self.n:
            given = max(self.come.values())
            for end in self.come:
                with contextlib.suppress(OSError):
                    end.sendall(given)
            self.come.clear()

    def lose(self) -> None:
        """It is gone, and all connections with it."""
        for end in self.ends:
            end.close()
        self.ends.clear()
        self.come.clear()


def agent(page: Page, store: Store) -> None:
    """Waits until a rank has ended, and ends the others."""
    n = store.n
    while True:
        if page.get(Slot.COMMAND) == COMMANDS["lose-store"]:
            store.lose()
            page.set(Slot.DONE, COMMANDS["lose-store"])
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
        store.serve(0.005)


class Rank:
    """One rank: its communicators, its numbers on the GPU."""

    def __init__(self, shape: Shape, memory: mmap.mmap, slot: int, first: int, store: socket.socket):
        sys.path.insert(0, str(Path(__file__).parents[1] / "softgpu"))
        import nccl

        assert shape.ranks is not None
        self.nccl: Any = nccl
        self.ranks, self.rank, self.n = shape.ranks, slot - 1, len(shape.processes) - 1
        self.page, self.store = Page(memory, slot), store
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
        return self.meet(bytes(self.nccl.unique_id()) if self.rank == 0 else bytes(WORDS))

    def meet(self, brought: bytes = bytes(WORDS)) -> bytes:
        """Waits at the store for all ranks; what one has brought. Raises ConnectionError: the store is gone."""
        self.store.sendall(brought)
        given = self.store.recv(WORDS, socket.MSG_WAITALL)
        if not given:
            raise ConnectionError("the store is gone")
        return given

    def made(self, name: str, *words: Any) -> int:
        """A communicator, ready."""
        comm = ctypes.c_void_p()
        more = (ctypes.byref(comm), ctypes.byref(self.config))
        code = self.nccl.raw(name, more[0], *words, more[1]) if "Init" in name else self.nccl.raw(name, *words, *more)
        asked = comm.value if "Init" in name else words[0]  # a split that goes on says SUCCESS, and its parent not
        if code in (self.nccl.SUCCESS, self.nccl.IN_PROGRESS):
            code = self.nccl.settled(asked)
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

    def all_reduce(self, to: int, comm: int, begin: int = 0, end: int | None = None, *, in_group: bool = False) -> None:
        count = (self.ranks.numbers if end is None else end) - begin
        at = (self.own + 4 * begin, to + 4 * begin)
        order = (*at, count, UINT32, self.nccl.SUM, comm, self.stream)
        self.nccl.issue("ncclAllReduce", *order, on=() if in_group else (comm,))

    def talk(self) -> None:
        """What all have, what those of the same parity have, what the rank before has."""
        nccl, half = self.nccl, self.ranks.numbers // 2
        if self.ranks.groups:
            nccl.nccl("ncclGroupStart")
            self.all_reduce(self.sums, self.world, 0, half, in_group=True)
            self.all_reduce(self.par, self.parity, in_group=True)
            self.all_reduce(self.sums, self.world, half, in_group=True)
            nccl.issue("ncclGroupEnd", on=(self.world, self.parity))
        else:
            self.all_reduce(self.sums, self.world)
            self.all_reduce(self.par, self.parity)
        if self.ranks.p2p:
            next_, last = (self.rank + 1) % self.n, (self.rank - 1) % self.n
            more = (self.world, self.stream)
            nccl.nccl("ncclGroupStart")
            nccl.nccl("ncclSend", self.own, self.ranks.numbers, UINT32, next_, *more)
            nccl.nccl("ncclRecv", self.ring, self.ranks.numbers, UINT32, last, *more)
            nccl.issue("ncclGroupEnd", on=(self.world,))

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
            if ranks.meets and epoch % ranks.meets == 0:
                self.meet()
            time.sleep(PAUSE)

    def answer(self, request: int, epoch: int) -> None:
        """Proves the memory: what is on the GPU now."""
        self.page.set(Slot.ANSWER_EPOCH, epoch)
        self.page.set(Slot.BYTES, zlib.crc32(self.nccl.get(self.own, self.bytes)))
        self.page.set(Slot.ANSWER, request)

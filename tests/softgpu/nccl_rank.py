"""One rank of a job that computes with its peers, by libcuda.so.1 and libnccl.so.2 alone; nccl_agent.py starts it.

    nccl_rank.py FILE --steps N [--until FILE] [--pause MS] [--elements N] [--p2p] [--groups] [--threads]
                      [--nonblocking] [--capture] [--barrier-every N] [--skew MS] [--watchdog [--patience S]]
                      [--register] [--shrink kept|ended] [--asking LIBRARY]

Every step all-reduces the numbers of all ranks, and of those of the same parity (a communicator of ncclCommSplit), and
makes the next numbers from the sums. That can be undone: it is modulo 2^32, one's own are taken five times, those of
others an even number of times. So one wrong number anywhere shows in every later step. FILE gets a line for each step:
which it is, the CRC of the numbers, the time. Two runs that nobody disturbed have the same lines but for the time.

    --until          ends before that, after the step that FILE names once it is there; nobody may be there yet
    --p2p            also a ring: send to the next rank, receive from the one before, in one group
    --groups         collectives of both communicators, and halves of them, in one group
    --threads        a second thread does the same with a communicator of its own; its lines are in FILE.thread
    --nonblocking    communicators are made with blocking=0
    --capture        each step begins with a collective on a stream that is captured, which is refused
    --graph          a broadcast was captured, where a rule has NCCL in software accept it
    --register       memory is registered, and must be at the end
    --split-in-group a split is there at the end of a group
    --by-pointer     a split is there when its variable is no longer NULL: nothing is asked, as PyTorch does
    --retry          where a split fails all that was made is aborted, and made once more
    --hasty          at first rank 0 wants a split and an end of what is busy: both are refused, and nothing has changed
    --shrink         all ranks but the last also have one that was shrunk from another, which is kept or ended
    --barrier-every  a barrier at the store: ranks wait on the host
    --skew           each rank is late by up to so much, differently in each step
    --watchdog       a thread asks for asynchronous errors all the time, and ends the rank with 3 when there is one
    --asking         a library (asking.c): a thread asks for the errors of one communicator without a pause
    --patience       it ends the rank with 4 when a step's calls are older than that, as PyTorch's: their time is taken
                     before the first of them, and it looks at the clock before it looks whether they are done
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import nccl
from nccl_store import Client

UINT32 = nccl.TYPES["u4"]


class Ended(Exception):
    """A communicator that does not come into being."""


def steady_seconds() -> float:
    """std::chrono::steady_clock::now(), from wherever a program in C++ has it."""
    for library in (None, "libstdc++.so.6"):
        try:
            now = ctypes.CDLL(library)._ZNSt6chrono3_V212steady_clock3nowEv
        except AttributeError:
            continue
        now.restype = ctypes.c_int64
        return int(now()) / 1e9
    raise Ended("no libstdc++")


class Watchdog:
    """Asks every communicator for its asynchronous error, and looks how old calls are."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._works: list[tuple[float, int]] = []
        self._comms: list[int] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def add(self, comm: int) -> None:
        with self._lock:
            self._comms.append(comm)

    def forget(self, comm: int) -> None:
        with self._lock:
            self._comms.remove(comm)

    def issued(self, begun: float, stream: int) -> None:
        with self._lock:
            self._works.append((begun, stream))

    def _watch(self) -> None:
        while True:
            with self._lock:
                for begun, stream in [*self._works]:
                    if (age := steady_seconds() - begun) > self._patience:
                        print(f"watchdog: a step is {age:.3f} s old", flush=True)
                        os._exit(4)
                    if nccl.query(stream) == 0:
                        self._works.remove((begun, stream))
                for comm in self._comms:
                    error = nccl.async_error(comm)
                    if error not in (nccl.SUCCESS, nccl.IN_PROGRESS):
                        print(f"watchdog: a communicator has the error {error}", flush=True)
                        os._exit(3)
            time.sleep(0.02)


class Lines:
    """The file of a rank."""

    def __init__(self, path: str):
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def add(self, step: int, numbers: np.ndarray) -> None:
        os.write(self._fd, f"{step} {zlib.crc32(numbers):08x} {time.monotonic():.6f}\n".encode())


class Rank:
    """What the process is and has."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.rank, self.n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = int(os.environ["LOCAL_RANK"])
        self.store = Client(int(os.environ["MASTER_PORT"]))
        self.watchdog = Watchdog(options.patience) if options.watchdog else None
        while self.rank and options.late and not os.path.exists(options.late):
            time.sleep(0.01)
        nccl.device(self.device)

    def world(self, key: str) -> int:
        """A communicator of all ranks, by a unique id that rank 0 gives the others."""
        if self.rank == 0:
            self.store.set(key, nccl.unique_id().hex())
        unique = nccl.UniqueId.of(bytes.fromhex(self.store.get(key)))
        comm, made = ctypes.c_void_p(), self.options.made_by
        at, config = ctypes.byref(comm), ctypes.byref(self.config(key))
        if made == "ncclCommInitRank":
            code = nccl.raw(made, at, self.n, unique, self.rank)
        elif made == "ncclCommInitRankScalable":
            code = nccl.raw(made, at, self.n, self.rank, 1, ctypes.byref(unique), config)
        else:
            code = nccl.raw(made, at, self.n, unique, self.rank, config)
        return self.ready(int(comm.value or 0), code)

    def config(self, name: str) -> nccl.Config:
        """That of a communicator; with --named it has something of everything, and its texts do not last."""
        config = nccl.Config(0 if self.options.nonblocking else 1)
        if self.options.named:
            config.commName, config.netName = f"{name} of {self.n}".encode(), b"Socket"
            config.minCTAs, config.maxCTAs, config.cgaClusterSize = 2, 8, 1
            config.splitShare, config.trafficClass, config.nvlsCTAs = 1, 3, 4
        return config

    def split(self, world: int) -> int:
        """A communicator of the ranks of the same parity."""
        comm, grouped = ctypes.c_void_p(), self.options.split_in_group
        if grouped:
            nccl.nccl("ncclGroupStart")
        code = nccl.raw(
            "ncclCommSplit", world, self.rank % 2, self.rank, ctypes.byref(comm), ctypes.byref(self.config("parity"))
        )
        if grouped:
            code = nccl.raw("ncclGroupEnd")
        while self.options.by_pointer and code in (nccl.SUCCESS, nccl.IN_PROGRESS):
            if comm.value:
                return int(comm.value)  # and nobody ever asks about it
            time.sleep(0.001)
        try:
            self.done(world, code)  # until then there is none
        except Ended:
            if comm.value:
                nccl.nccl("ncclCommAbort", comm)
            raise
        return self.ready(int(comm.value or 0), nccl.async_error(int(comm.value or 0)))

    def shrink(self, key: str) -> int:
        """A communicator of all ranks but the last, which has none (0), shrunk from one of all."""
        last, every, shrunk = self.n - 1, self.world(key), 0
        if self.rank != last:
            comm, excluded, config = ctypes.c_void_p(), ctypes.c_int(last), self.config(key)
            made = ctypes.byref(excluded), 1, ctypes.byref(comm), ctypes.byref(config), 0
            self.done(every, nccl.raw("ncclCommShrink", every, *made))
            shrunk = self.ready(int(comm.value or 0), nccl.async_error(int(comm.value or 0)))
        if self.options.shrink == "ended":
            self.destroy(every)
        return shrunk

    def done(self, comm: int, code: int) -> None:
        """Waits until what was begun on it has come to its end: a split that goes on says SUCCESS."""
        code = nccl.settled(comm) if code in (nccl.SUCCESS, nccl.IN_PROGRESS) else code
        if code != nccl.SUCCESS:
            raise Ended(f"{code}: {nccl.libnccl.ncclGetLastError(None).decode()}")

    def ready(self, comm: int, code: int) -> int:
        self.done(comm, code)
        if self.watchdog:
            self.watchdog.add(comm)
        return comm

    def destroy(self, comm: int) -> None:
        if self.watchdog:
            self.watchdog.forget(comm)
        nccl.nccl("ncclCommDestroy", comm)


class Work:
    """Numbers on the device, communicators for them, and steps; one for each thread."""

    def __init__(self, rank: Rank, name: str, seed: int):
        self.rank, options = rank, rank.options
        self.seed = seed
        self.count: int = options.elements
        self.world, self.parity = self.two(name)
        self.shrunk = rank.shrink(f"{name} to shrink") if options.shrink else 0
        self.dead = {self.world, self.parity}  # or in use: no handle for another one
        self.stream = nccl.stream()
        self.captured = nccl.stream() if options.capture else 0
        self.bytes = 4 * self.count
        memory = [nccl.memory(self.bytes) for _ in range(5)]
        self.own, self.sums, self.parity_sums, self.ring, self.shrunk_sums = memory
        self.registered: list[int] = []
        self.hold(options)
        numbers = np.random.default_rng(seed + rank.rank).integers(0, 1 << 32, self.count, dtype=np.uint32)
        nccl.put(self.own, numbers.tobytes())
        self.operators = [self.operator(self.world, factor) for factor in (2, 3)] if options.operators else []
        if options.hasty:
            self.hasty()

    def two(self, name: str) -> tuple[int, int]:
        """Communicators of all ranks and of those of the same parity."""
        world = self.rank.world(name)
        try:
            return world, self.rank.split(world)
        except Ended:
            if not self.rank.options.retry:
                raise
            if self.rank.watchdog:
                self.rank.watchdog.forget(world)
            nccl.nccl("ncclCommAbort", world)
        world = self.rank.world(f"{name} again")
        return world, self.rank.split(world)

    def hasty(self) -> None:
        """The first collective of one that does not block lasts until all ranks have called it."""
        order, comm = (self.own, self.sums, self.count, UINT32, nccl.SUM, self.world, self.stream), ctypes.c_void_p()
        if self.rank.rank == 0:
            config = self.rank.config("parity")
            said = [
                nccl.raw("ncclAllReduce", *order),
                nccl.raw("ncclCommSplit", self.world, 0, 0, ctypes.byref(comm), ctypes.byref(config)),
                nccl.raw("ncclCommDestroy", self.world),
            ]
            if said != [nccl.IN_PROGRESS, nccl.INVALID_ARGUMENT, nccl.INVALID_ARGUMENT]:
                raise Ended(f"what was ordered of a busy communicator: {said}")
        self.rank.store.barrier("hasty", self.rank.n)
        if self.rank.rank:
            nccl.raw("ncclAllReduce", *order)
        self.rank.done(self.world, nccl.IN_PROGRESS)
        nccl.synchronize(self.stream)

    def hold(self, options: argparse.Namespace) -> None:
        """What hangs on a communicator, or on no one."""
        handle = ctypes.c_void_p()
        for memory in (self.own, self.sums) if options.register else ():
            nccl.nccl("ncclCommRegister", self.world, memory, self.bytes, ctypes.byref(handle))
            self.registered.append(int(handle.value or 0))
        if options.window:
            nccl.nccl("ncclCommWindowRegister", self.world, self.own, self.bytes, ctypes.byref(handle), 1)
        if options.newer:
            nccl.nccl("ncclSoftgpuConfig", self.world, ctypes.byref(nccl.Config()))
        if options.memory:
            nccl.nccl("ncclMemAlloc", ctypes.byref(handle), 3 << 20)
        if options.graph:
            captured, broadcast = nccl.stream(), (self.own, self.own, self.count, UINT32, 0, self.world)
            nccl.cu("cuStreamBeginCapture_v2", ctypes.c_void_p(captured), 2)
            nccl.nccl("ncclBroadcast", *broadcast, captured)
            nccl.cu("cuStreamEndCapture", ctypes.c_void_p(captured), ctypes.byref(handle))

    def all_reduce(self, to: int, comm: int, begin: int = 0, end: int | None = None, *, in_group: bool = False) -> None:
        end = self.count if end is None else end
        offset = 4 * begin
        op = self.operators[begin > 0] if self.operators and comm == self.world else nccl.SUM
        order = (self.own + offset, to + offset, end - begin, UINT32, op, comm, self.stream)
        nccl.issue("ncclAllReduce", *order, on=() if in_group else (comm,))

    def operator(self, comm: int, factor: int) -> int:
        """An operator of its own: what each rank gives is multiplied first."""
        op, scalar = ctypes.c_int(), ctypes.c_uint32(factor)
        nccl.nccl("ncclRedOpCreatePreMulSum", ctypes.byref(op), ctypes.byref(scalar), UINT32, 1, comm)
        return op.value

    def sum_up(self) -> None:
        """The sums of all, and of those of the same parity, and what the rank before has."""
        options, half, begun = self.rank.options, self.count // 2, steady_seconds()
        if options.groups:
            nccl.nccl("ncclGroupStart")
            self.all_reduce(self.sums, self.world, 0, half, in_group=True)
            self.all_reduce(self.parity_sums, self.parity, in_group=True)
            self.all_reduce(self.sums, self.world, half, in_group=True)
            nccl.issue("ncclGroupEnd", on=(self.world, self.parity))
        else:
            self.all_reduce(self.sums, self.world)
            self.all_reduce(self.parity_sums, self.parity)
        if self.shrunk:
            self.all_reduce(self.shrunk_sums, self.shrunk)
        if options.p2p:
            after, before = (self.rank.rank + 1) % self.rank.n, (self.rank.rank - 1) % self.rank.n
            nccl.nccl("ncclGroupStart")
            nccl.nccl("ncclSend", self.own, self.count, UINT32, after, self.world, self.stream)
            nccl.nccl("ncclRecv", self.ring, self.count, UINT32, before, self.world, self.stream)
            nccl.issue("ncclGroupEnd", on=(self.world,))
        if self.rank.watchdog:
            self.rank.watchdog.issued(begun, self.stream)

    def capture(self) -> None:
        """The driver in software captures nothing, and NCCL says so; nothing comes of it."""
        graph = ctypes.c_void_p()
        nccl.cu("cuStreamBeginCapture_v2", ctypes.c_void_p(self.captured), 2)
        code = nccl.raw("ncclAllReduce", self.own, self.sums, self.count, UINT32, nccl.SUM, self.world, self.captured)
        if code != nccl.INVALID_USAGE:
            raise Ended(f"a collective was captured: {code}")
        nccl.cu("cuStreamEndCapture", ctypes.c_void_p(self.captured), ctypes.byref(graph))
        nccl.cu("cuGraphDestroy", graph)

    def read(self, address: int) -> np.ndarray:
        return np.frombuffer(nccl.get(address, self.bytes), np.uint32)

    def step(self, step: int) -> np.ndarray:
        options = self.rank.options
        if options.skew:
            time.sleep(random.Random(f"{self.seed} {self.rank.rank} {step}").random() * options.skew / 1000)
        if options.capture:
            self.capture()
        if options.anew:
            self.rank.destroy(self.parity)
            self.parity = self.rank.split(self.world)
            if self.parity in self.dead and "limosa" in os.environ.get("LD_PRELOAD", ""):  # libnccl itself does that
                raise Ended(f"the handle {self.parity:#x} is that of a communicator that has ended")
            self.dead.add(self.parity)
        self.sum_up()
        nccl.synchronize(self.stream)
        numbers = 5 * self.read(self.own) + 2 * self.read(self.sums) + np.uint32(step)
        numbers += 4 * self.read(self.parity_sums)
        if self.shrunk:
            numbers += 2 * self.read(self.shrunk_sums)
        if options.p2p:
            numbers += 2 * self.read(self.ring)
        nccl.put(self.own, numbers.tobytes())
        return numbers

    def run(self, lines: Lines, barrier: bool) -> None:
        options = self.rank.options
        for step in range(1, options.steps + 1):
            lines.add(step, self.step(step))
            if barrier and options.barrier_every and step % options.barrier_every == 0:
                self.rank.store.barrier(f"step {step}", self.rank.n)
            if options.until and step >= named_in(options.until):
                return
            time.sleep(options.pause / 1000)

    def tell(self, path: str) -> None:
        """What its communicators were made with."""
        found = []
        for comm in (self.world, self.parity):
            config = nccl.Config()
            nccl.nccl("ncclSoftgpuConfig", comm, ctypes.byref(config))
            found.append(" ".join(f"{name}={getattr(config, name)}" for name, _ in config._fields_))
        Path(path).write_text("\n".join(found))

    def end(self) -> None:
        if self.rank.options.abort:  # it waits for nobody
            nccl.nccl("ncclCommAbort", self.parity)
            nccl.nccl("ncclCommAbort", self.world)
            return
        for handle in self.registered:
            nccl.nccl("ncclCommDeregister", self.world, handle)  # refused where it is registered no more
        if self.shrunk:
            self.rank.destroy(self.shrunk)
        self.rank.destroy(self.parity)
        self.rank.destroy(self.world)


def named_in(path: str) -> float:
    """The step that a file names, none where there is no file."""
    try:
        with open(path) as file:
            return int(file.read())
    except FileNotFoundError:
        return float("inf")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--until")
    parser.add_argument("--pause", type=float, default=0)
    parser.add_argument("--elements", type=int, default=1 << 19)
    parser.add_argument("--barrier-every", type=int, default=0)
    parser.add_argument("--skew", type=float, default=0)
    parser.add_argument("--patience", type=float, default=float("inf"))
    parser.add_argument("--linger", type=float, default=0, help="seconds that rank 0 stays at its end")
    parser.add_argument("--load", help="a library that is loaded first")
    parser.add_argument("--asking")
    parser.add_argument("--made-by", default="ncclCommInitRankConfig")
    parser.add_argument("--shrink", choices=("kept", "ended"))
    parser.add_argument("--late", help="a file: all but rank 0 begin once it is there")
    ways = (
        "p2p groups threads nonblocking capture operators watchdog anew register window memory graph newer abort named"
        " split-in-group by-pointer retry hasty"
    )
    for name in ways.split():
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    if options.load:
        ctypes.CDLL(options.load)
    rank = Rank(options)
    works = [Work(rank, "world", 1)]
    failed = []

    def aside(work: Work) -> None:
        try:
            nccl.device(rank.device)
            work.run(Lines(f"{options.file}.thread"), barrier=False)
        except BaseException as error:
            failed.append(error)
            print(f"the second thread: {error}", flush=True)
            os._exit(4)

    if options.threads:
        works.append(Work(rank, "thread", 1000))
    asking = ctypes.CDLL(options.asking) if options.asking else None
    if asking and asking.begin_asking(nccl.libnccl.ncclCommGetAsyncError, ctypes.c_void_p(works[0].world)):
        raise Ended("no thread can be made")
    threads = [threading.Thread(target=aside, args=(work,)) for work in works[1:]]
    for thread in threads:
        thread.start()
    works[0].run(Lines(options.file), barrier=True)
    for thread in threads:
        thread.join()
    if asking and (error := asking.end_asking()):
        raise Ended(f"a communicator has the error {error}")
    if options.named:
        works[0].tell(f"{options.file}.config")
    for work in works:
        work.end()
    if rank.rank == 0:
        time.sleep(options.linger)
    return 0


if __name__ == "__main__":
    sys.exit(main(arguments()))

"""What it costs that the driver sees all GPUs while the job sees its own, and what that is good for.

A job with CUDA_VISIBLE_DEVICES of one GPU cannot import memory of another one after the driver has moved it there; so a
move makes the memory in the pause and copies it then. Could a library in the job, for the time of cuInit alone, set the
variable to "the job's GPUs first, in their order, then all others"? Bare driver calls, no Limosa:

    python3 tests/gpu/experiments/seeing_all.py [--gb 40] [--only seen,import,pieces]

    seen      cuInit, a context, the driver's checkpoint and restore, host and device memory: by how many GPUs are seen
    import    whether memory on the GPU that it was moved to can be imported, and whether it is right
    pieces    what the way of today costs in the pause: memory made, exported, imported elsewhere, filled; by its pieces

Prints tables as they come, ends by itself after --seconds (85). Needs two GPUs, root; four show more.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

MIB, GB = 1 << 20, 10**9
VARIABLE = "CUDA_VISIBLE_DEVICES"
CYCLES = 3
u64 = ctypes.c_uint64


class Failed(Exception):
    """A call of the driver failed."""


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int), ("id", ctypes.c_int),
        ("windows", ctypes.c_void_p), ("flags", ctypes.c_uint8 * 8),
    ]  # fmt: skip


class Access(ctypes.Structure):
    _fields_ = [("where", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]


class Cuda:
    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *values: Any) -> None:
        code = getattr(self.library, name)(*values)
        if code:
            raise Failed(f"{name}: {code}")


# ------------------------------------------------------------------------------------------------- in one process ---


class Process:
    """Does what it is told, a line of JSON each: a job, or who gives it memory."""

    def __init__(self, fd: int):
        self.cuda, self.peer = Cuda(), socket.socket(fileno=fd)
        self.held: dict[str, tuple[int, int, int]] = {}  # name → handle, address, bytes
        self.contexts: list[ctypes.c_void_p] = []

    def begin(self, at_init: str | None = None, contexts: int = 1) -> dict[str, Any]:
        """``at_init``: the variable for the time of cuInit; afterwards it is as it was."""
        libc, before = ctypes.CDLL(None), os.environ.get(VARIABLE)
        if at_init is not None:
            libc.setenv(VARIABLE.encode(), at_init.encode(), 1)
        begun = time.perf_counter()
        self.cuda("cuInit", 0)
        init = time.perf_counter() - begun
        if at_init is not None:
            if before is None:
                libc.unsetenv(VARIABLE.encode())
            else:
                libc.setenv(VARIABLE.encode(), before.encode(), 1)
        begun, count = time.perf_counter(), ctypes.c_int()
        for device in range(contexts):
            self.contexts.append(ctypes.c_void_p())
            self.cuda("cuDevicePrimaryCtxRetain", ctypes.byref(self.contexts[-1]), device)
        self.cuda("cuCtxSetCurrent", self.contexts[0])
        retain = time.perf_counter() - begun
        self.cuda("cuDeviceGetCount", ctypes.byref(count))
        raw = ctypes.create_string_buffer(16)
        self.cuda("cuDeviceGetUuid_v2", raw, 0)
        return {"init": init, "context": retain, "count": count.value, "first": raw.raw.hex(), **self.size()}

    def size(self) -> dict[str, Any]:
        """Its own host memory, MB, and the driver's descriptors and mappings."""
        with open("/proc/self/status") as file:
            anon = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
        with open("/proc/self/maps") as file:
            maps = sum("/dev/nvidia" in line for line in file)
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return {"anon_mb": anon / 1000, "maps": maps, "fds": sum(link.startswith("/dev/nvidia") for link in links)}

    def create(self, bytes_: int, device: int) -> int:
        prop, handle = Prop(1, 1, 1, device), u64()
        self.cuda("cuMemCreate", ctypes.byref(handle), u64(bytes_), ctypes.byref(prop), u64())
        return handle.value

    def map(self, handle: int, bytes_: int, devices: Sequence[int]) -> int:
        at = u64()
        self.cuda("cuMemAddressReserve", ctypes.byref(at), u64(bytes_), u64(), u64(), u64())
        self.cuda("cuMemMap", at, u64(bytes_), u64(), u64(handle), u64())
        for device in devices:
            access = Access(1, device, 3)
            self.cuda("cuMemSetAccess", at, u64(bytes_), ctypes.byref(access), u64(1))
        return at.value

    def hold(self, name: str, bytes_: int, device: int = 0, value: int = 0) -> dict[str, Any]:
        self.cuda("cuCtxSetCurrent", self.contexts[device])
        handle = self.create(bytes_, device)
        at = self.map(handle, bytes_, [device])
        if value:
            self.cuda("cuMemsetD32_v2", u64(at), value, u64(bytes_ // 4))
            self.cuda("cuCtxSynchronize")
        self.held[name] = handle, at, bytes_
        return {}

    def let_go(self, name: str) -> dict[str, Any]:
        handle, at, bytes_ = self.held.pop(name)
        self.cuda("cuMemUnmap", u64(at), u64(bytes_))
        self.cuda("cuMemRelease", u64(handle))
        self.cuda("cuMemAddressFree", u64(at), u64(bytes_))
        return {}

    def give(self, name: str) -> dict[str, Any]:
        fd = ctypes.c_int(-1)
        self.cuda("cuMemExportToShareableHandle", ctypes.byref(fd), u64(self.held[name][0]), 1, u64())
        self.peer.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.value]))])
        os.close(fd.value)
        return {}

    def receive(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            word, control, _, _ = self.peer.recvmsg(1, socket.CMSG_SPACE(400))
            if not word:
                raise Failed("the other process has ended")
            for _, _, data in control:
                found += struct.unpack(f"{len(data) // 4}i", data)
        return found

    def take(self, name: str, bytes_: int, value: int) -> dict[str, Any]:
        """Imports, maps for its own GPU, looks whether it reads what it should and can write."""
        (fd,) = self.receive(1)
        found: dict[str, Any] = {}
        begun, handle = time.perf_counter(), u64()
        try:
            self.cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
            at = self.map(handle.value, bytes_, [0])
            found["import_and_map"] = time.perf_counter() - begun
            self.held[name] = handle.value, at, bytes_
            seen = ctypes.c_uint32()
            self.cuda("cuMemcpyDtoH_v2", ctypes.byref(seen), u64(at + bytes_ - 4), ctypes.c_size_t(4))
            self.cuda("cuMemsetD32_v2", u64(at), value + 1, u64(bytes_ // 4))
            self.cuda("cuCtxSynchronize")
            found["right"] = seen.value == value
        except Failed as error:
            found["failed"] = str(error)
        os.close(fd)
        return found

    # -- the way of today

    def make(self, bytes_: int, pieces: int, threads: int) -> dict[str, Any]:
        """Makes memory on its GPU in so many pieces, maps it, exports it; descriptors go to the peer."""
        each, took = bytes_ // pieces // (2 * MIB) * 2 * MIB, dict.fromkeys(("create", "map", "export"), 0.0)
        fds: list[int] = []
        mutex, errors = threading.Lock(), list[str]()

        def some(count: int, first: int) -> None:
            try:
                self.cuda("cuCtxSetCurrent", self.contexts[0])
                for number in range(count):
                    marks = [time.perf_counter()]
                    handle = self.create(each, 0)
                    marks.append(time.perf_counter())
                    at = self.map(handle, each, [0])
                    marks.append(time.perf_counter())
                    fd = ctypes.c_int(-1)
                    self.cuda("cuMemExportToShareableHandle", ctypes.byref(fd), u64(handle), 1, u64())
                    marks.append(time.perf_counter())
                    with mutex:
                        self.held[f"made{first + number}"] = handle, at, each
                        fds.append(fd.value)
                        for name, begin, end in zip(took, marks, marks[1:]):  # noqa: B905 - one more mark
                            took[name] += end - begin
            except Failed as error:
                errors.append(str(error))

        begun = time.perf_counter()
        share = [pieces // threads + (n < pieces % threads) for n in range(threads)]
        workers = [threading.Thread(target=some, args=(c, sum(share[:n]))) for n, c in enumerate(share) if c]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        whole = time.perf_counter() - begun
        for i in range(0, len(fds), 100):
            self.peer.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds[i : i + 100]))])
        for fd in fds:
            os.close(fd)
        return {"whole": whole, "each": each, "made": len(fds), **took, **({"failed": errors[0]} if errors else {})}

    def unmake(self) -> dict[str, Any]:
        for name in [name for name in self.held if name.startswith("made")]:
            self.let_go(name)
        return {}

    def fill(self, each: int, pieces: int, source: str, device: int) -> dict[str, Any]:
        """As the mover: imports the pieces, maps them, copies to them from memory on the other GPU."""
        fds = self.receive(pieces)
        self.cuda("cuCtxSetCurrent", self.contexts[device])
        begun = time.perf_counter()
        places = []
        for fd in fds:
            handle = u64()
            self.cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
            places.append((handle.value, self.map(handle.value, each, range(len(self.contexts)))))
        imported = time.perf_counter() - begun
        begun = time.perf_counter()
        _, at, _ = self.held[source]
        for number, (_, place) in enumerate(places):
            self.cuda("cuMemcpyDtoDAsync_v2", u64(place), u64(at + number * each), ctypes.c_size_t(each), None)
        self.cuda("cuCtxSynchronize")
        copied = time.perf_counter() - begun
        for fd in fds:
            os.close(fd)
        for handle, place in places:
            self.cuda("cuMemUnmap", u64(place), u64(each))
            self.cuda("cuMemRelease", u64(handle))
            self.cuda("cuMemAddressFree", u64(place), u64(each))
        return {"import": imported, "copy": copied}

    def source(self, name: str, bytes_: int, device: int) -> dict[str, Any]:
        """Memory to copy from, which both GPUs reach."""
        self.cuda("cuCtxSetCurrent", self.contexts[device])
        handle = self.create(bytes_, device)
        self.held[name] = handle, self.map(handle, bytes_, range(len(self.contexts))), bytes_
        return {}

    def serve(self) -> None:
        for line in sys.stdin:
            words = json.loads(line)
            try:
                answer = getattr(self, words.pop("do"))(**words)
            except (Failed, KeyError) as error:
                answer = {"failed": str(error)}
            print(json.dumps(answer), flush=True)


# ------------------------------------------------------------------------------------------------- the controller ---


class Child:
    """Such a process, and the way to tell it something."""

    all: ClassVar[list[Child]] = []

    def __init__(self, end: socket.socket, env: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--process", str(end.fileno())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[end.fileno()], text=True,
            env={**{k: v for k, v in os.environ.items() if k != VARIABLE}, **env},
        )  # fmt: skip
        Child.all.append(self)

    def tell(self, do: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        found: dict[str, Any] = json.loads(line) if line else {"failed": f"it has ended: {self.process.wait(5)}"}
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)


def pair(job: dict[str, str], giver: dict[str, str] | None = None) -> tuple[Child, Child | None]:
    one, other = socket.socketpair()
    made = Child(one, job), Child(other, giver) if giver is not None else None
    one.close()
    other.close()
    return made


class Controller:
    """Locks, checkpoints, restores, unlocks; it has no context."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.cuda("cuInit", 0)
        count, raw = ctypes.c_int(), ctypes.create_string_buffer(16)
        self.cuda("cuDeviceGetCount", ctypes.byref(count))
        self.uuids = []
        for device in range(count.value):
            self.cuda("cuDeviceGetUuid_v2", raw, device)
            self.uuids.append(raw.raw)

    def call(self, what: str, pid: int, arguments: Any = None) -> float:
        begun = time.perf_counter()
        self.cuda(f"cuCheckpointProcess{what}", pid, arguments)
        return time.perf_counter() - begun

    def cycle(self, pid: int, moves: dict[int, int] | None = None) -> dict[str, float]:
        """All four calls; ``moves`` are GPUs that change, completed to all of them."""
        lock = ctypes.create_string_buffer(64)
        struct.pack_into("I", lock, 0, 10_000)
        found = {"lock": self.call("Lock", pid, lock), "checkpoint": self.call("Checkpoint", pid, bytes(64))}
        found["saved_mb"] = rss(pid)
        full = {gpu: gpu for gpu in range(len(self.uuids))} | (moves or {})
        pairs = b"".join(self.uuids[old] + self.uuids[new] for old, new in full.items())
        kept, arguments = ctypes.create_string_buffer(pairs), ctypes.create_string_buffer(128)
        struct.pack_into("QI", arguments, 0, ctypes.addressof(kept), len(full))
        found["restore"] = self.call("Restore", pid, arguments)
        found["unlock"] = self.call("Unlock", pid, bytes(64))
        return found


def rss(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1000


def used(pid: int) -> str:
    """MB that a process has on each GPU, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        held = {one.pid: one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        found.append(f"{(held.get(pid) or 0) / 1e6:.0f}" if pid in held else "-")
    return "/".join(found)


def show(head: Sequence[str], *rows: Sequence[Any]) -> None:
    for row in (head, *rows):
        print(" | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row), flush=True)


# ------------------------------------------------------------------------------------------------------ the parts ---


def ways(count: int) -> list[tuple[str, dict[str, str], str | None]]:
    """What is compared: in words, the environment, the variable for the time of cuInit."""
    alone = {VARIABLE: "0"}
    order = ",".join(map(str, range(count)))
    found: list[tuple[str, dict[str, str], str | None]] = [("one", alone, None)]
    if count > 2:
        found.append(("one, two at cuInit", alone, "0,1"))
    found += [("one, all at cuInit", alone, order), ("all", {}, None)]
    last = ",".join(map(str, [count - 1, *range(count - 1)]))
    return [*found, ("the last, all at cuInit", {VARIABLE: str(count - 1)}, last)]


def seen(controller: Controller, options: argparse.Namespace) -> None:
    print(f"\nseen: medians of {CYCLES}, seconds and MB; a context on the first GPU and 64 MiB")
    head = ["sees", "count", "cuInit", "context", "lock", "checkpoint", "restore", "unlock", "saved MB"]
    show([*head, "own MB", "maps", "fds", "MB on GPUs", "device 0 is"])
    for name, env, at_init in ways(len(controller.uuids)):
        job, _ = pair(env)
        told = job.tell("begin", at_init=at_init)
        if "failed" in told:
            show([name, told["failed"]])
            continue
        job.tell("hold", name="some", bytes_=64 * MIB, value=7)
        where = used(job.process.pid)
        try:
            runs = [controller.cycle(job.process.pid) for _ in range(CYCLES + 1)][1:]
        except Failed as error:
            show([name, str(error)])
            job.end()
            continue
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        first = [uuid.hex() for uuid in controller.uuids].index(told["first"])
        cells = [middle[key] for key in ("lock", "checkpoint", "restore", "unlock")]
        cells += [f"{middle['saved_mb']:.0f}", f"{told['anon_mb']:.0f}", told["maps"], told["fds"], where, first]
        show([name, told["count"], told["init"], told["context"], *cells])
        job.end()


def importing(controller: Controller, options: argparse.Namespace) -> None:
    print("\nimport: 256 MiB of another process on the GPU that the job was moved to, back and there again")
    show(["sees", "when", "restore", "import + map", "what it reads"])
    size = 256 * MIB
    for name, env, at_init in ways(len(controller.uuids)):
        if name.startswith("the last"):
            continue
        job, giver = pair(env, {})
        assert giver is not None
        told = giver.tell("begin", contexts=2), job.tell("begin", at_init=at_init)
        if bad := [one["failed"] for one in told if "failed" in one]:
            show([name, "begin", bad[0]])
            continue
        held = [giver.tell("hold", name=str(one), bytes_=size, device=one, value=100 + one) for one in (0, 1)]
        if bad := [one["failed"] for one in held if "failed" in one]:
            show([name, "what is given", bad[0]])
            continue
        for turn, device in enumerate((0, 1, 0, 1)):
            took: Any = "-"
            try:
                if turn:
                    took = controller.cycle(job.process.pid, {0: 1, 1: 0})["restore"]
            except Failed as error:
                show([name, f"on GPU {device}", str(error)])
                break
            giver.tell("give", name=str(device))
            found = job.tell("take", name="taken", bytes_=size, value=100 + device if turn < 2 else 101 + device)
            word = found.get("failed") or ("right" if found["right"] else "WRONG")
            when = f"on GPU {device}" if turn else "on GPU 0, never moved"
            show([name, when, took, found.get("import_and_map", "-"), word])
            if "failed" not in found:
                job.tell("let_go", name="taken")
            elif turn:
                break
        for child in (job, giver):
            child.end()


def pieces(controller: Controller, options: argparse.Namespace) -> None:
    size = int(options.gb * GB) // (2 * MIB) * 2 * MIB
    print(f"\npieces: {size / GB:.1f} GB made by the job on its GPU, filled from the other by another process; seconds")
    show(["pieces", "MB each", "threads", "made, in all", "create", "map", "export", "import", "copy", "sum", "GB/s"])
    job, mover = pair({VARIABLE: "1"}, {})
    assert mover is not None
    for child, contexts in ((job, 1), (mover, 2)):
        if "failed" in (told := child.tell("begin", contexts=contexts)):
            print(told["failed"], flush=True)
            return
    told = mover.tell("source", name="source", bytes_=size, device=0)
    if "failed" in told:
        print(told["failed"], flush=True)
        return
    for count, threads in ((640, 1), (640, 4), (160, 1), (40, 1), (40, 4), (10, 1), (4, 4), (1, 1)):
        if size // count < 2 * MIB:
            continue
        for counts in (False, True):
            made = job.tell("make", bytes_=size, pieces=count, threads=threads)
            if "failed" in made:
                show([count, made["failed"]])
                break
            filled = mover.tell("fill", each=made["each"], pieces=count, source="source", device=0)
            job.tell("unmake")
            if "failed" in filled:
                show([count, filled["failed"]])
                break
            if counts:
                whole = made["whole"] + filled["import"] + filled["copy"]
                cells = [made[key] for key in ("create", "map", "export")] + [filled["import"], filled["copy"], whole]
                each = f"{made['each'] / 1e6:.0f}"
                show([count, each, threads, made["whole"], *cells, f"{size / GB / max(1e-9, filled['copy']):.0f}"])
    for child in (job, mover):
        child.end()


PARTS = {"seen": seen, "import": importing, "pieces": pieces}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=40)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=85)
    parser.add_argument("--process", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process >= 0:
        Process(options.process).serve()
        return 0

    def over(*_: object) -> None:
        print("time is up", flush=True)
        for child in Child.all:
            child.process.kill()
        os._exit(3)

    # From a thread: a driver call that hangs holds no signal handler up.
    timer = threading.Timer(options.seconds, over)
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGTERM, over)
    controller = Controller()
    if len(controller.uuids) < 2:
        print("it needs two GPUs", file=sys.stderr)
        return 12
    for name in options.only.split(","):
        begun = time.monotonic()
        try:
            PARTS[name](controller, options)
        except Failed as error:
            print(f"{name}: {error}", flush=True)
        finally:
            for child in Child.all:
                child.end()
            Child.all.clear()
        print(f"({name}: {time.monotonic() - begun:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

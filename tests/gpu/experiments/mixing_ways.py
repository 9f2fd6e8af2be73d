"""What the driver does when another tool checkpoints a process with imported memory, and what a library in it can do.

After one parked move a job's memory is imported. The driver checkpoints such a process and cannot restore it: NVIDIA's
cuda-checkpoint loses the job. At a checkpoint the driver asks the C library's ``mmap`` for the host memory that it
saves to. Does a checkpoint whose ``mmap`` is answered by ENOMEM leave the process whole? And what would it cost to give
the process memory of its own instead?

    python3 tests/gpu/experiments/mixing_ways.py [--gb 64] [--only CASE,...]

Needs a C compiler, libcuda and two GPUs (one will do for most); torch where it is there. Each line of the output is one
JSON object. It is self-contained, so that it says what the driver does, not what Limosa does.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

MIB = 1 << 20
QUIET: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
POPULATE = 0x8000

CUDA_CORE = """
import sys
try:
    from cuda.core import checkpoint
except ImportError:
    from cuda.core.experimental import checkpoint
one = checkpoint.Process(int(sys.argv[1]))
one.lock(10000)
try:
    one.checkpoint()
except BaseException as error:
    print(type(error).__name__, error)
print(one.state)
one.unlock()
print(one.state)
"""

HOOK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A page shared with the controller: what is answered, what is written down. */
struct control { volatile int fail, log, log_ioctl, failed; };
static struct control *control;
static int out = -1;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("HOOK_CONTROL"), *log = getenv("HOOK_LOG");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *at = (void *)syscall(SYS_mmap, NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        control = at == MAP_FAILED ? NULL : at;
        close(fd);
    }
    out = log ? open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void note(const char *format, ...)
{
    char text[512];
    va_list args;
    int n = snprintf(text, sizeof text, "{\"at\": %.6f, \"tid\": %d, ", now(), (int)syscall(SYS_gettid));
    va_start(args, format);
    n += vsnprintf(text + n, sizeof text - n - 3, format, args);
    va_end(args);
    text[n++] = '}';
    text[n++] = '\n';
    if (write(out, text, n) < 0)
        return;
}

static const char *caller(void *at)
{
    Dl_info info;
    const char *slash;
    if (!dladdr(at, &info) || !info.dli_fname)
        return "?";
    slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}

static void *answer(void *from, void *address, size_t bytes, int protection, int flags, int fd, long offset)
{
    int kind = MAP_ANONYMOUS | MAP_POPULATE, large = !address && bytes >= (32u << 20) && (flags & kind) == kind;
    int fails = control && control->fail && large;
    void *got = MAP_FAILED;

    if (fails) {
        control->failed++;
        errno = control->fail;
    } else {
        got = (void *)syscall(SYS_mmap, address, bytes, protection, flags, fd, offset);
    }
    if (control && control->log && (large || control->log > 1)) {
        int saved = errno;
        note("\"call\": \"mmap\", \"bytes\": %zu, \"protection\": %d, \"flags\": %d, \"address\": %d, \"fd\": %d, "
             "\"from\": \"%s\", \"failed\": %d", bytes, protection, flags, address != NULL, fd, caller(from), fails);
        errno = saved;
    }
    return got;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, long offset)
{
    return answer(__builtin_return_address(0), address, bytes, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t bytes, int protection, int flags, int fd, long offset)
{
    return answer(__builtin_return_address(0), address, bytes, protection, flags, fd, offset);
}

int ioctl(int fd, unsigned long request, void *argument)
{
    int result = (int)syscall(SYS_ioctl, fd, request, argument);
    if (control && control->log_ioctl && (request >> 8 & 0xff) == 'F') {
        int saved = errno;
        unsigned number = request & 0xff;
        unsigned command = number == 0x2a || number == 0x2b ? ((unsigned *)argument)[number == 0x2a ? 2 : 3] : 0;
        note("\"call\": \"ioctl\", \"number\": %u, \"command\": %u, \"result\": %d", number, command, result);
        errno = saved;
    }
    return result;
}
"""


class CudaError(Exception):
    """A call of the driver failed."""

    def __init__(self, call: str, code: int):
        super().__init__(f"{call}: {code}")
        self.code = code


class Cuda:
    """libcuda, as much as is needed here."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *values: Any) -> None:
        code = getattr(self.library, name)(*values)
        if code:
            raise CudaError(name, code)


def u64(value: int = 0) -> Any:
    return ctypes.c_uint64(value)


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int), ("id", ctypes.c_int),
        ("windows", ctypes.c_void_p), ("flags", ctypes.c_uint8 * 8),
    ]  # fmt: skip


class Access(ctypes.Structure):
    _fields_ = [("where", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]


# ------------------------------------------------------------------------------------------------- in one process ---


class Piece:
    """A piece of device memory, and where it is mapped."""

    def __init__(self, bytes_: int, pattern: int):
        self.bytes, self.pattern, self.handle, self.at = bytes_, pattern, 0, 0


class Process:
    """A victim, or who gives it memory: does what it is told, one JSON line each, on its standard streams."""

    def __init__(self, fd: int):
        self.cuda, self.pieces, self.device = Cuda(), [], 0
        self.pills: list[int] = []
        self.peer = socket.socket(fileno=fd) if fd >= 0 else None
        self.work: threading.Thread | None = None
        self.stop, self.steps = threading.Event(), 0
        self.torch: Any = None

    def begin(self, device: int = 0, devices: int = 1, torch: bool = False) -> dict[str, Any]:
        if torch:
            import torch as library

            self.torch = library
            library.zeros(1, device="cuda")
        self.cuda("cuInit", 0)
        self.device = device
        for one in range(devices):
            context = ctypes.c_void_p()
            self.cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), (device + one) % max(devices, device + 1))
            if one == 0:
                self.context = context
        self.current()
        return {"pid": os.getpid()}

    def current(self) -> None:
        self.cuda("cuCtxSetCurrent", self.context)

    def create(self, piece: Piece) -> int:
        prop, handle = Prop(1, 1, 1, self.device), u64()
        self.cuda("cuMemCreate", ctypes.byref(handle), u64(piece.bytes), ctypes.byref(prop), u64())
        return handle.value

    def reserve(self, bytes_: int) -> int:
        at = u64()
        self.cuda("cuMemAddressReserve", ctypes.byref(at), u64(bytes_), u64(), u64(), u64())
        return at.value

    def map_at(self, at: int, bytes_: int, handle: int) -> None:
        access = Access(1, self.device, 3)
        self.cuda("cuMemMap", u64(at), u64(bytes_), u64(), u64(handle), u64())
        self.cuda("cuMemSetAccess", u64(at), u64(bytes_), ctypes.byref(access), u64(1))

    def export(self, handle: int) -> int:
        fd = ctypes.c_int(-1)
        self.cuda("cuMemExportToShareableHandle", ctypes.byref(fd), u64(handle), 1, u64())
        return fd.value

    def take(self, fd: int) -> int:
        handle = u64()
        self.cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
        return handle.value

    def own(self, count: int, bytes_: int, write: bool = True) -> dict[str, Any]:
        for i in range(count):
            piece = Piece(bytes_, 0x1000 + len(self.pieces) * 7 + i)
            piece.handle, piece.at = self.create(piece), self.reserve(bytes_)
            self.map_at(piece.at, bytes_, piece.handle)
            if write:
                self.cuda("cuMemsetD32_v2", u64(piece.at), piece.pattern, u64(bytes_ // 4))
            self.pieces.append(piece)
        self.cuda("cuCtxSynchronize")
        return {}

    def give(self, count: int, bytes_: int) -> dict[str, Any]:
        """Make memory and send descriptors of it; its contents are the peer's to write."""
        fds = []
        for _ in range(count):
            piece = Piece(bytes_, 0)
            piece.handle = self.create(piece)
            fds.append(self.export(piece.handle))
            self.cuda("cuMemRelease", u64(piece.handle))
        for i in range(0, len(fds), 100):
            self.peer.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds[i : i + 100]))])
        for fd in fds:
            os.close(fd)
        return {}

    def receive(self, count: int) -> list[int]:
        fds: list[int] = []
        while len(fds) < count:
            _, control, _, _ = self.peer.recvmsg(1, socket.CMSG_SPACE(400))
            for _, _, data in control:
                fds += struct.unpack(f"{len(data) // 4}i", data)
        return fds

    def imported(self, count: int, bytes_: int) -> dict[str, Any]:
        fds = self.receive(count)
        begun = time.perf_counter()
        for i, fd in enumerate(fds):
            piece = Piece(bytes_, 0x9000 + i)
            piece.handle, piece.at = self.take(fd), self.reserve(bytes_)
            self.map_at(piece.at, bytes_, piece.handle)
            self.pieces.append(piece)
        took = time.perf_counter() - begun
        for fd in fds:
            os.close(fd)
        for piece in self.pieces[-count:]:
            self.cuda("cuMemsetD32_v2", u64(piece.at), piece.pattern, u64(bytes_ // 4))
        self.cuda("cuCtxSynchronize")
        return {"import_and_map_s": took}

    def own_imported(self, keep_original: bool) -> dict[str, Any]:
        """Its own memory, exported and imported again by itself."""
        self.own(1, 64 * MIB)
        piece = self.pieces[-1]
        fd = self.export(piece.handle)
        self.cuda("cuMemUnmap", u64(piece.at), u64(piece.bytes))
        if not keep_original:
            self.cuda("cuMemRelease", u64(piece.handle))
        piece.handle = self.take(fd)
        self.map_at(piece.at, piece.bytes, piece.handle)
        os.close(fd)
        return {}

    def unmap(self) -> dict[str, Any]:
        for piece in self.pieces:
            self.cuda("cuMemUnmap", u64(piece.at), u64(piece.bytes))
        return {}

    def remap(self) -> dict[str, Any]:
        for piece in self.pieces:
            self.map_at(piece.at, piece.bytes, piece.handle)
        return {}

    def release(self) -> dict[str, Any]:
        for piece in self.pieces:
            self.cuda("cuMemRelease", u64(piece.handle))
        return {}

    def forget(self) -> dict[str, Any]:
        """All of it is unmapped and let go of."""
        self.unmap()
        self.release()
        self.pieces.clear()
        return {}

    def check(self) -> dict[str, Any]:
        wrong = 0
        for piece in self.pieces:
            got = ctypes.create_string_buffer(piece.bytes)
            self.cuda("cuMemcpyDtoH_v2", got, u64(piece.at), u64(piece.bytes))
            wrong += got.raw != struct.pack("I", piece.pattern) * (piece.bytes // 4)
        return {"pieces": len(self.pieces), "wrong": wrong, "steps": self.steps}

    def busy(self) -> dict[str, Any]:
        """Work on the GPU in a thread, until it is told to end."""

        def loop() -> None:
            if self.torch:
                a = self.torch.randn(2048, 2048, device="cuda")
                while not self.stop.is_set():
                    a = (a @ a).tanh_()
                    if self.steps % 20 == 0:
                        self.torch.cuda.synchronize()
                    self.steps += 1
            else:
                self.current()
                at = self.reserve(64 * MIB)
                self.map_at(at, 64 * MIB, self.create(Piece(64 * MIB, 0)))
                while not self.stop.is_set():
                    self.cuda("cuMemsetD32_v2", u64(at), self.steps, u64(16 * MIB))
                    self.cuda("cuCtxSynchronize")
                    self.steps += 1
                    time.sleep(0.001)

        self.work = threading.Thread(target=loop)
        self.work.start()
        while self.steps < 10:
            time.sleep(0.01)
        return {}

    def idle(self) -> dict[str, Any]:
        self.stop.set()
        self.work.join(20)
        return {"steps": self.steps, "ended": not self.work.is_alive()}

    def replace(self, ahead: bool) -> dict[str, Any]:
        """Each imported piece becomes one that this process has made: what that costs, piece by piece."""
        self.cuda("cuCtxSynchronize")
        times: dict[str, list[float]] = {name: [] for name in ("create", "window", "copy", "exchange", "release")}
        made = []
        begun = time.perf_counter()
        if ahead:
            for piece in self.pieces:
                since = time.perf_counter()
                made.append(self.create(piece))
                times["create"].append(time.perf_counter() - since)
        paused = time.perf_counter()
        window = self.reserve(max(piece.bytes for piece in self.pieces))
        for i, piece in enumerate(self.pieces):
            marks = [time.perf_counter()]
            handle = made[i] if ahead else self.create(piece)
            marks.append(time.perf_counter())
            self.map_at(window, piece.bytes, handle)
            marks.append(time.perf_counter())
            self.cuda("cuMemcpyDtoDAsync_v2", u64(window), u64(piece.at), u64(piece.bytes), None)
            self.cuda("cuCtxSynchronize")
            marks.append(time.perf_counter())
            self.cuda("cuMemUnmap", u64(window), u64(piece.bytes))
            self.cuda("cuMemUnmap", u64(piece.at), u64(piece.bytes))
            self.map_at(piece.at, piece.bytes, handle)
            marks.append(time.perf_counter())
            self.cuda("cuMemRelease", u64(piece.handle))
            marks.append(time.perf_counter())
            piece.handle = handle
            if not ahead:
                times["create"].append(marks[1] - marks[0])
            for name, a, b in zip(("window", "copy", "exchange", "release"), marks[1:], marks[2:], strict=False):
                times[name].append(b - a)
        end = time.perf_counter()
        return {
            "whole_s": end - begun, "pause_if_at_once_s": end - paused,
            "sums_s": {name: sum(one) for name, one in times.items()},
            "most_s": {name: max(one) for name, one in times.items()},
        }  # fmt: skip

    def pill(self, kind: int) -> dict[str, Any]:
        """A small piece of managed memory: the driver does not checkpoint a process that has some."""
        self.current()
        at, begun = u64(), time.perf_counter()
        self.cuda("cuMemAllocManaged", ctypes.byref(at), u64(65536), kind)
        self.pills.append(at.value)
        return {"alloc_s": time.perf_counter() - begun}

    def no_pill(self) -> dict[str, Any]:
        begun = time.perf_counter()
        for at in self.pills:
            self.cuda("cuMemFree_v2", u64(at))
        self.pills.clear()
        return {"free_s": time.perf_counter() - begun}

    def launches(self) -> dict[str, Any]:
        """Seconds for many small pieces of work, and for a large one."""
        found: dict[str, Any] = {}
        if self.torch:
            small, large = (self.torch.ones(n, n, device="cuda") for n in (16, 4096))
            for name, one, times in (("small", small, 20000), ("large", large, 200)):
                self.torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(times):
                    one.add_(1)
                self.torch.cuda.synchronize()
                found[f"{name}_s"] = time.perf_counter() - begun
        return found

    def ordinary(self) -> dict[str, Any]:
        """What a program asks the driver for, so that its mmap calls can be told from those of a checkpoint."""
        at, memory = ctypes.c_void_p(), u64()
        done = {}
        for name, call in {
            "cuMemAllocHost": lambda: self.cuda("cuMemAllocHost_v2", ctypes.byref(at), u64(256 * MIB)),
            "cuMemHostAlloc": lambda: self.cuda("cuMemHostAlloc", ctypes.byref(at), u64(256 * MIB), 3),
            "cuMemHostAllocWriteCombined": lambda: self.cuda("cuMemHostAlloc", ctypes.byref(at), u64(256 * MIB), 4),
            "cuMemAlloc": lambda: self.cuda("cuMemAlloc_v2", ctypes.byref(memory), u64(1024 * MIB)),
            "cuMemAllocManaged": lambda: self.cuda("cuMemAllocManaged", ctypes.byref(memory), u64(256 * MIB), 1),
            "cuMemFreeManaged": lambda: self.cuda("cuMemFree_v2", memory),
            "pageable copy": lambda: self.cuda(
                "cuMemcpyDtoH_v2", ctypes.create_string_buffer(256 * MIB), u64(self.pieces[0].at), u64(64 * MIB)
            ),
        }.items():
            mark = time.monotonic()
            try:
                call()
                done[name] = [mark, time.monotonic(), 0]
            except CudaError as error:
                done[name] = [mark, time.monotonic(), error.code]
        return {"calls": done}

    def serve(self) -> None:
        for line in sys.stdin:
            words = json.loads(line)
            try:
                answer = getattr(self, words.pop("do"))(**words)
            except CudaError as error:
                answer = {"error": str(error), "code": error.code}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), flush=True)


# ------------------------------------------------------------------------------------------------- the controller ---


class Child:
    """A process of the kind above."""

    def __init__(self, folder: Path, hook: Path, fd: int, name: str):
        self.folder = folder / name
        self.folder.mkdir()
        self.control_path = self.folder / "control"
        self.control_path.write_bytes(bytes(4096))
        self.log = self.folder / "log"
        env = {**os.environ, "LD_PRELOAD": str(hook), "HOOK_CONTROL": str(self.control_path), "HOOK_LOG": str(self.log)}
        self.errors = open(self.folder / "errors", "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--process", str(fd)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, pass_fds=[fd], env=env, text=True,
        )  # fmt: skip

    def tell(self, do: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"error": "it has ended", "exit": self.process.wait(5)}
        line: list[str] = []
        reader = threading.Thread(target=lambda: line.append(self.process.stdout.readline()), daemon=True)
        reader.start()
        reader.join(120)
        if reader.is_alive():
            return {"error": "no answer within 120 s"}
        if not line[0]:
            return {"error": "it has ended", "exit": self.process.wait(5)}
        answer: dict[str, Any] = json.loads(line[0])
        return answer

    def set(self, fail: int = 0, log: int = 1, log_ioctl: int = 0) -> None:
        with self.control_path.open("r+b") as file:
            file.write(struct.pack("3i", fail, log, log_ioctl))

    def times_failed(self) -> int:
        return int(struct.unpack_from("i", self.control_path.read_bytes(), 12)[0])

    def logged(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        self.log.write_text("")
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self.errors.close()


class Experiment:
    """The cases; each prints what it found."""

    def __init__(self, folder: Path, gb: int):
        self.folder, self.gb, self.number = folder, gb, 0
        self.hook = folder / "hook.so"
        source = folder / "hook.c"
        source.write_text(HOOK)
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or "cc"
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", self.hook, source, "-ldl"], check=True, timeout=60)
        self.cuda = Cuda()
        self.cuda("cuInit", 0)
        count = ctypes.c_int()
        self.cuda("cuDeviceGetCount", ctypes.byref(count))
        self.devices = count.value
        self.case = ""
        self.children: list[Child] = []

    def say(self, **words: Any) -> None:
        print(json.dumps({"case": self.case, **words}), flush=True)

    def pair(self, torch: bool = False, devices: int = 1) -> tuple[Child, Child]:
        """A victim, and who gives it memory."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.number += 1
        victim = Child(self.folder, self.hook, here.fileno(), f"victim{self.number}")
        giver = Child(self.folder, self.hook, there.fileno(), f"giver{self.number}")
        self.children += [victim, giver]
        here.close()
        there.close()
        victim.set()
        for one, words in ((giver, {}), (victim, {"torch": torch, "devices": devices})):
            answer = one.tell("begin", **words)
            if "error" in answer:
                raise RuntimeError(f"a process did not begin: {answer['error'].splitlines()[-1:]}")
        return victim, giver

    def call(self, what: str, pid: int) -> dict[str, Any]:
        """One of the driver's calls, with its time and the state afterwards."""
        args = ctypes.create_string_buffer(64)
        if what == "Lock":
            struct.pack_into("I", args, 0, 10_000)
        begun = time.perf_counter()
        code = int(getattr(self.cuda.library, f"cuCheckpointProcess{what}")(pid, args))
        took = time.perf_counter() - begun
        state = ctypes.c_int(-1)
        asked = int(self.cuda.library.cuCheckpointProcessGetState(pid, ctypes.byref(state)))
        names = {0: "running", 1: "locked", 2: "checkpointed", 3: "failed"}
        now = names.get(state.value, state.value) if not asked else f"error {asked}"
        return {"call": what.lower(), "code": code, "s": round(took, 4), "state": now}

    def cycle(self, child: Child, calls: str = "Lock Checkpoint Restore Unlock") -> list[dict[str, Any]]:
        return [self.call(one, child.process.pid) for one in calls.split()]

    def restore_thread(self, child: Child) -> int:
        tid = ctypes.c_int(-1)
        self.cuda.library.cuCheckpointProcessGetRestoreThreadId(child.process.pid, ctypes.byref(tid))
        return tid.value

    def mmaps(self, child: Child, logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
        thread = self.restore_thread(child)
        return [
            {"bytes": one["bytes"], "protection": one["protection"], "flags": one["flags"], "from": one["from"],
             "by": "restore thread" if one["tid"] == thread else "another thread", "failed": one["failed"]}
            for one in logged if one["call"] == "mmap"
        ]  # fmt: skip

    # --- cases

    def own(self) -> None:
        """The driver's own way, undisturbed: which calls are made, and in which order."""
        victim, _ = self.pair()
        victim.tell("own", count=4, bytes_=64 * MIB)
        victim.logged()
        victim.set(log=2, log_ioctl=1)
        calls = self.cycle(victim, "Lock Checkpoint")
        logged = victim.logged()
        bulk = [i for i, one in enumerate(logged) if one["call"] == "mmap" and one["flags"] & POPULATE]
        place = next((i for i in bulk if logged[i]["bytes"] >= 32 * MIB), None)
        self.say(calls=calls, mmaps=self.mmaps(victim, logged), bulk_is_call_number=place)
        if place is not None:
            for name, part in (("before", logged[:place]), ("after", logged[place:])):
                ioctls = Counter(f"{one['number']:#x}:{one['command']:#x}" for one in part if one["call"] == "ioctl")
                frees = sum(n for key, n in ioctls.items() if key.startswith("0x29:"))
                self.say(ioctls=name, total=sum(ioctls.values()), frees=frees, most=ioctls.most_common(12))
        victim.set()
        self.say(calls=self.cycle(victim, "Restore Unlock"), check=victim.tell("check"))

    def imported(self) -> None:
        """The known loss."""
        victim, giver = self.pair()
        giver.tell("give", count=4, bytes_=64 * MIB)
        self.say(given=victim.tell("imported", count=4, bytes_=64 * MIB))
        self.say(calls=self.cycle(victim), note="restore is expected to be 801: it is lost")

    def refused(self, torch: bool = False, devices: int = 1) -> None:
        """Imported memory, and mmap answered by ENOMEM: the question of this experiment."""
        victim, giver = self.pair(torch=torch, devices=devices)
        giver.tell("give", count=4, bytes_=64 * MIB)
        victim.tell("imported", count=4, bytes_=64 * MIB)
        victim.tell("busy")
        for error in (12, 12, 11, 1, 12):
            victim.logged()
            victim.set(fail=error, log_ioctl=1)
            before = victim.times_failed()
            calls = self.cycle(victim, "Lock Checkpoint")
            logged = victim.logged()
            again = self.cycle(victim, "Checkpoint")
            times = victim.times_failed() - before
            calls += again + self.cycle(victim, "Unlock")
            ioctls = Counter(one["number"] for one in logged if one["call"] == "ioctl")
            self.say(errno=error, calls=calls, mmap_refused=times, mmaps=self.mmaps(victim, logged),
                     ioctls=sum(ioctls.values()), frees=ioctls[0x29], check=victim.tell("check"))  # fmt: skip
        victim.set(fail=12)
        self.say(other_tools=self.other_tools(victim), check=victim.tell("check"))
        self.say(idle=victim.tell("idle"))
        victim.set()
        # It is as good as new: without the imported memory it goes the driver's way.
        self.say(forgotten=victim.tell("forget"))
        victim.tell("own", count=4, bytes_=64 * MIB)
        for _ in range(2):
            self.say(calls=self.cycle(victim), check=victim.tell("check"))

    def refused_torch(self) -> None:
        self.refused(torch=True)

    def refused_two(self) -> None:
        if self.devices > 1:
            self.refused(devices=2)

    def pills(self, torch: bool = False, devices: int = 1) -> None:
        """Imported memory, and a small piece of managed memory beside it, which the driver refuses to checkpoint."""
        victim, giver = self.pair(torch=torch, devices=devices)
        giver.tell("give", count=4, bytes_=64 * MIB)
        victim.tell("imported", count=4, bytes_=64 * MIB)
        for kind, name in ((1, "global"), (2, "host")):
            without = [victim.tell("launches") for _ in range(2)] if torch else []
            victim.tell("busy") if kind == 1 else None
            made = [victim.tell("pill", kind=kind) for _ in range(2)]
            if kind == 1:
                self.say(idle=victim.tell("idle"))
            self.say(kind=name, made=made, without=without, beside=[victim.tell("launches") for _ in range(2)])
            for _ in range(4):
                victim.logged()
                calls = self.cycle(victim, "Lock Checkpoint")
                states = {call["state"] for call in calls}
                if "checkpointed" in states:
                    self.say(kind=name, calls=calls, note="the pill does not help")
                    return
                calls += self.cycle(victim, "Checkpoint Unlock")
                self.say(kind=name, calls=calls, mmaps=self.mmaps(victim, victim.logged()), check=victim.tell("check"))
            self.say(kind=name, other_tools=self.other_tools(victim), check=victim.tell("check"))
            self.say(kind=name, freed=victim.tell("no_pill"))
        self.say(forgotten=victim.tell("forget"))
        victim.tell("own", count=4, bytes_=64 * MIB)
        self.say(calls=self.cycle(victim), check=victim.tell("check"), note="without imported memory and pill")
        made = victim.tell("pill", kind=1)
        self.say(made=made, calls=self.cycle(victim, "Lock Checkpoint Unlock"), freed=victim.tell("no_pill"))
        self.say(calls=self.cycle(victim), check=victim.tell("check"), note="once more")

    def pills_torch(self) -> None:
        self.pills(torch=True)

    def pills_two(self) -> None:
        if self.devices > 1:
            self.pills(devices=2)

    def other_tools(self, victim: Child) -> dict[str, Any]:
        """What others make of it: NVIDIA's program where it is there, cuda.core."""
        found: dict[str, Any] = {}
        pid = victim.process.pid
        program = shutil.which("cuda-checkpoint")
        if program:
            done = subprocess.run([program, "--toggle", "--pid", str(pid)], check=False, **QUIET)
            found["cuda-checkpoint"] = [done.returncode, done.stdout, done.stderr]
            found["state"] = self.call("Unlock", pid)
        done = subprocess.run([sys.executable, "-c", CUDA_CORE, str(pid)], check=False, **QUIET)
        found["cuda.core"] = [done.returncode, done.stdout.splitlines(), done.stderr.splitlines()[-1:]]
        return found

    def variants(self) -> None:
        """Which kinds of imported memory the driver cannot restore."""
        for name, steps in {
            "mapped, handle held": [],
            "unmapped, handle held": ["unmap"],
            "mapped, handle let go": ["release"],
            "unmapped and let go": ["forget"],
        }.items():
            victim, giver = self.pair()
            giver.tell("give", count=1, bytes_=64 * MIB)
            victim.tell("imported", count=1, bytes_=64 * MIB)
            done = [victim.tell(step) for step in steps]
            self.say(kind=name, steps=done, calls=self.cycle(victim))
        for keep in (False, True):
            victim, _ = self.pair()
            done = [victim.tell("own_imported", keep_original=keep)]
            kind = f"its own memory, imported again, original {'held' if keep else 'let go'}"
            calls = self.cycle(victim)
            runs = calls[-1]["state"] == "running"
            self.say(kind=kind, steps=done, calls=calls, check=victim.tell("check") if runs else None)

    def ordinary(self) -> None:
        """mmap calls with MAP_POPULATE that are no checkpoint's."""
        for torch in (False, True):
            victim, _ = self.pair(torch=torch)
            self.say(torch=torch, at_start=self.mmaps(victim, victim.logged()))
            victim.tell("own", count=1, bytes_=64 * MIB)
            victim.set(log=2)
            calls = victim.tell("ordinary").get("calls", {})
            logged = victim.logged()
            for name, (begun, ended, code) in calls.items():
                those = [one for one in logged if begun <= one["at"] <= ended and one["bytes"] >= 32 * MIB]
                self.say(torch=torch, call=name, code=code, mmaps=self.mmaps(victim, those))

    def costs(self) -> None:
        """What it costs to exchange imported memory for memory of the process's own."""
        free, total = u64(), u64()
        context = ctypes.c_void_p()
        self.cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.cuda("cuCtxSetCurrent", context)
        self.cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        self.cuda("cuDevicePrimaryCtxRelease_v2", 0)
        gb = min(self.gb, free.value * 9 // 20 // 10**9)
        for bytes_, whole, ahead in ((1024, gb, False), (1024, gb, True), (20, min(gb, 20), False), (4096, gb, False)):
            count = whole * 10**9 // (bytes_ * MIB)
            if count:
                victim, giver = self.pair()
                self.say(given=giver.tell("give", count=count, bytes_=bytes_ * MIB))
                taken = victim.tell("imported", count=count, bytes_=bytes_ * MIB)
                self.say(pieces=count, mib=bytes_, ahead=ahead, **taken, **victim.tell("replace", ahead=ahead))
                victim.end()
                giver.end()
        victim, giver = self.pair()
        giver.tell("give", count=16, bytes_=64 * MIB)
        victim.tell("imported", count=16, bytes_=64 * MIB)
        victim.tell("replace", ahead=False)
        for _ in range(2):
            self.say(note="exchanged memory by the driver's way", calls=self.cycle(victim), check=victim.tell("check"))

    def run(self, only: list[str]) -> None:
        refused = [self.refused, self.refused_torch, self.refused_two]
        pills = [self.pills, self.pills_torch, self.pills_two]
        cases = [self.own, self.imported, *refused, *pills, self.variants, self.ordinary, self.costs]
        for case in cases:
            if only and case.__name__ not in only:
                continue
            self.case = case.__name__
            begun = time.monotonic()
            try:
                case()
            except Exception:
                self.say(error=traceback.format_exc().splitlines()[-3:])
            for child in self.children:
                if child.process.poll() is None:
                    child.end()
                words = (child.folder / "errors").read_text(errors="replace").strip().splitlines()
                if words:
                    self.say(said=words[-3:])
            self.children.clear()
            self.say(ended_after_s=round(time.monotonic() - begun, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=int, default=64)
    parser.add_argument("--only", default="")
    parser.add_argument("--process", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        Process(args.process).serve()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(Path(folder), args.gb)
        experiment.run([word for word in args.only.split(",") if word])
    return 0


if __name__ == "__main__":
    sys.exit(main())

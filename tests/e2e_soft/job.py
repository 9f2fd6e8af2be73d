"""The job of these tests: it holds memory of software GPUs and writes all of it anew, again and again.

    python job.py FOLDER [--mib N] [--gpu I] [--also I] [--peer] [--managed] [--export] [--child] [--spin]

After READY it prints ``tick N TIME`` for each round. A round looks whether pages (of 4 KiB) hold what the round before
has written, then stamps them with its own number: a page that is stale, lost or somebody else's ends it with an error.
It ends with DONE when there is a file ``stop`` in its folder.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from ctypes import c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

PTX = Path(__file__).parents[2] / "src" / "limosa" / "demo" / "kernels.ptx"
PAGE, WORDS = 4096, 512
STEP = 4 << 20
MASK = (1 << 64) - 1
STALE_SECONDS = 6.0


def do(answer: Any) -> Any:
    result, *values = answer
    if result != cu.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"the driver says {result.name}")
    return values[0] if len(values) == 1 else tuple(values)


def stamped(epoch: int, page: int) -> bytes:
    """What the kernel ``stamp`` writes into a page."""
    words = (epoch * 0x9E3779B97F4A7C15 + (page * WORDS + i) * 0xD1B54A32D192ED03 for i in range(WORDS))
    return struct.pack(f"{WORDS}Q", *(word & MASK for word in words))


class Memory:
    """Device memory that moves: it is stamped with the number of the round.

    All of it at first; then in each round the beginning, which others look at, and one ``STEP`` more: all of it each
    time would take half a core from those who move it.
    """

    def __init__(self, gpu: int, size: int, managed: bool = False):
        self.context = do(cu.cuDevicePrimaryCtxRetain(do(cu.cuDeviceGet(gpu))))
        self.use()
        self.module = do(cu.cuModuleLoadData(PTX.read_bytes() + b"\0"))
        self.size = size
        flags = cu.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
        self.at = int(do(cu.cuMemAllocManaged(size, flags) if managed else cu.cuMemAlloc(size)))
        self.round, self.rounds = 0, [0] * -(-size // STEP)
        for _ in self.rounds:
            self.stamp()

    def use(self) -> None:
        do(cu.cuCtxSetCurrent(self.context))

    def run(self, name: str, *arguments: tuple[Any, Any]) -> None:
        function = do(cu.cuModuleGetFunction(self.module, name.encode()))
        values, kinds = zip(*arguments, strict=True)
        do(cu.cuLaunchKernel(function, 8, 1, 1, 64, 1, 1, 0, 0, (values, kinds), 0))

    def stamp(self) -> None:
        self.use()
        self.round += 1
        for step in {0, self.round % len(self.rounds)}:
            self.rounds[step] = self.round
            self.write(self.at + step * STEP, step)

    def write(self, at: int, step: int) -> None:
        """What a step holds, there or elsewhere."""
        words = min(STEP, self.size - step * STEP) // 8
        page = step * STEP // PAGE
        self.run("stamp", (at, c_void_p), (words, c_uint64), (self.rounds[step], c_uint64), (page, c_uint64))

    def check_all(self) -> None:
        """Every word, at the end, beside what the kernel writes once more; where there is no room for that, some pages.

        NumPy would be slower to load than this is.
        """
        self.use()
        answer, again = cu.cuMemAlloc(STEP)
        if answer != cu.CUresult.CUDA_SUCCESS:
            self.check(list(range(0, self.size // PAGE, 7)))
            return
        for step, round_ in enumerate(self.rounds):
            start = step * STEP
            size = min(STEP, self.size - start)
            wanted, found = bytearray(size), bytearray(size)
            self.write(int(again), step)
            do(cu.cuMemcpyDtoH(wanted, again, size))
            do(cu.cuMemcpyDtoH(found, self.at + start, size))
            if found != wanted:
                raise SystemExit(f"the memory at {start} is not what round {round_} has written")

    def check(self, pages: list[int]) -> None:
        self.use()
        for page in pages:
            found = bytearray(PAGE)
            do(cu.cuMemcpyDtoH(found, self.at + page * PAGE, PAGE))
            round_ = self.rounds[page * PAGE // STEP]
            if bytes(found) != stamped(round_, page):
                raise SystemExit(f"page {page} is not what round {round_} has written")


class Seen:
    """Another process's memory: its rounds are seen to go on, and never to go back."""

    def __init__(self, at: int):
        self.at, self.round, self.since, self.looked = at, 0, time.monotonic(), time.monotonic()

    def look(self) -> None:
        word = bytearray(8)
        do(cu.cuMemcpyDtoH(word, self.at, 8))
        shown = int.from_bytes(word, "little") * pow(0x9E3779B97F4A7C15, -1, MASK + 1) & MASK
        if not self.round <= shown < 1 << 32:
            raise SystemExit(f"round {shown} is seen after {self.round}")
        now = time.monotonic()
        if shown > self.round or now - self.looked > 1:  # or both were held still
            self.round, self.since = shown, now
        self.looked = now
        if now - self.since > STALE_SECONDS:
            raise SystemExit(f"the other's memory has stood at round {shown} for too long")


def told_of(gpu: int) -> dict[str, list[Any]]:
    """UUID, bus id and bus number of its GPU, as the driver says them by each way to it."""
    found = {}
    library = ctypes.CDLL("libcuda.so.1")
    for way in ("direct", "dlsym", "cuGetProcAddress", "bindings"):

        def get(name: str, version: str = "", way: str = way) -> Any:
            if way == "cuGetProcAddress":
                at, status = c_void_p(), ctypes.c_int()
                where, more = ctypes.byref(at), (13000, c_uint64(0), ctypes.byref(status))
                if library.cuGetProcAddress_v2(name.encode(), where, *more):
                    raise SystemExit(f"there is no {name}")
                return ctypes.CFUNCTYPE(ctypes.c_int)(at.value or 0)
            return (ctypes.CDLL(None) if way == "direct" else library)[name + version]

        if way == "bindings":
            uuid, text = bytes(do(cu.cuDeviceGetUuid(gpu)).bytes), do(cu.cuDeviceGetPCIBusId(32, gpu))
            bus = do(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, gpu))
            found[way] = [uuid.hex(), text.split(b"\0")[0].decode(), bus]
            continue
        raw, name, number = ctypes.create_string_buffer(16), ctypes.create_string_buffer(32), ctypes.c_int()
        if get("cuDeviceGetUuid", "_v2")(raw, gpu) or get("cuDeviceGetPCIBusId")(name, 32, gpu):
            raise SystemExit(f"by {way} the driver does not say where it is")
        if get("cuDeviceGetAttribute")(ctypes.byref(number), 33, gpu):
            raise SystemExit(f"by {way} the driver does not say its bus")
        found[way] = [raw.raw.hex(), name.value.decode(), number.value]
    return found


def synchronise(memory: Memory) -> None:
    """While the driver has checkpointed this process each of these would end it."""
    memory.use()
    while True:
        do(cu.cuCtxSynchronize())
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--also", type=int, help="a second GPU to hold memory on")
    parser.add_argument("--peer", action="store_true", help="peer access between the two")
    parser.add_argument("--managed", action="store_true")
    parser.add_argument("--small", action="store_true", help="a small piece as well")
    parser.add_argument("--export", action="store_true", help="by legacy IPC, to a child")
    parser.add_argument("--import", dest="handle", help="the handle of another's")
    parser.add_argument("--event", help="that of an event which is shared beside it, as PyTorch does")
    parser.add_argument("--child", action="store_true", help="a child with CUDA state of its own")
    parser.add_argument("--child-without", metavar="NAME", help="a variable that the child does not have")
    parser.add_argument("--partner", action="store_true", help="a child that opens our memory once there is `share`")
    parser.add_argument("--waits", action="store_true", help="be that child")
    parser.add_argument("--still", action="store_true", help="compute, and change nothing")
    parser.add_argument("--jax", action="store_true", help="a library of JAX's mapped, by its name")
    parser.add_argument("--multicast", action="store_true", help="try to take part in NVLink multicast")
    parser.add_argument("--spin", action="store_true", help="a kernel that does not end")
    parser.add_argument("--synchronises", action="store_true", help="a thread that waits for the GPU all the time")
    parser.add_argument("--small-child", action="store_true", help="a child with nothing that can be parked")
    options = parser.parse_args()
    do(cu.cuInit(0))
    held = [Memory(options.gpu, options.mib << 20, options.managed)]
    if options.also is not None:
        held.append(Memory(options.also, options.mib << 20))
    if options.small:
        do(cu.cuMemAlloc(4096))
    if options.peer:
        do(cu.cuCtxEnablePeerAccess(held[0].context, 0))
    seen = None
    if options.handle:
        handle = cu.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), bytes.fromhex(options.handle), 64)
        seen = Seen(int(do(cu.cuIpcOpenMemHandle(handle, 1))))
        event = cu.CUipcEventHandle()
        ctypes.memmove(event.getPtr(), bytes.fromhex(options.event), 64)
        do(cu.cuIpcOpenEventHandle(event))
    child = None
    (options.folder / f"pid-{'importer' if seen else 'job'}").write_text(str(os.getpid()))
    own = [sys.executable, __file__, str(options.folder), "--mib", str(options.mib), "--gpu", str(options.gpu)]
    if options.export:
        held[0].use()
        name = ctypes.string_at(do(cu.cuIpcGetMemHandle(held[0].at)).getPtr(), 64).hex()
        event = do(cu.cuEventCreate(6))  # without timing, for other processes
        shown = ctypes.string_at(do(cu.cuIpcGetEventHandle(event)).getPtr(), 64).hex()
        child = subprocess.Popen([*own, "--import", name, "--event", shown], stdout=subprocess.DEVNULL)
    if options.child:
        env = {k: v for k, v in os.environ.items() if k != options.child_without}
        more = ["--still"] if options.still else []
        child = subprocess.Popen([*own, *more], stdout=subprocess.DEVNULL, env=env)
    if options.small_child:
        child = subprocess.Popen([*own, "--mib", "1", "--synchronises"], stdout=subprocess.DEVNULL)
    if options.partner:
        child = subprocess.Popen([*own, "--waits"], stdout=subprocess.DEVNULL)
    if options.multicast:
        cu.cuMulticastAddDevice(0, options.gpu)  # these GPUs have none
    if options.synchronises:
        threading.Thread(target=synchronise, args=(held[0],), daemon=True).start()
    if options.spin:
        flag = int(do(cu.cuMemHostAlloc(4096, 0)))
        held[0].run("spin", (flag, c_void_p), (1, c_uint32))
    library = options.folder / "xla_cuda_plugin.so"
    if options.jax:
        library.write_bytes(bytes(4096))
        with library.open("rb") as file:
            library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (options.folder / f"ready-{os.getpid()}").touch()
    while child is not None and child.poll() is None and not (options.folder / f"ready-{child.pid}").exists():
        time.sleep(0.02)  # whoever suspends the two is to meet both
    print("READY", os.getpid(), flush=True)
    number, rests = 0, False
    while not (options.folder / "stop").exists():
        time.sleep(0.1)  # most of a core is left to those who move it
        if options.spin:
            continue  # every further call on its stream would wait for the kernel
        if options.waits and seen is None and (options.folder / "handle").exists():
            handle = cu.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), (options.folder / "handle").read_bytes(), 64)
            held[0].use()
            seen = Seen(int(do(cu.cuIpcOpenMemHandle(handle, 1))))
            (options.folder / "shared").touch()
        if options.partner and (options.folder / "share").exists():
            (options.folder / "share").unlink()
            name = ctypes.string_at(do(cu.cuIpcGetMemHandle(held[0].at)).getPtr(), 64)
            (options.folder / "handle.new").write_bytes(name)
            (options.folder / "handle.new").rename(options.folder / "handle")
        if (options.folder / "grow").exists():
            (options.folder / "grow").unlink()
            held.append(Memory(options.gpu, options.mib << 20))
            (options.folder / "grown").touch()
        if (options.folder / "where").exists():
            (options.folder / "where").unlink()
            (options.folder / "there.new").write_text(json.dumps(told_of(options.gpu)))
            (options.folder / "there.new").rename(options.folder / "there")
        if seen is not None:
            seen.look()
        if (options.folder / "rest").exists():
            if not rests:
                print("RESTS", flush=True)
            rests = True
            continue
        rests = False
        for memory in held:
            memory.check([0, random.randrange(memory.size // PAGE), memory.size // PAGE - 1])
            if not options.still:
                memory.stamp()
        number += 1
        print("tick", number, time.monotonic(), flush=True)
    for memory in held:
        memory.check_all()
    if child is not None and child.wait(60):
        raise SystemExit("the child ended badly")
    print("DONE", flush=True)


_shown: list[Any] = []


def show_environment(env: dict[str, str]) -> None:
    """Has /proc/PID/environ show what this process was given, and not what the warm one was."""
    data = b"".join(f"{name}={value}\0".encode() for name, value in env.items())
    shown = ctypes.create_string_buffer(data, len(data))
    _shown.append(shown)
    libc, at = ctypes.CDLL(None, use_errno=True), ctypes.addressof(shown)
    libc.sbrk.restype = c_uint64
    of = [0, 0, 0, *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]  # numbered as in proc(5)
    code, stack, data_and_heap, words = of[26:28], of[28], of[45:48], of[48:50]
    numbers = [*map(int, (*code, *data_and_heap)), int(libc.sbrk(0)), *map(int, (stack, *words)), at, at + len(data)]
    made = struct.pack("11QQIi", *numbers, 0, 0, -1)  # struct prctl_mm_map
    if libc.prctl(35, 14, made, c_uint64(len(made)), 0):  # PR_SET_MM, PR_SET_MM_MAP
        raise OSError(ctypes.get_errno(), "PR_SET_MM_MAP")


def become(order: dict[str, Any], stdout: int, stderr: int) -> None:
    """The child of a warm process (``warm.py``), which has the driver's bindings; does not return."""
    from limosa_softgpu.node import join

    code: Any = 1
    try:
        os.environ.clear()
        os.environ.update(order["env"])
        show_environment(order["env"])
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        for fd, copy in ((null, 0), (stdout, 1), (stderr, 2)):
            os.dup2(fd, copy)
        os.closerange(3, 64)
        os.chdir(order["cwd"])
        join(order["node"])
        sys.argv = [__file__, *order["argv"]]
        main()
        code = 0
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def warm() -> None:
    """Forks jobs: the bindings take longer to load than most jobs to do what they are there for."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from warm import serve

    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])), become)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        warm()
    main()

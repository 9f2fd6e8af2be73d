"""A victim: a program that computes on device memory all the time and can be asked to prove what is in it.

Forked from a nursery that has loaded ``cuda.bindings`` and has never called the driver. It is led through a control
page, a small file that it has mapped: it writes its epoch there, and answers a request with hashes of its memory at the
end of the epoch it is in. No pipe, no socket: CRIU can dump it.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import signal
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from campaign.shapes import COMMANDS, FLOATS, SHAPES, Part, Slot, factor, page_of, sees

PAUSE = float(os.environ.get("CAMPAIGN_PAUSE", "0.02"))
GRID, BLOCK = 4, 64
GRANULARITY = 2 << 20
BUSY_SECONDS = 1.7
SHIM = "liblimosa_shim" in os.environ.get("LD_PRELOAD", "")


def check(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call; an error ends the process, loudly."""
    if int(answer[0]) != 0:
        raise RuntimeError(f"driver: {answer[0]!r}")
    return answer[1] if len(answer) > 1 else None


class Page:
    """One process's slot of the control page."""

    def __init__(self, memory: mmap.mmap, slot: int):
        self._memory, self._base = memory, slot * Slot.WORDS * 8

    def get(self, word: int) -> int:
        """A word."""
        return int(struct.unpack_from("<Q", self._memory, self._base + 8 * word)[0])

    def set(self, word: int, value: int) -> None:
        """Writes a word."""
        struct.pack_into("<Q", self._memory, self._base + 8 * word, value & ((1 << 64) - 1))


class Work:
    """One part: a context, its blocks and its float array."""

    def __init__(self, cu: Any, ptx: bytes, first: int, slot: int, number: int, part: Part):
        self.cu, self.slot, self.number, self.part = cu, slot, number, part
        self.device = check(cu.cuDeviceGet(first + part.device))
        self.context = check(cu.cuDevicePrimaryCtxRetain(self.device))
        check(cu.cuCtxSetCurrent(self.context))
        self.module = check(cu.cuModuleLoadData(ptx))
        names = ("stamp", "saxpy", "hash", *(("fill", "spin") if SHIM else ()))
        self.kept: list[Any] = []
        self.kernels = {name: check(cu.cuModuleGetFunction(self.module, name.encode())) for name in names}
        self.streams = [check(cu.cuStreamCreate(1)) for _ in range(max(1, part.threads))]
        self.plain = [int(check(cu.cuMemAlloc(8 * words))) for words in part.plain]
        self.handles: list[Any] = []
        self.descriptors: list[int] = []
        self.vmm = [self._vmm(8 * words, i) for i, words in enumerate(part.vmm)]
        self.own = [self._vmm(8 * words, i, shown=False) for i, words in enumerate(part.own)]
        self.pooled = [int(check(cu.cuMemAllocAsync(8 * words, self.streams[0]))) for words in part.pooled]
        self.idle = int(check(cu.cuMemAlloc(part.idle))) if part.idle else 0
        self.out = int(check(cu.cuMemAlloc(4096)))
        self.y = int(check(cu.cuMemAlloc(4 * FLOATS)))
        self.x = int(check(cu.cuMemAlloc(4 * FLOATS)))
        x = array.array("f", (_f32(_f32(i + 0.5) * _f32(0.37)) for i in range(FLOATS)))
        check(cu.cuMemcpyHtoD(self.x, x.tobytes(), 4 * FLOATS))
        check(cu.cuMemsetD8(self.y, 0, 4 * FLOATS))
        check(cu.cuCtxSynchronize())

    def _vmm(self, size: int, number: int, shown: bool = True) -> int:
        cu = self.cu
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(self.device)
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        if shown:
            prop.requestedHandleTypes = kind
        size = -(-size // GRANULARITY) * GRANULARITY
        address = int(check(cu.cuMemAddressReserve(size, 0, 0, 0)))
        handle = check(cu.cuMemCreate(size, prop, 0))
        check(cu.cuMemMap(address, size, 0, handle, 0))
        access = cu.CUmemAccessDesc()
        access.location = prop.location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(cu.cuMemSetAccess(address, size, [access], 1))
        if shown:  # open ever after
            self.descriptors.append(int(check(cu.cuMemExportToShareableHandle(handle, kind, 0))))
        if number % 2:
            check(cu.cuMemRelease(handle))  # the mapping alone keeps it
        else:
            self.handles.append(handle)
        return address

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Address and words of each block."""
        return list(zip([*self.plain, *self.vmm, *self.own, *self.pooled], self.part.blocks, strict=True))

    def launch(self, name: str, stream: Any, values: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        """Queues a kernel."""
        kernel = self.kernels[name]
        check(self.cu.cuLaunchKernel(kernel, GRID, 1, 1, BLOCK, 1, 1, 0, stream, (values, types), 0))

    def stamp(self, epoch: int, only: int | None = None) -> None:
        """Queues this epoch's stamps, of one block in ``threads`` where ``only`` says so."""
        u64 = ctypes.c_uint64
        for b, (address, words) in enumerate(self.blocks):
            thread = b % len(self.streams)
            if only is None or only == thread:
                page = page_of(self.slot, self.number, b)
                self.launch("stamp", self.streams[thread], (address, words, epoch, page), (u64,) * 4)

    def churn(self) -> None:
        """Allocates, writes, reads and frees for ever; what it reads is what it wrote."""
        cu, u64, words, round_ = self.cu, ctypes.c_uint64, self.part.churn, 0
        check(cu.cuCtxSetCurrent(self.context))
        stream = check(cu.cuStreamCreate(1))
        while True:
            round_ += 1
            address = self._allocated(8 * words)
            self.launch("fill", stream, (address, words, round_), (u64,) * 3)
            check(cu.cuStreamSynchronize(stream))
            if self._read(address + 8 * (words - 1), 8) != struct.pack("<Q", round_):
                raise RuntimeError(f"what came and goes is not what was written in round {round_}")
            check(cu.cuMemFree(address))
            time.sleep(PAUSE)

    def _allocated(self, size: int) -> int:
        """Waits where the GPU has no room: somebody else may fill it while this process holds nothing."""
        result, address = self.cu.cuMemAlloc(size)
        while result == self.cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            time.sleep(PAUSE)
            result, address = self.cu.cuMemAlloc(size)
        return int(check((result, address)))

    def busy(self, how: str, seconds: float) -> None:
        """Has work on the GPU that does not end for so long: a kernel, or a function of the host."""
        cu = self.cu
        check(cu.cuCtxSetCurrent(self.context))
        stream, flag = check(cu.cuStreamCreate(1)), 0
        if how == "spin":
            flag = int(check(cu.cuMemHostAlloc(4096, 0)))
            ctypes.c_uint32.from_address(flag).value = 0
            self.launch("spin", stream, (flag, 1), (ctypes.c_uint64, ctypes.c_uint32))
        else:
            waits = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(seconds))
            self.kept.append(waits)
            pointer = cu.CUhostFn(_ptr=ctypes.addressof(waits))
            check(cu.cuLaunchHostFunc(stream, pointer, 0))

        def let_end() -> None:
            time.sleep(seconds)
            if flag:
                ctypes.c_uint32.from_address(flag).value = 1
            check(cu.cuCtxSetCurrent(self.context))
            check(cu.cuStreamSynchronize(stream))
            check(cu.cuStreamDestroy(stream))

        threading.Thread(target=let_end, daemon=True).start()

    def begin(self, epoch: int) -> None:
        """Queues an epoch."""
        check(self.cu.cuCtxSetCurrent(self.context))
        if len(self.plain) > 4:  # one allocation after another is given back and made anew
            b = 2 + epoch % (len(self.plain) - 2)
            check(self.cu.cuMemFree(self.plain[b]))
            self.plain[b] = int(check(self.cu.cuMemAlloc(8 * self.part.plain[b])))
        if not self.part.threads:
            self.stamp(epoch)
        u64 = ctypes.c_uint64
        values = (self.y, self.x, factor(epoch), FLOATS)
        self.launch("saxpy", self.streams[0], values, (u64, u64, ctypes.c_float, u64))

    def finish(self) -> None:
        """Waits for what is queued."""
        check(self.cu.cuCtxSetCurrent(self.context))
        for stream in self.streams:
            check(self.cu.cuStreamSynchronize(stream))

    def prove(self) -> tuple[int, bytes, bytes]:
        """The kernel's hash of the blocks, their bytes, and the floats'."""
        cu, u64 = self.cu, ctypes.c_uint64
        check(cu.cuCtxSetCurrent(self.context))
        total, data = 0, b""
        for b, (address, words) in enumerate(self.blocks):
            check(cu.cuMemsetD8Async(self.out, 0, 8, self.streams[0]))
            self.launch("hash", self.streams[0], (address, words, self.out), (u64,) * 3)
            self.finish()
            total += struct.unpack("<Q", self._read(self.out, 8))[0] * (2 * (100 * self.number + b) + 1)
            data += self._read(address, 8 * words)
        return total % (1 << 64), data, self._read(self.y, 4 * FLOATS)

    def _read(self, address: int, size: int) -> bytes:
        data = bytearray(size)
        check(self.cu.cuMemcpyDtoH(data, address, size))
        return bytes(data)


def _f32(value: float) -> float:
    return ctypes.c_float(value).value


class Process:
    """One process of a victim."""

    def __init__(self, shape: str, memory: mmap.mmap, slot: int, ptx: bytes, first: int):
        self.page = Page(memory, slot)
        self.page.set(Slot.PID, os.getpid())
        self.works: list[Work] = []
        parts = SHAPES[shape].processes[slot]
        if parts:
            from cuda.bindings import driver as cu

            check(cu.cuInit(0))
            self.works = [Work(cu, ptx, first, slot, i, part) for i, part in enumerate(parts)]
        for work in self.works:
            for other in self.works:
                if work.part.peer and other is not work:
                    check(work.cu.cuCtxSetCurrent(work.context))
                    check(work.cu.cuCtxEnablePeerAccess(other.context, 0))
        self.threads = sum(work.part.threads for work in self.works)
        self.epoch = 0
        self.gate = threading.Barrier(self.threads + 1) if self.threads else None
        if SHAPES[shape].behaviour in ("exit", "fork", "busy"):
            threading.Thread(target=self.obey, daemon=True).start()
        for work in self.works:
            for number in range(work.part.threads):
                threading.Thread(target=self.side, args=(work, number), daemon=True).start()
            if work.part.churn:
                threading.Thread(target=self.other, args=(work,), daemon=True).start()

    def other(self, work: Work) -> None:
        """A thread whose memory comes and goes."""
        try:
            work.churn()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
            os._exit(3)

    def side(self, work: Work, number: int) -> None:
        """A thread with a stream of its own; what fails in it ends the process."""
        assert self.gate is not None
        try:
            check(work.cu.cuCtxSetCurrent(work.context))
            while True:
                self.gate.wait()
                work.stamp(self.epoch, only=number)
                self.gate.wait()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
            os._exit(3)

    def obey(self) -> None:
        """Does what the control page says, whatever the driver is doing with the rest of the process."""
        children: list[int] = []
        while True:
            command = self.page.get(Slot.COMMAND)
            if command and command != self.page.get(Slot.DONE):
                if command == COMMANDS["exit"]:
                    os._exit(0)
                elif command == COMMANDS["fork"]:
                    child = os.fork()
                    if child == 0:
                        signal.pause()
                        os._exit(0)
                    children.append(child)
                elif command in (COMMANDS["spin"], COMMANDS["callback"]):
                    how = "spin" if command == COMMANDS["spin"] else "callback"
                    self.works[0].busy(how, BUSY_SECONDS)
                else:
                    for child in children:
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                    children.clear()
                self.page.set(Slot.DONE, command)
            time.sleep(0.003)

    def run(self) -> None:
        """Computes for ever."""
        while True:
            self.epoch += 1
            for work in self.works:
                work.begin(self.epoch)
            if self.gate is not None:
                self.gate.wait()
                self.gate.wait()
            for work in self.works:
                work.finish()
            self.page.set(Slot.EPOCH, self.epoch)
            request = self.page.get(Slot.REQUEST)
            if request != self.page.get(Slot.ANSWER):
                self.answer(request)
            time.sleep(PAUSE)

    def answer(self, request: int) -> None:
        """Proves the memory."""
        total, crc, floats = 0, 0, 0
        for work in self.works:
            part, data, y = work.prove()
            total, crc, floats = total + part, zlib.crc32(data, crc), zlib.crc32(y, floats)
        for word, value in (
            (Slot.ANSWER_EPOCH, self.epoch),
            (Slot.HASH, total),
            (Slot.BYTES, crc),
            (Slot.FLOATS, floats),
            (Slot.ANSWER, request),
        ):
            self.page.set(word, value)


def main(shape: str, folder: str, ptx: str, first: int) -> None:
    """Runs a victim of that class whose first GPU is ``first``; does not return."""
    place = Path(folder)
    with open(place / "page", "r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    image = Path(ptx).read_bytes() + b"\0"
    known = SHAPES[shape]
    if known.blind:
        os.environ["CUDA_VISIBLE_DEVICES"], first = str(first), 0
    if known.hidden:
        file = sees(place)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(first))
        os.environ["LIMOSA_SEES"], first = str(file), 0
    if known.ranks is not None:
        from campaign import rank

        ends = rank.connections(len(known.processes) - 1)
    slot = 0
    for child in range(1, len(known.processes) + known.idle):
        if os.fork() == 0:
            slot = child
            break
    if slot >= len(known.processes):  # a helper of the job, without CUDA
        page = Page(memory, slot)
        page.set(Slot.PID, os.getpid())
        while True:
            page.set(Slot.EPOCH, page.get(Slot.EPOCH) + 1)
            time.sleep(0.01)
    try:
        if known.ranks is not None:
            rank.main(known, memory, slot, first, ends)
        Process(shape, memory, slot, image, first).run()
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        Page(memory, slot).set(Slot.ERROR, 1)
        os._exit(3)

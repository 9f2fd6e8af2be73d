"""A job and a controller, each a :class:`Remote` with the calls that it makes most."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.remote import LIMIT, Answer, Pending, Remote

PTX = Path(__file__).parents[2] / "src" / "limosa" / "demo" / "kernels.ptx"
KERNELS = ("fill", "stamp", "saxpy", "hash", "spin")
STATES = ("RUNNING", "LOCKED", "CHECKPOINTED", "FAILED")
MIB = 1 << 20
WORDS = 4096
Pairs = Sequence[tuple[str, str]]


class Job(Remote):
    """A process that uses a GPU."""

    functions: dict[str, int]
    context: int = 0
    flags: Sequence[int] = ()  # of its kernels that spin
    memory: int = 0  # WORDS stamped words, of a pooled job

    def init(self) -> Job:
        """``cuInit`` and no more."""
        self.do("cuInit", 0)
        return self

    def start_up(self, device: int = 0) -> Job:
        """``cuInit`` and the primary context of a GPU, current in the main thread."""
        self.init()
        self.context = self.do("cuDevicePrimaryCtxRetain", device)
        self.do("cuCtxSetCurrent", self.context)
        return self

    def enter(self, thread: str) -> str:
        """Make the context current in another thread, too."""
        self.do("cuCtxSetCurrent", self.context, thread=thread)
        return thread

    def load(self) -> Job:
        """Load the kernels into the current context."""
        self.module = self.do("cuModuleLoadData", {"b": PTX.read_bytes().hex() + "00"})
        self.functions = {
            name: self.do("cuModuleGetFunction", self.module, {"b": name.encode().hex()}) for name in KERNELS
        }
        return self

    def launch(self, kernel: str, *args: tuple[int | float, str], stream: int = 0, thread: str = "main") -> str:
        """Start a kernel on a small grid; ``args`` are values with the names of their ctypes."""
        return self.says(*launching(self.functions[kernel], *args, stream=stream), thread=thread)

    def fill(self, device: int, words: int, value: int, stream: int = 0) -> None:
        """Fill device memory with a 64-bit word, by a kernel."""
        assert self.launch("fill", pointer(device), number(words), number(value), stream=stream) == "SUCCESS"

    def pinned(self, size: int = 4096) -> int:
        return int(self.do("cuMemHostAlloc", size, 0))

    def spin(self, stream: int = 0) -> int:
        """Start a kernel that ends when its flag is raised; the flag's address, in pinned memory."""
        flag = self.pinned()
        self.poke(flag, bytes(4))
        self.flags = [*self.flags, flag]
        assert self.launch("spin", pointer(flag), (1, "c_uint32"), stream=stream) == "SUCCESS"
        return flag

    def raise_flag(self, flag: int) -> None:
        """End a kernel that spins."""
        self.poke(flag, struct.pack("<I", 1))

    def end_work(self) -> None:
        """Raise every flag, let every callback go."""
        for flag in self.flags:
            self.raise_flag(flag)
        self.flags = []
        self.run("release_all", thread="memory")

    def uuid(self, device: int = 0) -> str:
        return str(self.do("cuDeviceGetUuid", device))

    def stamped(self, device: int, words: int, epoch: int = 1) -> int:
        """Stamp device memory by a kernel; the address again."""
        assert self.launch("stamp", pointer(device), number(words), number(epoch), number(0)) == "SUCCESS"
        self.do("cuCtxSynchronize")
        return device

    def check_stamps(self, device: int = 0, words: int = WORDS, epoch: int = 1) -> None:
        """Every word of stamped memory is what was written last (of a pooled job: its own memory)."""
        found = self.words(device or self.memory, words)
        assert found == tuple(stamp(epoch, n) for n in range(words))


def stamp(epoch: int, word: int) -> int:
    """What the kernel of that name writes to a word."""
    return (epoch * 0x9E3779B97F4A7C15 + word * 0xD1B54A32D192ED03) % (1 << 64)


def pointer(address: int) -> tuple[int, str]:
    return address, "c_void_p"


def number(value: int) -> tuple[int, str]:
    return value, "c_uint64"


def launching(
    function: int, *args: tuple[int | float, str], stream: int = 0, grid: int = 4, block: int = 64
) -> list[Any]:
    """The arguments of ``cuLaunchKernel``, its name before them."""
    return ["cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, {"k": [list(a) for a in args]}, 0]


def lock_args(timeout_ms: int = 0, raw: str = "") -> dict[str, Any]:
    return {"s": "CUcheckpointLockArgs", "f": {"timeoutMs": timeout_ms}, **({"raw": raw} if raw else {})}


def packed_pairs(pairs: Pairs) -> bytes:
    """``CUcheckpointGpuPair[]`` of pairs of UUIDs in hexadecimal."""
    return b"".join(bytes.fromhex(old) + bytes.fromhex(new) for old, new in pairs)


class Controller(Remote):
    """A process without a context that checkpoints others.

    Each call is made in a thread that is free, so that one that blocks leaves the others possible. Results are names;
    of ``state``, the state's.
    """

    @staticmethod
    def of(job: Job) -> Controller:
        """A job's process seen as a controller."""
        job.__class__ = Controller  # type: ignore[assignment] # both are a Remote with other methods
        return job  # type: ignore[return-value]

    def init(self) -> Controller:
        self.do("cuInit", 0)
        self.uuids = [self.do("cuDeviceGetUuid", n) for n in range(self.do("cuDeviceGetCount"))]
        return self

    def free_thread(self) -> str:
        names = ["main", *(f"t{n}" for n in range(30))]
        return next(n for n in names if all(f.done() for f in self._threads.get(n, [])[-1:]))

    def begin(self, call: str, pid: int, *args: Any) -> Pending:
        """Start ``cuCheckpointProcess<call>``."""
        return self.start(f"cuCheckpointProcess{call}", pid, *args, thread=self.free_thread())

    def asked(self, call: str, pid: int, *args: Any, limit: float = LIMIT) -> Answer:
        return self.begin(call, pid, *args).answer(limit)

    def state(self, pid: int, limit: float = LIMIT) -> str:
        answer = self.asked("GetState", pid, limit=limit)
        return STATES[answer.value] if answer.result == "SUCCESS" else answer.result

    def thread_id(self, pid: int, limit: float = LIMIT) -> Answer:
        return self.asked("GetRestoreThreadId", pid, limit=limit)

    def lock(self, pid: int, timeout_ms: int = 10000, limit: float = LIMIT) -> str:
        return self.asked("Lock", pid, lock_args(timeout_ms), limit=limit).result

    def checkpoint(self, pid: int, limit: float = LIMIT) -> str:
        return self.asked("Checkpoint", pid, None, limit=limit).result

    def restore(self, pid: int, pairs: Pairs | None = None, limit: float = LIMIT) -> str:
        """Restore with a map as the bindings make one (None: no arguments at all)."""
        return self.begin_restore(pid, pairs).result(limit)

    def begin_restore(self, pid: int, pairs: Pairs | None = None) -> Pending:
        if pairs is None:
            return self.begin("Restore", pid, None)
        data = packed_pairs(pairs)
        address = self.run("memory", max(len(data), 1), thread="memory")
        self.poke(address, data)
        return self.begin("Restore", pid, restore_args(address, len(pairs)))

    def unlock(self, pid: int, limit: float = LIMIT) -> str:
        return self.asked("Unlock", pid, None, limit=limit).result

    # --- several at once; each must succeed ---

    def suspend(self, pid: int) -> None:
        assert self.lock(pid) == "SUCCESS"
        assert self.checkpoint(pid) == "SUCCESS"

    def resume(self, pid: int, pairs: Pairs | None = None) -> None:
        assert self.restore(pid, pairs) == "SUCCESS"
        assert self.unlock(pid) == "SUCCESS"

    def cycle(self, pid: int, pairs: Pairs | None = None) -> None:
        self.suspend(pid)
        self.resume(pid, pairs)

    @property
    def identity(self) -> list[tuple[str, str]]:
        return [(uuid, uuid) for uuid in self.uuids]

    @property
    def swap(self) -> list[tuple[str, str]]:
        first, second, *others = self.uuids
        return [(first, second), (second, first), *((uuid, uuid) for uuid in others)]

    # --- what NVML says ---

    def inventory(self) -> list[dict[str, Any]]:
        """UUID (hexadecimal), minor number and index of each GPU, in the order of ``uuids``."""
        found = []
        for index in range(self.told("nvmlDeviceGetCount")):
            gpu = {"gpu": index}
            uuid = self.told("nvmlDeviceGetUUID", gpu).removeprefix("GPU-").replace("-", "")
            found.append({"uuid": uuid, "minor": self.told("nvmlDeviceGetMinorNumber", gpu), "index": index})
        return sorted(found, key=lambda gpu: self.uuids.index(gpu["uuid"]))

    def told(self, name: str, *args: Any) -> Any:
        """The value of a call of NVML that must succeed."""
        answer = self.nvml(name, *args)
        assert answer.result == "SUCCESS", f"{name}{args}: {answer}"
        return answer.value

    def bytes_of(self, pid: int) -> dict[int, int | None]:
        """What a process holds, by GPU (in the driver's order)."""
        held = {}
        for place, gpu in enumerate(self.inventory()):
            for process in self.told("nvmlDeviceGetComputeRunningProcesses", {"gpu": gpu["index"]}):
                if process["pid"] == pid:
                    held[place] = process["usedGpuMemory"]
        return held

    def gpus_of(self, pid: int) -> set[int]:
        """The GPUs that a process is on."""
        return set(self.bytes_of(pid))

    def used(self, place: int) -> int:
        """Bytes in use on a GPU, by all."""
        index = self.inventory()[place]["index"]
        return int(self.told("nvmlDeviceGetMemoryInfo", {"gpu": index})["used"])

    def wait_state(self, pid: int, wanted: str, limit: float = LIMIT) -> str:
        """Ask until a state is as wanted; the last answer."""
        end = time.monotonic() + limit
        while (state := self.state(pid, limit)) != wanted and time.monotonic() < end:
            time.sleep(0.02)
        return state


def restore_args(address: int | None, count: int, reserved: bytes = b"") -> dict[str, Any]:
    """``CUcheckpointRestoreArgs`` as its bytes lie in memory."""
    raw = struct.pack("<QI", address or 0, count) + reserved
    return {"s": "CUcheckpointRestoreArgs", "raw": raw.hex()}


def prop(device: int = 0, exportable: bool = False, **fields: Any) -> dict[str, Any]:
    """``CUmemAllocationProp`` of pinned memory on a GPU."""
    return {
        "s": "CUmemAllocationProp",
        "f": {
            "type": {"e": "CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED"},
            "location.type": {"e": "CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE"},
            "location.id": device,
            **({"requestedHandleTypes": POSIX} if exportable else {}),
            **fields,
        },
    }


def enum(name: str) -> dict[str, str]:
    """An enumerator of the bindings: ``enum("CUlimit.CU_LIMIT_STACK_SIZE")``."""
    return {"e": name}


def text(value: str) -> dict[str, str]:
    """A ``const char *``."""
    return {"b": value.encode().hex()}


def plain(value: str) -> str:
    """Text that a call has written to a buffer, here in hexadecimal, or that came as text."""
    try:
        value = bytes.fromhex(value).decode()
    except ValueError:
        pass
    return value.rstrip("\0 ")


POSIX = enum("CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")


def access(device: int = 0, write: bool = True) -> list[dict[str, Any]]:
    """``CUmemAccessDesc[1]``: one GPU may read, or read and write."""
    flags = "READWRITE" if write else "READ"
    return [
        {
            "s": "CUmemAccessDesc",
            "f": {
                "location.type": {"e": "CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE"},
                "location.id": device,
                "flags": {"e": f"CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_{flags}"},
            },
        }
    ]

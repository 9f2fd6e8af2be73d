"""A driver in a few lines of Python, for the step engine's own tests only: real processes, made-up device memory.

It keeps the rules that the engine relies on (the state machine, the full permutation, a restore without room poisons)
and can be told to fail. What the real driver does is tested on GPUs, in ``tests/gpu``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from limosa.errors import DriverError, IllegalState, LimosaError, NoCudaState
from limosa.gpu import Gpu, GpuProcess, Inventory, LockResult, State

GB = 1 << 30
PROGRAM = """
import mmap, sys, time, pathlib
folder = pathlib.Path(sys.argv[1])
library = folder / "libcuda.so.1"
library.write_bytes(bytes(4096))
with open(library, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
print("READY", flush=True)
while True:
    time.sleep(0.01)
    print("tick", 0, time.monotonic(), flush=True)
"""
"""What a process runs that looks as if it held CUDA state."""


class _States(dict[int, str]):
    """What each process is in; called as ``Driver.states`` is, it says so of several."""

    def __init__(self, double: DriverDouble):
        super().__init__()
        self._double = double

    def __call__(self, pids: Iterable[int], timeout: float | None = 5.0) -> dict[int, State | LimosaError]:
        found: dict[int, State | LimosaError] = {}
        for pid in pids:
            try:
                found[pid] = self._double.state(pid)
            except LimosaError as error:
                found[pid] = error
        return found


class DriverDouble:
    """Stands where ``limosa.gpu.Driver`` stands; one for the whole test, whoever asks for one."""

    def __init__(self, gpus: int = 2, memory: int = 10 * GB, names: tuple[str, ...] = ()):
        self.uuids = [f"GPU-{i}0000000-0000-0000-0000-000000000000" for i in range(gpus)]
        self.names = names or ("Test GPU",) * gpus
        self.memory = memory
        self.states = _States(self)
        self.held: dict[int, dict[str, int]] = {}
        self.others: dict[str, int] = {}  # memory of processes that are not ours
        self.calls: list[tuple[str, int]] = []
        self.faults: dict[tuple[str, int], BaseException] = {}  # (call, how many such calls before) → error
        self.hanging: dict[int, str] = {}  # process → the call that has not come back
        self.after_checkpoint = lambda: None
        self.will: list[str] | None = None
        self._mutex = threading.Lock()

    def adopt(self, pid: int, gpu: int = 0, size: int = GB) -> None:
        """This process holds that much on that GPU now."""
        self.states[pid] = "running"
        self.held[pid] = {self.uuids[gpu]: size}

    def where(self, pid: int) -> list[int]:
        """The GPUs on which a process's memory is (or will be when it is restored)."""
        return [self.uuids.index(u) for u in self.held[pid]]

    # -- limosa.gpu.Driver -------------------------------------------------------------------------------------

    def available(self, limit: float | None = None) -> None:
        pass

    def state(self, pid: int, timeout: float | None = 5.0) -> State:
        if pid not in self.states:
            raise NoCudaState(call="cuCheckpointProcessGetState", pid=pid, result="X", code=3, meaning="none")
        return State(self.states[pid])

    def lock(self, pid: int, timeout_ms: int = 0, limit: float | None = None) -> LockResult:
        self._call("lock", pid, "running", "locked")
        return LockResult.LOCKED

    def checkpoint(self, pid: int, limit: float | None = None) -> None:
        self._call("checkpoint", pid, "locked", "checkpointed")
        self.after_checkpoint()

    def restore(self, pid: int, mapping: Mapping[str, str] | None = None, limit: float | None = None) -> None:
        if mapping is None:  # where it was
            mapping = {u: u for u in self.uuids}
        with self._mutex:
            assert sorted(mapping) == sorted(self.uuids) == sorted(mapping.values())
        self._call("restore", pid, "checkpointed", "locked")
        with self._mutex:
            self.held[pid] = {mapping[u]: size for u, size in self.held[pid].items()}
            for uuid in self.uuids:
                assert self._used(uuid) <= self.memory, "a restore without room poisons the job"

    def unlock(self, pid: int, limit: float | None = None) -> None:
        self._call("unlock", pid, "locked", "running")

    def wait_under_way(self, pid: int, timeout: float | None = None) -> bool:
        return self.under_way(pid) is None

    def under_way(self, pid: int) -> str | None:
        return self.hanging.get(pid)

    def set_will(
        self,
        argv: list[str] | None,
        limit: float | None = None,
        *,
        wait: bool = True,
        name: str = "",
        holds: int = -1,
    ) -> None:
        self.will = argv

    def start(self) -> None:
        pass

    def close(self, wait: float = 5.0) -> None:
        pass

    def __enter__(self) -> DriverDouble:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, pid: int, need: str, then: str) -> None:
        with self._mutex:
            count = sum(1 for n, _ in self.calls if n == name)
            self.calls.append((name, pid))
            error = self.faults.get((name, count))
            if error is not None:
                raise error
            if self.states.get(pid) != need:
                raise IllegalState(call=name, pid=pid, result="CUDA_ERROR_ILLEGAL_STATE", code=401, meaning="no")
            self.states[pid] = then

    def _used(self, uuid: str) -> int:
        held = sum(h.get(uuid, 0) for pid, h in self.held.items() if self.states[pid] != "checkpointed")
        return held + self.others.get(uuid, 0)

    # -- limosa.gpu.inventory, openable ------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        return Inventory(
            driver_version="580.1",
            cuda_version="13.0",
            gpus=[
                Gpu(
                    index=i,
                    uuid=uuid,
                    name=self.names[i],
                    memory_total=self.memory,
                    memory_used=self._used(uuid),
                    memory_free=self.memory - self._used(uuid),
                    minor=i,
                    pci_bus_id=f"0000:0{i}:00.0",
                    processes=[
                        GpuProcess(pid=pid, memory_used=h[uuid])
                        for pid, h in self.held.items()
                        if uuid in h and self.states[pid] != "checkpointed"
                    ],
                )
                for i, uuid in enumerate(self.uuids)
            ],
        )

    def openable(self, inventory: Inventory, pid: int) -> list[Gpu]:
        return list(inventory.gpus)


def failure(call: str, pid: int = 0) -> DriverError:
    """What a failed driver call raises."""
    return DriverError(call=call, pid=pid, result="CUDA_ERROR_UNKNOWN", code=999, meaning="made to fail")

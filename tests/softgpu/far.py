"""A process in a node that runs Python for a test: a job, or a controller. As a program: the far end.

    job = Far(node); job("start()"); job("plain(4, seed=1)")     # in its main thread
    pending = job.send("ok(cu.cuCtxSynchronize())")              # in a thread of its own; pending.value(limit)

The far end has ``cu`` (cuda.bindings.driver) and what this module defines under "the far end".
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

LIMIT = 90.0
MIB = 1 << 20
PTX = Path(__file__).parents[2] / "src" / "limosa" / "demo" / "kernels.ptx"


class FarError(Exception):
    """What the far end raised."""


class Died(Exception):
    """The far end ended instead of answering; the argument is its exit code."""


class Pending:
    """A request that may not have been answered yet."""

    def __init__(self, future: Future[Any]):
        self.future = future

    def value(self, limit: float = LIMIT) -> Any:
        return self.future.result(limit)

    @property
    def done(self) -> bool:
        return self.future.done()


class Far:
    """The near end; the process ends with the node.

    Args:
        node: a soft_node.Node.
        prefix: put before the program (setpriv, unshare …).
        env: variables for it.
    """

    def __init__(self, node: Any, *prefix: str, env: dict[str, str] | None = None):
        if prefix or any(name.startswith("LD_") for name in env or {}):
            self.process: Any = node.popen(
                [*prefix, sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=env,
            )
        else:
            self.process = _forked(node, env)
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        self.pid: int = self("os.getpid()")

    def _read(self) -> None:
        for line in self.process.stdout:
            answer = json.loads(line)
            future = self._waiting.pop(answer["id"])
            if "error" in answer:
                future.set_exception(FarError(answer["error"]))
            else:
                future.set_result(answer["value"])
        code = self.process.wait()
        with self._lock:
            for future in self._waiting.values():
                future.set_exception(Died(code))
            self._waiting.clear()

    def send(self, code: str, *, main: bool = False) -> Pending:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
        try:
            self.process.stdin.write(json.dumps({"id": number, "code": code, "main": main}) + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            with self._lock, contextlib.suppress(Exception):
                self._waiting.pop(number, future).set_exception(Died(self.process.wait(60)))
        return Pending(future)

    def __call__(self, code: str, limit: float = LIMIT) -> Any:
        return self.send(code, main=True).value(limit)

    def died(self, limit: float = LIMIT) -> int:
        """Wait for its end; its exit code."""
        return int(self.process.wait(limit))

    # --- as a controller -------------------------------------------------------------------------------------------

    def state(self, pid: int) -> Any:
        """ "running", … or a number that is none of ours; an error's name."""
        return self(f"state({pid})")

    def lock(self, pid: int, timeout_ms: int = 0) -> str:
        return str(self(f"lock({pid}, {timeout_ms})"))

    def checkpoint(self, pid: int) -> str:
        return str(self(f"checkpoint({pid})"))

    def restore(self, pid: int, pairs: list[tuple[str, str]] | None = None) -> str:
        return str(self(f"restore({pid}, {pairs!r})"))

    def unlock(self, pid: int) -> str:
        return str(self(f"unlock({pid})"))

    def suspend(self, pid: int) -> None:
        assert [self.lock(pid, 5000), self.checkpoint(pid)] == ["SUCCESS", "SUCCESS"]

    def resume(self, pid: int, pairs: list[tuple[str, str]] | None = None) -> None:
        assert [self.restore(pid, pairs), self.unlock(pid)] == ["SUCCESS", "SUCCESS"]


def _forked(node: Any, env: dict[str, str] | None) -> Any:
    """A far end that is forked: the driver's bindings take as long to load as most tests here."""
    from warm import Forked, Warm

    (stdin, ours), (theirs, stdout) = os.pipe(), os.pipe()
    told = node.environment(env)
    pid, ended = Warm.of(told, __file__).start(
        [], env=told, cwd=os.getcwd(), node=node.pid, stdout=stdin, stderr=stdout
    )
    os.close(stdin)
    os.close(stdout)
    process: Any = Forked(["far.py"], pid, ended, os.fdopen(theirs))
    process.stdin = os.fdopen(ours, "w")
    node.add(process)
    return process


def until(true: Callable[[], Any], limit: float = 60) -> None:
    """Wait for what has to come true; for both ends."""
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


def quick_enough(measure: Callable[[], float], least: float, most: float) -> None:
    """What takes so long takes no longer: the quickest of some times, as whoever is held up only takes longer."""
    for _ in range(8):
        took = measure()
        assert took >= least
        if took < most:
            return
    raise AssertionError(f"it always takes longer than {most} s, {took:.2f} s at last")


# --- the far end ------------------------------------------------------------------------------------------------------

blocks: list[tuple[int, bytes]] = []
ticks = 0
_keep: list[Any] = []


def word(code: Any) -> str:
    """ "ILLEGAL_STATE" of CUDA_ERROR_ILLEGAL_STATE."""
    return str(getattr(code, "name", code)).removeprefix("CUDA_").removeprefix("ERROR_")


def ok(answer: tuple[Any, ...]) -> Any:
    """The value of a call that must succeed."""
    if int(answer[0]) != 0:
        raise RuntimeError(word(answer[0]))
    return answer[1] if len(answer) == 2 else answer[1:] if len(answer) > 2 else None


def said(answer: tuple[Any, ...]) -> str:
    """The result of a call."""
    return word(answer[0])


def says(name: str, *arguments: Any) -> str:
    """The result of the function of that name."""
    return said(getattr(cu, name)(*arguments))


def free() -> int:
    """Free bytes of the current context's GPU."""
    return int(ok(cu.cuMemGetInfo())[0])


def room(size: int = 65536) -> int:
    """Plain device memory, all zeroes."""
    address = int(ok(cu.cuMemAlloc(size)))
    ok(cu.cuMemsetD8(address, 0, size))
    ok(cu.cuCtxSynchronize())  # a memset does not wait, and not every stream waits for it
    return address


def filled(data: bytes, size: int = 65536) -> int:
    """Plain device memory that begins with these bytes."""
    address = room(size)
    put(address, data)
    return address


def put(address: int, data: bytes) -> None:
    ok(cu.cuMemcpyHtoD(address, data, len(data)))


def get(address: int, size: int) -> str:
    """What is there, in hexadecimal."""
    back = bytearray(size)
    ok(cu.cuMemcpyDtoH(back, address, size))
    return back.hex()


def start(device: int = 0) -> None:
    """``cuInit`` and a current primary context."""
    ok(cu.cuInit(0))
    context(device)


def context(device: int = 0) -> None:
    """The primary context of a device, current in this thread."""
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(device))))


def pattern(size: int, seed: int) -> bytes:
    """Bytes that no other seed has."""
    import random

    return random.Random(seed).randbytes(size)


def plain(mib: int, seed: int) -> int:
    """Plain device memory with a pattern in it."""
    address = int(ok(cu.cuMemAlloc(mib * MIB)))
    return written(address, mib, seed)


def vmm(mib: int, seed: int, device: int = 0, *, exported: bool = False) -> int:
    """Memory of a handle, mapped, with a pattern in it; a descriptor of it stays open where ``exported``."""
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    if exported:
        prop.requestedHandleTypes = kind
    handle = ok(cu.cuMemCreate(mib * MIB, prop, 0))
    if exported:
        _keep.append(ok(cu.cuMemExportToShareableHandle(handle, kind, 0)))
    address = int(ok(cu.cuMemAddressReserve(mib * MIB, 0, 0, 0)))
    ok(cu.cuMemMap(address, mib * MIB, 0, handle, 0))
    access = cu.CUmemAccessDesc()
    access.location = prop.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cu.cuMemSetAccess(address, mib * MIB, [access], 1))
    return written(address, mib, seed)


def written(address: int, mib: int, seed: int) -> int:
    """Write a pattern and remember it."""
    data = pattern(mib * MIB, seed)
    ok(cu.cuMemcpyHtoD(address, data, len(data)))
    blocks.append((address, data))
    return address


def intact() -> bool:
    """Whether every block holds what was written."""
    for address, data in blocks:
        back = bytearray(len(data))
        ok(cu.cuMemcpyDtoH(back, address, len(data)))
        if bytes(back) != data:
            return False
    return True


def ticking(device: int = 0) -> None:
    """Start a thread that calls the driver all the time and counts in ``ticks``."""

    def go() -> None:
        global ticks
        context(device)
        address = ok(cu.cuMemAlloc(4096))
        while True:
            ok(cu.cuMemsetD8(address, ticks % 256, 4096))
            ticks += 1
            time.sleep(0.001)

    threading.Thread(target=go, daemon=True).start()


def spin() -> None:
    """Start a kernel that ends when ``release()`` is called."""
    module = ok(cu.cuModuleLoadData(PTX.read_bytes() + b"\0"))
    kernel = ok(cu.cuModuleGetFunction(module, b"spin"))
    flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
    ctypes.memset(flag, 0, 4096)
    _keep.append(flag)
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((flag, 1), (ctypes.c_uint64, ctypes.c_uint32)), 0))


def release() -> None:
    """Let the spinning kernel end."""
    ctypes.c_uint32.from_address(_keep[0]).value = 1


def state(pid: int) -> Any:
    try:
        code, value = cu.cuCheckpointProcessGetState(pid)
    except ValueError:
        number = ctypes.c_int(-1)
        ctypes.CDLL("libcuda.so.1").cuCheckpointProcessGetState(pid, ctypes.byref(number))
        return number.value
    return word(value).removeprefix("CU_PROCESS_STATE_").lower() if int(code) == 0 else word(code)


def lock(pid: int, timeout_ms: int = 0) -> str:
    args = cu.CUcheckpointLockArgs()
    args.timeoutMs = timeout_ms
    return word(cu.cuCheckpointProcessLock(pid, args)[0])


def checkpoint(pid: int) -> str:
    return word(cu.cuCheckpointProcessCheckpoint(pid, None)[0])


def restore(pid: int, pairs: list[tuple[str, str]] | None = None) -> str:
    args = None
    keep = []
    if pairs is not None:
        made = []
        for old, new in pairs:
            pair = cu.CUcheckpointGpuPair()
            for side, text in (("oldUuid", old), ("newUuid", new)):
                buffer = ctypes.create_string_buffer(bytes.fromhex(text), 16)
                keep.append(buffer)
                setattr(pair, side, cu.CUuuid(ctypes.addressof(buffer)))
            made.append(pair)
        args = cu.CUcheckpointRestoreArgs()
        args.gpuPairs = made
        args.gpuPairsCount = len(made)
        keep.append(made)
    result = word(cu.cuCheckpointProcessRestore(pid, args)[0])
    del keep
    return result


def unlock(pid: int) -> str:
    return word(cu.cuCheckpointProcessUnlock(pid, None)[0])


def thread_id(pid: int) -> Any:
    code, value = cu.cuCheckpointProcessGetRestoreThreadId(pid)
    return int(value) if int(code) == 0 else word(code)


def _main() -> None:
    out = threading.Lock()

    def run(request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            try:
                compiled = compile(request["code"], "<far>", "eval")
            except SyntaxError:
                exec(request["code"], globals())
                answer["value"] = None
            else:
                answer["value"] = eval(compiled, globals())
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        with out:
            print(json.dumps(answer, default=repr), flush=True)

    requests: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if request["main"]:
                requests.put(request)
            else:
                threading.Thread(target=run, args=(request,), daemon=True).start()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    while True:
        run(requests.get())


def _become(order: dict[str, Any], stdin: int, stdout: int) -> None:
    from limosa_softgpu.node import join

    try:
        os.environ.clear()
        os.environ.update(order["env"])
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(3, 64)
        os.chdir(order["cwd"])
        join(order["node"])
        _main()
    finally:
        os._exit(1)


if __name__ == "__main__":
    from cuda.bindings import driver as cu

    if len(sys.argv) == 1:
        _main()
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from warm import serve

        serve(socket.socket(fileno=int(sys.argv[1])), _become)

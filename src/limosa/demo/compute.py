"""The demo's job where there is no PyTorch for the GPU, and on software GPUs: a program of its own.

    python compute.py FOLDER --steps N --pace SECONDS

It imports nothing of Limosa and asks for nothing but NVIDIA's cuda.bindings. A table of 64 MiB lies on the device; each
step hashes the slice that was written longest ago, writes it anew, and adds a multiple of one vector to another. The
hash is a sum that goes on from the first step to the last, on the device: what a disturbance loses, repeats or bends
shows in every step that follows. Each is appended to FOLDER/losses as ``step hash time``, time by CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuda.bindings import driver

SLICES, SLICE = 64, 1 << 20  # bytes
FLOATS = 1 << 18
PTX = Path(__file__).with_name("kernels.ptx")
_PAGE = 4096


def main() -> None:
    """Compute until the last step, writing each hash."""
    parser = argparse.ArgumentParser(description="the demo's program on device memory")
    parser.add_argument("folder")
    parser.add_argument("--framework", choices=("cuda",), default="cuda")
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pace", type=float, default=0.02)
    options = parser.parse_args()
    hashes = device_hashes()
    out = os.open(os.path.join(options.folder, "losses"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for step, found in zip(range(options.steps), hashes, strict=False):
        os.write(out, f"{step} {found:#018x} {time.monotonic():.6f}\n".encode())
        print(f"step {step} hash {found:#018x}", flush=True)
        time.sleep(options.pace)
    print("done", flush=True)


class Device:
    """A GPU with a context that is current, a stream, and the demo's kernels."""

    def __init__(self, ordinal: int):
        _do(driver.cuInit(0))
        _do(driver.cuCtxSetCurrent(_do(driver.cuDevicePrimaryCtxRetain(_do(driver.cuDeviceGet(ordinal))))))
        self._module = _do(driver.cuModuleLoadData(PTX.read_bytes() + b"\0"))
        self.stream = _do(driver.cuStreamCreate(0))

    def memory(self, size: int) -> int:
        """The address of so many bytes."""
        return int(_do(driver.cuMemAlloc(size)))

    def number(self) -> int:
        """The address of a number of 64 bits, which is 0."""
        address = self.memory(8)
        _do(driver.cuMemsetD8(address, 0, 8))
        return address

    def fill(self, address: int, floats: int, draws: random.Random) -> None:
        """Writes so many floats between -1 and 1."""
        drawn = struct.pack(f"{floats}f", *(draws.uniform(-1, 1) for _ in range(floats)))
        _do(driver.cuMemcpyHtoD(address, drawn, len(drawn)))

    def run(self, name: str, *arguments: tuple[Any, Any]) -> None:
        """Launches a kernel, with each argument and its type."""
        function = _do(driver.cuModuleGetFunction(self._module, name.encode()))
        values, kinds = zip(*arguments, strict=True)
        _do(driver.cuLaunchKernel(function, 64, 1, 1, 256, 1, 1, 0, self.stream, (values, kinds), 0))

    def read(self, address: int) -> int:
        """The number there, once the stream has come to it."""
        answer = bytearray(8)
        _do(driver.cuMemcpyDtoHAsync(answer, address, 8, self.stream))
        _do(driver.cuStreamSynchronize(self.stream))
        return int.from_bytes(answer, "little")


def device_hashes() -> Iterator[int]:
    """The running hash after each step, without end."""
    device = Device(0)
    table, x, y = (device.memory(n) for n in (SLICES * SLICE, 4 * FLOATS, 4 * FLOATS))
    total = device.number()
    u64, pointer = ctypes.c_uint64, ctypes.c_void_p
    draws = random.Random(7)
    for vector in (x, y):
        device.fill(vector, FLOATS, draws)
    device.run("stamp", (table, pointer), (SLICES * SLICE // 8, u64), (0, u64), (0, u64))
    epoch = 0
    while True:
        place = epoch % SLICES
        epoch += 1
        start = table + place * SLICE
        device.run("hash", (start, pointer), (SLICE // 8, u64), (total, pointer))
        device.run("stamp", (start, pointer), (SLICE // 8, u64), (epoch, u64), (place * SLICE // _PAGE, u64))
        device.run("saxpy", (y, pointer), (x, pointer), (draws.uniform(-0.01, 0.01), ctypes.c_float), (FLOATS, u64))
        device.run("hash", (y, pointer), (FLOATS // 2, u64), (total, pointer))
        yield device.read(total)


def _do(answer: Any) -> Any:
    """The value of a driver call; the end where it fails."""
    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"the driver says {result.name}")
    return values[0] if values else None


if __name__ == "__main__":
    main()

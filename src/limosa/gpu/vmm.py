"""Device memory that can be handed to another process: ``cuMemCreate`` and what belongs to it, over ``cuda.bindings``.

Everything here is in the calling process and needs a current context on the GPU that is to use the memory. Sizes and
addresses are bytes; sizes are multiples of 2 MiB (``cuMemGetAllocationGranularity``). CUDA driver API, "Virtual Memory
Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

from limosa.errors import DriverError
from limosa.gpu.binding import find, words
from limosa.gpu.meanings import SUCCESS, driver_error
from limosa.gpu.names import uuid_of_bytes

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> Any:
    """Call a function of the driver.

    Returns:
        What it gives besides its result: nothing, one value or a tuple.

    Raises:
        DriverError: its result is not SUCCESS.
    """
    binding = find()
    result, *values = getattr(binding, name)(*args)
    if int(result) != SUCCESS:
        raise driver_error(
            name, os.getpid(), int(result), name=getattr(result, "name", ""), words=words(binding, result)
        )
    return values[0] if len(values) == 1 else tuple(values)


class Piece:
    """One piece of physical device memory, mapped in this process.

    Attributes:
        bytes: its size.
        at: where it is mapped.
        gpu: ordinal of the GPU that it is on; -1 where it was imported and nobody said.
    """

    def __init__(self, handle: Any, bytes_: int, gpu: int, users: Sequence[int]):
        self.bytes, self.gpu, self._handle, self.at, self._mapped = bytes_, gpu, handle, 0, False
        try:
            self.at = int(call("cuMemAddressReserve", bytes_, 0, 0, 0))
            self._mapped = True  # also where it is done, and the driver says that it is not
            call("cuMemMap", self.at, bytes_, 0, handle, 0)
            call("cuMemSetAccess", self.at, bytes_, [_access(user) for user in users], len(users))
        except BaseException:
            self.close()
            raise

    @classmethod
    def make(cls, bytes_: int, gpu: int, users: Sequence[int]) -> Piece:
        """Make new memory on a GPU.

        Raises:
            DriverError: CUDA_ERROR_OUT_OF_MEMORY above all.
        """
        binding = find()
        prop = binding.CUmemAllocationProp()
        prop.type = binding.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = binding.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = gpu
        prop.requestedHandleTypes = _posix()
        return cls(call("cuMemCreate", bytes_, prop, 0), bytes_, gpu, users)

    @classmethod
    def take(cls, fd: int, bytes_: int, users: Sequence[int]) -> Piece:
        """Map memory that a descriptor leads to; the descriptor stays the caller's."""
        return cls(call("cuMemImportFromShareableHandle", fd, _posix()), bytes_, -1, users)

    def export(self) -> int:
        """Return a descriptor of it, the caller's to close; not of what was imported (INVALID_VALUE)."""
        fd = int(call("cuMemExportToShareableHandle", self._handle, _posix(), 0))
        os.set_inheritable(fd, False)
        return fd

    def close(self) -> bool:
        """Unmap it and release it; the memory lives as long as somebody else holds it.

        Returns:
            Whether the driver did so. If not, the memory stays until this process ends.
        """
        binding = find()
        results = []
        if self._mapped:
            results.append(binding.cuMemUnmap(self.at, self.bytes)[0])
            self._mapped = False
        if self._handle is not None:
            results.append(binding.cuMemRelease(self._handle)[0])
            self._handle = None
        if self.at:
            results.append(binding.cuMemAddressFree(self.at, self.bytes)[0])
            self.at = 0
        return all(int(result) == SUCCESS for result in results)


class HostPiece:
    """Host memory behind a descriptor (a memfd), mapped in this process, and pinned where it is asked for.

    Attributes:
        bytes: its size.
        at: where it is mapped.
        pinned: whether the driver copies it at the speed of the bus.
    """

    def __init__(self, fd: int, bytes_: int):
        self.bytes, self.pinned = bytes_, False
        self._memory = mmap.mmap(fd, bytes_)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        with contextlib.suppress(OSError):  # a kernel that has none for memory files
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def touch(self, start: int, size: int) -> None:
        """Have the kernel back a part of it; several threads may, for several parts.

        Raises:
            OSError: there is no memory (ENOMEM), or the kernel cannot (EINVAL; then it is done when it is pinned).
        """
        if _libc.madvise(ctypes.c_void_p(self.at + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def pin(self) -> None:
        """Pin it; a context must be the thread's.

        Raises:
            DriverError: the driver cannot.
        """
        if not self.pinned:
            call("cuMemHostRegister", self.at, self.bytes, 1)  # CU_MEMHOSTREGISTER_PORTABLE
            self.pinned = True

    def clear(self, start: int, end: int) -> None:
        """Make these bytes zero."""
        ctypes.memset(self.at + start, 0, end - start)

    def close(self) -> None:
        """Let it go; the contents live as long as somebody has the descriptor. A context must be the thread's."""
        if self.pinned:
            find().cuMemHostUnregister(self.at)
            self.pinned = False
        if self.at:
            self._memory.close()
            self.at = 0


def _posix() -> Any:
    return find().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _access(gpu: int) -> Any:
    binding = find()
    access = binding.CUmemAccessDesc()
    access.location.type = binding.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = gpu
    access.flags = binding.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


class Contexts:
    """Primary contexts of this process, by the UUID of their GPU; made when first asked for, by any thread."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def gpus(self) -> list[str]:
        """Return the GPUs that there is a context on."""
        return sorted(self._made)

    def ordinal(self, uuid: str) -> int:
        """Return this process's number of a GPU, with a context on it.

        Raises:
            DriverError: this process does not see that GPU.
        """
        with self._lock:
            if uuid not in self._made:
                for ordinal in range(int(call("cuDeviceGetCount"))):
                    if uuid_of_bytes(bytes(call("cuDeviceGetUuid", ordinal).bytes)) == uuid:
                        self._made[uuid] = (ordinal, call("cuDevicePrimaryCtxRetain", ordinal))
                        break
                else:
                    raise DriverError(
                        call="cuDeviceGetUuid", pid=0, result="not there", code=101, meaning=f"no GPU {uuid}"
                    )
        return self._made[uuid][0]

    def use(self, uuid: str) -> None:
        """Make the context on that GPU the calling thread's."""
        self.ordinal(uuid)
        call("cuCtxSetCurrent", self._made[uuid][1])

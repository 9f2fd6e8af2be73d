"""libnccl.so.2 and libcuda.so.1 by ctypes: device memory, streams, communicators, for programs without PyTorch."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = range(8)
TYPES = {"i1": 0, "u1": 1, "i4": 2, "u4": 3, "i8": 4, "u8": 5, "f2": 6, "f4": 7, "f8": 8, "bf": 9}
SIZES = {"i1": 1, "u1": 1, "i4": 4, "u4": 4, "i8": 8, "u8": 8, "f2": 2, "f4": 4, "f8": 8, "bf": 2}
SUM, PROD, MAX, MIN, AVG = range(5)
UNDEFINED = -(1 << 31)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]

    @classmethod
    def of(cls, data: bytes) -> UniqueId:
        return cls.from_buffer_copy(data)


class Config(ctypes.Structure):
    """As NCCL_CONFIG_INITIALIZER leaves it, but for ``blocking``."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        *[(name, c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")],
        ("netName", c_char_p),
        *[(name, c_int) for name in ("splitShare", "trafficClass")],
        ("commName", c_char_p),
        *[(name, c_int) for name in ("collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs")],
        *[(name, c_int) for name in ("nChannelsPerNetPeer", "nvlinkCentricSched")],
    ]

    def __init__(self, blocking: int = UNDEFINED):
        undefined = {name: UNDEFINED for name, kind in self._fields_ if kind is c_int}
        super().__init__(
            ctypes.sizeof(Config), 0xCAFEBEEF, 22809, **{**undefined, "blocking": blocking, "netName": None}
        )


class Team(ctypes.Structure):
    """Ranks that are so many apart."""

    _fields_ = [("n", c_int), ("rank", c_int), ("stride", c_int)]


class NcclError(Exception):
    """A call that failed; ``code`` says how."""

    def __init__(self, name: str, code: int, words: str):
        super().__init__(f"{name}: {code} ({words})")
        self.code = code


class CudaError(Exception):
    """As NcclError."""

    def __init__(self, name: str, code: int):
        super().__init__(f"{name}: {code}")
        self.code = code


_BUFFER, _HANDLE = c_void_p, c_void_p
_END = [c_void_p, c_void_p]  # communicator and stream
_ARGUMENTS: dict[str, list[Any]] = {
    "ncclCommInitRank": [c_void_p, c_int, UniqueId, c_int],
    "ncclCommInitRankConfig": [c_void_p, c_int, UniqueId, c_int, c_void_p],
    "ncclCommInitRankScalable": [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p],
    "ncclCommInitAll": [c_void_p, c_int, c_void_p],
    "ncclCommSplit": [_HANDLE, c_int, c_int, c_void_p, c_void_p],
    "ncclCommShrink": [_HANDLE, c_void_p, c_int, c_void_p, c_void_p, c_int],
    "ncclCommFinalize": [_HANDLE],
    "ncclCommDestroy": [_HANDLE],
    "ncclCommAbort": [_HANDLE],
    "ncclCommRevoke": [_HANDLE, c_int],
    "ncclCommGetAsyncError": [_HANDLE, c_void_p],
    "ncclCommCount": [_HANDLE, c_void_p],
    "ncclCommCuDevice": [_HANDLE, c_void_p],
    "ncclCommUserRank": [_HANDLE, c_void_p],
    "ncclAllReduce": [_BUFFER, _BUFFER, c_size_t, c_int, c_int, *_END],
    "ncclBroadcast": [_BUFFER, _BUFFER, c_size_t, c_int, c_int, *_END],
    "ncclBcast": [_BUFFER, c_size_t, c_int, c_int, *_END],
    "ncclReduce": [_BUFFER, _BUFFER, c_size_t, c_int, c_int, c_int, *_END],
    "ncclReduceScatter": [_BUFFER, _BUFFER, c_size_t, c_int, c_int, *_END],
    "ncclAllGather": [_BUFFER, _BUFFER, c_size_t, c_int, *_END],
    "ncclAlltoAll": [_BUFFER, _BUFFER, c_size_t, c_int, *_END],
    "ncclGather": [_BUFFER, _BUFFER, c_size_t, c_int, c_int, *_END],
    "ncclScatter": [_BUFFER, _BUFFER, c_size_t, c_int, c_int, *_END],
    "ncclSend": [_BUFFER, c_size_t, c_int, c_int, *_END],
    "ncclRecv": [_BUFFER, c_size_t, c_int, c_int, *_END],
    "ncclRedOpCreatePreMulSum": [c_void_p, c_void_p, c_int, c_int, _HANDLE],
    "ncclRedOpDestroy": [c_int, _HANDLE],
    "ncclCommRegister": [_HANDLE, _BUFFER, c_size_t, c_void_p],
    "ncclCommDeregister": [_HANDLE, c_void_p],
    "ncclCommWindowRegister": [_HANDLE, _BUFFER, c_size_t, c_void_p, c_int],
    "ncclCommWindowDeregister": [_HANDLE, c_void_p],
    "ncclMemAlloc": [c_void_p, c_size_t],
    "ncclMemFree": [c_void_p],
    "ncclGetUniqueId": [c_void_p],
    "ncclGetVersion": [c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclGroupSimulateEnd": [c_void_p],
    "ncclSoftgpuConfig": [_HANDLE, c_void_p],
}

# As a program that is linked with them finds them: a library that was preloaded comes before.
for _name in ("libcuda.so.1", "libnccl.so.2"):
    ctypes.CDLL(_name, ctypes.RTLD_GLOBAL)
libcuda, libnccl = ctypes.CDLL(None), ctypes.CDLL(None)
for _function, _types in _ARGUMENTS.items():
    if hasattr(libnccl, _function):  # the real one lacks some
        getattr(libnccl, _function).argtypes = _types
if hasattr(libnccl, "ncclTeamWorld"):
    libnccl.ncclTeamWorld.argtypes, libnccl.ncclTeamWorld.restype = [_HANDLE], Team
libnccl.ncclGetErrorString.restype = c_char_p
libnccl.ncclGetLastError.restype = c_char_p
libnccl.ncclGetLastError.argtypes = [c_void_p]


def raw(name: str, *arguments: Any) -> int:
    """Call a function of NCCL; its result."""
    return int(getattr(libnccl, name)(*arguments))


def nccl(name: str, *arguments: Any) -> None:
    """Call a function of NCCL that must succeed."""
    code = raw(name, *arguments)
    if code != SUCCESS:
        raise NcclError(name, code, libnccl.ncclGetLastError(None).decode())


def issue(name: str, *arguments: Any, on: Sequence[int]) -> None:
    """Call a function that orders something, or ends a group; wait until these communicators are done with it.

    One that does not block goes on behind the call, and takes no more orders until it answers that it is done.
    """
    code = raw(name, *arguments)
    if code not in (SUCCESS, IN_PROGRESS):
        raise NcclError(name, code, libnccl.ncclGetLastError(None).decode())
    for comm in on if code == IN_PROGRESS else ():
        if (code := settled(comm)) != SUCCESS:
            raise NcclError(name, code, f"communicator {comm:#x}")


def cu(name: str, *arguments: Any) -> None:
    """Call a function of the driver that must succeed."""
    code = int(getattr(libcuda, name)(*arguments))
    if code:
        raise CudaError(name, code)


# --- the driver -------------------------------------------------------------------------------------------------------


def device(ordinal: int) -> None:
    """Make the primary context of a device current in this thread."""
    context = c_void_p()
    cu("cuInit", 0)
    cu("cuDevicePrimaryCtxRetain", byref(context), ordinal)
    cu("cuCtxSetCurrent", context)


def memory(size: int) -> int:
    """Device memory."""
    address = c_uint64()
    cu("cuMemAlloc_v2", byref(address), c_size_t(size))
    return int(address.value)


def free(address: int) -> None:
    cu("cuMemFree_v2", c_uint64(address))


def put(address: int, data: bytes) -> None:
    """Copy to the device."""
    cu("cuMemcpyHtoD_v2", c_uint64(address), data, c_size_t(len(data)))


def get(address: int, size: int) -> bytes:
    """Copy from the device, when the streams that wait for the default one are done."""
    back = ctypes.create_string_buffer(size)
    cu("cuMemcpyDtoH_v2", back, c_uint64(address), c_size_t(size))
    return back.raw


def stream() -> int:
    """A stream that does not wait for the default one."""
    handle = c_void_p()
    cu("cuStreamCreate", byref(handle), 1)
    return int(handle.value or 0)


def synchronize(handle: int) -> None:
    cu("cuStreamSynchronize", c_void_p(handle))


def query(handle: int) -> int:
    """0, or 600: not ready."""
    return int(libcuda.cuStreamQuery(c_void_p(handle)))


# --- communicators ----------------------------------------------------------------------------------------------------


def unique_id() -> bytes:
    made = UniqueId()
    nccl("ncclGetUniqueId", byref(made))
    return ctypes.string_at(byref(made), 128)


def init(n: int, unique: bytes, rank: int, config: Config | None = None) -> int:
    """A communicator, ready."""
    comm = c_void_p()
    nccl("ncclCommInitRankConfig", byref(comm), n, UniqueId.of(unique), rank, byref(config) if config else None)
    return int(comm.value or 0)


def split(comm: int, colour: int, key: int, config: Config | None = None) -> int:
    """0 where it has no part in any."""
    made = c_void_p()
    nccl("ncclCommSplit", comm, colour, key, byref(made), byref(config) if config else None)
    return int(made.value or 0)


def settled(comm: int) -> int:
    """What it answers when it is in progress no more."""
    while (code := async_error(comm)) == IN_PROGRESS:
        time.sleep(0.0002)
    return code


_asking = threading.Lock()


def async_error(comm: int) -> int:
    """By one thread at a time: who finds that a group is done lets go of it, and NCCL does not guard that."""
    error = c_int(-1)
    with _asking:
        nccl("ncclCommGetAsyncError", comm, byref(error))
    return error.value


def number(name: str, comm: int) -> int:
    """What ncclCommCount, ncclCommUserRank or ncclCommCuDevice says."""
    value = c_int(-1)
    nccl(name, comm, byref(value))
    return value.value


def team(comm: int) -> tuple[int, int, int]:
    """What ncclTeamWorld says: how many ranks, which this one is, how far from one to the next."""
    found = libnccl.ncclTeamWorld(comm)
    return found.n, found.rank, found.stride

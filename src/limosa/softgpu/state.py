"""``struct node_state`` of ``native/softgpu/node.h``, byte for byte, and the folder it lies in."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

NODE_FOLDER = "/dev/nvidia-soft"
MAGIC = 0x3155504774666F53
MAX_GPUS = 16
MAX_BLOCKS = 65536
GRANULARITY = 2 << 20
KIND_RESERVED = 4
NVML_MPS = 1
"""A bit of ``nvml_flags``: compute processes are clients of MPS."""


class NodeGpu(ctypes.Structure):
    """``struct node_gpu``."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * 64),
        ("pci", ctypes.c_char * 20),
        ("minor", ctypes.c_int32),
        ("cc_major", ctypes.c_int32),
        ("cc_minor", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("memory", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("mig", ctypes.c_uint32),
        ("persistence", ctypes.c_uint32),
        ("compute_mode", ctypes.c_uint32),
        ("lost", ctypes.c_uint32),
        ("pad", ctypes.c_uint32 * 8),
    )


class NodeRates(ctypes.Structure):
    """``struct node_rates``: bytes a second (0: as fast as the machine is), and seconds."""

    _fields_ = (
        ("checkpoint", ctypes.c_double),
        ("restore", ctypes.c_double),
        ("checkpoint_fixed", ctypes.c_double),
        ("restore_fixed", ctypes.c_double),
        ("lock_fixed", ctypes.c_double),
        ("unlock_fixed", ctypes.c_double),
        ("host_to_device", ctypes.c_double),
        ("device_to_host", ctypes.c_double),
        ("device_to_device", ctypes.c_double),
        ("peer", ctypes.c_double),
        ("copy_fixed", ctypes.c_double),
        ("pinned", ctypes.c_double),
        ("init_fixed", ctypes.c_double),
        ("context_fixed", ctypes.c_double),
        ("context_bytes", ctypes.c_uint64),
        ("checkpoint_bytes", ctypes.c_uint64),
    )


class NodeBlock(ctypes.Structure):
    """``struct node_block``."""

    _fields_ = (
        ("id", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("start_time", ctypes.c_uint64),
        ("pid", ctypes.c_int32),
        ("gpu", ctypes.c_int16),
        ("kind", ctypes.c_int16),
    )


class NodeState(ctypes.Structure):
    """``struct node_state``."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("n_gpus", ctypes.c_int32),
        ("cuda_version", ctypes.c_int32),
        ("driver_version", ctypes.c_char * 32),
        ("gpus", NodeGpu * MAX_GPUS),
        ("rates", NodeRates),
        ("fault_generation", ctypes.c_uint32),
        ("nvml_flags", ctypes.c_uint32),
        ("next_block", ctypes.c_uint64),
        ("n_blocks", ctypes.c_int32),
        ("blocks", NodeBlock * MAX_BLOCKS),
    )


@contextmanager
def locked(folder: str = NODE_FOLDER) -> Iterator[None]:
    """Hold the node's lock, as the libraries do while they change its state."""
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def opened(folder: str = NODE_FOLDER) -> Iterator[NodeState]:
    """Map a node's state; what is changed is changed at once for every process of the node.

    Args:
        folder: the node's folder as seen from here.

    Raises:
        OSError: there is no node.
    """
    fd = os.open(os.path.join(folder, "state"), os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, ctypes.sizeof(NodeState))
    finally:
        os.close(fd)
    state = NodeState.from_buffer(memory)
    try:
        yield state
    finally:
        del state  # the map cannot be closed while something points into it
        try:
            memory.close()
        except BufferError:  # the caller kept a part of it
            pass

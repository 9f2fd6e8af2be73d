"""``struct node_state`` of ``native/node.h``, byte for byte, and the folder it lies in.

Everybody in a node may write into its folder, also where root works there. So what lies in it is opened below the
folder's descriptor, and only where it is a file: a link would lead root to a file of the machine's, a pipe would have
it wait.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from limosa.process.openat import closing, open_in

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
        ("pid_namespace", ctypes.c_uint64),
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
def open_folder(folder: str = NODE_FOLDER, name: str = "") -> Iterator[int]:
    """Open a node's folder, or one of those in it.

    Args:
        folder: the node's folder as seen from here.
        name: of the folder in it: "faults", "memory"; "" for the node's own.

    Raises:
        OSError: it is not there, or it is not a node's: root's (or the caller's), with names that nobody exchanges.
    """
    with closing(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
        found = os.fstat(fd)
        if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
            raise OSError(errno.EPERM, "it is a folder whose files others can exchange", folder)
        if not name:
            yield fd
            return
        with closing(open_in(fd, name, os.O_RDONLY | os.O_DIRECTORY)) as inner:
            if os.fstat(inner).st_uid not in (0, os.geteuid()):
                raise OSError(errno.EPERM, "it is a folder of another user's", f"{folder}/{name}")
            yield inner


def open_file(folder: int, name: str, flags: int) -> int:
    """Open a file in an open folder of a node, or make it: whoever is in the node may write to it.

    Raises:
        OSError: it cannot be opened, or is no file.
    """
    fd = open_in(folder, name, flags, 0o666 if flags & os.O_CREAT else 0)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EPROTO, "it is not a file of the node", name)


@contextmanager
def locked(folder: str = NODE_FOLDER) -> Iterator[None]:
    """Hold the node's lock, as the libraries do while they change its state."""
    with open_folder(folder) as fd:
        lock = open_file(fd, "lock", os.O_RDWR)
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
        OSError: there is no node, or its state is no such thing.
    """
    with open_folder(folder) as inner, closing(open_file(inner, "state", os.O_RDWR)) as fd:
        if os.fstat(fd).st_size < ctypes.sizeof(NodeState):
            raise OSError(errno.EPROTO, "somebody has cut off the state of the node", f"{folder}/state")
        memory = mmap.mmap(fd, ctypes.sizeof(NodeState))
    state = NodeState.from_buffer(memory)
    try:
        yield state
    finally:
        del state  # the map cannot be closed while something points into it
        try:
            memory.close()
        except BufferError:  # the caller kept a part of it
            pass

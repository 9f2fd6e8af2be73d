"""What is said over the control socket of a process that runs under the shim (``native/shim/protocol.h``).

Packets (SOCK_SEQPACKET) of one message, records behind it, descriptors beside it. Numbers are the machine's own.
"""

from __future__ import annotations

import enum
import struct

MAGIC, VERSION = 0x4C4D5341, 3
OLD_VERSION = 2
"""Of jobs, and of images of them, that an earlier Limosa started: the same messages."""
STAND_IN = 25449
"""Seconds: the limit that marks a socket which a restore puts in the place of a shim's."""
MOST = 200
"""Records, or descriptors, in a packet."""
KEPT_MOST = 4096
"""Descriptors that a process keeps while its memory is away."""
MESSAGE = struct.Struct("=IHHIi4Q")
RECORD = struct.Struct("=QQQQIIiI")
PAIR = struct.Struct("=QQ")
PLACE = struct.Struct("=16s16sI4B")
PLACES_MOST = 40
"""Places in a packet: as many as GPUs of a machine, at most."""
# What is left to the driver, and why: native/shim/count.h.
COUNT_KINDS = ("small", "pool", "managed", "failed", "shared", "foreign", "array", "ipc", "graph", "tables")
COUNTS = struct.Struct(f"={2 * len(COUNT_KINDS)}Q")
PLAIN, SHARED, AWAY, MAPPED, IMPORTED = 1, 2, 4, 8, 16
NOT_READY = 600
"""CUDA_ERROR_NOT_READY: the gate could not be closed within the time, and is open again."""
CAPTURING = 900
"""CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: likewise, because a stream was being captured into a graph."""


COMM = struct.Struct("=4Q3iI32s")
COUNTED = struct.Struct("=3Q2I")
WANT = struct.Struct("=3Q4I")
LIMIT = struct.Struct("=3Q2HI")
JOIN = struct.Struct("=Q128s")
UNIQUE_ID = 128
"""Bytes of ncclUniqueId."""
JOINING, CLOSED, CAPTURED, STRANGE, MEMORY, AGAIN, NEWER = 1, 2, 4, 8, 16, 32, 64
"""Flags of a communicator."""
WORDS = 4096
"""Of 8 bytes, behind a message to the shim."""
MOST_JOINS = 200
"""Communicators in one request to make them again, limits in one, numbers of those to be closed."""


class Verb(enum.IntEnum):
    """What can be asked."""

    HELLO = 1
    LIST = 2
    EXPORT = 3
    CLOSE = 4
    OPEN = 5
    UNMAP = 6
    MAP = 7
    STACK = 8
    COUNTS = 9
    BULK = 10
    DEVICES = 11
    KEEP = 12
    KEPT = 13
    CALLED = 14
    SHARE = 15
    SHARERS = 16
    MAKE = 17
    PLACES = 18
    COMMS = 19
    CUT = 20
    LIMITS = 21
    REST = 22
    SHUT = 23
    IDS = 24
    JOIN = 25
    LET = 26


class Role(enum.IntEnum):
    """What the shim knows of a function of the driver (``native/driver/functions.list``)."""

    UNKNOWN = 0
    PASS = 1
    USES = 2
    HOST = 3
    OLD = 4
    OWN = 5
    COPY = 6


class CommGate(enum.IntEnum):
    """How the gate before NCCL stands (``native/shim/comms.h``)."""

    OPEN = 0
    CUT = 1
    SHUT = 2


class Kind(enum.IntEnum):
    """What is counted: collectives by communicator, sends and receives by peer."""

    COLLECTIVE = 0
    SEND = 1
    RECEIVE = 2


class Stand(enum.IntEnum):
    """Where a process's memory stands."""

    OPEN = 0
    CLOSED = 1
    AWAY = 2

"""Decodes a shim's answers: whoever can write to the process's memory may have written them.

Each function takes what follows the message in one packet, and raises :class:`~limosa.ipc.packet.Wrong` if that is not
exactly as it should be.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from limosa.gpu.names import uuid_of_bytes
from limosa.ipc.packet import Wrong, text
from limosa.parking import protocol
from limosa.parking.protocol import AWAY, COUNT_KINDS, IMPORTED, MAPPED, PLAIN, SHARED, CommGate, Kind, Role, Stand

MOST_BYTES = 1 << 46
"""Of device memory that one process can have: 64 TiB."""
MOST_GPUS = 64
MOST_RANKS = 1 << 20
LONGEST_NAME = 256
_MOST_PID = 1 << 22
_ERRNOS = 4096
_FLAGS = PLAIN | SHARED | AWAY | MAPPED | IMPORTED


class Message(msgspec.Struct, frozen=True):
    """What every answer begins with (``native/shim/protocol.h``)."""

    magic: int
    version: int
    verb: int
    number: int
    result: int
    a: int
    b: int
    c: int
    d: int


class Memory(msgspec.Struct, frozen=True):
    """One piece of device memory that the shim looks after."""

    id: int  # its number in that process, never used twice
    bytes: int  # physical size, a multiple of 2 MiB; 0: shared, and not mapped yet
    device: int  # the process's number of its GPU
    at: int = 0  # the address where it is first mapped, 0 where it is not
    plain: bool = False  # whether it is of cuMemAlloc (else of cuMemCreate)
    shared: bool = False  # whether somebody whom nobody knows was given it; such memory stays with the driver
    away: bool = False  # whether it is not there at the moment
    imported: bool = False  # it came the parked way, or from another process: the driver could not bring it back
    share: int = 0  # the number under which several processes have it (legacy IPC handles); 0: this one alone
    owner: int = 0  # the pid of the process that gave it, where another did (-1: nobody knows which); else 0


class Comm(msgspec.Struct, frozen=True):
    """One rank of a communicator of NCCL's, as its process knows it."""

    id: tuple[int, int]  # the same in all of its ranks
    number: int  # in this process
    collectives: int  # how many were begun
    rank: int  # -1 where it is not made yet
    ranks: int
    device: int  # the process's number of its GPU
    joining: bool = False  # it is being made
    closed: bool = False  # by Limosa
    captured: bool = False  # a CUDA graph has some of its operations
    memory: bool = False  # the process has memory of ncclMemAlloc
    again: bool = False  # Limosa has made it again an odd number of times
    strange: str = ""  # a function was called on it that Limosa cannot repeat
    newer: str = ""  # a function that the shim does not know is called in the process, or linked with


class Counted(msgspec.Struct, frozen=True):
    """How often a rank has sent to another, and received from it."""

    number: int  # the communicator's, in this process
    sent: int
    received: int
    peer: int


class Want(msgspec.Struct, frozen=True):
    """What a thread that waits before NCCL wants to get to."""

    id: tuple[int, int]
    wanted: int
    kind: Kind
    peer: int
    thread: int
    rank: int = -1  # that wants it; -1: a communicator that is being made, or an older shim


class CommsLook(msgspec.Struct, frozen=True):
    """How the gate before NCCL stands, how many calls are inside, and a number that goes up with each of them."""

    gate: CommGate
    inside: int
    changes: int


class Called(msgspec.Struct, frozen=True):
    """A function of the driver that a process called or asked for, and what the shim knows of it."""

    name: str
    role: Role
    called: bool
    asked_for: bool


class Hello(msgspec.Struct, frozen=True):
    """What a process says of itself: where it stands, its pieces of memory, the bytes that can be parked."""

    stand: Stand
    n_memories: int
    bytes: int


def message(packet: bytes) -> tuple[Message, bytes]:
    """Return the message and what stands behind it."""
    if len(packet) < protocol.MESSAGE.size:
        raise Wrong("less than a message")
    found = Message(*protocol.MESSAGE.unpack_from(packet))
    if found.result <= -_ERRNOS:
        raise Wrong("a result that there is not")
    return found, packet[protocol.MESSAGE.size :]


def hello(said: Message) -> Hello:
    """Return what a process says of itself."""
    return Hello(stand(said.a), said.c, bounded(said.d, MOST_BYTES))


def stand(number: int) -> Stand:
    """Return where a process's memory stands."""
    try:
        return Stand(number)
    except ValueError as error:
        raise Wrong(f"a state that there is not ({number})") from error


def bounded(number: int, most: int) -> int:
    """Return a number that is not larger than it may be."""
    if number > most:
        raise Wrong(f"{number} where {most} is the most")
    return number


def memories(data: bytes, n: int) -> Iterator[Memory]:
    """Yield the pieces of one packet."""
    exactly(data, n * protocol.RECORD.size)
    for id_, bytes_, at, share, device, flags, owner, _ in protocol.RECORD.iter_unpack(data):
        least = 0 if flags & SHARED else 1  # what the program has imported and not mapped yet: nobody knows its size
        if not least <= bytes_ <= MOST_BYTES or device >= MOST_GPUS or flags & ~_FLAGS or not -1 <= owner <= _MOST_PID:
            raise Wrong(f"a piece of memory that there cannot be ({bytes_} bytes on device {device})")
        yield Memory(
            id_,
            bytes_,
            device,
            at if flags & MAPPED else 0,
            plain=bool(flags & PLAIN),
            shared=bool(flags & SHARED),
            away=bool(flags & AWAY),
            imported=bool(flags & IMPORTED),
            share=share,
            owner=owner,
        )


def comms_look(said: Message) -> CommsLook:
    """Return how the gate before NCCL stands."""
    try:
        return CommsLook(CommGate(said.c & 0xFFFFFFFF), said.c >> 32, said.d)
    except ValueError as error:
        raise Wrong(f"a gate that there is not ({said.c})") from error


def comms(data: bytes, n: int) -> Iterator[Comm]:
    """Yield the communicators of one packet."""
    exactly(data, n * protocol.COMM.size)
    for a, b, number, collectives, rank, ranks, device, flags, named in protocol.COMM.iter_unpack(data):
        if not -1 <= rank < MOST_RANKS or not 0 <= ranks < MOST_RANKS or not -1 <= device < MOST_GPUS:
            raise Wrong(f"a communicator that there cannot be (rank {rank} of {ranks} on device {device})")
        why = text(named.rstrip(b"\0"))
        yield Comm(
            (a, b),
            number,
            collectives,
            rank,
            ranks,
            device,
            joining=bool(flags & protocol.JOINING),
            closed=bool(flags & protocol.CLOSED),
            captured=bool(flags & protocol.CAPTURED),
            memory=bool(flags & protocol.MEMORY),
            again=bool(flags & protocol.AGAIN),
            strange="" if flags & protocol.NEWER else why,
            newer=why if flags & protocol.NEWER else "",
        )


def counted(data: bytes, n: int) -> Iterator[Counted]:
    """Yield the sends and receives of one packet."""
    exactly(data, n * protocol.COUNTED.size)
    for number, sent, received, peer, _ in protocol.COUNTED.iter_unpack(data):
        yield Counted(number, sent, received, bounded(peer, MOST_RANKS))


def wants(data: bytes, n: int) -> Iterator[Want]:
    """Yield what threads wait for, of one packet."""
    exactly(data, n * protocol.WANT.size)
    for a, b, wanted, kind, peer, thread, rank in protocol.WANT.iter_unpack(data):
        if kind > Kind.RECEIVE:
            raise Wrong(f"a kind of call that there is not ({kind})")
        yield Want((a, b), wanted, Kind(kind), bounded(peer, MOST_RANKS), thread, bounded(rank, MOST_RANKS + 1) - 1)


def pairs(data: bytes, n: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of one packet: share, pid."""
    exactly(data, n * protocol.PAIR.size)
    for share, pid in protocol.PAIR.iter_unpack(data):
        if not 0 < pid <= _MOST_PID:
            raise Wrong(f"a process that there cannot be ({pid})")
        yield share, pid


def names(data: bytes, n: int) -> Iterator[Called]:
    """Yield the functions of one packet."""
    at = 0
    for _ in range(n):
        end = data.find(b"\0", at + 2, at + 2 + LONGEST_NAME)
        if end < 0:
            raise Wrong("a name without an end")
        try:
            role = Role(data[at])
        except ValueError as error:
            raise Wrong(f"a role that there is not ({data[at]})") from error
        yield Called(text(data[at + 2 : end]), role, called=bool(data[at + 1] & 1), asked_for=bool(data[at + 1] & 2))
        at = end + 1
    exactly(data, at)


def gpus(said: Message, data: bytes) -> tuple[list[str], list[str]]:
    """Return the UUIDs of a process's GPUs, and of those that it saw at first."""
    now, first = bounded(said.a, MOST_GPUS), bounded(said.b, MOST_GPUS)
    exactly(data, 16 * (now + first))
    uuids = [uuid_of_bytes(data[16 * i : 16 * i + 16]) for i in range(now + first)]
    return uuids[:now], uuids[now:]


def counts(data: bytes) -> dict[str, tuple[int, int]]:
    """Return pieces and bytes of each kind that is left to the driver."""
    exactly(data, protocol.COUNTS.size)
    # They are counted without a lock: in passing one may be less than nothing.
    values = [0 if value >> 63 else min(value, MOST_BYTES) for value in protocol.COUNTS.unpack(data)]
    n = len(COUNT_KINDS)
    return {kind: (values[i], values[n + i]) for i, kind in enumerate(COUNT_KINDS)}


def exactly(data: bytes, size: int) -> None:
    """Raise where an answer has more bytes, or fewer, than it says."""
    if len(data) != size:
        raise Wrong(f"{len(data)} bytes where {size} were to come")

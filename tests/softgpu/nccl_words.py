"""What a rank of the tests of NCCL can do: collectives on numbers that every rank knows of every other.

Each rank computes for itself what must come out, with numpy, and says whether it did, bit for bit.
"""

from __future__ import annotations

import ctypes
from typing import Any

import nccl as N
import numpy as np

rank, n = 0, 1
comm = 0
stream = 0
streams: list[int] = []
kept: dict[str, Any] = {}


def begin(own: int, of: int, device: int | None = None) -> None:
    """Be a rank on a GPU."""
    global rank, n, stream
    rank, n = own, of
    N.device(own if device is None else device)
    stream = N.stream()


def connect(unique: str, **options: Any) -> bool:
    global comm
    comm = N.init(n, bytes.fromhex(unique), rank, **options)
    return comm != 0


def init_aside(unique: str, blocking: int = 0) -> int:
    """The result of an init; the communicator is ``comm`` whatever that is."""
    global comm
    made = ctypes.c_void_p()
    config = N.Config(blocking)
    code = N.raw(
        "ncclCommInitRankConfig",
        ctypes.byref(made),
        n,
        N.UniqueId.of(bytes.fromhex(unique)),
        rank,
        ctypes.byref(config),
    )
    comm = made.value or 0
    return code


def init_scalable(ids: list[str]) -> int:
    """The same, by several ids."""
    global comm
    made = ctypes.c_void_p()
    given_ids = (N.UniqueId * len(ids))(*[N.UniqueId.of(bytes.fromhex(one)) for one in ids])
    code = N.raw("ncclCommInitRankScalable", ctypes.byref(made), n, rank, len(ids), given_ids, None)
    comm = made.value or 0
    return code


def unique() -> str:
    return N.unique_id().hex()


def result(name: str, *arguments: Any) -> int:
    return N.raw(name, *arguments)


def destroy() -> int:
    return N.raw("ncclCommDestroy", comm)


# --- numbers ----------------------------------------------------------------------------------------------------------


def from_bf(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("u4") << 16).view("f4")


def to_bf(numbers: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(numbers, "f4").view("u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")


def given(of: int, count: int, kind: str) -> np.ndarray:
    """What a rank gives; bfloat16 as its bits."""
    random = np.random.default_rng([of, count])
    if kind == "bf":
        return to_bf(random.standard_normal(count, "f4") * 3)
    if kind[0] == "f":
        return (random.standard_normal(count) * 3).astype(kind)
    info = np.iinfo(kind)
    return random.integers(info.min, info.max, count, dtype=kind, endpoint=True)


def reduced(parts: list[np.ndarray], kind: str, op: int) -> np.ndarray:
    """In the order of ranks; halves are added up as floats and rounded once."""
    wide = {"bf": from_bf, "f2": lambda part: part.astype("f4")}.get(kind, lambda part: part)
    total = wide(parts[0]).copy()
    for part in parts[1:]:
        more = wide(part)
        total = [np.add, np.multiply, np.maximum, np.minimum, np.add][op](total, more)
    if op == N.AVG:
        if kind[0] in "iu":
            whole = total.astype(object)
            total = np.array([abs(int(x)) // len(parts) * (1 if x >= 0 else -1) for x in whole], kind)
        else:
            total = total / total.dtype.type(len(parts))
    return to_bf(total) if kind == "bf" else total.astype(kind)


def mine(data: np.ndarray, size: int = 0) -> int:
    """Device memory that begins with these."""
    address = N.memory(max(size, data.nbytes, 1))
    if data.nbytes:
        N.put(address, data.tobytes())
    return address


def same(address: int, expected: np.ndarray) -> bool:
    N.synchronize(stream)
    return bool(N.get(address, expected.nbytes) == expected.tobytes())


# --- collectives ------------------------------------------------------------------------------------------------------


def check(name: str, kind: str, count: int, op: int = 0, root: int = 0, *, in_place: bool = False) -> bool:
    """Whether a collective does what it is for; every rank calls this alike."""
    with np.errstate(all="ignore"):
        return _check(name, kind, count, op, root, in_place)


def _check(name: str, kind: str, count: int, op: int, root: int, in_place: bool) -> bool:
    size, type_ = N.SIZES[kind], N.TYPES[kind]
    blocks = name in ("ReduceScatter", "AlltoAll", "Scatter")
    all_ = [given(r, count * n if blocks else count, kind) for r in range(n)]
    block = slice(rank * count, (rank + 1) * count)
    expected = {
        "AllReduce": lambda: reduced(all_, kind, op),
        "Reduce": lambda: reduced(all_, kind, op),
        "ReduceScatter": lambda: reduced([part[block] for part in all_], kind, op),
        "Broadcast": lambda: all_[root],
        "Bcast": lambda: all_[root],
        "AllGather": lambda: np.concatenate(all_),
        "Gather": lambda: np.concatenate(all_),
        "AlltoAll": lambda: np.concatenate([part[block] for part in all_]),
        "Scatter": lambda: all_[root][block],
    }[name]()
    gathers = name in ("AllGather", "Gather")
    to = N.memory(max(expected.nbytes, 1))
    own = mine(all_[rank])
    if in_place:
        if gathers:
            own = to + rank * count * size
            N.put(own, all_[rank].tobytes())
        elif name in ("ReduceScatter", "Scatter"):
            to = own + rank * count * size
        else:
            to = own
    if name == "Bcast":
        N.issue("ncclBcast", own, count, type_, root, comm, stream, on=(comm,))
        return same(own, expected)
    arguments = [op] if name in ("AllReduce", "Reduce", "ReduceScatter") else []
    arguments += [root] if name in ("Reduce", "Broadcast", "Gather", "Scatter") else []
    N.issue(f"nccl{name}", own, to, count, type_, *arguments, comm, stream, on=(comm,))
    N.synchronize(stream)
    if name in ("Reduce", "Gather") and rank != root:
        return True
    return same(to, expected)


def all_reduce(count: int = 1000, of: int = 0, on: int = 0) -> int:
    """Begin a sum of float32 and do not wait; where it comes to. ``of``, ``on``: another communicator, stream."""
    kept["own"] = mine(given(rank, count, "f4"))
    kept["to"] = N.memory(4 * count)
    return N.raw("ncclAllReduce", kept["own"], kept["to"], count, N.TYPES["f4"], N.SUM, of or comm, on or stream)


def summed(count: int = 1000) -> bool:
    """Whether that is right."""
    return same(kept["to"], reduced([given(r, count, "f4") for r in range(n)], "f4", N.SUM))


def pre_multiplied(kind: str, *, device: bool) -> bool:
    """A sum of numbers that each rank has multiplied by a scalar of its own."""
    op = ctypes.c_int()
    factors = [np.array([r + 2], kind) for r in range(n)]
    host = ctypes.create_string_buffer(factors[rank].tobytes())
    scalar = mine(factors[rank]) if device else ctypes.addressof(host)
    N.nccl("ncclRedOpCreatePreMulSum", ctypes.byref(op), scalar, N.TYPES[kind], 0 if device else 1, comm)
    own, to = mine(given(rank, 1000, kind)), N.memory(8000)
    N.nccl("ncclAllReduce", own, to, 1000, N.TYPES[kind], op.value, comm, stream)
    N.nccl("ncclRedOpDestroy", op.value, comm)
    assert N.raw("ncclAllReduce", own, to, 1000, N.TYPES[kind], op.value, comm, stream) == N.INVALID_ARGUMENT
    return same(to, reduced([given(r, 1000, kind) * factors[r] for r in range(n)], kind, N.SUM))


def ring(count: int, times: int = 1) -> bool:
    """Send to the next, receive from the one before, all in one group: whole numbers, each with what tells it apart."""
    after, before = (rank + 1) % n, (rank - 1) % n
    to = [N.memory(4 * count) for _ in range(times)]
    N.nccl("ncclGroupStart")
    for i in range(times):
        N.nccl("ncclSend", mine(given(rank * 100 + i, count, "i4")), count, N.TYPES["i4"], after, comm, stream)
    for address in to:
        N.nccl("ncclRecv", address, count, N.TYPES["i4"], before, comm, stream)
    N.nccl("ncclGroupEnd")
    return all(same(address, given(before * 100 + i, count, "i4")) for i, address in enumerate(to))


def grouped(count: int) -> bool:
    """Collectives of several streams and a send to oneself in nested groups; what comes after a stream sees them."""
    others = [N.stream(), N.stream()]
    own = mine(given(rank, count, "f4"))
    to = [N.memory(4 * count) for _ in range(3)]
    N.nccl("ncclGroupStart")
    for address, on in zip(to, others, strict=False):
        N.nccl("ncclGroupStart")
        N.nccl("ncclAllReduce", own, address, count, N.TYPES["f4"], N.SUM, comm, on)
        N.nccl("ncclGroupEnd")
    N.nccl("ncclRecv", to[2], count, N.TYPES["f4"], rank, comm, stream)
    N.nccl("ncclSend", own, count, N.TYPES["f4"], rank, comm, stream)
    N.nccl("ncclGroupEnd")
    expected = reduced([given(r, count, "f4") for r in range(n)], "f4", N.SUM)
    for on in others:
        N.synchronize(on)
    return same(to[0], expected) and same(to[1], expected) and same(to[2], given(rank, count, "f4"))


def all_in_one(devices: int) -> bool:
    """Ranks of one process, in one thread: made together, used in groups, destroyed one after the other."""
    global n
    comms = (ctypes.c_void_p * devices)()
    n = devices
    N.nccl("ncclCommInitAll", comms, devices, None)
    places = []
    for r in range(devices):
        N.device(r)
        places.append((N.stream(), mine(given(r, 5000, "f4")), N.memory(20000)))
    for _ in range(3):
        N.nccl("ncclGroupStart")
        for r, (on, own, to) in enumerate(places):
            N.nccl("ncclAllReduce", own, to, 5000, N.TYPES["f4"], N.SUM, comms[r], on)
        N.nccl("ncclGroupEnd")
    expected = reduced([given(r, 5000, "f4") for r in range(devices)], "f4", N.SUM).tobytes()
    right = True
    for r, (on, _, to) in enumerate(places):
        N.device(r)
        N.synchronize(on)
        right &= N.get(to, 20000) == expected
        right &= N.number("ncclCommCuDevice", comms[r]) == r
    for r in range(devices):
        N.nccl("ncclCommDestroy", comms[r])
    return bool(right)

"""Asks processes under the shim before an operation: what can be parked, and what speaks against it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping, Sequence

import msgspec

from limosa import gpu
from limosa.errors import CannotBeMoved, LimosaError, Reason
from limosa.operation import claims, counting, idle
from limosa.operation.journal import Member
from limosa.operation.parked import shares
from limosa.parking.answers import Called, Hello, Memory
from limosa.parking.protocol import Stand
from limosa.parking.shim import ANSWER_SECONDS, Shim, under_shim
from limosa.process.memory import two

LARGE = 512 << 20
"""Bytes of an allocation that the driver was seen not to restore where GPUs have peer access (``refusals``)."""


def shims_of(members: Sequence[Member]) -> list[tuple[Member, Shim]]:
    """Connects to the members that have memory that can be parked, as :func:`connected` does."""
    return connected(members, lambda _, hello: hello.bytes > 0 and hello.stand is Stand.OPEN)


def held_still(
    members: Sequence[Member], stand: Stand = Stand.OPEN, but: Container[int] = ()
) -> list[tuple[Member, Shim]]:
    """Connects to those whose gate stands so, whatever they have, as :func:`connected` does.

    Args:
        members: of these.
        stand: open where they are to be held still; closed where they were, and are to go on.
        but: pids of those that there is a connection to: a shim serves one at a time.
    """
    return connected([m for m in members if m.pid not in but], lambda _, hello: hello.stand is stand)


def connected(members: Sequence[Member], wanted: Callable[[Member, Hello], bool]) -> list[tuple[Member, Shim]]:
    """Connects to the members under the shim that are wanted; the caller closes the connections.

    Raises CannotBeMoved: one runs under the shim and does not answer: the driver might lose its memory.
    """
    found: list[tuple[Member, Shim]] = []
    try:
        for member in members:
            hello = hello_of(member)
            if hello is None:
                continue
            shim, said = hello
            if wanted(member, said):
                found.append((member, shim))
            else:
                shim.close()
    except BaseException:
        for _, shim in found:
            shim.close()
        raise
    return found


def hello_of(member: Member) -> tuple[Shim, Hello] | None:
    """Connects to a process and asks where it stands; None where it does not run under the shim, or has ended.

    Raises CannotBeMoved: it runs under the shim and does not answer: the driver might lose its memory.
    """
    shim: Shim | None = None
    try:
        shim = Shim(member.identity, whole=ANSWER_SECONDS)  # a user can have us wait so often, and no more
        said = shim.hello()
        shim.is_kept()
        return shim, said
    except LimosaError as error:
        if shim is not None:
            shim.close()
        if under_shim(member.pid) and member.identity.alive():
            raise CannotBeMoved(detail=f"the shim of process {member.pid} does not answer ({error})") from error
        return None


class Parkable(msgspec.Struct):
    """What the shims of a job say."""

    bytes: dict[int, int] = {}  # by pid, what can be parked
    reasons: list[Reason] = []  # memory that the driver could not bring back
    known: set[int] = set()  # the processes whose shim has told all that they share
    small: set[int] = set()  # those of them that have left the driver no large allocation


def ask(members: Sequence[Member]) -> Parkable:
    """Asks the shims of a job what they look after; fills in what NVML does not count as the processes'.

    Memory that came by the parked way was made by somebody else: NVML does not know it as the process's, and the driver
    would save it and could not bring it back (a handle that was imported: NOT_SUPPORTED, measured).
    """
    found: list[Reason] = []
    total: dict[int, int] = {}
    seen: set[int] = set()
    small: set[int] = set()
    with contextlib.ExitStack() as stack:
        shims: dict[int, Shim] = {}
        all_of: dict[int, list[Memory]] = {}
        for member in members:
            if member.was != gpu.State.RUNNING:
                continue
            with contextlib.suppress(LimosaError):
                shim = stack.enter_context(Shim.to_look(member.identity))
                devices, all_of[member.pid] = shim.devices(), shim.memories()
                shims[member.pid] = shim
                counts = shim.counts()
                found += _left_to_others(member, counts, all_of[member.pid])
                found += _given_up(member, refused=shim.refused)
                found += _multicast(member, shim.called())
                if sum(counts[kind][1] for kind in ("pool", "managed", "failed", "foreign", "array")) < LARGE:
                    small.add(member.pid)
                # What several processes have is there once.
                pieces = [m for m in all_of[member.pid] if not m.shared and not (m.share and m.share in seen)]
                seen |= {m.share for m in pieces}
                total[member.pid] = sum(m.bytes for m in pieces)
                for uuid, parts in counting.by_gpu(devices, pieces).items():
                    counted = member.held.get(uuid, 0)
                    member.beside[uuid] = counting.beside(counted, *parts)
                    member.held[uuid] = counting.held(counted, *parts)
        for pid, text in shares.outside(shims, all_of):
            hint = "name the process that all of them descend from"
            found.append(Reason(id="shared-memory", text=text, exit_code=13, hint=hint, pid=pid))
        aside = _aside(members)
        total |= {pid: sum(m.bytes for m in own if not m.shared) for pid, own in aside.items()}
    return Parkable(total, found, {*shims, *aside}, small)


def too_full(inventory: gpu.Inventory, members: Sequence[Member]) -> tuple[str, bool]:
    """Whether a move has no room for both copies at once: the parked way lets go of the source last.

    Jobs that change places may be moved by the driver all the same, which puts all of it into host memory first.
    Returns what is short, in a sentence, or ""; and whether the driver could not carry it (it came by the parked way).
    """
    wanted: dict[str, int] = {}
    seen: set[int] = set()
    imported = False
    for member in members:
        if member.was != gpu.State.RUNNING or not member.changes_gpu:
            continue
        with contextlib.suppress(LimosaError), Shim.to_look(member.identity) as shim:
            devices = shim.devices()
            for m in shim.memories():
                here = devices[m.device]
                there = member.map.get(here, here)
                if not m.shared and there != here and not (m.share and m.share in seen):
                    seen |= {m.share} if m.share else set()
                    wanted[there] = wanted.get(there, 0) + m.bytes
                    imported |= m.imported
    told = []
    spare = idle.spare(inventory, members)
    for one in inventory.gpus:
        free = max(0, one.memory_free + spare.get(one.uuid, 0) - claims.reserved(one.uuid, most=one.memory_total))
        if (coming := wanted.get(one.uuid, 0)) > free:
            left, size = two(free, coming)
            told.append(f"GPU {one.index} has {left} free, and {size} come before anything leaves")
    return "; ".join(told), imported


def _aside(members: Sequence[Member]) -> dict[int, list[Memory]]:
    """The memory of those that are suspended, by pid, where it is aside: their shims tell it without the driver."""
    found = {}
    for member in members:
        if member.was != gpu.State.RUNNING:
            with contextlib.suppress(LimosaError), Shim.to_look(member.identity) as shim:
                if shim.hello().stand is Stand.AWAY:
                    found[member.pid] = shim.memories()
    return found


def _given_up(member: Member, *, refused: bool) -> list[Reason]:
    """A process whose checkpoint has failed once: the driver answers UNKNOWN to every later one (measured)."""
    if not refused:
        return []
    text = (
        f"another tool has tried to checkpoint process {member.pid} after it was moved: the driver could not have "
        "brought it back, so the library let that fail; the job runs on, and the driver checkpoints it no more"
    )
    hint = "let it write its own checkpoint and start it again; limosa suspend --release=memory-only works"
    return [Reason(id="given-up", text=text, exit_code=13, hint=hint, pid=member.pid)]


def _multicast(member: Member, called: Sequence[Called]) -> list[Reason]:
    """A process with NVLink multicast, or that had it: whether the driver has forgotten it nobody was seen to try.

    Every process that takes part adds its GPU to the object, whoever made it.
    """
    if not any(one.called and one.name == "cuMulticastAddDevice" for one in called):
        return []
    text = (
        f"process {member.pid} has used NVLink multicast (NCCL's NVLS, PyTorch's symmetric memory): "
        "the driver cannot checkpoint its memory, and may hang"
    )
    hint = "start it with NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1; --force it if you can lose it"
    return [Reason(id="multicast", text=text, exit_code=13, hint=hint, pid=member.pid, forceable=True)]


def _left_to_others(member: Member, counts: Mapping[str, tuple[int, int]], pieces: Sequence[Memory]) -> list[Reason]:
    """What the shim knows of memory of others, or for others, that the driver could not bring back."""
    found = []
    if counts["ipc"][0]:
        text = f"process {member.pid} shares small allocations, or pools, by CUDA IPC: the driver could not restore it"
        found.append(Reason(id="cuda-ipc", text=text, exit_code=13, pid=member.pid))
    if any(m.owner < 0 for m in pieces):
        text = f"process {member.pid} has imported memory by a descriptor: the driver could not restore it"
        hint = "end what shares its memory first; what NCCL shares goes, where all ranks are started by limosa run"
        found.append(Reason(id="imported-memory", text=text, exit_code=13, hint=hint, pid=member.pid))
    return found

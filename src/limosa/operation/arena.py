"""The arena: how large it may be, its state, and making it ready before it is needed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping

import msgspec

from limosa import gpu
from limosa.errors import GpuUnavailable, LimosaError, NoRoomOnHost, Reason, UsageError
from limosa.ipc.packet import hang_up, peer
from limosa.operation import drivers
from limosa.operation.jobs import user_name
from limosa.parking.mover import Mover
from limosa.parking.resident import look_for, residents
from limosa.parking.segments import SMALL
from limosa.parking.vault import Vault, no_room
from limosa.process.cgroups import memory_levels_of, tightest
from limosa.process.identity import Identity
from limosa.process.limits import many_descriptors
from limosa.process.memory import grow_host_memory, host_memory, two

KEEP_SECONDS = 3600.0
"""How long an arena that was asked for is kept, by default."""
GIVE_BACK_SECONDS = 5.0
"""How long the mover may take to let go of what was given back: it looks every other second."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def arena_cap() -> int:
    """The arena's largest size in bytes: ``LIMOSA_ARENA_MAX`` ("64G"; UsageError), else as host memory lets it."""
    text = os.environ.get("LIMOSA_ARENA_MAX", "").strip()
    if not text:
        return 1 << 62
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(detail=f"LIMOSA_ARENA_MAX={text!r} is not a size (64G)")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


class Arena(msgspec.Struct, kw_only=True):
    """What there is of a user's arena."""

    user: str = ""  # whose it is, where that is not the caller
    used: int = 0  # bytes of segments that hold a suspended job's memory, or are just being filled
    held_by: dict[int, int] = {}  # those bytes by the pid of the process whose memory it is
    free: int = 0  # bytes of segments that are kept for the next
    pinned: int = 0  # bytes that are pinned: copied at the speed of the bus
    reserved: int = 0  # bytes that were asked to be there
    seconds: float = 0.0  # for how long they are kept
    cap: int | None = None  # how large it may be, in bytes; None: as large as host memory lets it
    vault: int = 0  # the process that holds it, or 0
    mover: int = 0  # the process that pins it, or 0
    mover_memory: dict[str, int] = {}  # device memory of the mover's contexts, by GPU UUID
    # seconds until the mover ends by itself; None while it is in use, or is not there
    mover_ends_in: float | None = None
    others: list[Arena] = []  # for root, those of other users


def arena(bytes_: int | None = None, *, keep: float = KEEP_SECONDS, end: bool = False) -> Arena:
    """Shows the caller's arena; has it made and pinned, or given back.

    ``bytes_``: how large it is to be, used and free together, for ``keep`` seconds from now on; None: as it is; 0: what
    nobody uses is given back. ``end``: that, and the mover, and workers of the driver that wait for a command, end as
    soon as nobody needs them. Raises NoRoomOnHost (it may not be so large, or host memory has no room), GpuUnavailable
    (nothing can be pinned), FailedUndone (vault or mover do not answer).
    """
    if end:
        bytes_ = 0
    if bytes_ is not None and (bytes_ > 0 or look_for("vault", os.geteuid()) is not None):
        _reserve(bytes_, keep)
    if bytes_ is not None:
        _wait_for_mover(end=end)
    if end:
        drivers.end_waiting()
    found = shown(os.geteuid())
    for uid in owners() if os.geteuid() == 0 and bytes_ is None else ():
        if uid != 0:
            found.others.append(shown(uid))
            found.others[-1].user = user_name(uid)
    return found


def _wait_for_mover(*, end: bool) -> None:
    """Has the mover end, or waits until it has let go of what was given back: only then the memory is free."""
    found = look_for("mover", os.geteuid())
    if found is None:
        return
    limit = time.monotonic() + GIVE_BACK_SECONDS
    with Mover(found=found) as mover:
        if end:
            mover.end()
        while not end and time.monotonic() < limit:
            there = shown(os.geteuid())
            if mover.pinned() <= there.used + there.free:
                break
            time.sleep(0.1)
    while end and time.monotonic() < limit and found.identity.alive():
        time.sleep(0.02)


@many_descriptors()
def _reserve(bytes_: int, keep: float) -> None:
    bytes_ = -(-bytes_ // SMALL) * SMALL
    inventory = gpu.inventory() if bytes_ else None
    if inventory is not None and not inventory.gpus:
        raise GpuUnavailable(detail="there is no GPU here")
    with Vault() as vault:
        said = vault.arena()
        short = host_room(max(0, bytes_ - said.used - said.free))
        if short:
            raise NoRoomOnHost(detail=short, hint="end something that uses host memory, or ask for less")
        fds = vault.reserve(bytes_, keep, arena_cap())
        try:
            if fds and inventory is not None:
                best = max(inventory.gpus, key=lambda g: g.memory_free)
                with Mover() as mover:
                    mover.prepare([best.uuid])
                    mover.warm(fds, sum(os.fstat(fd).st_size for fd in fds), best.uuid, keep)
        finally:
            for fd in fds:
                os.close(fd)


def host_room(fresh: int, uid: int | None = None) -> str:
    """Why the arena cannot grow by so many bytes, in a sentence; "" where it can.

    It is the mover that touches the memory: its memory cgroup counts, which is that of whoever started it.
    """
    if fresh <= 0:
        return ""
    found = look_for("mover", os.geteuid() if uid is None else uid)
    pid = found.identity.pid if found is not None else os.getpid()
    if found is not None:
        hang_up(found.connection)
    with contextlib.suppress(OSError):
        level = tightest(memory_levels_of(pid))
        if level.room is not None and level.room < fresh:
            left, needed = two(level.room, fresh)
            return f"the memory cgroup {level.path} has {left} left, and the arena needs {needed} more"
    available = host_memory()[1]
    if available < fresh:
        available = grow_host_memory(fresh)
    if available < fresh:
        left, needed = two(available, fresh)
        return f"the machine has {left} of host memory available, and the arena needs {needed} more"
    return ""


def refusals(wanted: Mapping[int, int]) -> list[Reason]:
    """What stands against so many bytes of arena, by the owner of what goes there."""
    found = []
    cap = arena_cap()
    for uid, size in wanted.items():
        there = _held(uid)
        if there.used + size > cap:
            error = no_room(size, there.used, cap)
            found.append(Reason(id="arena", text=error.message, exit_code=15, hint=error.hint))
            continue
        short = host_room(size - there.free, uid)
        if short:
            hint = "end something that uses host memory, or suspend fewer jobs at a time"
            found.append(Reason(id="host-memory", text=short, exit_code=15, hint=hint, forceable=True))
    return found


def shown(uid: int) -> Arena:
    """What there is of a user's arena, and who looks after it; starts nothing."""
    found = _held(uid)
    with contextlib.suppress(LimosaError):
        one = look_for("mover", uid, replaces=False)
        if one is not None:
            with Mover(uid, found=one) as mover:
                found.pinned = mover.pinned()
            found.mover, found.mover_ends_in = one.identity.pid, one.said.ends_in
            found.mover_memory = gpu.inventory().held({one.identity.pid})
    return found


def _held(uid: int) -> Arena:
    """What there is of a user's arena, as the vault says."""
    cap = arena_cap()
    found = Arena(cap=None if cap == 1 << 62 else cap)
    with contextlib.suppress(LimosaError):
        one = look_for("vault", uid, replaces=False)
        if one is not None:
            with Vault(uid, found=one) as vault:
                said = vault.arena()
            found.vault = one.identity.pid
            found.used, found.free = said.used, said.free
            found.reserved, found.seconds = said.reserved, said.seconds
            found.held_by = {Identity.from_str(key.rpartition("/")[2]).pid: n for key, n in said.by.items()}
    return found


def owners() -> list[int]:
    """The users of whom a vault or a mover is there that the caller may talk to."""
    found = set()
    for kind in ("vault", "mover"):
        for one in residents(kind):
            found.add(peer(one.connection)[1])
            hang_up(one.connection)
    return sorted(found)

"""Memory that is away when its process cannot go home: the GPU was filled meanwhile (41).

The driver leaves such a process suspended. What the shim looks after still lies on the GPU, held by vault and mover; it
goes into an arena in host memory, as after a suspend, so that ``resume`` finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from limosa import gpu
from limosa.errors import CannotBeMoved, FailedUndone, LimosaError
from limosa.ipc.packet import Given, close_all
from limosa.operation.arena import arena_cap
from limosa.operation.journal import Member
from limosa.operation.parked.aside import Layout, Placed, laid_out, read_layout
from limosa.operation.parked.holders import Held, aside_key
from limosa.operation.parked.pieces import copy_limit
from limosa.parking.mover import Mover
from limosa.parking.residents import Residents
from limosa.parking.segments import is_segment, layout_file
from limosa.parking.shim import Shim
from limosa.process.identity import Identity
from limosa.process.records import SuspendRecord


def strand(
    member: Member, shim: Shim, pieces: Sequence[Held], fds: Sequence[int], *, away: bool, operation: str
) -> None:
    """Puts a suspended process's memory into an arena that vault and process hold, and notes it as suspended with it.

    The driver's half is checkpointed; ``away``: on its destination. ``operation`` is the id of the one that it is of.
    Raises FailedUndone: no GPU has room for a context that could copy.
    """
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].gpu, pieces[i].id))
    layout, offset = laid_out(pieces[i] for i in order)
    with contextlib.closing(Residents()) as residents, Given() as held:
        held.add(Given(residents.segments(shim.owner, aside_key(member), offset, arena_cap())))
        _copy_out(shim.owner, [(pieces[i], fds[i]) for i in order], held.fds)
        held.add(Given([layout_file(msgspec.json.encode(Layout(layout, shim.saw(), operation)))]))
        residents.put(shim.owner, aside_key(member), held.fds, mover=False)
        shim.keep(held.fds)
    _note(member, layout, member.map if away else {})


def _note(member: Member, layout: Sequence[Placed], there: Mapping[str, str]) -> None:
    """What a resume needs room for: what the driver saved, and what lies in the arena."""
    record = SuspendRecord.of(Identity.of(member.root or member.pid))
    if record is None:
        return
    held = record.held.setdefault(str(member.pid), {})
    for placed in layout:
        uuid = there.get(placed.gpu, placed.gpu)
        held[uuid] = held.get(uuid, 0) + placed.bytes
        record.bytes[uuid] = record.bytes.get(uuid, 0) + placed.bytes
    record.save()


def _copy_out(owner: int, pieces: Sequence[tuple[Held, int]], arena: Sequence[int]) -> None:
    """Copies by any GPU that has room for a context: the one that the memory is on is full."""
    errors = []
    sizes, fds = [piece.bytes for piece, _ in pieces], [fd for _, fd in pieces]
    total = sum(sizes)
    inventory = gpu.inventory()
    for one in sorted(inventory.gpus, key=lambda g: -g.memory_free):
        try:
            with Mover(owner) as mover:  # the one before may have died of the try
                mover.take("stranded", fds, sizes, one.uuid)
                mover.hold("stranded/arena", arena, total, one.uuid, pin=False)
                mover.host("out", [("stranded", "stranded/arena", 0, one.uuid)], copy_limit(total))
                mover.drop("stranded")
                mover.drop("stranded/arena")
            return
        except (LimosaError, OSError, EOFError) as error:
            errors.append(f"GPU {one.index}: {error}")
    raise FailedUndone(f"its memory cannot be copied into host memory: {'; '.join(errors)}")


def has_arena(shim: Shim, operation: str = "") -> bool:
    """Whether its memory lies in an arena that this operation ("": any) has filled, by what it holds itself."""
    fds = shim.kept()
    try:
        layouts = [read_layout(fd) for fd in fds if not is_segment(fd)]
    except CannotBeMoved:
        return False
    finally:
        close_all(fds)
    return len(layouts) == 1 and operation in ("", layouts[0].operation)


def let_arena_go(member: Member, shim: Shim) -> None:
    """Its memory is where it belongs: nobody needs its arena."""
    shim.keep()
    with contextlib.closing(Residents()) as residents:
        residents.drop(shim.owner, aside_key(member))

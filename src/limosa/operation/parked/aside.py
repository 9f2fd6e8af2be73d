"""Suspended by the parked way: device memory in host memory that the job itself and the vault hold.

The memory of each process goes into segments of the *arena* (``parking/segments.py``) that are its own meanwhile: its
pieces in the order of the process's GPUs and of their ids; a small sealed file says which is where. They are pinned
before the pause, or have been before, and filled at the speed of the bus while the driver checkpoints what is left; a
resume reads them back, on any GPU of that chip.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import msgspec

from limosa.errors import CannotBeMoved, LimosaError, Reason
from limosa.gpu import Inventory, State
from limosa.ipc.messages import Count, Word, Words
from limosa.ipc.sealed import is_sealed
from limosa.operation.arena import refusals
from limosa.operation.journal import Member, added_up
from limosa.operation.parked.calls import together
from limosa.operation.parked.gates import closed_reason
from limosa.operation.parked.holders import Held, aside_key
from limosa.operation.parked.pieces import copy_limit
from limosa.operation.step import Verb
from limosa.operation.work import Work
from limosa.parking.answers import MOST_BYTES
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.segments import LARGE, is_segment, room_for
from limosa.parking.shim import MOST_PIECES, Shim, under_shim
from limosa.structs import ready
from limosa.terms import Release

_MOST_LAYOUT = 32 << 20


class Placed(msgspec.Struct, frozen=True):
    """Where a piece of memory is in an arena, and on which GPU it was."""

    id: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Annotated[int, msgspec.Meta(gt=0, le=MOST_BYTES)]
    gpu: Word
    offset: Count


class Layout(msgspec.Struct, frozen=True):
    """What is where in an arena.

    Attributes:
        pieces: in their order.
        saw: the GPUs that the process saw when it initialised the driver: of others it cannot import memory. Where that
            is not known there is none: it makes its memory itself then, which always works.
        operation: the id of the operation that filled it: another one's has what the process held at another time.
    """

    pieces: Annotated[list[Placed], msgspec.Meta(max_length=MOST_PIECES)]
    saw: Words = []
    operation: Word = ""


def laid_out(pieces: Iterable[Held]) -> tuple[list[Placed], int]:
    """Where each of these pieces is in an arena, one after the other, and the bytes of all."""
    found, end = list[Placed](), 0
    for piece in pieces:
        found.append(Placed(piece.id, piece.bytes, piece.gpu, end))
        end += piece.bytes
    return found, end


def read_layout(fd: int) -> Layout:
    """What is where in an arena. Raises CannotBeMoved: it says nothing that can be read."""
    try:
        if not is_sealed(fd):
            raise CannotBeMoved(detail="the arena of the suspended job cannot be read (it may change)")
        size = os.fstat(fd).st_size
        if size > _MOST_LAYOUT:
            raise CannotBeMoved(detail=f"the arena of the suspended job cannot be read ({size} bytes of what is where)")
        return msgspec.json.decode(os.pread(fd, size, 0), type=ready(Layout))
    except (msgspec.MsgspecError, OSError) as error:
        raise CannotBeMoved(detail=f"the arena of the suspended job cannot be read ({error})") from error


class InArena(msgspec.Struct):
    """What goes into an arena, or lies in one."""

    bytes: dict[int, int] = {}  # by pid, what a suspend puts there
    reasons: list[Reason] = []  # what stands against that


def ask(verb: Verb, members: Sequence[Member], release: Release) -> InArena:
    """What stands against an operation where memory goes into the arena, or is there.

    Of members whose memory alone is suspended ``away`` and ``held`` are filled in.
    """
    going: dict[int, int] = {}
    wanted: dict[int, int] = {}
    found: list[Reason] = []
    for member in members:
        if member.was != State.RUNNING:
            continue
        try:
            with Shim.to_look(member.identity) as shim:
                stand, devices, pieces = shim.hello().stand, shim.devices(), shim.memories()
        except LimosaError:
            continue
        pieces = [m for m in pieces if not m.shared]
        if stand is Stand.AWAY:
            member.away = True
            member.held = added_up({devices[m.device]: m.bytes} for m in pieces)
        elif verb.sets_aside and pieces:
            going[member.pid] = sum(m.bytes for m in pieces)
            wanted[shim.owner] = wanted.get(shim.owner, 0) + room_for(going[member.pid])
        if stand is Stand.CLOSED:  # the driver alone would do it all, and leave it standing
            found.append(closed_reason(member.pid))
    if verb.sets_aside:
        found += _into_arena(members, going, release)
        found += refusals(wanted)
    else:
        found += _out_of_arena(members, verb)
    return InArena(going, found)


def _out_of_arena(members: Sequence[Member], verb: Verb) -> list[Reason]:
    """What stands against a verb of which a suspended memory is to come back, or is in the way."""
    away = [m for m in members if m.away]
    if away and not verb.takes_back:
        return [parked_reason(away)]
    if any(m.changes_gpu for m in away):
        text = f"only the memory of process {away[0].pid} is suspended: its context is where it was"
        hint = f"limosa resume {away[0].root or away[0].pid}, then limosa move"
        return [Reason(id="context-stays", text=text, exit_code=13, hint=hint, pid=away[0].pid)]
    return []


def _into_arena(members: Sequence[Member], going: Mapping[int, int], release: Release) -> list[Reason]:
    """What stands against a suspend: it cannot be suspended further, or there is nothing that could go alone."""
    away, awake = [m for m in members if m.away], [m for m in members if m.was == State.RUNNING and not m.away]
    hint = "limosa suspend, without --release"
    if release != Release.MEMORY_ONLY:
        return [parked_reason(away)] if away else []
    if awake and not going and not away:
        text = "it has no memory that could be given back alone: that needs a job started by limosa run"
        text += ", without --no-shim"
        return [Reason(id="no-shim", text=text, exit_code=13, hint=hint)]
    text = "process {} has no memory that could be given back alone, and would run on"
    return [
        Reason(id="runs-on", text=text.format(m.pid), exit_code=13, hint=hint, pid=m.pid, forceable=True)
        for m in awake
        if m.pid not in going
    ]


def parked_reason(away: Sequence[Member]) -> Reason:
    """The refusal for a job of which the memory alone is suspended."""
    text = f"the memory of process {away[0].pid} is suspended, its context is not"
    hint = f"limosa resume {away[0].root or away[0].pid}, then this again"
    return Reason(id="suspended-memory", text=text, exit_code=13, hint=hint, pid=away[0].pid)


def aside_shims(members: Sequence[Member]) -> list[tuple[Member, Shim]]:
    """Connects to the suspended members whose memory is in an arena; the caller closes them."""
    found: list[tuple[Member, Shim]] = []
    for member in members:
        try:
            shim = Shim(member.identity)
        except LimosaError as error:
            if under_shim(member.pid):  # resumed by the driver alone it would stand at its gate for ever
                raise CannotBeMoved(detail=f"the shim of process {member.pid} does not answer ({error})") from error
            continue
        if shim.hello().stand is Stand.AWAY:
            found.append((member, shim))
        else:
            shim.close()
    return found


Copy = tuple[str, str, int, str]
"""What is copied: its key, the arena's key, where in it, the GPU."""


def shut_to_movers(inventory: Inventory, members: Sequence[Member]) -> list[Reason]:
    """A refusal where a GPU that memory is to go to lets one process only have a context: the mover needs one, too."""
    found = []
    by_uuid = inventory.by_uuid()
    for uuid in sorted({m.map.get(u, u) for m in members if under_shim(m.pid) for u in m.held}):
        there = by_uuid.get(uuid)
        if there is not None and there.compute_mode != "default":
            text = f"GPU {there.index} is in compute mode {there.compute_mode}: "
            text += "the mover, which copies the job's memory, could have no context beside it"
            hint = f"nvidia-smi -i {there.index} -c DEFAULT"
            found.append(Reason(id="exclusive", text=text, exit_code=12, hint=hint))
    return found


def copy_all(
    work: Work,
    residents: Residents,
    way: Literal["out", "in"],
    some: Sequence[tuple[int, Sequence[Copy]]],
    bytes_: int,
) -> None:
    """Copies between GPUs and arenas, what each owner's processes have by his mover, all at once."""
    copies: dict[int, list[Copy]] = {}
    for owner, own in some:
        copies.setdefault(owner, []).extend(own)
    with work.spent("copy"):
        limit, mover = copy_limit(bytes_), residents.mover
        together([partial(mover(owner).host, way, own, limit) for owner, own in copies.items()])


def find_arena(residents: Residents, shim: Shim, keys: Sequence[str]) -> tuple[list[int], bool]:
    """What is held of a suspended process under the first of these keys, or by itself.

    Returns descriptors, which are the caller's to close, none where everybody has said that he holds nothing; and
    whether the process alone has them. Raises FailedUndone: the process has none, and somebody does not say.
    """
    unsaid: LimosaError | None = None
    for key in keys:
        try:
            return residents.get(shim.owner, key)[0], False
        except KeyError:
            pass
        except LimosaError as error:
            unsaid = error
    fds = shim.kept()  # the vault was killed meanwhile
    if not fds and unsaid is not None:
        raise unsaid
    return fds, True


def arena_of(residents: Residents, member: Member, shim: Shim) -> list[int]:
    """What is held of a suspended process, by the vault or by itself; descriptors, which are the caller's to close.

    Raises CannotBeMoved: nobody holds anything; FailedUndone: the process does not, and the vault does not say.
    """
    fds, by_itself = find_arena(residents, shim, [aside_key(member)])
    if not fds and by_itself:
        raise CannotBeMoved(detail=f"nobody has the device memory of the suspended process {member.pid} any more")
    if by_itself:
        residents.put(shim.owner, aside_key(member), fds, mover=False)
    return fds


def parts_of(member: Member, arena: Sequence[int]) -> tuple[list[int], Layout]:
    """The segments among what is held of a suspended process, and what is where in them.

    Raises CannotBeMoved: it is no arena.
    """
    layouts = [fd for fd in arena if not is_segment(fd)]
    if len(layouts) != 1:
        raise CannotBeMoved(detail=f"what is held of the suspended process {member.pid} is no arena")
    segments, layout = [fd for fd in arena if is_segment(fd)], read_layout(layouts[0])
    sizes, end = [os.fstat(fd).st_size for fd in segments], 0
    whole = all(size == LARGE for size in sizes[:-1]) and len({p.id for p in layout.pieces}) == len(layout.pieces)
    for piece in layout.pieces:
        whole = whole and piece.offset == end
        end += piece.bytes
    if not whole or end > sum(sizes):
        raise CannotBeMoved(detail=f"what is held of the suspended process {member.pid} is no arena")
    return segments, layout

"""From the claim until the job stands still: what ``move``, ``suspend`` and ``checkpoint`` have in common.

A job may change between the look and the lock; a locked one cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from limosa import gpu
from limosa.errors import DriverHung, LimosaError, NoRoomOnGpu
from limosa.operation import driver_steps, room
from limosa.operation.journal import Member, Noted
from limosa.operation.members import find_members
from limosa.operation.prepare import Prepared
from limosa.operation.work import Work
from limosa.process import runtime
from limosa.process.candidates import may_use_cuda
from limosa.process.records import SuspendRecord
from limosa.process.tree import job_tree

T = TypeVar("T")
TRIES = 3
"""How often a job is tried that grows while it is being locked."""


class Grew(LimosaError):
    """The job is not what was looked at: a process of it got a CUDA context, or somebody has suspended or moved it."""

    id, exit_code, template = "grew", 19, "the job keeps changing while it is looked at: processes {pids}"


def while_it_grows(once: Callable[[], T]) -> T:
    """Tries anew where the job has changed since it was looked at; each try looks first. The last one raises Grew."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(Grew):
            return once()
    return once()


def refuse_stale(work: Work, prepared: Sequence[Prepared]) -> None:
    """Looks, with the claim and before there is anything to undo, whether somebody worked on it since it was looked at.

    Call it before the driver's undo is registered: that would undo what the other has done. Grew: a process has another
    state, or is suspended on another GPU, than it was planned from.
    """
    for p in prepared:
        record = SuspendRecord.of(p.root)
        for member in p.members:
            try:
                state = driver_steps.settled_state(work.driver, member.pid, work.progress, work.left)
            except DriverHung:
                work.check()
                raise
            suspended = record if member.was == gpu.State.CHECKPOINTED else None
            moved = suspended is not None and suspended.held.get(str(member.pid), {}) != member.held
            if state != member.was or moved:
                raise Grew(pids=str(member.pid))


def refuse_growth(driver: gpu.Driver, prepared: Prepared) -> None:
    """Raises Grew where more processes of the job hold CUDA state than when it was planned.

    Any process that has libcuda mapped is asked, also one that was there before. What has none does not count: a
    DataLoader may start workers at any time.
    """
    known = {m.identity for m in prepared.members}
    others = [i for i in job_tree(prepared.root) if i not in known and may_use_cuda(i.pid)]
    grown = find_members(driver, prepared.root, others, None)[0] if others else []
    if grown:
        raise Grew(pids=", ".join(str(m.pid) for m in grown))


def weigh_again(work: Work, comes: bool, members: Sequence[Member]) -> None:
    """A locked job can allocate nothing more: what it holds now must fit, and be where it was planned from.

    ``comes``: it is to be on other GPUs at its end. Raises Grew (it has changed GPUs) and NoRoomOnGpu (it has grown).
    """
    inventory = work.driver.inventory()
    for member in members:
        if member.was != gpu.State.CHECKPOINTED:
            member.identity.check()  # one that has ended holds nothing, which is no change of GPUs
            held = inventory.held({member.pid})
            if set(held) != set(member.held):
                raise Grew(pids=str(member.pid))
            if work.journal is not None and work.journal.began(Noted.PARK, member.pid):
                held = {uuid: min(size, member.beside.get(uuid, size)) for uuid, size in held.items()}
            member.held = held
    if work.journal is not None:
        work.journal.rewrite_header()
    if comes and work.claim is not None:
        with runtime.lock("claims"):
            work.claim.gpus = room.needs(members)
            work.claim.save()  # before looking, as in ``claims.make``: others look as well
            short = room.shortage(inventory, members, work.id, vacated=room.held_now(members))
            if short:
                raise NoRoomOnGpu(
                    detail=short, hint="somebody, or the mover's own context, has taken room meanwhile: limosa gpus"
                )

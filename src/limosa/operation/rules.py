"""Reasons against a verb: small functions from facts to reasons, and the list of them for each verb, in order.

To add one: write a function, and put its name into the lists of the verbs that it concerns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from limosa.errors import LimosaError, Reason, UsageError
from limosa.gpu import State
from limosa.operation import claims, container_gpus, idle, room
from limosa.operation.communicators import beside
from limosa.operation.facts import Ask, Facts
from limosa.operation.journal import added_up
from limosa.operation.parked import aside
from limosa.operation.refusals import gpu_refusals
from limosa.operation.work import Clock
from limosa.process import device_nodes, hazards, sees_inside
from limosa.process.memory import grow_host_memory
from limosa.terms import Release

Rule: TypeAlias = Callable[[Facts, Ask, Clock], Sequence[Reason]]


def for_every_operation(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """What nobody can work on: not permitted, frozen, traced, somebody else's namespace."""
    return hazards.common_hazards(facts.observation)


def at_work(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """Somebody works on it, or has left it in the middle."""
    return [busy(facts.claim)] if facts.claim is not None else []


def states_told(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """The driver does not tell the state of a process, or tells one with which nothing can be done."""
    return facts.unasked


def a_place_to_be(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """Where it is, or is to go, makes no sense."""
    return [*facts.unknown, *([as_reason(facts.nowhere)] if facts.nowhere is not None else [])]


def what_it_sees(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """It is to go to another GPU, and what it sees is somebody else's to change."""
    for member in facts.members:
        whose = device_nodes.owner(member.sees)
        if member.sees and member.changes_gpu and os.geteuid() not in (0, whose):
            text = f"which GPUs process {member.pid} sees is for uid {whose} to change"
            return [Reason(id="permission", text=text, exit_code=11, hint="do it as that user or as root")]
        if (
            member.sees_inside
            and member.changes_gpu
            and (why := sees_inside.refusal(member.identity, member.sees_inside))
        ):
            text = f"which GPUs process {member.pid} sees is in {member.sees_inside} of its container: {why}"
            hint = "start it there without limosa run --gpus"
            return [Reason(id="sees-inside", text=text, exit_code=13, hint=hint, pid=member.pid)]
    return []


def gpus_of_containers(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """It is to go to a GPU that its container does not have."""
    if facts.inventory is None or facts.nowhere is not None or not ask.verb.comes:
        return []
    return container_gpus.reasons(facts.members, facts.tree, facts.inventory)


def what_shims_say(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """Memory of which the library in the job knows that the driver could not bring it back."""
    by_driver = ask.verb.goes and ask.release == Release.ALL  # else the driver checkpoints nothing
    found = [r for r in facts.parked.reasons if by_driver or r.id not in ("given-up", "multicast")]
    # What NCCL shares between ranks goes with their communicators; it is looked for again when those are closed.
    return [r for r in found if r.id not in ("cuda-ipc", "imported-memory") or r.pid not in facts.comms.pids]


def communicators(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """What keeps communicators between its processes from being closed and made again."""
    return facts.comms.reasons if ask.verb.goes else []


def ranks_beside(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """Ranks of another job are on the GPUs that its ranks are to be on."""
    stays_away = not ask.verb.comes and not ask.leave_running
    if stays_away or not facts.comms.ranks or facts.inventory is None or facts.nowhere is not None:
        return []
    return beside.in_the_way(facts.inventory, facts.members)


def ranks_to_come(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """Its ranks are to change GPUs, and some have not begun to use one: they would, on the one that they were told."""
    if not ask.verb.comes or not any(m.changes_gpu for m in facts.members):
        return []
    late = hazards.late_ranks(facts.observation, {m.pid for m in facts.members})
    if not late:
        return []
    names = ", ".join(f"{p.title} (rank {p.env['RANK']})" for p in late[:5])
    return [to_come(f"{names} has", late[0].pid, "try again when all ranks compute")]


def to_come(who_has: str, pid: int, hint: str) -> Reason:
    """Return the reason: of whom it is said, and what could be done."""
    text = f"{who_has} not begun to use a GPU: it would, on the one that it was told, with the others moved elsewhere"
    hint += "; --force=rank-to-come if it never uses one"
    return Reason(id="rank-to-come", text=text, exit_code=13, hint=hint, pid=pid, forceable=True)


def arenas(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """What goes into an arena, or lies in one."""
    return facts.arena.reasons


def one_context_only(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """A GPU that memory is to go to lets one process have a context: the mover could not copy there."""
    if facts.inventory is None or facts.nowhere is not None or (ask.verb.goes and not facts.parked_bytes):
        return []
    return aside.shut_to_movers(facts.inventory, facts.members)


def gpus_and_driver(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """What NVML says of GPUs and driver."""
    if facts.inventory is None or facts.nowhere is not None:
        return []
    moves = any(m.changes_gpu for m in facts.members)
    return gpu_refusals(facts.inventory, facts.members, moves=moves, small=facts.parked.small)


def seen_from_outside(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """What ``/proc`` shows of what the driver cannot bring back."""
    members, known = facts.members, facts.parked.known
    calm = [*known]  # the shim's gate holds them still
    if not ask.verb.image:  # who is checkpointed has been at risk until now, and is after a resume no more
        calm += [m.pid for m in members if m.was == State.CHECKPOINTED]
    branch = facts.inventory.driver_major if facts.inventory is not None else None
    pids = [m.pid for m in members]
    found = hazards.cuda_hazards(facts.observation, cuda_pids=pids, driver_branch=branch, calm=calm)
    # From outside shared events look like shared memory. The shim knows what is shared.
    found = [r for r in found if r.id != "cuda-ipc" or r.pid not in known]
    # Of ranks under the shim it knows the communicators, unless NCCL is part of the program.
    ranks = {p.pid for p in facts.observation.processes if hazards.is_rank(p)}
    told = {p.pid for p in facts.observation.processes if p.pid in facts.comms.told and hazards.has_nccl(p)}
    if ranks <= told:
        found = [r for r in found if r.id not in ("nccl-ranks", "nccl-peers-unknown")]
    # Its shim was told to leave them alone.
    hint = "its library was told to leave NCCL alone (limosa run --without ranks): start it without that"
    silent = known - facts.comms.told
    found = [
        msgspec.structs.replace(r, hint=hint) if r.id.startswith("nccl-") and r.pid in silent else r for r in found
    ]
    # What an adapter knew of memory was lost when that was taken away: there is nothing left to keep by refusing.
    return [r for r in found if r.id != "rdma" or ask.verb.goes]


def host_memory(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """There is no host memory for what the driver saves."""
    grow = partial(grow_host_memory, stop=clock.stop_asked)
    found = hazards.memory_hazards(facts.observation, by_driver(facts, ask), probe=ask.probe_memory, grow=grow)
    clock.check()
    return found


def by_driver(facts: Facts, ask: Ask) -> dict[int, int]:
    """By pid, the bytes that the driver saves in host memory."""
    needed = all_by_driver(facts)
    if ask.release == Release.MEMORY_ONLY:
        return dict.fromkeys(needed, 0)
    if ask.verb.image:  # what goes into the image as chunks does not go by the job's host memory
        return {m.pid: sum((m.held | m.beside).values()) for m in facts.members if m.pid in needed}
    elsewhere = facts.arena.bytes
    if ask.verb.comes:  # goes from GPU to GPU
        elsewhere = {m.pid: facts.parked.bytes.get(m.pid, 0) for m in facts.members if m.changes_gpu}
    return {pid: size - elsewhere.get(pid, 0) for pid, size in needed.items()}


def all_by_driver(facts: Facts) -> dict[int, int]:
    """The same, where the driver carries everything."""
    return {m.pid: m.bytes for m in facts.members if m.was != State.CHECKPOINTED and not m.away}


def driver_fits(facts: Facts, ask: Ask) -> bool:
    """Whether host memory would take what the shim looks after as well."""
    needed = all_by_driver(facts)
    return by_driver(facts, ask) == needed or not hazards.memory_hazards(facts.observation, needed)


def room_there(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """There is no room where it goes."""
    if not ask.check_room or facts.inventory is None:
        return []
    vacated = added_up([room.held_now(facts.members), ask.freed])
    short = idle.shortage_seen(facts.inventory, facts.members, vacated)
    hint = "make room there (limosa ps shows who holds it), or choose another GPU"
    return [Reason(id="gpu-room", text=short, exit_code=14, hint=hint)] if short else []


def a_way_back(facts: Facts, ask: Ask, clock: Clock) -> Sequence[Reason]:
    """It could not come back to where it is."""
    short = room.no_way_back(facts.inventory, facts.members) if facts.inventory is not None else ""
    return [Reason(id="gpu-room", text=f"it could not come back: {short}", exit_code=14)] if short else []


ANY: tuple[Rule, ...] = (for_every_operation, at_work, states_told)
"""Of every job."""

_MEMORY: tuple[Rule, ...] = (
    a_place_to_be,
    what_it_sees,
    gpus_of_containers,
    what_shims_say,
    communicators,
    ranks_beside,
    ranks_to_come,
    arenas,
)
_DRIVER: tuple[Rule, ...] = (gpus_and_driver, seen_from_outside)
_LEAVES: tuple[Rule, ...] = (*_MEMORY, *_DRIVER, host_memory, a_way_back)
"""Of a job that leaves its GPUs and goes nowhere else yet."""

WITH_CUDA: dict[str, tuple[Rule, ...]] = {
    "move": (*_MEMORY, one_context_only, *_DRIVER, host_memory, room_there),
    "suspend": _LEAVES,
    "resume": (*_MEMORY, one_context_only, *_DRIVER, room_there),
    "toggle": (),  # it is looked at again, as what it turns out to be
    "checkpoint": _LEAVES,
}
"""Of jobs with CUDA state, by verb; those of images are in ``checkpoint_plan.py`` and ``restore_plan.py``."""


def judge(facts: Facts, ask: Ask, clock: Clock) -> list[Reason]:
    """All that stands against it, in the order of the lists: the first that refuses gives the exit code."""
    if facts.busy:  # what else was seen is what that one does
        return [*at_work(facts, ask, clock), *states_told(facts, ask, clock)]
    rules = (*ANY, *(WITH_CUDA[ask.verb.name] if facts.members else ()))
    found = [reason for rule in rules for reason in rule(facts, ask, clock)]
    found += ask.more(facts.observation, facts.members)
    if facts.claim is None and (begun := claims.on(facts.tree)) is not None:  # since it was looked at
        facts.claim = begun
        found.append(busy(begun))
        if facts.busy:
            return [busy(begun), *states_told(facts, ask, clock)]
    return apply_force(found, ask.force)


def busy(claim: claims.Claim) -> Reason:
    """The reason where another operation, living or dead, has its hands on one of these processes."""
    if claim.alive:
        text = f"{claim.operation} by process {claim.holder.pid} works on this job"
        return Reason(id="busy", text=text, exit_code=19, hint="wait for it")
    text = f"this job is in the middle of a {claim.operation} that died"
    return Reason(id="busy", text=text, exit_code=19, hint="limosa recover")


def apply_force(reasons: Sequence[Reason], force: Collection[str]) -> list[Reason]:
    """Turns the named refusals into warnings; UsageError: one cannot be forced."""
    result = []
    for reason in reasons:
        if reason.refuses and reason.id in force:
            if not reason.forceable:
                raise UsageError(detail=f"--force={reason.id}: this cannot be forced: {reason.text}")
            result.append(reason.as_warning())
        else:
            result.append(reason)
    return result


def as_reason(error: LimosaError) -> Reason:
    """An error as a refusal."""
    return Reason(id=error.id, text=error.message, exit_code=error.exit_code, hint=error.hint)

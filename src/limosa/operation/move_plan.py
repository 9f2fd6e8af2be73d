"""What stands against ``move``, ``suspend``, ``resume`` and ``toggle``, and what they will do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from limosa import gpu
from limosa.errors import PauseTooLong, Reason
from limosa.operation import estimate
from limosa.operation.holding import TRIES
from limosa.operation.jobs import Job
from limosa.operation.journal import Member
from limosa.operation.parked.gates import any_shut
from limosa.operation.parked.parkable import too_full
from limosa.operation.prepare import Prepared, Where, apply_force, look
from limosa.operation.work import Clock


def look_at(
    verb: str,
    which: Job,
    driver: gpu.Driver,
    where: Where,
    *,
    force: Collection[str],
    max_pause: float | None = None,
    check_room: bool = True,
    freed: Mapping[str, int] | None = None,
    clock: Clock | None = None,
    release: str = "all",
) -> Prepared:
    """Plans one verb for one job.

    Args:
        verb: "move", "suspend", "resume" or "toggle".
        which: the job.
        driver: asked for states.
        where: where it is to go.
        force: ids of reasons that become warnings.
        max_pause: seconds.
        check_room: False for a swap, where room is looked at for both together.
        freed: bytes by GPU UUID that jobs planned before this one will have freed (negative: taken).
        clock: how long it may take.
        release: what a suspend is to give back: "all" or "memory-only".
    """
    common: dict[str, Any] = {"where": where, "force": force, "check_room": check_room, "freed": freed, "clock": clock}
    prepared = look(verb, which, driver=driver, release=release, **common)
    if verb == "toggle":
        prepared = _either(prepared, lambda chosen: look(chosen, which, driver=driver, **common))
    if verb == "move" and not prepared.busy and any_shut(prepared.members) and not _unasked(prepared):
        if prepared.states == {"checkpointed"} and check_room:
            prepared = look("resume", which, driver=driver, **common)
        else:
            prepared.reasons.append(_first_resume(prepared))
    operation = prepared.operation
    if check_room:
        note_full([prepared])
    extra: list[Reason] = []
    if not prepared.members and not prepared.is_refused():
        text = f"process {which.root.pid} and its children hold no CUDA state: nothing to {operation}"
        hint = "limosa checkpoint writes it to disk"
        extra.append(Reason(id="no-cuda-state", text=text, exit_code=13, hint=hint, pid=which.root.pid))
    for member in prepared.members:
        if member.was == "locked":
            text = f"process {member.pid} is locked by somebody; it will be unlocked"
            extra.append(Reason(id="locked", text=text, pid=member.pid))
    cost = estimate.of(operation, prepared.members, parked=prepared.parked, release=release)
    too_long = max_pause is not None and cost.pause_seconds is not None and cost.pause_seconds > max_pause
    if too_long and not is_done(operation, prepared):
        extra.append(pause_reason(cost.pause_seconds or 0.0, max_pause or 0.0))
    prepared.reasons += apply_force(extra, force)
    if is_done(operation, prepared):
        prepared.steps, prepared.done = [], True
        # Nothing will be touched, so nothing can stand against it but not being allowed to look.
        prepared.reasons = [r if r.exit_code in (0, 2, 10, 11, 19) else r.as_warning() for r in prepared.reasons]
    else:
        prepared.steps = steps_of(operation, prepared)
    return prepared


def note_full(planned: Sequence[Prepared]) -> None:
    """Says of moves that there is no room for both copies of their memory at once, and what becomes of them then."""
    first = planned[0]
    if first.operation != "move" or first.inventory is None or not any(p.parked for p in planned):
        return
    short, imported = too_full(first.inventory, [m for p in planned for m in p.members])
    if not short or any(r.id == "gpu-room" for p in planned for r in p.reasons):
        return
    for prepared in planned:
        if imported or not all(p.driver_can for p in planned):
            hint = "limosa suspend, then limosa resume --to or --map: through host memory"
            text = f"the parked way needs room for both copies ({short}), and the driver cannot carry the memory"
            prepared.reasons.append(Reason(id="gpu-room", text=text, exit_code=14, hint=hint))
        else:
            cost = estimate.by_the_driver("move", prepared.members, prepared.parked)
            text = f"the parked way needs room for both copies ({short}): the driver carries the memory, {cost}"
            prepared.reasons.append(Reason(id="driver-way", text=text))
            prepared.parked = 0


def pause_reason(estimated: float, limit: float) -> Reason:
    """``--max-pause`` refuses by estimate."""
    error = PauseTooLong(estimate=estimated, limit=limit)
    return Reason(id=error.id, text=error.message, exit_code=error.exit_code, hint="raise --max-pause")


def _either(prepared: Prepared, again: Callable[[str], Prepared]) -> Prepared:
    """Looks again for what a toggle is to be; once more where that was chosen by what is so no longer, or never was."""
    for _ in range(TRIES):
        if _unasked(prepared):  # which of the two it is must be known, not guessed
            break
        chosen = _toggled(prepared)
        prepared = again(chosen)
        if _toggled(prepared) == chosen:
            break
    return prepared


def _toggled(prepared: Prepared) -> str:
    suspended = prepared.states == {"checkpointed"} or any(m.away for m in prepared.members)
    return "resume" if suspended else "suspend"


def _first_resume(prepared: Prepared) -> Reason:
    """A refusal where what is suspended the parked way would have to come back in the middle of a move of others."""
    text = f"process {prepared.root.pid}, or one of its children, is suspended: its memory is in host memory"
    hint = f"limosa resume {prepared.job.name or prepared.root.pid}, then this again"
    return Reason(id="suspended-memory", text=text, exit_code=13, hint=hint, pid=prepared.root.pid)


def _unasked(prepared: Prepared) -> bool:
    """Whether there is a process whose state the driver does not tell."""
    return any(r.id == "cannot-be-asked" for r in prepared.reasons)


def is_done(operation: str, prepared: Prepared) -> bool:
    """Whether the job is already as the verb wants it."""
    if not prepared.members or _unasked(prepared):
        return False
    away = any(m.away for m in prepared.members)
    if operation == "suspend":
        return prepared.states == {"checkpointed"} or (away and prepared.release != "all")
    if away:
        return False
    if prepared.inventory is None or prepared.nowhere:
        return False  # where it is, or is to be, cannot be told
    if operation == "resume":
        return prepared.states == {"running"} and not any(m.changes_gpu for m in prepared.members)
    return prepared.states == {"running"} and not any(_leaves(m) for m in prepared.members)


def _leaves(member: Member) -> bool:
    return any(member.map.get(u, u) != u for u in member.held)


def steps_of(operation: str, prepared: Prepared) -> list[str]:
    """The steps in words."""
    if (operation == "suspend" and prepared.release != "all") or any(m.away for m in prepared.members):
        away = "host memory → device memory" if operation == "resume" else "device memory → host memory"
        return [f"hold the job still; {away}; its context stays"]
    awake = [m.pid for m in prepared.members if m.was != "checkpointed"]
    pids = ", ".join(str(m.pid) for m in prepared.members)
    steps = []
    if operation in ("move", "suspend") and awake:
        asleep = ", ".join(map(str, awake))
        aside = {
            "move": f"hold {asleep} still; device memory goes from GPU to GPU",
            "suspend": f"hold {asleep} still; device memory goes to pinned host memory",
        }
        what = "what is left" if prepared.by_parking else "device memory"
        steps += [aside[operation]] if prepared.by_parking else []
        steps += [f"lock {asleep}", f"checkpoint {asleep}: {what} to host memory"]
    if operation in ("move", "resume"):
        changed = {a: b for m in prepared.members for a, b in m.map.items() if a != b}
        index = {g.uuid: g.index for g in prepared.inventory.gpus} if prepared.inventory else {}
        told = ", ".join(f"GPU {index.get(a, a)} → GPU {index.get(b, b)}" for a, b in changed.items())
        steps += [f"restore {pids}" + (f" with {told}" if told else ""), f"unlock {pids}"]
        steps += ["device memory is mapped where it was; the job goes on"] if prepared.by_parking else []
    return steps

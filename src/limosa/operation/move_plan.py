"""What speaks against ``move``, ``suspend``, ``resume`` and ``toggle``, and what they will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from limosa import gpu
from limosa.errors import NoSuchProcess, PauseTooLong, Reason
from limosa.operation.facts import Ask
from limosa.operation.holding import TRIES
from limosa.operation.jobs import Job
from limosa.operation.parked.gates import any_shut
from limosa.operation.parked.parkable import too_full
from limosa.operation.prepare import Prepared, look
from limosa.operation.results import Estimate
from limosa.operation.rules import apply_force
from limosa.operation.step import Verb
from limosa.operation.verbs import MOVE, RESUME, SUSPEND, TOGGLE
from limosa.operation.work import Clock
from limosa.process.identity import ending
from limosa.terms import Release


def look_at(
    ask: Ask, which: Job, driver: gpu.Driver, *, max_pause: float | None = None, clock: Clock | None = None
) -> Prepared:
    """Plans ``move``, ``suspend``, ``resume`` or ``toggle`` for one job."""

    def again(verb: Verb) -> Prepared:
        return look(which, msgspec.structs.replace(ask, verb=verb), driver, clock)

    prepared = again(ask.verb)
    if ask.verb is TOGGLE:
        prepared = _either(prepared, again)
    if ask.verb is MOVE and not prepared.busy and any_shut(prepared.members) and not _unasked(prepared):
        if prepared.states == {gpu.State.CHECKPOINTED} and ask.check_room:
            prepared = again(RESUME)
        else:
            prepared.reasons.append(_first_resume(prepared))
    verb, force = prepared.verb, ask.force
    if ask.check_room:
        note_full([prepared])
    extra: list[Reason] = []
    if not prepared.members and not prepared.is_refused():
        if ending(which.root.pid):  # its CUDA state goes first
            raise NoSuchProcess(f"process {which.root.pid} has ended", pid=which.root.pid)
        text = f"process {which.root.pid} and its children hold no CUDA state: nothing to {verb.name}"
        hint = "limosa checkpoint writes it to disk"
        extra.append(Reason(id="no-cuda-state", text=text, exit_code=13, hint=hint, pid=which.root.pid))
    for member in prepared.members:
        if member.was == gpu.State.LOCKED:
            text = f"process {member.pid} is locked by somebody; it will be unlocked"
            extra.append(Reason(id="locked", text=text, pid=member.pid))
    if verb is RESUME and _runs_elsewhere(prepared):
        text = "the job runs, on another GPU: there is nothing to bring back"
        extra.append(Reason(id="not-suspended", text=text, exit_code=13, hint="limosa move", pid=prepared.root.pid))
    prepared.done = is_done(prepared)
    if not prepared.done:
        extra += pause_reasons(verb.estimate(prepared.shape), max_pause)
    prepared.reasons += apply_force(extra, force)
    if prepared.done:
        # Nothing will be touched, so nothing can stand against it but not being allowed to look.
        prepared.reasons = [r if r.exit_code in (0, 2, 10, 11, 19) else r.as_warning() for r in prepared.reasons]
    return prepared


def note_full(planned: Sequence[Prepared]) -> None:
    """Says of moves that there is no room for both copies of their memory at once, and what becomes of them then."""
    first = planned[0]
    if first.verb is not MOVE or first.inventory is None or not any(p.parked for p in planned):
        return
    short, imported = too_full(first.inventory, [m for p in planned for m in p.members])
    if not short or any(r.id == "gpu-room" for p in planned for r in p.reasons):
        return
    for prepared in planned:
        if imported or not all(p.driver_fits for p in planned):
            hint = "limosa suspend, then limosa resume --to or --map: through host memory"
            text = f"the parked way needs room for both copies ({short}), and the driver cannot carry the memory"
            prepared.reasons.append(Reason(id="gpu-room", text=text, exit_code=14, hint=hint))
        else:
            cost = MOVE.by_the_driver(prepared.members, prepared.parked)
            text = f"the parked way needs room for both copies ({short}): the driver carries the memory, {cost}"
            prepared.reasons.append(Reason(id="driver-way", text=text))
            prepared.parked = 0


def pause_reasons(cost: Estimate, limit: float | None) -> list[Reason]:
    """``--max-pause`` refuses by estimate."""
    if limit is None or cost.pause_seconds is None or cost.pause_seconds <= limit:
        return []
    error = PauseTooLong(estimate=cost.pause_seconds, limit=limit)
    return [Reason(id=error.id, text=error.message, exit_code=error.exit_code, hint="raise --max-pause")]


def _either(prepared: Prepared, again: Callable[[Verb], Prepared]) -> Prepared:
    """Looks again for what a toggle is to be; once more where that was chosen by what is so no longer, or never was."""
    for _ in range(TRIES):
        if _unasked(prepared):  # which of the two it is must be known, not guessed
            break
        chosen = _toggled(prepared)
        prepared = again(chosen)
        if _toggled(prepared) is chosen:
            break
    return prepared


def _toggled(prepared: Prepared) -> Verb:
    suspended = prepared.states == {gpu.State.CHECKPOINTED} or any(m.away for m in prepared.members)
    return RESUME if suspended else SUSPEND


def _first_resume(prepared: Prepared) -> Reason:
    """A refusal where what is suspended the parked way would have to come back in the middle of a move of others."""
    text = f"process {prepared.root.pid}, or one of its children, is suspended: its memory is in host memory"
    hint = f"limosa resume {prepared.job.name or prepared.root.pid}, then this again"
    return Reason(id="suspended-memory", text=text, exit_code=13, hint=hint, pid=prepared.root.pid)


def _unasked(prepared: Prepared) -> bool:
    """Whether there is a process whose state the driver does not tell."""
    return any(r.id == "cannot-be-asked" for r in prepared.reasons)


def _runs_elsewhere(prepared: Prepared) -> bool:
    """Whether nothing of it is suspended, and it was asked for on other GPUs than it is on."""
    if prepared.states != {gpu.State.RUNNING} or any(m.away for m in prepared.members):
        return False
    return any(m.changes_gpu for m in prepared.members)


def is_done(prepared: Prepared) -> bool:
    """Whether the job is already as the verb wants it."""
    if not prepared.members or _unasked(prepared):
        return False
    away = any(m.away for m in prepared.members)
    if prepared.verb is SUSPEND:
        return prepared.states == {gpu.State.CHECKPOINTED} or (away and prepared.release != Release.ALL)
    if away:
        return False
    if prepared.inventory is None or prepared.nowhere:
        return False  # where it is, or is to be, cannot be told
    if prepared.verb is RESUME:
        return prepared.states == {gpu.State.RUNNING} and not any(m.changes_gpu for m in prepared.members)
    leaves = any(m.map.get(uuid, uuid) != uuid for m in prepared.members for uuid in m.held)
    return prepared.states == {gpu.State.RUNNING} and not leaves

"""``move``, ``suspend``, ``resume`` and ``toggle``: the verbs that need nothing but the driver.

move: lock → checkpoint → restore(map) → unlock. suspend: its first half. resume: its second half. Several jobs are
done side by side by one worker of the driver, each with a journal, an undo and a result of its own; ``swap`` does two
as one, because neither fits before the other has left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from limosa import gpu
from limosa.errors import InvalidMap, LimosaError, NoRoomOnGpu, NoRoomOnHost, Reason, UsageError, worst
from limosa.operation import drivers, room
from limosa.operation.estimate import device_bytes
from limosa.operation.facts import Ask
from limosa.operation.holding import while_it_grows
from limosa.operation.jobs import Job, JobLike, job, refuse_twice
from limosa.operation.journal import added_up
from limosa.operation.members import Where
from limosa.operation.move_plan import look_at, note_full
from limosa.operation.options import DoingOptions, ReleaseLike, check_names, check_seconds, release_of
from limosa.operation.prepare import Prepared, look
from limosa.operation.results import Outcome, Plan
from limosa.operation.rules import as_reason
from limosa.operation.transfer import result_of, transfer
from limosa.operation.turns import GO, Turn, Turns
from limosa.operation.verbs import MOVE, RESUME, SUSPEND, TOGGLE
from limosa.operation.work import Clock, Work
from limosa.process.identity import Identity, pid_in
from limosa.progress import ProgressFn, silent
from limosa.terms import Verdict

if TYPE_CHECKING:
    from typing_extensions import Unpack

AT_ONCE = 2
"""How many of several jobs are worked on at once: with three and four it took longer, and so did their pauses."""
_LOOK_SECONDS = 0.1
"""How often the main thread wakes to act on a signal: one that comes as it begins to wait does not wake it."""

_SMALL = 1 << 30
"""Bytes of host memory that need not be counted job by job: what the driver saves beside what is parked."""


class _How(NamedTuple):
    """What is asked for, and how it is to be done (:class:`limosa.operation.options.DoingOptions`)."""

    ask: Ask
    max_pause: float | None = None
    dry_run: bool = False
    timeout: float | None = None
    progress: ProgressFn = silent
    cancel: threading.Event | None = None
    driver: gpu.Driver | None = None
    one_by_one: bool = False
    turns: Turns | None = None

    def work(self, started: float) -> Work:
        return Work(
            self.ask.verb.name,
            timeout=self.timeout,
            max_pause=self.max_pause,
            progress=self.progress,
            cancel=self.cancel,
            started=started,
            driver=self.driver,
            turn=Turn(self.turns) if self.turns is not None else None,
        )


def _how(ask: Ask, doing: DoingOptions) -> _How:
    """What is asked for, checked.

    Raises:
        InvalidArgument: a time is none.
        TypeError: there is no such keyword.
    """
    check_names(ask.verb.name, doing, DoingOptions.__annotations__)
    check_seconds(timeout=doing.get("timeout"), max_pause=doing.get("max_pause"))
    return _How(ask, **doing)


def move(
    jobs: JobLike | Sequence[JobLike],
    *,
    to: str | None = None,
    source: str | None = None,
    gpu_map: str | Mapping[str, str] | None = None,
    swap: bool = False,
    force: Collection[str] = (),
    **doing: Unpack[DoingOptions],
) -> list[Outcome]:
    """Moves jobs to other GPUs; they go on where they were, on the new GPU, with the same addresses and data.

    Args:
        jobs: one job or several; with ``swap`` exactly two.
        to: the destination GPU: index, UUID or PCI bus id.
        source: the GPU to clear, where a job is on several.
        gpu_map: instead of ``to``: what changes, "0=1,1=0" or a mapping; completed to the full permutation.
        swap: two jobs change places, also when both GPUs are full.
        force: ids of reasons to treat as warnings.
        **doing: how it is to be done (:class:`limosa.operation.options.DoingOptions`).

    Returns:
        An outcome a job. With several jobs an error is in ``Outcome.error``.

    Raises:
        LimosaError: with one job, whatever kept it from being moved; the exit code says what state it is in.
    """
    how = _how(Ask(verb=MOVE, where=Where(to=to, source=source, gpu_map=gpu_map), force=force), doing)
    if swap:
        if to or source or gpu_map is not None:
            raise InvalidMap(detail="--swap takes no destination and no map")
        return _swap(jobs, how)
    if to is None and gpu_map is None:
        raise UsageError(detail="where to? name a GPU with --to, or a map with --map")
    return _each(jobs, how)


def suspend(
    jobs: JobLike | Sequence[JobLike],
    *,
    release: ReleaseLike = "all",
    force: Collection[str] = (),
    **doing: Unpack[DoingOptions],
) -> list[Outcome]:
    """Puts jobs aside: their device memory goes to host memory, the GPUs are free for others. See :func:`move`.

    Suspending a suspended job succeeds with ``already``.

    With ``release="memory-only"`` the job's context stays on its GPU (some hundred MiB), as does what the shim does not
    look after; giving the memory back and taking it again takes milliseconds, and it is resumed on that GPU only. For
    jobs started by ``limosa run``.
    """
    return _each(jobs, _how(Ask(verb=SUSPEND, release=release_of(release), force=force), doing))


def resume(
    jobs: JobLike | Sequence[JobLike],
    *,
    to: str | None = None,
    source: str | None = None,
    gpu_map: str | Mapping[str, str] | None = None,
    force: Collection[str] = (),
    **doing: Unpack[DoingOptions],
) -> list[Outcome]:
    """Brings suspended jobs back, on their GPU or on another. See :func:`move`.

    Where the memory does not fit nothing is tried and the job stays suspended (14). Resuming a running job succeeds
    with ``already``.
    """
    where = Where(to=to, source=source, gpu_map=gpu_map)
    return _each(jobs, _how(Ask(verb=RESUME, where=where, force=force), doing))


def toggle(
    jobs: JobLike | Sequence[JobLike], *, force: Collection[str] = (), **doing: Unpack[DoingOptions]
) -> list[Outcome]:
    """Suspends running jobs and resumes suspended ones; a tree of which a part runs is suspended. See :func:`move`."""
    return _each(jobs, _how(Ask(verb=TOGGLE, force=force), doing))


def worst_exit_code(outcomes: Sequence[Outcome]) -> int:
    """The exit code for several jobs: 40, else 41, else 1, else the first failure's, else 0."""
    return worst([o.error.exit_code if o.error else (o.plan.exit_code if o.plan else 0) for o in outcomes])


# --- doing ----------------------------------------------------------------------------------------------------


def _each(jobs: JobLike | Sequence[JobLike], how: _How) -> list[Outcome]:
    drivers.check(how.driver)
    single = isinstance(jobs, (int, str, bytes)) or not isinstance(jobs, Sequence)
    likes: Sequence[JobLike] = [jobs] if single else list(jobs)  # type: ignore[list-item, arg-type]

    if not how.dry_run and single:
        return [_one(job(likes[0]), how)]
    if not how.dry_run and len(likes) == 1:
        return [_doing(likes[0], how)]
    _refuse_twice(likes)
    with drivers.using(how.driver) as driver:
        if how.dry_run:
            return _plans(likes, how, driver)
        return _side_by_side(likes, how._replace(driver=driver))


def _refuse_twice(likes: Sequence[JobLike]) -> None:
    """Refuses one job that is named twice. What names no job fails alone, later."""
    jobs = []
    for like in likes:
        with contextlib.suppress(LimosaError):
            jobs.append(job(like))
    refuse_twice(jobs)


def _side_by_side(likes: Sequence[JobLike], how: _How) -> list[Outcome]:
    """Does it to several jobs at once; each looks for itself, is refused for itself and fails alone."""
    cancel = how.cancel or threading.Event()
    how = how._replace(cancel=cancel, turns=Turns())
    at_once = 1 if how.one_by_one else AT_ONCE
    with ThreadPoolExecutor(at_once, thread_name_prefix="limosa-job") as pool:
        begun = [pool.submit(_alone, like, how) for like in likes]
        interrupted: KeyboardInterrupt | None = None
        while not all(one.done() for one in begun):
            try:
                wait(begun, _LOOK_SECONDS)
            except KeyboardInterrupt as error:  # it comes to this thread alone; all that is under way is undone first
                interrupted = error
                cancel.set()
        if interrupted is not None:
            raise interrupted
    outcomes = [one.result() for one in begun]
    if how.ask.verb in (MOVE, RESUME, TOGGLE):
        _once_more(likes, outcomes, how)
    return outcomes


def _once_more(likes: Sequence[JobLike], outcomes: list[Outcome], how: _How) -> None:
    """Tries those again, in turn, that found no room while others had not left yet: as long as any of them gets on."""
    gets_on = any(one.result is not None and not one.result.already for one in outcomes)
    while gets_on:
        gets_on = False
        for n, outcome in enumerate(outcomes):
            if outcome.error is None or outcome.error.exit_code not in (NoRoomOnGpu.exit_code, NoRoomOnHost.exit_code):
                continue
            outcomes[n] = _alone(likes[n], how)
            gets_on = gets_on or outcomes[n].error is None


def _alone(like: JobLike, how: _How) -> Outcome:
    """Does it to one of several jobs; whatever goes wrong is a part of its result, and nobody else's."""
    try:
        return _doing(like, how._replace(progress=_about(like, how.progress)))
    except Exception as error:
        return Outcome(pid=_pid_of(like), error=LimosaError(detail=f"{type(error).__name__}: {error}"))


def _about(like: JobLike, progress: ProgressFn) -> ProgressFn:
    """Says of each message which of several jobs it is about."""
    who = (like.name or str(like.root.pid)) if isinstance(like, Job) else str(_pid_of(like) or like)
    return lambda event: progress(msgspec.structs.replace(event, step=f"{who}: {event.step}"))


def _doing(like: JobLike, how: _How) -> Outcome:
    """Does it to one of a list; its error is a part of the result."""
    pid, name = _pid_of(like), ""
    try:
        which = job(like)
        pid, name = which.root.pid, which.name
        return _one(which, how)
    except LimosaError as error:
        return Outcome(pid=pid, name=name, error=error)


def _plans(likes: Sequence[JobLike], how: _How, driver: gpu.Driver) -> list[Outcome]:
    """Plans all jobs in their order, each knowing what those before it free and take."""
    freed: dict[str, int] = {}
    outcomes = []
    verb = how.ask.verb.name
    for like in likes:
        pid = _pid_of(like)
        try:
            which = job(like)
            pid = which.root.pid
            clock = Clock(verb, timeout=how.timeout, cancel=how.cancel)
            ask = msgspec.structs.replace(how.ask, freed=freed)
            prepared = look_at(ask, which, driver, max_pause=how.max_pause, clock=clock)
        except LimosaError as error:
            refused = Plan(operation=verb, pid=pid, verdict=Verdict.REFUSED, reasons=[as_reason(error)])
            outcomes.append(Outcome(pid=pid, plan=refused))
            continue
        plan = prepared.plan()
        outcomes.append(Outcome(pid=pid, plan=plan))
        if plan.verdict == Verdict.OK and not prepared.done:
            parts = [room.held_now(prepared.members)]
            if prepared.verb.comes:
                parts.append({uuid: -size for uuid, size in room.needs(prepared.members).items()})
            freed = added_up([freed, *parts])
    return outcomes


def _pid_of(like: JobLike) -> int:
    """The pid that was named; 0 for a name that nobody has."""
    if isinstance(like, Job):
        return like.root.pid
    known = getattr(like, "identity", like)
    if isinstance(known, Identity):
        return known.pid
    return (pid_in(known) if isinstance(known, str) else int(known) if isinstance(known, int) else 0) or 0


def _one(which: Job, how: _How) -> Outcome:
    started = time.monotonic()

    def once() -> Outcome:
        with how.work(started) as work:
            work.check()
            with work.timed("plan", "looking"):
                prepared = look_at(how.ask, which, work.driver, max_pause=how.max_pause, clock=work)
                if work.turn is not None and _fills_the_host(prepared):
                    work.take_turn(GO)  # host memory that is free when we look is so until it is used
                    prepared = look_at(how.ask, which, work.driver, max_pause=how.max_pause, clock=work)
                prepared.refuse()
            work.operation = prepared.verb.name
            if not prepared.done:
                transfer(work, [prepared])
            result = result_of(work, prepared, already=prepared.done)
        result.timings = work.timings
        return Outcome(pid=which.root.pid, result=result)

    return while_it_grows(once)


def _fills_the_host(prepared: Prepared) -> bool:
    """Whether the job will need so much host memory that two at once may find less than each has seen."""
    verb = prepared.verb
    beside = 0 if not verb.goes else device_bytes(prepared.members) - (0 if verb.sets_aside else prepared.parked)
    return beside > _SMALL


def _swap(jobs: JobLike | Sequence[JobLike], how: _How) -> list[Outcome]:
    """Two jobs as one operation: both change places, or both are as they were."""
    drivers.check(how.driver)
    likes = list(jobs) if isinstance(jobs, Sequence) and not isinstance(jobs, str) else []
    if len(likes) != 2:
        raise UsageError(detail="--swap takes two jobs")
    _refuse_twice(likes)
    pair = [job(like) for like in likes]
    started = time.monotonic()

    def once() -> list[Outcome]:
        with how.work(started) as work:
            work.check()
            with work.timed("plan", "looking"):
                prepared = _look_at_swap(pair, work, how)
            if how.dry_run:
                return [Outcome(pid=p.root.pid, plan=p.plan()) for p in prepared]
            if (no := next((p for p in prepared if p.is_refused()), None)) is not None:
                return [Outcome(pid=p.root.pid, name=p.job.name, error=p.refusal(no.reasons)) for p in prepared]
            transfer(work, prepared)
            results = [result_of(work, p, of_two=True) for p in prepared]
        for result in results:
            result.timings = dict(work.timings)
        return [Outcome(pid=r.pid, result=r) for r in results]

    try:
        return while_it_grows(once)
    except LimosaError as error:
        return [Outcome(pid=which.root.pid, name=which.name, error=error) for which in pair]


def _look_at_swap(pair: Sequence[Job], work: Work, how: _How) -> list[Prepared]:
    """Plans two jobs changing places: each goes where the other is; room counts what the other leaves."""
    driver, ask = work.driver, msgspec.structs.replace(how.ask, check_room=False)
    first = [look(which, ask, driver, work) for which in pair]
    sides = [{u for m in p.members for u in m.held} for p in first]
    if any(len(side) != 1 for side in sides) or sides[0] == sides[1]:
        error = InvalidMap(detail="--swap needs two jobs, each holding memory on one GPU, not on the same")
        for p in first:
            p.reasons.append(as_reason(error))
        return first
    a, b = next(iter(sides[0])), next(iter(sides[1]))
    change = {a: b, b: a}
    ask = msgspec.structs.replace(ask, where=Where(gpu_map=change))
    prepared = [look_at(ask, which, driver, max_pause=how.max_pause, clock=work) for which in pair]
    inventory = prepared[0].inventory
    members = [m for p in prepared for m in p.members]
    if inventory is not None:
        vacated = room.held_now(members)
        short = room.shortage(inventory, members, "", vacated=vacated)
        if short:
            hint = "make room there (limosa ps shows who holds it)"
            prepared[0].reasons.append(Reason(id="gpu-room", text=short, exit_code=14, hint=hint))
        note_full(prepared)
    return prepared

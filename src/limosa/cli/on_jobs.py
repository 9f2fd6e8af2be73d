"""What ``move``, ``suspend``, ``resume`` and ``toggle`` share: naming jobs, doing it to each, telling of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from limosa.cli import words
from limosa.cli.output import Report, error_object, plain
from limosa.cli.signals import cancelling
from limosa.errors import LimosaError, Reason, UsageError, worst
from limosa.terms import JobState, Route, Verdict

if TYPE_CHECKING:
    from limosa.gpu import Driver
    from limosa.operation.jobs import Job
    from limosa.operation.results import JobResult, Outcome, Plan


class Selection(NamedTuple):
    """Which jobs a command line names: JOB…, ``--gpu GPU`` or ``--all``."""

    jobs: Sequence[str] | None
    gpu: str | None = None
    every: bool = False

    @classmethod
    def of(cls, jobs: Sequence[str], containers: Sequence[str], gpu: str | None, every: bool) -> Selection:
        """What was typed; a container is a JOB by another name."""
        return cls([*(jobs or ()), *(f"container:{name}" for name in containers or ())], gpu, every)

    def resolve(self, driver: Driver) -> list[Job]:
        """The jobs; the driver is asked where no names are given.

        Raises:
            UsageError: none, or in two ways at once.
            NoSuchProcess: one that is not there.
        """
        from limosa.operation import resolve

        return resolve(tuple(self.jobs or ()), on_gpu=self.gpu, everything=self.every, driver=driver)

    @property
    def pid(self) -> int:
        """The pid where it is one job named by its pid, else 0."""
        from limosa.process.identity import pid_in

        one = self.jobs[0] if self.jobs and len(self.jobs) == 1 else ""
        return pid_in(one) or 0


def act(report: Report, verb: str, named: Selection, *, dry_run: bool = False, **options: Any) -> None:
    """Do it to the jobs, or plan it, and print a result for each; the exit code is the worst one's.

    Args:
        report: where the result goes.
        verb: "move", "suspend", "resume" or "toggle".
        named: what to do it to.
        dry_run: only say what would be done.
        **options: as the function of that name in ``limosa.operation`` takes them.
    """
    from limosa.operation.drivers import driver as driver_of

    with driver_of() as driver:
        driver.warm()  # it comes up while the rest is loaded
        _act(report, verb, named, driver, dry_run, options)


def _act(report: Report, verb: str, named: Selection, driver: Driver, dry_run: bool, options: dict[str, Any]) -> None:
    from limosa import operation

    do: dict[str, Callable[..., list[Outcome]]] = {
        "move": operation.move,
        "suspend": operation.suspend,
        "resume": operation.resume,
        "toggle": operation.toggle,
    }
    try:
        jobs = named.resolve(driver)
    except LimosaError as error:
        if not dry_run or error.id == UsageError.id:
            raise
        print_plans(report, [refused(verb, error, pid=named.pid)])
        return
    with cancelling(report) as cancel:
        outcomes = do[verb](jobs, dry_run=dry_run, progress=report.progress, cancel=cancel, driver=driver, **options)
    if dry_run:
        print_plans(report, [_plan_of(verb, o) for o in outcomes])
    else:
        tell(report, verb, outcomes, driver)


def tell(report: Report, verb: str, outcomes: Sequence[Outcome], driver: Driver | None = None) -> None:
    """Print what became of each job."""
    for outcome in outcomes:
        if outcome.result is not None:
            report.warn(*outcome.result.warnings)
        if outcome.error is not None:
            report.warn(*outcome.error.warnings)
    errors = [o.error for o in outcomes if o.error is not None]
    code = worst([int(e.exit_code) for e in errors])
    if len(outcomes) == 1 and errors:
        raise errors[0]
    results = [_entry(verb, o) for o in outcomes]
    value: dict[str, Any] = {"results": results}
    if len(outcomes) == 1:
        value = {**results[0], **value}
    elif errors:
        value["error"] = error_object(next(e for e in errors if e.exit_code == code))
    lines = [_line(o.result, report.verbose, driver) for o in outcomes if o.result is not None]
    report.result(value, "\n".join(lines), exit_code=code)
    told: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:  # what is true of several is said once (two that were to change places)
        if (e := outcome.error) is not None:
            told.setdefault((e.message, e.job_state, e.hint), []).append(outcome)
    for those in told.values():
        names = " and ".join(outcome.name or str(outcome.pid) for outcome in those)
        assert those[0].error is not None
        report.problem(those[0].error, about=f"{'jobs' if len(those) > 1 else 'job'} {names}: ")


def _entry(verb: str, outcome: Outcome) -> dict[str, Any]:
    if outcome.result is not None:
        return dict(plain(outcome.result))
    assert outcome.error is not None
    return {"operation": verb, "pid": outcome.pid, "name": outcome.name, "error": error_object(outcome.error)}


def _line(result: JobResult, verbose: int = 0, driver: Driver | None = None) -> str:
    """One job in a sentence; with ``-v`` which way it took."""
    who = words.job(result.name, result.pid)
    told = {"checkpointed": "suspended", "parked": "suspended (its context stays on the GPU)"}
    state = told.get(result.state, result.state)
    if result.already:
        return f"{who} {_is_so(result, state, driver)} already"
    pause = result.timings.get("pause_seconds")
    how = "brought back in" if _came_back(result) else "stood still for"
    stood = f", {how} {words.seconds(pause)}" if pause is not None and state == JobState.RUNNING else ""
    moved = words.moves(result.map, result.gpus, driver)
    onto = f" ({moved})" if moved else ""
    return f"{who} is {state}{onto}, {words.size(result.bytes)}{stood}{_by(result) if verbose else ''}"


def _came_back(result: JobResult) -> bool:
    """Whether it is the result of a resume."""
    from limosa.operation.verbs import RESUME

    return result.operation == RESUME.name


def _is_so(result: JobResult, state: str, driver: Driver | None = None) -> str:
    """What a job is that nothing had to be done to: where it is asked to be."""
    where = words.places(result.gpus, driver)
    if state != JobState.RUNNING:
        return f"is {state}"
    if _came_back(result):
        return f"runs on {where}" if where else "runs"
    return f"is on {where}" if where else "is there"


def _by(result: JobResult) -> str:
    """Which way it took, and what was estimated for the other."""
    if result.other is None:
        return ""
    other = words.seconds(result.other.pause_seconds or result.other.seconds)
    if result.way == Route.PARKED:
        return f" (parked; by the driver alone {other} were estimated)"
    return f" (by the driver alone; with the library of limosa run {other} were estimated)"


def _plan_of(verb: str, outcome: Outcome) -> Plan:
    if outcome.plan is not None:
        return outcome.plan
    assert outcome.error is not None
    if isinstance(outcome.error, UsageError):
        raise outcome.error
    return refused(verb, outcome.error, pid=outcome.pid)


def refused(verb: str, error: LimosaError, pid: int = 0, name: str = "") -> Plan:
    """A job that cannot even be looked at, as a plan that says so."""
    from limosa.operation.results import Plan

    reasons = getattr(error, "reasons", None) or [
        Reason(id=error.id, text=error.message, exit_code=error.exit_code, hint=error.hint, pid=pid)
    ]
    return Plan(operation=verb, pid=pid, name=name, verdict=Verdict.REFUSED, reasons=list(reasons))


def print_plans(report: Report, plans: Sequence[Plan]) -> None:
    """Print plans: one as itself, several in ``results``; always also in ``results``."""
    entries = [dict(plain(p)) for p in plans]
    value: dict[str, Any] = {"results": entries}
    if len(plans) == 1:
        value = {**entries[0], **value}
    text = "\n".join(_plan_text(p, report.verbose) for p in plans)
    report.result(value, text, exit_code=worst([p.exit_code for p in plans]))


def _plan_text(plan: Plan, verbose: int = 0) -> str:
    who = f" of {words.job(plan.name, plan.pid)}" if plan.pid else ""  # no such job, no such image
    lines = [f"{plan.operation}{who}: {plan.verdict}", *words.reason_lines(plan.reasons)]
    if plan.already:
        lines.append("  nothing to do: it is so already")
    elif plan.verdict == Verdict.OK:
        pause = plan.estimate.pause_seconds
        if pause is not None:
            lines.append(f"  the job would stand still for about {words.seconds(pause)}")
        lines.append(
            f"  {words.size(plan.estimate.bytes)} to copy, about {words.seconds(plan.estimate.seconds)} in all"
        )
        if plan.other is not None and verbose:
            what = {"parked": "with the library of limosa run", "driver": "by the driver alone"}[plan.other.way]
            pause, whole = plan.other.pause_seconds, plan.other.seconds
            cost = (
                f"take about {words.seconds(whole)}"
                if pause is None
                else f"stand still for about {words.seconds(pause)}"
            )
            lines.append(f"  way: {plan.way}; {what} it would {cost}")
        moved = words.moves(plan.map, plan.gpus)
        if moved:
            lines.append(f"  {moved}")
        lines += [f"  {number}. {words.clean(step)}" for number, step in enumerate(plan.steps, 1)]
    return "\n".join(lines)

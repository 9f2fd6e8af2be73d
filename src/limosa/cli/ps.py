"""``limosa ps``, also ``limosa list``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from limosa.cli import words
from limosa.cli.output import Report, console
from limosa.cli.table import table
from limosa.cli.verb import flag, verb
from limosa.errors import UsageError
from limosa.terms import Route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from limosa.operation.results import Ps


_LISTED = 8  # numbers in a line
_ID = 12  # letters of a container's id
_SECONDS = 2.0  # between two looks of --watch


@verb(
    flag("--watch", "-w", help="Look again every two seconds, until Ctrl-C."),
)
def command(report: Report, *, watch: bool) -> None:
    """List jobs: what they hold, what state they are in, and whether they can be moved.

    A job is a process that uses CUDA, or that limosa run started, with its
    children. -v says why a job cannot be moved, and lists its processes and,
    of a job that talks over NCCL, their ranks.

    MOVES: fast (limosa run started it; most of its memory goes from GPU to
    GPU), slow (the driver copies its memory through the host), no (-v says
    why), or - (it has nothing on a GPU).
    """
    from limosa.operation import ps

    if watch:
        if report.json or not sys.stdout.isatty():
            raise UsageError(detail="--watch is for a terminal", hint="limosa ps -o json, as often as you like")
        _watch(report.verbose)
        return
    jobs = ps()
    report.result({"jobs": jobs}, lambda on: _draw(on, jobs, report.verbose))


def _watch(verbose: int) -> None:
    """Draws again and again; a Ctrl-C leaves what was drawn last."""
    from limosa.operation import ps
    from limosa.operation.drivers import driver as driver_of

    on = console()
    driver = driver_of()
    try:
        while True:
            with on.capture() as drawn:
                _draw(on, ps(driver), verbose)
            lines = drawn.get().splitlines()
            room = max(2, on.height - 1)
            if len(lines) > room:
                lines[room - 1 :] = [f"… {len(lines) - room + 1} lines more"]
            sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
            sys.stdout.flush()
            time.sleep(_SECONDS)
    except KeyboardInterrupt:
        pass
    finally:
        driver.close()


def _state(job: Ps) -> str:
    """The state in a word; where Limosa suspended it, how long ago and by whom; who works on it, or has left it so."""
    if job.under_way is not None:
        verb = job.under_way["operation"]
        return f"{verb} under way" if job.under_way["alive"] else f"left in the middle by a {verb} (limosa recover)"
    told = words.STATES.get(job.state, job.state)
    if job.state not in words.STATES or job.suspended is None:
        return told
    return f"{told} {words.age(job.suspended['since'])} ago by {words.clean(job.suspended['by'])}"


def _way(process: dict[str, Any]) -> str:
    """Which way a process's memory goes, what can be parked and what not."""
    said = [f"{process['way']}: {process['why']}" if process["why"] else str(process["way"])]
    if process["parkable"]:
        said.append(f"{words.size(process['parkable'])} can be parked")
    said += [f"{words.size(size)} left to the driver ({cause})" for cause, size in process["left"].items()]
    if process["unknown"]:
        said.append(f"calls functions that nobody knows here: {', '.join(process['unknown'])}")
    return ", ".join(said)


def _ranks(process: dict[str, Any], closed: bool) -> str:
    """Which ranks of NCCL's a process is, by its largest communicator, and on which GPUs."""
    ranks = process["ranks"]
    largest = [one for one in ranks if one["communicator"] == ranks[0]["communicator"]]
    gpus = [str(one["gpu"]) for one in largest if one["gpu"] >= 0]
    said = f"{_listed('rank', [str(one['rank']) for one in largest])} of {ranks[0]['ranks']}"
    said += f" on {_listed('GPU', gpus)}" if gpus else ""
    n = len({one["communicator"] for one in ranks})
    return f"{said}, {n} communicator{'s' if n > 1 else ''}" + (", closed" if closed else "")


def _listed(what: str, numbers: Sequence[str]) -> str:
    more = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:_LISTED])}{more}"


def _moves(job: Ps) -> str:
    """Whether it can be moved, and how long it would stand still for it."""
    if not job.movable:
        # Without CUDA state there is nothing to move.
        return "no" if job.way or any(reason.refuses for reason in job.reasons) else "-"
    return "fast" if job.way == Route.PARKED else "slow"


def _contained(job: Ps) -> str:
    """What the job's container is called, as a JOB may be given."""
    if job.container is None:
        return ""
    return f"{job.container['runtime']}:{job.container['name'] or job.container['id'][:_ID]}"


def _draw(on: Console, jobs: Sequence[Ps], verbose: int) -> None:
    """A line a job; with ``-v`` its reasons and processes below."""
    rows = [
        (
            job.pid,
            job.name or _contained(job) or "-",
            job.user,
            _state(job),
            ",".join(str(g["index"]) if g["index"] >= 0 else "?" for g in job.gpus) or "-",
            words.size(sum(g["memory_used"] for g in job.gpus)) if job.gpus else "-",
            _moves(job),
            words.command_line(job.command),
        )
        for job in jobs
    ]
    headers = ("PID", "NAME", "USER", "STATE", "GPU", "MEMORY", "MOVES", "COMMAND")
    table(
        on,
        headers,
        rows,
        right=("PID", "MEMORY"),
        text=("NAME", "USER", "STATE", "COMMAND"),
        least=("USER", "COMMAND", "MOVES", "NAME"),
    )
    for job in jobs if verbose else ():
        on.print(f"\nprocess {job.pid}")
        if job.container is not None:
            told = words.clean(_contained(job)), job.container["id"][:_ID], words.clean(job.container["pod"])
            pod = f", pod {words.clean(job.container['namespace'])}/{told[2]}" if told[2] else ""
            on.print(f"  in container {told[0]} ({words.clean(told[1])}){pod}")
        for process in job.processes:
            text = words.command_line(process["command"])
            held = words.size(process["memory_used"]) if process["memory_used"] else "-"
            on.print(f"  {process['pid']} {process['state'] or 'no CUDA'} {held} {text}")
            if "way" in process:
                on.print(f"    {_way(process)}")
            if process.get("ranks"):
                on.print(f"    {_ranks(process, closed=bool(job.communicators and job.communicators['closed']))}")
        for line in words.reason_lines(job.reasons):
            on.print(line)

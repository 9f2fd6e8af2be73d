"""``limosa stop``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from limosa.cli import words
from limosa.cli.options import ONE_JOB
from limosa.cli.output import Report
from limosa.cli.verb import flag, option, verb

if TYPE_CHECKING:
    from limosa.operation.results import StopResult


@verb(
    ONE_JOB,
    option(
        "--grace",
        metavar="SECONDS",
        type=click.FloatRange(min=0),
        default=10.0,
        show_default=True,
        help="Time from SIGTERM to SIGKILL.",
    ),
    flag("--kill", help="SIGKILL at once, even if it is suspended."),
)
def command(report: Report, *, job: str, grace: float, kill: bool) -> None:
    """End a job: SIGTERM, then SIGKILL to what is left of it.

    limosa stop train

    limosa stop train --grace 120        it saves its weights on SIGTERM

    A suspended job is refused, because it cannot handle SIGTERM before it is
    resumed. --kill ends it anyway; its memory is lost. To keep a job on disk
    and end it, use limosa checkpoint.
    """
    from limosa.cli.signals import cancelling
    from limosa.operation import stop

    with cancelling(report, "no longer waiting for it to end") as cancel:
        done = stop(job, grace=grace, kill=kill, progress=report.progress, cancel=cancel)
    report.result(done, _text(done))


def _text(done: StopResult) -> str:
    who = words.job(done.name, done.pid)
    how = f" with exit code {done.exit_code}" if done.exit_code is not None else ""
    killed = ""
    if done.killed:
        pids = ", ".join(map(str, done.killed))
        killed = f"; SIGKILL for process{'es' if len(done.killed) > 1 else ''} {pids}"
    return f"{who} has ended{how}, after {words.seconds(done.seconds)}{killed}"

"""``limosa suspend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from limosa.cli.options import HOW, JOBS, ON_GPU, check_force
from limosa.cli.output import Report
from limosa.cli.verb import option, verb


@verb(
    JOBS,
    *ON_GPU,
    option(
        "--release",
        type=click.Choice(["all", "memory-only"]),
        default="all",
        show_default=True,
        help="Give back all, or memory-only: its context stays where it is.",
    ),
    *HOW,
)
def command(
    report: Report, *, jobs: Sequence[str], gpu: str | None, every: bool, force: Sequence[str], **how: Any
) -> None:
    """Put jobs aside in host memory; their GPUs are free for others.

    limosa suspend train

    limosa suspend --gpu 3        everything on GPU 3

    The job's memory is in the job itself and, of jobs started by limosa
    run, in pinned memory that it holds (limosa arena): it lives as long
    as its processes do. What must outlive the machine: limosa checkpoint.
    Suspending a suspended job succeeds.
    """
    from limosa.cli.on_jobs import Selection, act

    named = Selection(jobs, gpu, every)
    act(report, "suspend", named, **how, force=check_force(force))

"""``limosa suspend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from limosa.cli.options import JOBS, ON_GPU, check_force, how
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
        help="Free all, or only its memory (jobs of limosa run): faster, but its context stays on the GPU.",
    ),
    *how("Refuse if the suspend itself would take longer."),
)
def command(
    report: Report,
    *,
    jobs: Sequence[str],
    gpu: str | None,
    containers: Sequence[str],
    every: bool,
    force: Sequence[str],
    **how: Any,
) -> None:
    """Suspend jobs into host memory; their GPUs become free.

    limosa suspend train

    limosa suspend --gpu 3        everything on GPU 3

    Device memory moves to the job's own host memory, for jobs started by
    limosa run mostly to pinned host memory (limosa arena). It is lost when
    the job's processes end or the machine stops; limosa checkpoint writes a
    job to disk. Suspending a suspended job succeeds.
    """
    from limosa.cli.on_jobs import Selection, act

    named = Selection.of(jobs, containers, gpu, every)
    act(report, "suspend", named, **how, force=check_force(force))

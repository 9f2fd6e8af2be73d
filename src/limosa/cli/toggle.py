"""``limosa toggle``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limosa.cli.options import JOBS, ON_GPU, check_force, how
from limosa.cli.output import Report
from limosa.cli.verb import verb


@verb(
    JOBS,
    *ON_GPU,
    *how("Refuse if the suspend, or the resume, would take longer."),
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
    """Suspend what runs, resume what is suspended.

    limosa toggle train

    If one process of a job runs and another is suspended, the job is
    suspended. In scripts use suspend and resume: they may be repeated.
    """
    from limosa.cli.on_jobs import Selection, act

    named = Selection.of(jobs, containers, gpu, every)
    act(report, "toggle", named, force=check_force(force), **how)

"""``limosa resume``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limosa.cli.options import HOW, JOBS, ON_GPU, WHERE, check_force
from limosa.cli.output import Report
from limosa.cli.verb import verb
from limosa.errors import UsageError


@verb(
    JOBS,
    *WHERE,
    *ON_GPU,
    *HOW,
)
def command(  # noqa: PLR0913 - what is typed
    report: Report,
    *,
    jobs: Sequence[str],
    to: str | None,
    gpu_map: str | None,
    gpu: str | None,
    containers: Sequence[str],
    every: bool,
    force: Sequence[str],
    **how: Any,
) -> None:
    """Bring suspended jobs back, where they were or on other GPUs.

    limosa resume train

    limosa resume train --to 5

    Limosa checks free memory first. If there is too little, the job stays
    suspended. Resuming a running job succeeds.
    """
    from limosa.cli.on_jobs import Selection, act

    if to is not None and gpu_map is not None:
        raise UsageError(detail="name a destination (--to) or a map (--map), not both")
    named = Selection.of(jobs, containers, gpu, every)
    act(report, "resume", named, to=to, gpu_map=gpu_map, force=check_force(force), **how)

"""``limosa resume``."""

from __future__ import annotations

from limosa.cli.options import (
    AllJobs,
    DryRun,
    Force,
    FormatOption,
    FromGpu,
    Jobs,
    MapOption,
    MaxPause,
    OnGpu,
    Quiet,
    Timeout,
    ToGpu,
    Verbose,
    check_force,
)
from limosa.cli.output import Format, reporting
from limosa.errors import UsageError


def command(
    jobs: Jobs = None,
    *,
    to: ToGpu = None,
    source: FromGpu = None,
    gpu_map: MapOption = None,
    gpu: OnGpu = None,
    every: AllJobs = False,
    timeout: Timeout = None,
    max_pause: MaxPause = None,
    force: Force = None,
    dry_run: DryRun = False,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Bring suspended jobs back, where they were or on other GPUs.

    limosa resume train

    limosa resume train --to 5

    Free memory is looked at first: where it does not fit, the job stays
    suspended. Resuming a running job succeeds.
    """
    with reporting("resume", fmt, quiet, verbose) as report:
        from limosa.cli.on_jobs import Selection, act

        if to is not None and gpu_map is not None:
            raise UsageError(detail="name a destination (--to) or a map (--map), not both")
        named = Selection(jobs, gpu, every)
        options = {"to": to, "source": source, "gpu_map": gpu_map, "force": check_force(force)}
        act(report, "resume", named, **options, timeout=timeout, max_pause=max_pause, dry_run=dry_run)

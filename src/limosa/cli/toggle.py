"""``limosa toggle``."""

from __future__ import annotations

from limosa.cli.options import (
    AllJobs,
    DryRun,
    Force,
    FormatOption,
    Jobs,
    MaxPause,
    OnGpu,
    Quiet,
    Timeout,
    Verbose,
    check_force,
)
from limosa.cli.output import Format, reporting


def command(
    jobs: Jobs = None,
    *,
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
    """Suspend what runs, resume what is suspended.

    A job of which one process runs and another is suspended is suspended.
    Scripts are better off with suspend and resume, which may be repeated.
    """
    with reporting("toggle", fmt, quiet, verbose) as report:
        from limosa.cli.on_jobs import Selection, act

        named = Selection(jobs, gpu, every)
        options = {"force": check_force(force)}
        act(report, "toggle", named, **options, timeout=timeout, max_pause=max_pause, dry_run=dry_run)

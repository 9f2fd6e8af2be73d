"""``limosa suspend``."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

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


class Release(str, enum.Enum):
    """What a suspend gives back."""

    all = "all"
    memory_only = "memory-only"


def command(
    jobs: Jobs = None,
    *,
    gpu: OnGpu = None,
    every: AllJobs = False,
    release: Annotated[
        Release, typer.Option("--release", help="Give back all, or memory-only: its context stays where it is.")
    ] = Release.all,
    max_pause: MaxPause = None,
    timeout: Timeout = None,
    force: Force = None,
    dry_run: DryRun = False,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Put jobs aside in host memory; their GPUs are free for others.

    limosa suspend train

    limosa suspend --gpu 3        everything on GPU 3

    The job's memory is in the job itself and, of jobs started by limosa
    run, in pinned memory that it holds (limosa arena): it lives as long
    as its processes do. What must outlive the machine: limosa checkpoint.
    Suspending a suspended job succeeds.
    """
    with reporting("suspend", fmt, quiet, verbose) as report:
        from limosa.cli.on_jobs import Selection, act

        named = Selection(jobs, gpu, every)
        options = {"force": check_force(force), "max_pause": max_pause, "release": release.value}
        act(report, "suspend", named, **options, timeout=timeout, dry_run=dry_run)

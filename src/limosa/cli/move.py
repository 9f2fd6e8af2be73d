"""``limosa move``."""

from __future__ import annotations

from typing import Annotated

import typer

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
    swap: Annotated[bool, typer.Option("--swap", help="Let two jobs change places, also on full GPUs.")] = False,
    gpu: OnGpu = None,
    every: AllJobs = False,
    max_pause: MaxPause = None,
    timeout: Timeout = None,
    force: Force = None,
    dry_run: DryRun = False,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Move running jobs to other GPUs.

    limosa move 4711 --to 5       what it has on its GPU goes to GPU 5

    limosa move train --map 0=2,1=3

    limosa move A B --swap        A and B change places

    limosa move --gpu 3 --to 5    everything on GPU 3

    A job that is suspended is resumed there. If anything fails, each job is
    as it was.
    """
    with reporting("move", fmt, quiet, verbose) as report:
        from limosa.cli.on_jobs import Selection, act

        if swap and (to is not None or gpu_map is not None or source is not None):
            raise UsageError(detail="--swap knows where to: leave out --to, --from and --map")
        if swap and len(jobs or ()) != 2:
            raise UsageError(detail="--swap takes two JOBs", hint="limosa move A B --swap")
        if to is not None and gpu_map is not None:
            raise UsageError(detail="name a destination (--to) or a map (--map), not both")
        if not swap and to is None and gpu_map is None:
            raise UsageError(detail="say where to: --to GPU, or --map A=B,..., or --swap")
        named = Selection(jobs, gpu, every)
        if gpu is not None and source is None and gpu_map is None:
            source = gpu  # "all on this GPU" means what they have on this GPU
        where = {"to": to, "source": source, "gpu_map": gpu_map}
        options = {"force": check_force(force), "max_pause": max_pause}
        act(report, "move", named, **where, **options, swap=swap, timeout=timeout, dry_run=dry_run)

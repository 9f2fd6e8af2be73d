"""``limosa move``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limosa.cli.options import HOW, JOBS, ON_GPU, WHERE, check_force
from limosa.cli.output import Report
from limosa.cli.verb import flag, verb
from limosa.errors import UsageError


@verb(
    JOBS,
    *WHERE,
    flag("--swap", help="Let two jobs change places, also on full GPUs."),
    *ON_GPU,
    *HOW,
)
def command(  # noqa: PLR0913 - what is typed
    report: Report,
    *,
    jobs: Sequence[str],
    to: str | None,
    source: str | None,
    gpu_map: str | None,
    swap: bool,
    gpu: str | None,
    containers: Sequence[str],
    every: bool,
    force: Sequence[str],
    **how: Any,
) -> None:
    """Move running jobs to other GPUs.

    limosa move 4711 --to 5       what it has on its GPU goes to GPU 5

    limosa move train --map 0=2,1=3

    limosa move A B --swap        A and B change places

    limosa move --gpu 3 --to 5    everything on GPU 3

    The job stands still meanwhile; limosa plan move says for how long. A
    suspended job is resumed there (not one of --release=memory-only: resume
    it first). Of several jobs two at a time are worked on; one that fails is
    as it was, and the others are moved all the same.
    """
    from limosa.cli.on_jobs import Selection, act

    if swap and (to is not None or gpu_map is not None or source is not None):
        raise UsageError(detail="--swap knows where to: leave out --to, --from and --map")
    if swap and len(jobs or ()) + len(containers or ()) != 2:
        raise UsageError(detail="--swap takes two JOBs", hint="limosa move A B --swap")
    if to is not None and gpu_map is not None:
        raise UsageError(detail="name a destination (--to) or a map (--map), not both")
    if not swap and to is None and gpu_map is None:
        raise UsageError(detail="say where to: --to GPU, or --map A=B,..., or --swap")
    named = Selection.of(jobs, containers, gpu, every)
    if gpu is not None and source is None and gpu_map is None:
        source = gpu  # "all on this GPU" means what they have on this GPU
    act(report, "move", named, to=to, source=source, gpu_map=gpu_map, swap=swap, force=check_force(force), **how)

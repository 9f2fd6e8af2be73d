"""``limosa checkpoint``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from limosa.cli import words
from limosa.cli.options import CRIU_DUMP, CRIU_PATH, ONE_JOB, PRINT_STATS, check_force, folder, how, parse_size
from limosa.cli.output import Report
from limosa.cli.verb import flag, look_ahead, option, verb
from limosa.errors import LimosaError, UsageError
from limosa.terms import JobState

if TYPE_CHECKING:
    from limosa.operation.results import CheckpointResult


@verb(
    ONE_JOB,
    option("--output", metavar="DIR", type=folder(), required=True, help="The image's folder: a new or an empty one."),
    flag("--leave-running", "-R", help="Let the job run on."),
    *CRIU_DUMP,
    option("--ghost-limit", metavar="SIZE", help="Refuse if a deleted open file is larger (such as 64M)."),
    flag("--link-remap", help="Name open files whose name was deleted; allows one restore."),
    flag("--skip-in-flight", help="Leave out TCP connections not accepted yet."),
    flag("--ext-unix-sk", help="Reconnect datagram unix sockets to outside names (/dev/log)."),
    option("--rate", metavar="SIZE", help="Copy at most this much a second while the job runs (such as 2G)."),
    option(
        "--rounds",
        metavar="N",
        type=click.IntRange(min=0),
        help="Copy what changed at most N times before the pause.",
    ),
    option(
        "--chunk",
        metavar="SIZE",
        default="16M",
        show_default=True,
        help="Size of the pieces of device memory in the image (4M to 64M).",
    ),
    PRINT_STATS,
    CRIU_PATH,
    *how("With --leave-running: refuse if the job would stand still for longer."),
)
def command(  # noqa: PLR0913 - what is typed
    report: Report,
    *,
    job: str,
    output: Path,
    ghost_limit: str | None,
    rate: str | None,
    chunk: str,
    criu: Path | None,
    timeout: float | None,
    force: Sequence[str],
    dry_run: bool,
    **more: Any,
) -> None:
    """Write a job to disk and end it, or let it run on.

    limosa checkpoint train --output /data/train-1

    limosa checkpoint 4711 --output /data/copy --leave-running

    A job started by limosa run computes on while its device memory is copied
    (--rate, --rounds), and stands still only for what changed meanwhile.

    The job is ended only when the image is whole and on disk. If anything
    fails before that, it runs on. limosa restore DIR brings it back. Needs
    root or capabilities, which limosa doctor names.

    A container (podman:train) is not only ended: it is removed, and what
    podman has logged of it goes too.
    """
    if more["tcp_established"] and more["tcp_close"]:
        raise UsageError(detail="--tcp-established or --tcp-close, not both")
    if more["max_pause"] is not None and not more["leave_running"]:
        raise UsageError(detail="--max-pause is for --leave-running: a job that ends has no pause")
    options: dict[str, Any] = {
        **more,
        "ghost_limit": parse_size(ghost_limit, "--ghost-limit") if ghost_limit is not None else None,
        "rate": float(parse_size(rate, "--rate")) if rate is not None else None,
        "chunk_bytes": parse_size(chunk, "--chunk"),
        "criu": str(criu) if criu is not None else None,
        "force": check_force(force),
    }
    output = output.absolute()  # said at once where we are nowhere
    look_ahead(options["criu"])
    from limosa import operation
    from limosa.cli.on_jobs import print_plans, refused
    from limosa.cli.signals import cancelling

    if dry_run:
        from limosa.process.identity import pid_in

        try:
            plan = operation.plan("checkpoint", job, output=output, **options)
        except UsageError:
            raise
        except LimosaError as error:
            plan = refused("checkpoint", error, pid=pid_in(job) or 0)
        print_plans(report, [plan])
        return
    with cancelling(report) as cancel:
        done = operation.checkpoint(job, output, timeout=timeout, progress=report.progress, cancel=cancel, **options)
    report.warn(*done.warnings)
    report.result(done, _text(done, more["print_stats"]))


def _text(done: CheckpointResult, stats: bool) -> str:
    who = words.job(done.name, done.pid)
    asleep = done.state == JobState.CHECKPOINTED
    became = "is suspended, as before" if asleep else "runs on" if done.left_running else "has ended"
    if done.removed:  # not only ended: nobody is to look for it, or for what it has said
        became = f"is removed{', its logs too' if done.removed[1:] else ''}"
    pause = done.timings.get("pause_seconds")
    if done.left_running and pause is not None:
        became += f", stood still for {words.seconds(pause)}"
    lines = [f"{words.clean(done.image)}: {words.size(done.bytes)}; {who} {became}", f"id {done.id}"]
    if done.rounds:
        last = sum(r.bytes for r in done.rounds if r.in_pause)
        before = len([r for r in done.rounds if not r.in_pause])
        text = f"{words.size(done.device_bytes)} of device memory"
        if before and not done.was_suspended:
            text += f", copied in {before} round{'s'[: before > 1]} while it ran"
        lines.append(f"{text}; {words.size(last)} in the pause" if (done.left_running and not asleep) or last else text)
    if stats:
        lines += [f"  {name}: {value}" for name, value in done.stats.items()]
    return "\n".join(lines)

"""``limosa checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limosa.cli import words
from limosa.cli.options import (
    CriuPath,
    DryRun,
    FileLocks,
    Force,
    FormatOption,
    MaxPause,
    OneJob,
    PrintStats,
    Quiet,
    ShellJob,
    TcpClose,
    TcpEstablished,
    Timeout,
    Verbose,
    check_force,
    parse_size,
)
from limosa.cli.output import Format, reporting
from limosa.errors import LimosaError, UsageError

if TYPE_CHECKING:
    from limosa.operation.results import CheckpointResult


def command(
    job: OneJob,
    *,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="The image's folder; made, or empty.")],
    leave_running: Annotated[bool, typer.Option("--leave-running", "-R", help="Let the job run on.")] = False,
    tcp_established: TcpEstablished = False,
    tcp_close: TcpClose = False,
    shell_job: ShellJob = False,
    file_locks: FileLocks = False,
    ghost_limit: Annotated[
        str | None,
        typer.Option("--ghost-limit", metavar="SIZE", help="Refuse where a deleted file is larger (64M)."),
    ] = None,
    link_remap: Annotated[
        bool, typer.Option("--link-remap", help="Files that lost one of their names get one, for one restore.")
    ] = False,
    skip_in_flight: Annotated[
        bool, typer.Option("--skip-in-flight", help="Leave out TCP connections that were not accepted yet.")
    ] = False,
    ext_unix_sk: Annotated[
        bool, typer.Option("--ext-unix-sk", help="Connect datagram unix sockets anew to a name outside (/dev/log).")
    ] = False,
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="SIZE", help="Copy at most so much a second (2G) while the job runs."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", metavar="N", min=0, help="Copy what changes so often, at most, before the pause."),
    ] = None,
    chunk: Annotated[
        str, typer.Option("--chunk", metavar="SIZE", help="Cut device memory into pieces of so much (4M to 64M).")
    ] = "16M",
    print_stats: PrintStats = False,
    criu: CriuPath = None,
    max_pause: MaxPause = None,
    timeout: Timeout = None,
    force: Force = None,
    dry_run: DryRun = False,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Write a job to disk and end it, or let it run on.

    limosa checkpoint train --output /data/train-1

    limosa checkpoint 4711 --output /data/copy --leave-running

    Device memory of a job started by limosa run is copied while it computes
    (--rate, --rounds); it stands still for what has changed until then.

    The job is ended only after the image is whole and on disk. If anything
    fails before, it runs on. limosa restore DIR brings it back.
    """
    with reporting("checkpoint", fmt, quiet, verbose) as report:
        if tcp_established and tcp_close:
            raise UsageError(detail="--tcp-established or --tcp-close, not both")
        options: dict[str, Any] = {
            "leave_running": leave_running,
            "tcp_established": tcp_established,
            "tcp_close": tcp_close,
            "shell_job": shell_job,
            "file_locks": file_locks,
            "ghost_limit": parse_size(ghost_limit) if ghost_limit is not None else None,
            "link_remap": link_remap,
            "skip_in_flight": skip_in_flight,
            "ext_unix_sk": ext_unix_sk,
            "rate": float(parse_size(rate)) if rate is not None else None,
            "rounds": rounds,
            "chunk_bytes": parse_size(chunk),
            "print_stats": print_stats,
            "criu": str(criu) if criu is not None else None,
            "max_pause": max_pause,
            "force": check_force(force),
        }
        output = output.absolute()  # said at once where we are nowhere
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
            done = operation.checkpoint(
                job, output, timeout=timeout, progress=report.progress, cancel=cancel, **options
            )
        report.warn(*done.warnings)
        report.result(done, _text(done, print_stats))


def _text(done: CheckpointResult, stats: bool) -> str:
    who = words.job(done.name, done.pid)
    asleep = done.state == "checkpointed"
    became = "is suspended, as before" if asleep else "runs on" if done.left_running else "has ended"
    pause = done.timings.get("pause_seconds")
    if done.left_running and pause is not None:
        became += f", stood still for {words.seconds(pause)}"
    lines = [f"{words.clean(done.image)}: {words.size(done.bytes)}; {who} {became}", f"id {done.id}"]
    if done.rounds:
        last = sum(r.bytes for r in done.rounds if r.in_pause)
        before = len([r for r in done.rounds if not r.in_pause])
        text = f"{words.size(done.device_bytes)} of device memory"
        if before and not asleep:
            text += f", copied in {before} round{'s'[: before > 1]} while it ran"
        lines.append(f"{text}; {words.size(last)} in the pause" if (done.left_running and not asleep) or last else text)
    if stats:
        lines += [f"  {name}: {value}" for name, value in done.stats.items()]
    return "\n".join(lines)

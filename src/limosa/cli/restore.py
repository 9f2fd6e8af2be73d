"""``limosa restore``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limosa.cli import words
from limosa.cli.options import (
    CRIU_PATH,
    CRIU_RESTORE,
    DRY_RUN,
    FORCE,
    IMAGE,
    PRINT_STATS,
    TIMEOUT,
    WHERE,
    check_force,
    folder,
)
from limosa.cli.output import Report
from limosa.cli.verb import flag, look_ahead, option, verb
from limosa.errors import LimosaError, UsageError

if TYPE_CHECKING:
    from limosa.operation.results import RestoreResult


@verb(
    IMAGE,
    *WHERE,
    flag("--attach", help="Show its output, pass signals on and exit as it does, like limosa run."),
    flag("--no-verify", help="Do not check the hashes of CRIU's files."),
    flag("--rewind-files", help="Cut grown files back to their old size; keep the rest beside them."),
    option("--name", metavar="NAME", help="A container: call it so, not as it was called."),
    option("--bundle", metavar="DIR", type=folder(), help="A container of runc: use this bundle of its own."),
    option("--publish", metavar="PORTS", multiple=True, help="A container of podman: HOST:CONTAINER; may be repeated."),
    option("--log", metavar="FILE", type=folder(), help="A container of runc or containerd: append its output here."),
    option("--cgroup", metavar="PATH", help="Put the job here instead of the caller's cgroup."),
    *CRIU_RESTORE,
    PRINT_STATS,
    CRIU_PATH,
    TIMEOUT,
    FORCE,
    DRY_RUN,
)
def command(  # noqa: PLR0913 - what is typed
    report: Report,
    *,
    image: Path,
    attach: bool,
    no_verify: bool,
    bundle: Path | None,
    log: Path | None,
    criu: Path | None,
    timeout: float | None,
    force: Sequence[str],
    dry_run: bool,
    **more: Any,
) -> None:
    """Bring a job back from disk, under the pids that it had.

    limosa restore /data/train-1

    limosa restore /data/train-1 --to 5 --attach

    Limosa checks all that it can before it starts anything, and ends what it has
    started if the image's bytes are not as they were written. The image stays.
    Needs root or capabilities, which limosa doctor names.
    """
    if more["to"] is not None and more["gpu_map"] is not None:
        raise UsageError(detail="name a destination (--to) or a map (--map), not both")
    if more["tcp_established"] and more["tcp_close"]:
        raise UsageError(detail="--tcp-established or --tcp-close, not both")
    if attach and report.json:
        raise UsageError(detail="-o json and --attach exclude each other: while attached, stdout is the job's output")
    options = {
        **more,
        "verify": not no_verify,
        "bundle": str(bundle.absolute()) if bundle is not None else None,
        "log": str(log.absolute()) if log is not None else None,
        "criu": str(criu) if criu is not None else None,
        "force": check_force(force),
    }
    image = image.absolute()  # said at once where we are nowhere
    if dry_run:
        _plan(report, image, {**options, "adopt": attach})
        return
    _restore(report, image, options, timeout, attach)


def _plan(report: Report, image: Path, options: dict[str, Any]) -> None:
    from limosa import operation
    from limosa.cli.on_jobs import print_plans, refused

    try:
        plan = operation.plan_restore(image, **options)
    except UsageError:
        raise
    except LimosaError as error:
        plan = refused("restore", error)
    print_plans(report, [plan])


def _restore(report: Report, image: Path, options: dict[str, Any], timeout: float | None, attach: bool) -> None:
    look_ahead(options["criu"])
    from limosa import operation
    from limosa.cli.signals import cancelling

    if attach:
        _attached(report, image, options, timeout)
        return
    with cancelling(report) as cancel:
        done = operation.restore(image, timeout=timeout, progress=report.progress, cancel=cancel, **options)
    report.warn(*done.warnings)
    text = _text(done, options["print_stats"])
    if options["log"] is not None and not done.log:
        text += f"\nnothing comes to {words.clean(options['log'])}: its output was on no pipe when it was checkpointed"
    report.result(done, text)


def _attached(report: Report, image: Path, options: dict[str, Any], timeout: float | None) -> None:
    from limosa import operation
    from limosa.cli.run import follow
    from limosa.cli.signals import cancelling
    from limosa.process.follow import Signals, child, stop_adopting

    begin = _end_of_log(image)
    with cancelling(report) as cancel:
        done = operation.restore(image, timeout=timeout, progress=report.progress, cancel=cancel, adopt=True, **options)
        with Signals() as signals:  # in the place of those that cancel: after that block Ctrl-C is ignored
            job = child(done.pid)
            signals.to(job)
            stop_adopting()  # what the job itself orphans from here on is init's to reap
            report.warn(*done.warnings)
            report.close()
            report.tell(_text(done, False))
            report.exit_code = follow(job, done.log, report, offset=begin, own=False)


def _end_of_log(image: Path) -> int:
    """Where the job's output will begin: it may have written much before we come to look."""
    from limosa.image import open_image
    from limosa.process.follow import log_end

    with open_image(image) as opened:
        return log_end(opened.manifest.job.log or "")


def _text(done: RestoreResult, stats: bool) -> str:
    who = words.job(done.name, done.pid)
    moved = words.moves(done.map, done.gpus)
    onto = f" ({moved})" if moved else ""
    lines = [f"{who} runs{onto}" + (f"; its output goes to {words.clean(done.log)}" if done.log else "")]
    if stats:
        lines += [f"  {name}: {value}" for name, value in done.stats.items()]
    return "\n".join(lines)

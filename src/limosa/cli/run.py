"""``limosa run``: start a job that can be checkpointed, show its output, pass signals and its exit code on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from limosa.cli.options import folder
from limosa.cli.output import Report
from limosa.cli.verb import Argument, flag, option, verb
from limosa.errors import LimosaError, RunFailed
from limosa.job import run
from limosa.process import device_nodes, records
from limosa.process.follow import Signals, follow_job
from limosa.process.identity import Identity

ENDED_BY_CHECKPOINT = 75


@verb(
    Argument("command_line", metavar="COMMAND...", nargs=-1, required=True, help="What to start."),
    option("--log", metavar="FILE", type=folder(), help="Append its output here (default: a new NAME.limosa.log)."),
    option("--name", metavar="NAME", help="What to call it (default: from COMMAND); refused if a living job has it."),
    flag("--detach", "-d", help="Print the pid and leave it running."),
    option("--gpus", metavar="GPU,...", help="Let it see these GPUs only; shortens its pauses."),
    flag("--no-seccomp", help="Do not hide io_uring, which CRIU cannot dump."),
    flag("--no-shim", help="Leave its device memory to the driver: moves take longer."),
    option(
        "--without",
        type=click.Choice(["bulk", "stack", "ranks"]),
        multiple=True,
        help="Leave alone: memory made ready (bulk), small stacks (stack), NCCL (ranks); may be repeated.",
    ),
    settings={"allow_interspersed_args": False},  # what follows COMMAND is COMMAND's
)
def command(
    report: Report, *, command_line: Sequence[str], detach: bool, no_seccomp: bool, no_shim: bool, **more: Any
) -> None:
    """Start a job that can be checkpointed.

    limosa run -d --name train -- python3 train.py

    COMMAND gets a session of its own, without a terminal and without pipes.
    Its stdin is /dev/null. Its output goes to a file and is shown here until
    the job ends. Ctrl-C and other signals are passed on, and limosa exits
    with the job's exit code. io_uring is hidden from the job. With -d, see
    limosa logs, wait and stop.

    Exit code 75: a checkpoint ended the job. 125-127: it was not started.
    """
    try:
        started: dict[str, Any] = {**more, "seccomp": not no_seccomp, "shim": not no_shim}
        report.exit_code = _run(command_line, report, detach, started)
    except LimosaError as error:
        if not isinstance(error, RunFailed):
            error.exit_code = RunFailed.exit_code  # type: ignore[misc]  # 1..40 would look like the job's own
        raise


def _run(command_line: Sequence[str], report: Report, detach: bool, options: Mapping[str, Any]) -> int:
    """Starts the job and follows it to its end unless ``detach``; the exit code for ``limosa run``."""
    if report.json and not detach:
        raise RunFailed(detail="-o json needs --detach: while attached, stdout is the job's output")
    with Signals() if not detach else contextlib.nullcontext() as signals:
        started = run(command_line, detach=detach, **options)
        report.warn(*started.warnings)
        if signals is None:
            fields = {"pid": started.pid, "name": started.name, "log": started.log}
            report.result(fields, str(started.pid))
            return 0
        signals.to(started.identity)
        report.tell(f"{started.name} is process {started.pid}, its output is kept in {started.log}")
        return follow(started.identity, started.log, report, offset=started.log_start, own=True)


def follow(job: Identity, log: str, report: Report, *, offset: int, own: bool) -> int:
    """Shows the job's output until it ends (``run``, ``restore --attach``); passing signals on is the caller's.

    Args:
        job: its root, a child of this process (``process.follow.adopting``).
        log: the file its output goes to, or "".
        report: where notes go.
        offset: where in the log to begin, in bytes.
        own: this process has opened the log for the job (``run``).

    Returns:
        The job's exit code, 128 + signal, 75 where a checkpoint ended it, 125 where nobody can know.
    """
    known = records.RunRecord.of(job)
    ended = follow_job(job, log, lambda data: _to_stdout(data, report), offset=offset, own=own)
    if log and _is_full(log):
        report.tell(f"the disk of {log} is full: some of the job's output may be missing")
    records.RunRecord(root=job, name="", command=[]).forget()
    if known is not None and not ended.image:  # else somebody may have restored it by now
        device_nodes.forget(known.sees)
    if ended.image:
        report.tell(f"a checkpoint ended the job; its image is {ended.image}")
        report.tell(f"hint: limosa restore {ended.image}")
        return ENDED_BY_CHECKPOINT
    if ended.exit_code is None:
        report.tell(f"process {job.pid} has ended; it was not a child of this limosa, so its exit code is not known")
        return RunFailed.exit_code
    return ended.exit_code


def _to_stdout(data: bytes, report: Report) -> None:
    """Writes to stdout past Python's buffers; a reader that has gone away, or a full disk, does not end the job."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            report.tell(f"the job's output can no longer be shown ({error.strerror}); its log has all of it")
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)


def _is_full(log: str) -> bool:
    """Whether nothing more can be written to the log's disk (root may write to the last of it)."""
    try:
        disk = os.statvfs(log)
    except OSError:
        return False
    return disk.f_blocks > 0 and (disk.f_bavail if os.geteuid() else disk.f_bfree) == 0

"""``limosa logs``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from limosa.cli import words
from limosa.cli.options import ONE_JOB
from limosa.cli.output import Report
from limosa.cli.verb import flag, option, verb
from limosa.errors import NoSuchProcess, PermissionDenied, UsageError

if TYPE_CHECKING:
    from limosa.operation.jobs import Job
    from limosa.process.follow import Tail

_CONTROLS = re.compile(rb"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")  # C0 and, as UTF-8, C1 (OSC, CSI, DCS)


@verb(
    ONE_JOB,
    flag("--follow", "-f", help="Show new output until the job ends."),
    option(
        "last",
        "--lines",
        "-n",
        metavar="N",
        type=click.IntRange(min=0),
        help="Show only the last N lines, and what follows with -f.",
    ),
)
def command(report: Report, *, job: str, follow: bool, last: int | None) -> None:
    """Show the output of a job that limosa run started.

    limosa logs train -n 20 -f

    The output is in a file; limosa logs train -o json names it. Once the
    job has ended, read that file. Ctrl-C ends -f and leaves the job alone.
    """
    from limosa.operation import resolve
    from limosa.process.follow import Tail, last_lines
    from limosa.process.job_log import open_said
    from limosa.process.records import RunRecord

    try:
        (found,) = resolve([job])
    except NoSuchProcess as error:
        error.hint = _ended(job) or error.hint
        raise
    record = RunRecord.of(found.root)
    if record is None or not record.log:
        _refuse_contained(found.root.pid)
        raise UsageError(
            detail=f"process {found.root.pid} was not started by limosa run: nobody keeps its output",
            hint=f"ls -l /proc/{found.root.pid}/fd/1 says where it goes",
        )
    if report.json and follow:
        raise UsageError(detail="-o json and --follow exclude each other: with --follow stdout is the job's output")
    try:
        fd = open_said(record.log, found.root.pid)
    except OSError as error:
        if not report.json:
            detail = f"the log {words.clean(record.log)} cannot be read: {error.strerror or error}"
            if isinstance(error, PermissionError):
                raise PermissionDenied(detail=detail, hint="sudo" if os.geteuid() else "") from error
            raise UsageError(detail=detail, hint="limosa logs -o json") from error
        fd = -1
    if report.json:
        size = os.fstat(fd).st_size if fd >= 0 else 0
        report.result({"pid": found.root.pid, "name": found.name, "log": record.log, "bytes": size}, "")
        return
    tail = Tail(fd, 0 if last is None else last_lines(fd, last), _writer(fd))
    try:
        _follow(report, found, tail) if follow else tail.copy_rest()
    finally:
        tail.close()


def _refuse_contained(pid: int) -> None:
    """Raises UsageError for a container: its output is its runtime's to keep."""
    from limosa.containers import Containers

    box = Containers().of(pid)
    program = {"podman": "podman", "docker": "docker", "cri-o": "crictl"}.get(box.runtime, "") if box else ""
    if box is not None and box.runtime == "containerd" and box.pod:
        program = "crictl"
    if box is not None and program:
        word = box.short if program == "crictl" or not box.name else box.name
        detail = f"{box.runtime} keeps the output of {words.clean(box.called)}"
        raise UsageError(detail=detail, hint=f"{program} logs {words.clean(word)}")


def _follow(report: Report, job: Job, tail: Tail) -> None:
    from limosa.operation import wait

    try:
        done = wait(job, while_waiting=tail.copy)
    except KeyboardInterrupt:
        return
    if done.image:
        report.tell(f"a checkpoint ended the job; its image is {words.clean(done.image)}")


def _ended(job: str) -> str:
    """Where the output of a job that has ended may be: a log of that name here."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", job):
        return ""
    found = sorted(Path().glob(f"{job}.limosa*.log"), key=lambda path: path.lstat().st_mtime)
    return f"if it has ended, its output is in {words.clean(found[-1].absolute())}" if found else ""


def _writer(fd: int) -> Callable[[bytes], None]:
    """Writes to stdout; what another user's job says must not drive our terminal."""
    foreign = sys.stdout.isatty() and os.fstat(fd).st_uid != os.geteuid()
    begun = b""  # of a character whose rest is still to come

    def write(data: bytes) -> None:
        nonlocal begun
        if foreign:
            data = begun + data
            begun = b"\xc2" if data.endswith(b"\xc2") else b""
            data = _CONTROLS.sub(b"?", data.removesuffix(begun))
        click.echo(data, nl=False)

    return write

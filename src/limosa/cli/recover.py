"""``limosa recover``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from limosa.cli import words
from limosa.cli.options import DryRun, FormatOption, Quiet, Verbose
from limosa.cli.output import Format, reporting
from limosa.errors import worst

if TYPE_CHECKING:
    from limosa.operation.results import Recovered


Folders = Annotated[
    Optional[list[Path]],  # noqa: UP045 - typer reads it at run time, on 3.10 too
    typer.Argument(metavar="[DIR]...", help="Also remove unfinished images in these folders.", show_default=False),
]


def command(
    folders: Folders = None,
    *,
    dry_run: DryRun = False,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Finish or undo what a killed limosa left, and clean up after it.

    Jobs left locked or half-way run on where they were; suspended ones stay
    suspended. Whole images are kept, unfinished ones removed. Your own
    operations; as root, users' own limosa is started for theirs, and what
    they come to is told but is not in the exit code.

    Exit code 0: nothing is left. 2, 11: DIR is no folder, or may not be read.
    40: look. 41: a job had to stay suspended.
    """
    with reporting("recover", fmt, quiet, verbose) as report:
        from limosa.cli.signals import cancelling
        from limosa.operation import recover

        with cancelling(report, "going on: what is half recovered is worse. Ctrl-C once more stops at once."):
            done = recover(folders or (), dry_run=dry_run, progress=report.progress)
        report.result({"recovered": done}, _text(done), exit_code=worst([r.exit_code for r in done if not r.user]))


def _text(done: Sequence[Recovered]) -> str:
    lines = []
    for one in done:
        of = f" of job {one.pid}" if one.pid else ""
        whose = f" ({words.clean(one.user)})" if one.user else ""
        lines.append(f"{one.operation or one.kind}{of}{whose}: {words.clean(one.did or one.error)}")
        if one.did and one.error:
            lines.append(f"  but {words.clean(one.error)}")
        if one.image and os.path.lexists(one.image):  # what was never finished has been removed
            lines.append(f"  image {words.clean(one.image)}")
    return "\n".join(lines) or "nothing was left in the middle"

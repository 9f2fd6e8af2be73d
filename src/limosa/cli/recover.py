"""``limosa recover``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from limosa.cli import words
from limosa.cli.options import DRY_RUN, folder
from limosa.cli.output import Report
from limosa.cli.verb import Argument, verb
from limosa.errors import worst

if TYPE_CHECKING:
    from limosa.operation.results import Recovered


@verb(
    Argument(
        "folders", metavar="[DIR]...", type=folder(), nargs=-1, help="Also remove unfinished images in these folders."
    ),
    DRY_RUN,
)
def command(report: Report, *, folders: Sequence[Path], dry_run: bool) -> None:
    """Finish or undo what a killed limosa left, and clean up after it.

    Jobs left locked or half-way run on where they were; suspended ones stay
    suspended. Whole images are kept, unfinished ones removed. It works on
    your own operations. Root also starts recover for every other user, as
    that user; those results are shown but do not count in the exit code.

    It names no job: it looks at all.

    Exit code 0: nothing is left. 2, 11: DIR is no folder, or may not be read;
    nothing was done. 40: something is left, and the message says what to do.
    41: a job had to stay suspended.
    """
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

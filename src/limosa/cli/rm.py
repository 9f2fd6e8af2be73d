"""``limosa rm``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from limosa.cli import words
from limosa.cli.options import folder
from limosa.cli.output import Report, error_object
from limosa.cli.verb import Argument, verb
from limosa.errors import CancelledUndone, LimosaError, worst


@verb(
    Argument(
        "images",
        metavar="DIR...",
        type=folder(),
        nargs=-1,
        required=True,
        help="An image, whole or unfinished.",
    ),
)
def command(report: Report, *, images: Sequence[Path]) -> None:
    """Remove images, and the nftables tables that belong to them.

    It removes whole and unfinished images, without asking, and nothing else:
    a folder with anything else in it is refused. The disk is not overwritten.
    """
    from limosa.cli.signals import cancelling
    from limosa.operation import remove_image

    removed: list[dict[str, Any]] = []
    failed: list[LimosaError] = []
    with cancelling(report, "stopping after the image that is being removed") as cancel:
        for image in images:
            if cancel.is_set():
                failed.append(CancelledUndone(f"{image} was not removed: cancelled"))
                break
            try:
                removed.append({"path": os.path.abspath(image), "bytes": remove_image(image)})
            except LimosaError as error:
                failed.append(error)
                if len(images) > 1:
                    report.problem(error)
    if len(images) == 1 and failed:
        raise failed[0]
    value: dict[str, Any] = {"removed": removed}
    code = worst([e.exit_code for e in failed])
    if failed:
        value["error"] = error_object(next(e for e in failed if e.exit_code == code))
    text = "\n".join(f"removed {words.clean(r['path'])}, {words.size(r['bytes'])}" for r in removed)
    report.result(value, text, exit_code=code)

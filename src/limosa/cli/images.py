"""``limosa images``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limosa.cli import words
from limosa.cli.options import folder as path
from limosa.cli.output import Report
from limosa.cli.table import table
from limosa.cli.verb import Argument, verb

if TYPE_CHECKING:
    from rich.console import Console

    from limosa.image import Listed


@verb(
    Argument(
        "folder", metavar="[DIR]", type=path(), default=".", help="A folder with images in it (default: this one)."
    ),
)
def command(report: Report, *, folder: Path) -> None:
    """List the images in a folder: whose job, how large, how old.

    limosa images /data

    Only manifests are read; limosa verify DIR reads every byte of an image.
    Unfinished images that killed checkpoints left are listed, too.
    """
    from limosa.image import images

    found = images(folder)
    report.result({"images": found}, (lambda console: _draw(console, found)) if found else "")
    if not found:
        seen = " that you may look at" if os.geteuid() else ""
        report.tell(f"no images in {words.clean(folder.absolute())}{seen}")


def _draw(console: Console, found: Sequence[Listed]) -> None:
    """A line an image."""
    rows: list[tuple[Any, ...]] = []
    for one in found:
        complete = one.state == "complete"
        rows.append(
            (
                Path(one.path).name,
                one.name or "-",
                one.pid or "-",
                words.size(one.bytes) if complete else "-",
                ", ".join(f"{n} × {name}" for name, n in _counted(one.gpus)) or "-",
                words.age(one.created),
                f"{one.state}: {one.problem}" if one.problem else one.state,
            )
        )
    table(
        console,
        ("IMAGE", "JOB", "PID", "SIZE", "GPUS", "AGE", "STATE"),
        rows,
        right=("PID", "SIZE"),
        text=("IMAGE", "JOB", "GPUS", "STATE"),
        least=("GPUS", "PID", "STATE"),
    )


def _counted(names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name, list(names).count(name)) for name in dict.fromkeys(names)]

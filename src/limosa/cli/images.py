"""``limosa images``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limosa.cli import words
from limosa.cli.options import FormatOption, Quiet, Verbose
from limosa.cli.output import Format, reporting
from limosa.cli.table import table

if TYPE_CHECKING:
    from rich.console import Console

    from limosa.image import Listed


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with images in it.")] = Path("."),
    *,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """List the images in a folder: whose job, how large, how old.

    limosa images /data

    Only manifests are read: limosa verify DIR reads every byte of one. What
    a checkpoint that was killed has left is listed, too.
    """
    with reporting("images", fmt, quiet, verbose) as report:
        from limosa.image import images

        found = images(folder)
        report.result({"images": found}, (lambda console: _draw(console, found)) if found else "")
        if not found:
            seen = " that you may look at" if os.geteuid() else ""
            report.tell(f"no images in {words.clean(folder.absolute())}{seen}")


def _draw(console: Console, found: Sequence[Listed]) -> None:
    """A line an image."""
    now = datetime.datetime.now(datetime.timezone.utc)
    rows: list[tuple[Any, ...]] = []
    for one in found:
        whole = one.state == "whole"
        rows.append(
            (
                Path(one.path).name,
                one.name or "-",
                one.pid or "-",
                words.size(one.bytes) if whole else "-",
                ", ".join(f"{n} × {name}" for name, n in _counted(one.gpus)) or "-",
                age(one.created, now),
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


def age(created: str, now: datetime.datetime) -> str:
    """How long ago a time in RFC 3339 was: 40 s, 12 min, 5 h, 3 days; "?" where it is none."""
    try:
        then = datetime.datetime.fromisoformat(created.replace("Z", "+00:00"))
        seconds = (now - then).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for limit, unit, word in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds // unit))} {word}"
    return f"{int(seconds // 86400)} days"

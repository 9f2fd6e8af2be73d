"""The options that verbs share, each in one place: its name, its help and how its value is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from limosa.cli.output import Format
from limosa.errors import UsageError

_MOST_SECONDS = 1e9  # 30 years
_MOST_BYTES = 1 << 62

FormatOption = Annotated[
    Format, typer.Option("-o", "--format", help="Print the result as text or json.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing on stderr but errors.")]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, help="Say more on stderr.", show_default=False)]


def names(incomplete: str) -> list[str]:
    """Completes the names of living jobs: reads the records and nothing else."""
    from limosa.process.records import RunRecord

    return [record.name for record in RunRecord.all() if record.name.startswith(incomplete)]


Jobs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB]...", help="A pid, or a name given to limosa run.", show_default=False, autocompletion=names
    ),
]
OneJob = Annotated[
    str, typer.Argument(metavar="JOB", help="A pid, or a name given to limosa run.", autocompletion=names)
]
OnGpu = Annotated[str | None, typer.Option("--gpu", metavar="GPU", help="All jobs on this GPU instead of JOB.")]
AllJobs = Annotated[bool, typer.Option("--all", help="All jobs on all GPUs instead of JOB.")]

ToGpu = Annotated[str | None, typer.Option("--to", metavar="GPU", help="Destination: index, GPU-<uuid> or PCI bus id.")]
FromGpu = Annotated[
    str | None, typer.Option("--from", metavar="GPU", help="What to move, where a job has several GPUs.")
]
MapOption = Annotated[
    str | None, typer.Option("--map", metavar="A=B,...", help="Which GPU becomes which; the rest is filled in.")
]


def sane_seconds(value: float | None) -> float | None:
    """A time that can be waited for; what it is not (nan, inf) passes by a smallest and a largest value.

    Raises:
        typer.BadParameter: it is none.
    """
    if value is not None and not 0 <= value <= _MOST_SECONDS:
        raise typer.BadParameter(f"{value} is not a number of seconds")
    return value


Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0, callback=sane_seconds, help="Undo and give up after this long."
    ),
]
MaxPause = Annotated[
    float | None,
    typer.Option(
        "--max-pause",
        metavar="SECONDS",
        min=0,
        callback=sane_seconds,
        help="Refuse where the job would stand still longer.",
    ),
]
Force = Annotated[
    list[str] | None,
    typer.Option("--force", metavar="ID", help="Turn the refusal of this id into a warning; may be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and touch nothing.")]

TcpEstablished = Annotated[bool, typer.Option("--tcp-established", help="Keep connected TCP sockets connected.")]
TcpClose = Annotated[bool, typer.Option("--tcp-close", help="Bring connected TCP sockets back closed.")]
ShellJob = Annotated[bool, typer.Option("--shell-job", help="The job was started from a shell and holds its terminal.")]
FileLocks = Annotated[bool, typer.Option("--file-locks", help="Save and restore file locks.")]
PrintStats = Annotated[bool, typer.Option("--print-stats", help="Show CRIU's statistics too.")]
CriuPath = Annotated[Path | None, typer.Option("--criu", metavar="PATH", help="Use this criu program.")]
ImageDir = Annotated[Path, typer.Argument(metavar="DIR", help="The image's folder.", readable=False)]

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_FACTOR = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes from ``1048576``, ``64M``, ``64MiB`` (powers of 1024, as CRIU has it) or ``64MB`` (powers of 1000).

    Raises:
        typer.BadParameter: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size (1048576, 64M, 64MiB)")
    number, unit, binary, byte = found.groups()
    base = 1000 if byte and unit and not binary else 1024
    size = int(float(number) * base ** _FACTOR[unit.lower()])
    if size > _MOST_BYTES:
        raise typer.BadParameter(f"{text!r} is more than any machine has")
    return size


def check_force(ids: Sequence[str] | None) -> list[str]:
    """The ids of ``--force``, each named by itself.

    Raises:
        UsageError: "all" and its like: every refusal is to be read before it is overruled.
    """
    found = [part.strip() for text in ids or () for part in text.split(",") if part.strip()]
    for one in found:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", one) or one in ("all", "any", "everything"):
            raise UsageError(
                detail=f"--force={one}: name the refusal to overrule, as limosa plan prints it; there is no 'all'"
            )
    return found

"""The options that verbs share, each in one place: its name, its help and how its value is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from limosa.cli.verb import Argument, flag, option
from limosa.errors import UsageError

_MOST_SECONDS = 1e9  # 30 years
_MOST_BYTES = 1 << 62


def names(ctx: Any, param: Any, incomplete: str) -> list[str]:
    """Completes the names of living jobs: reads the records and nothing else."""
    from limosa.errors import LimosaError
    from limosa.process.records import RunRecord

    try:
        return [record.name for record in RunRecord.all() if record.name.startswith(incomplete)]
    except LimosaError:  # the verb itself will say it
        return []


class Seconds(click.FloatRange):
    """A time that can be waited for; what it is not (nan, inf) passes by a smallest and a largest value."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Seconds, as a number."""
        found = super().convert(value, param, ctx)
        if not 0 <= found <= _MOST_SECONDS:
            self.fail(f"{found} is not a number of seconds", param, ctx)
        return found


def folder(*, readable: bool = True) -> click.Path:
    """A path that need not be there."""
    return click.Path(path_type=Path, readable=readable)


JOB_HELP = "A pid, a name given to limosa run, or a container (podman:train)."
JOBS = Argument("jobs", metavar="[JOB]...", nargs=-1, shell_complete=names, help=JOB_HELP)
ONE_JOB = Argument("job", metavar="JOB", shell_complete=names, help=JOB_HELP)
ON_GPU = (
    option("--gpu", metavar="GPU", help="All jobs on this GPU instead of JOB."),
    option(
        "containers", "--container", metavar="NAME", multiple=True, help="The job in the container of this name or id."
    ),
    flag("every", "--all", help="All jobs on all GPUs instead of JOB."),
    flag("one_by_one", "--one-by-one", help="Of several jobs, begin the next when the one before is done."),
)
WHERE = (
    option("--to", metavar="GPU", help="Destination: index, GPU-<uuid> or PCI bus id."),
    option("source", "--from", metavar="GPU", help="The GPU to leave, if a job uses several."),
    option("gpu_map", "--map", metavar="A=B,...", help="Which GPU becomes which; Limosa fills in the rest."),
)
TIMEOUT = option(
    "--timeout", metavar="SECONDS", type=Seconds(), help="After this long, undo everything, unless it is all but done."
)
FORCE = option(
    "--force", metavar="ID", multiple=True, help="Turn the refusal with this id into a warning; may be repeated."
)
DRY_RUN = flag("--dry-run", help="Say what would be done, and touch nothing.")


def how(refuse: str = "Refuse if the job would stand still for longer.") -> tuple[click.Parameter, ...]:
    """What every verb has that holds a job still; ``refuse``: what its ``--max-pause`` does."""
    return option("--max-pause", metavar="SECONDS", type=Seconds(), help=refuse), TIMEOUT, FORCE, DRY_RUN


HOW = how()
CRIU_PATH = option("--criu", metavar="PATH", type=folder(), help="Use this criu program.")
CRIU_DUMP = (
    flag("--tcp-established", help="Keep connected TCP sockets connected."),
    flag("--tcp-close", help="Bring connected TCP sockets back closed."),
    flag("--shell-job", help="The job was started from a shell and holds its terminal."),
    flag("--file-locks", help="Save file locks, and restore them."),
)
CRIU_RESTORE = tuple(
    flag(f"--{name}", help=f"{what} (not needed if the checkpoint had it).")
    for name, what in (
        ("tcp-established", "Keep connected TCP sockets connected"),
        ("tcp-close", "Bring connected TCP sockets back closed"),
        ("shell-job", "Give the job this terminal"),
        ("file-locks", "Restore file locks"),
    )
)
"""CRIU's options that a checkpoint and a restore have."""
PRINT_STATS = flag("--print-stats", help="Show CRIU's statistics too.")
IMAGE = Argument("image", metavar="DIR", type=folder(readable=False), help="The image's folder.")

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_FACTOR = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str, named: str | None = None) -> int:
    """Bytes from ``1048576``, ``64M``, ``64MiB`` (powers of 1024, as CRIU has it) or ``64MB`` (powers of 1000).

    ``named``: the option whose value it is.

    Raises:
        click.BadParameter: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a size (1048576, 64M, 64MiB)", param_hint=named)
    number, unit, binary, byte = found.groups()
    base = 1000 if byte and unit and not binary else 1024
    size = int(float(number) * base ** _FACTOR[unit.lower()])
    if size > _MOST_BYTES:
        raise click.BadParameter(f"{text!r} is more than any machine has", param_hint=named)
    return size


def check_force(ids: Sequence[str] | None) -> list[str]:
    """The ids of ``--force``, each named by itself.

    Raises:
        UsageError: "all" and its like: every refusal is to be read before it is overruled. An id that forces nothing.
    """
    found = [part.strip() for text in ids or () for part in text.split(",") if part.strip()]
    for one in found:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", one) or one in ("all", "any", "everything"):
            raise UsageError(
                detail=f"--force={one}: name the refusal to overrule, as limosa plan prints it; there is no 'all'"
            )
    if found:
        from limosa.operation import options

        options.check_force(found)
    return found

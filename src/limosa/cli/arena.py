"""``limosa arena``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from limosa.cli import words
from limosa.cli.options import parse_size
from limosa.cli.output import Report
from limosa.cli.verb import Argument, flag, option, verb
from limosa.errors import Reason, UsageError

if TYPE_CHECKING:
    from limosa.operation.arena import Arena

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@verb(
    Argument("size", metavar="[SIZE]", required=False, help="Its total size: 32G."),
    option("--keep", metavar="TIME", help="How long to keep it ready: 30m, 8h (default: 1h)."),
    flag("--end", help="Give back what no job uses; end Limosa's mover and driver worker."),
)
def command(report: Report, *, size: str | None, keep: str | None, end: bool) -> None:
    """Have host memory ready for the next suspend, show it, give it back.

    limosa arena 32G --keep 8h

    Jobs started by limosa run are suspended into pinned host memory, the
    arena. Pinning takes time (2.2 to 5.6 GiB/s were seen). A suspend that needs
    more than is ready makes more first, while the job runs; that is kept for
    ten minutes after use. SIZE is the total, in use and free. Without SIZE
    the arena is shown (as root: everybody's). limosa arena 0 gives back what
    no job uses and says who uses the rest.
    """
    from limosa.operation.arena import arena

    if size is not None and end:
        raise UsageError(detail="name a size, or --end")
    if size is None and keep is not None:
        raise UsageError(detail="--keep says for how long a SIZE is kept: limosa arena 32G --keep 8h")
    found = arena(None if size is None else parse_size(size, "SIZE"), keep=seconds_of(keep or "1h"), end=end)
    if found.used and (end or (size is not None and parse_size(size) == 0)):
        report.warn(in_use(found))
    told = lines(found)
    for other in found.others:
        told += [f"user {words.clean(other.user)}", *(f"  {line}" for line in lines(other))]
    report.result(found, "\n".join(told))


def in_use(found: Arena) -> Reason:
    """Whose the memory is that cannot be given back."""
    whose = ", ".join(map(str, found.held_by))
    text = f"{words.size(found.used)} stay: in them is the device memory of {whose or 'a job that is being suspended'}"
    return Reason(
        id="arena-in-use", text=text, hint=f"limosa resume {whose.replace(',', '')}" if whose else "limosa ps"
    )


def seconds_of(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``30m``, ``8h``, ``2d``.

    Raises:
        UsageError: it is no time.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", text.strip().lower())
    if found is None:
        raise UsageError(detail=f"--keep: {text!r} is not a time (90s, 30m, 8h)")
    return float(found[1]) * _UNITS[found[2]]


def lines(found: Arena) -> list[str]:
    """What there is, in sentences."""
    total = found.used + found.free
    told = [f"arena: {words.size(total)}, {words.size(found.used)} in use, {words.size(found.pinned)} pinned"]
    if found.pinned > total:
        told[0] += ", of which the mover is letting go"
    if found.cap is not None:
        told[0] += f", at most {words.size(found.cap)}"
    told += [f"  {words.size(size)}: process {pid}" for pid, size in found.held_by.items()]
    if found.reserved:
        told.append(f"{words.size(found.reserved)} are kept for {words.seconds(found.seconds)}")
    if found.mover:
        memory = ", ".join(words.size(size) for size in found.mover_memory.values()) or "none"
        ends = "" if found.mover_ends_in is None else f", ends in {words.seconds(found.mover_ends_in)}"
        told.append(f"mover: process {found.mover}, device memory of its contexts: {memory}{ends}")
    if found.vault:
        told.append(f"vault: process {found.vault}")
    return told

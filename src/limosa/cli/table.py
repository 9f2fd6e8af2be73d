"""Tables without lines, easy on people and on awk, at any width.

A number is never cut, nor is anything else that would then read as something else (a bus id). Text gives way first,
with an ellipsis; where that is not enough, whole columns do, the least important first. What a program reads has all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from limosa.cli.words import clean

if TYPE_CHECKING:
    from rich.console import Console

_GAP = "  "
_LEAST = 9  # cells that a text column keeps: "suspended"


def table(
    on: Console,
    headers: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Sequence[str] = (),
    text: Sequence[str] = (),
    least: Sequence[str] = (),
) -> None:
    """Draw a table.

    Args:
        on: where; its width counts where it is a terminal.
        headers: the columns.
        rows: as many cells each.
        right: the columns of numbers, flush right.
        text: the columns that may be cut, with an ellipsis.
        least: the columns that may be left out, the least important first.
    """
    from rich.cells import cell_len
    from rich.text import Text

    cells = [[clean(cell) for cell in row] for row in rows]
    natural = [max(cell_len(row[at]) for row in [list(headers), *cells]) for at in range(len(headers))]
    room = on.width if on.file.isatty() else sum(natural) + len(_GAP) * len(natural)
    widths = widths_of(headers, natural, room, text=text, least=least)
    for number, row in enumerate([list(headers), *cells]):
        line = Text(style="bold" if number == 0 else "")
        for at, width in widths.items():
            cell = Text(row[at])
            cell.truncate(width, overflow="ellipsis")
            fill = " " * (width - cell.cell_len)
            line.append(_GAP if line else "")
            line.append(fill if headers[at] in right else "").append(cell)
            line.append("" if headers[at] in right else fill)
        line.rstrip()
        on.print(line, soft_wrap=True)


def widths_of(
    headers: Sequence[str], natural: Sequence[int], room: int, *, text: Sequence[str] = (), least: Sequence[str] = ()
) -> dict[int, int]:
    """How wide each column is drawn.

    Args:
        headers: the columns.
        natural: how wide each would have to be to show all.
        room: cells that there are.
        text: the columns that may be cut.
        least: the columns that may be left out, the least important first.

    Returns:
        Column → cells. Wider than ``room`` in all where even the last columns do not fit: no number is cut.
    """
    left_out: set[str] = set()
    for name in (None, *least):
        left_out |= {name} if name is not None else set()
        widths = {at: width for at, width in enumerate(natural) if headers[at] not in left_out}
        floor = {at: max(len(headers[at]), _LEAST) for at in widths if headers[at] in text}
        over = sum(widths.values()) + len(_GAP) * (len(widths) - 1) - room
        while over > 0 and (wide := [at for at in floor if widths[at] > floor[at]]):
            at = max(wide, key=lambda at: widths[at])  # the widest first: what is left is shared fairly
            widths[at] -= 1
            over -= 1
        if over <= 0:
            break
    return widths

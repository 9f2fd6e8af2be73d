"""Makes man pages from the help of the command line: limosa(1), and limosa-VERB(1) for each verb.

python scripts/man.py build/man
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from limosa import __version__
from limosa.cli.main import VERBS, app, verb
from limosa.cli.verb import Argument

# docs/exit-codes.md in a line each.
NOT_DONE = (
    "not done, the job is as it was: 10 no such job, 11 not permitted, 13 it cannot be moved, 14 no room on the GPU, "
    "18 timed out, 19 busy, 21 failed and undone, 22 cancelled, 24 no working CRIU"
)
EXIT = (
    ("0", "done"),
    ("2", "the command makes no sense"),
    ("10 to 39", NOT_DONE),
    ("40", "an undo failed: look"),
    ("41", "left suspended, its memory safe on the host"),
    ("75", "(run, wait) a checkpoint ended the job"),
)


def escaped(text: str) -> str:
    """Text as roff has it."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in text.split("\n"))


def paragraphs(text: str) -> list[str]:
    """A docstring's paragraphs; commands stand as they are."""
    made = []
    for part in text.strip().replace("\b", "").split("\n\n"):
        lines = [line.strip() for line in part.strip("\n").split("\n")]
        if lines[0].startswith("limosa "):
            made += [".PP", ".EX", *(f"    {escaped(line)}" for line in lines), ".EE"]
        else:
            made += [".PP", escaped(" ".join(lines))]
    return made


def parameters(command: Any, ctx: Any) -> list[str]:
    """The options, as the help has them."""
    made = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if isinstance(parameter, Argument):
            record = parameter.metavar, parameter.about
        if record is not None:
            made += [".TP", f".B {escaped(record[0].strip())}", escaped(record[1].strip())]
    return made


def page(name: str, summary: str, command: Any, usage: str, more: list[str]) -> str:
    """One man page."""
    ctx = command.make_context(usage, [], resilient_parsing=True)
    pieces = " ".join(command.collect_usage_pieces(ctx))
    title = name.replace(" ", "-")
    lines = [
        f'.TH "{title.upper()}" 1 "" "limosa {__version__}" "Limosa"',
        ".SH NAME",
        escaped(f"{title} - {summary.rstrip('.')}"),
        ".SH SYNOPSIS",
        f".B {escaped(usage)}",
        escaped(pieces),
        ".SH DESCRIPTION",
        *paragraphs(command.help or summary),
        ".SH OPTIONS",
        *parameters(command, ctx),
        *more,
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """All of them, by file name."""
    made = {}
    listed = [".SH VERBS"]
    for name, (_, short) in VERBS.items():
        listed += [".TP", f".BR limosa\\-{escaped(name)} (1)", escaped(short)]
        see = [".SH SEE ALSO", ".BR limosa (1)"]
        made[f"limosa-{name}.1"] = page(f"limosa {name}", short, verb(name), f"limosa {name}", see)
    listed += [".SH EXIT STATUS", *(part for code, text in EXIT for part in (".TP", f".B {code}", escaped(text)))]
    made["limosa.1"] = page("limosa", "move, suspend and checkpoint running GPU jobs", app, "limosa", listed)
    return made


def main() -> None:
    """Write them into the folder that is named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()

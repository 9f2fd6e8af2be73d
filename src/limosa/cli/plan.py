"""``limosa plan VERB ...`` is ``limosa VERB ... --dry-run``."""

from __future__ import annotations

from typing import Annotated

import typer

from limosa.cli.meant import nearest
from limosa.cli.options import FormatOption, Quiet, Verbose, names
from limosa.cli.output import Format, json_wanted, reporting
from limosa.errors import UsageError

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
VERBS = ("move", "suspend", "resume", "toggle", "checkpoint", "restore", "recover")


def _verbs(incomplete: str) -> list[str]:
    return [verb for verb in VERBS if verb.startswith(incomplete)]


def command(
    verb: Annotated[str, typer.Argument(metavar="VERB", help=", ".join(VERBS), autocompletion=_verbs)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="...", help="As for that verb.", autocompletion=names)
    ] = None,
    *,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Say what a verb would do and what stands against it, and touch nothing.

    limosa plan move 4711 --to 5

    limosa plan checkpoint train --output /data/train-1

    Exit code 0: it would be done, or is so already. Else the first refusal's.
    """
    from limosa.cli import main

    if json_wanted(arguments or ()):
        fmt = Format.json
    if verb not in VERBS:
        with reporting("plan", fmt, quiet, verbose):
            guess = nearest(verb, VERBS)
            hint = f"did you mean limosa plan {guess}?" if guess else f"one of {', '.join(VERBS)}"
            raise UsageError(detail=f"there is no plan for {verb!r}", hint=hint)
    common = ["-o", fmt.value] if fmt is Format.json else []
    common += ["-q"] * quiet + ["-v"] * verbose
    chosen = main.verb(verb)
    arguments = [*common, "--dry-run", *(arguments or ())]
    code = chosen.main(args=arguments, prog_name=f"limosa plan {verb}", standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)

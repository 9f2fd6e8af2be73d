"""``limosa plan VERB ...`` is ``limosa VERB ... --dry-run``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import click

from limosa.cli.meant import nearest
from limosa.cli.options import names
from limosa.cli.output import Format, Report, json_wanted
from limosa.cli.verb import Argument, verb
from limosa.errors import UsageError

VERBS = ("move", "suspend", "resume", "toggle", "checkpoint", "restore", "recover")


def planned(command: click.Command, verb: str) -> click.Command:
    """The verb's command, with a help that says what planning it does and whose examples plan it."""
    changed = copy.copy(command)
    text = (command.help or "").replace(f"\n\nlimosa {verb} ", f"\n\nlimosa plan {verb} ")
    changed.help = f"Say what limosa {verb} would do, and touch nothing.\n\n{text}"
    return changed


def _verbs(ctx: Any, param: Any, incomplete: str) -> list[str]:
    return [verb for verb in VERBS if verb.startswith(incomplete)]


@verb(
    Argument("verb", metavar="VERB", shell_complete=_verbs, help=", ".join(VERBS)),
    Argument("arguments", metavar="[...]", nargs=-1, shell_complete=names, help="The arguments of that verb."),
    settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def command(report: Report, *, verb: str, arguments: Sequence[str]) -> None:
    """Say what a verb would do and what stands against it, and touch nothing.

    limosa plan move 4711 --to 5

    limosa plan checkpoint train --output /data/train-1

    Exit code 0: the verb would succeed, or there is nothing to do. Else: the
    code of the first refusal.
    """
    from limosa.cli import main

    if json_wanted(arguments):
        report.fmt = Format.json
    if verb not in VERBS:
        guess = nearest(verb, VERBS)
        hint = f"did you mean limosa plan {guess}?" if guess else f"one of {', '.join(VERBS)}"
        raise UsageError(detail=f"there is no plan for {verb!r}", hint=hint)
    common = ["-o", Format.json.value] if report.json else []
    common += ["-q"] * report.quiet + ["-v"] * report.verbose
    arguments = [*common, "--dry-run", *arguments]
    code = planned(main.verb(verb), verb).main(args=arguments, prog_name=f"limosa plan {verb}", standalone_mode=False)
    report.exit_code = code if isinstance(code, int) else 0

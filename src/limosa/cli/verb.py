"""What makes a verb of a function: its options and arguments, those that every verb has, and its report."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from limosa.cli.output import Format, reporting

Parameter = click.Parameter


class Argument(click.Argument):
    """An argument with a line of help, as options have one.

    Args:
        name: of the function's parameter.
        help: the line.
        **how: as :class:`click.Argument` takes it.
    """

    def __init__(self, name: str, *, help: str, **how: Any):  # noqa: A002 - click's own name for it
        super().__init__([name], **how)
        self.about = help  # newer clicks have a help of their own for it, and another heading


def option(*names: str, **how: Any) -> click.Option:
    """An option; ``name, "--option"`` where the function calls it something else."""
    return click.Option(list(names), **how)


def flag(*names: str, help: str) -> click.Option:  # noqa: A002 - click's own name for it
    """An option without a value."""
    return click.Option(list(names), is_flag=True, help=help)


OF_ALL: tuple[Parameter, ...] = (
    option(
        "fmt",
        "-o",
        "--format",
        type=click.Choice([one.value for one in Format]),
        metavar="<text|json>",
        default=Format.text.value,
        help="Print the result as text or json.",
    ),
    flag("-q", "--quiet", help="Say nothing on stderr but errors."),
    option("-v", "--verbose", count=True, help="Say more on stderr."),
)
"""What every verb has."""


class Verb(click.Command):
    """One verb; its help tells of its arguments, too."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments, then options."""
        told = [(p.metavar or p.name or "", p.about) for p in self.params if isinstance(p, Argument)]
        if told:
            with formatter.section("Arguments"):
                formatter.write_dl(told)
        super().format_options(ctx, formatter)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The words after the verb's name: what must be given without brackets, as everywhere."""
        return [re.sub(r"^\{(.*)\}$", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]


def verb(*parameters: Parameter, settings: Mapping[str, Any] | None = None) -> Callable[[Callable[..., None]], Verb]:
    """Makes a verb of a function, which is given a report and what was typed; its docstring is the help.

    The verb is called as the module is. Whatever the function raises is printed, and the exit code is the error's.

    Args:
        *parameters: its options and arguments, in the order in which the help has them.
        settings: click's, for the context.
    """

    def made(function: Callable[..., None]) -> Verb:
        name = function.__module__.removesuffix(".command").rpartition(".")[2]

        def callback(*, fmt: str, quiet: bool, verbose: int, **given: Any) -> None:
            with reporting(name, Format(fmt), quiet, verbose) as report:
                report.dry_run = bool(given.get("dry_run"))
                function(report, **given)

        return Verb(
            name,
            callback=callback,
            help=inspect.cleandoc(function.__doc__ or ""),
            params=[*parameters, *OF_ALL],
            context_settings={"help_option_names": ["-h", "--help"], **(settings or {})},
        )

    return made


def look_ahead(criu: str | None) -> None:
    """Begin what takes a moment, while the rest is loaded: to find CRIU, unless that one is named, and to load NVML."""
    from limosa.gpu import nvml
    from limosa.process.criu import find

    if criu is None:
        find.warm()
        click.get_current_context().call_on_close(find.forget)
    nvml.warm()

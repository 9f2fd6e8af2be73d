"""``limosa softgpu``: a node of GPUs in software, and a program in it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from limosa.cli.options import FormatOption, Quiet, Verbose, parse_size
from limosa.cli.output import Format, reporting

CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows COMMAND is COMMAND's
NOT_FOUND, NOT_STARTED = 127, 126  # as a shell has them


def command(
    command_line: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="What to start.", show_default=False)
    ] = None,
    *,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="How many GPUs.")] = 1,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE,...", help="Memory of each GPU, or one for all.")
    ] = "2GiB",
    chip: Annotated[
        str, typer.Option("--chip", metavar="NAME,...", help="Chip of each GPU (H200, A100, ...), or one for all.")
    ] = "H200",
    like: Annotated[
        str | None, typer.Option("--like", metavar="NAME", help="As slow as this one: h200 (default: no waiting).")
    ] = None,
    driver: Annotated[
        str | None, typer.Option("--driver", metavar="VERSION", help="What the driver calls itself.")
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", metavar="SPEC", help="Let calls fail; may be repeated.")
    ] = None,
    shell: Annotated[bool, typer.Option("--shell", help="Start your shell instead of COMMAND.")] = False,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Run COMMAND on a node of software GPUs.

    COMMAND, what it starts and the limosa that looks after them see GPUs that
    are not there: a driver in software, on the machine's memory, with the
    checkpoint calls and their failures. Nothing outside of COMMAND sees them;
    the node is gone with the last process in it. Needs root.

    Exit code: COMMAND's. 126, 127: it cannot be started.
    """
    with reporting("softgpu", fmt, quiet, verbose) as report:
        from limosa.errors import UsageError
        from limosa.softgpu import node
        from limosa.softgpu.spec import DRIVER_VERSION, make_spec

        if bool(command_line) == shell:
            raise UsageError(detail="name a COMMAND to run in the node, or --shell, and only one of these")
        argv = [os.environ.get("SHELL") or "/bin/sh"] if shell else list(command_line or ())
        spec = make_spec(
            gpus,
            [parse_size(part) for part in memory.split(",")],
            [part.strip().upper() for part in chip.split(",")],
            like=like,
            driver_version=driver or DRIVER_VERSION,
            faults=fault or (),
        )
        node.enter(spec)
        if shell:
            report.tell(f"a shell on a node of {gpus} software GPU{'s' if gpus > 1 else ''}; exit leaves it")
        report.close()
        try:
            node.run_here(argv)
        except OSError as error:
            report.tell(f"{argv[0]}: {error.strerror}")
            report.exit_code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED

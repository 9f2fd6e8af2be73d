"""``limosa softgpu``: a node of GPUs in software, and a program in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from limosa.cli.options import parse_size
from limosa.cli.output import Report
from limosa.cli.table import table
from limosa.cli.verb import Argument, flag, option, verb

if TYPE_CHECKING:
    from rich.console import Console

NOT_FOUND, NOT_STARTED = 127, 126  # as a shell has them


def _change(add: Sequence[str], lift: Sequence[str], turn: Sequence[str]) -> None:
    """Change the node that this process is in."""
    from limosa.errors import UsageError
    from limosa_softgpu.faults import Switches, check_rule

    node = Switches()
    for rule in add:
        check_rule(rule)
    unknown = set(lift) - {"all", *node.rules()}
    if unknown:
        raise UsageError(detail=f"--lift: there is no fault called {', '.join(sorted(unknown))}")
    for word in turn:
        node.turn(word)
    for name in lift:
        if name == "all":
            node.clear()
        else:
            node.remove(name)
    for rule in add:
        node.add(rule)


def _faults() -> dict[str, Any]:
    """Return the node's faults, each with how many calls it has met."""
    from limosa_softgpu.faults import Switches

    node = Switches()
    return {"faults": [{"name": n, "rule": rule, "calls": node.count(n)} for n, rule in node.rules().items()]}


def _draw(console: Console, found: dict[str, Any]) -> None:
    """A line a fault."""
    rows = [(fault["name"], fault["calls"], fault["rule"]) for fault in found["faults"]]
    table(console, ("FAULT", "CALLS", "RULE"), rows, right=("CALLS",), text=("RULE",))


@verb(
    Argument("command_line", metavar="[COMMAND]...", nargs=-1, help="What to start."),
    option("--gpus", metavar="N", type=int, help="How many GPUs (default: 1)."),
    option("--memory", metavar="SIZE,...", help="Memory of each GPU, or one for all (2GiB)."),
    option("--chip", metavar="NAME,...", help="Chip of each GPU (A100, ...), or one for all (H200)."),
    option("--like", metavar="NAME", help="Be as slow as a real GPU: h200 (default: no waiting)."),
    option(
        "--rate",
        metavar="WHAT=SPEED",
        multiple=True,
        help="Set a speed: copy=20GiB/s, checkpoint=2GiB/s, ...; may be repeated.",
    ),
    option(
        "--cost",
        metavar="WHAT=SECONDS",
        multiple=True,
        help="Set a fixed cost per call: checkpoint=0.4, lock=0.1, ...; may be repeated.",
    ),
    option("--driver", metavar="VERSION", help="The driver version that is reported."),
    option("--fault", metavar="SPEC", multiple=True, help="Let calls fail; may be repeated. In a node: from now on."),
    option("--log", metavar="FILE", default="", help="Append injected faults and calls of missing functions."),
    option("--lift", metavar="NAME", multiple=True, help="In a node: remove that fault, or all."),
    option(
        "--turn", metavar="GPU:WHAT=on|off", multiple=True, help="In a node: lost, mig or persistence; also mps=on."
    ),
    option("--cdi", metavar="FILE", help="Write a CDI spec of the node's GPUs (/etc/cdi/limosa.dev-softgpu.json)."),
    option("--join", metavar="PID", type=int, help="Run COMMAND in the node that this process is in."),
    flag("--shell", help="Start your shell instead of COMMAND."),
    settings={"allow_interspersed_args": False},  # what follows COMMAND is COMMAND's
)
def command(  # noqa: PLR0913 - what is typed
    report: Report,
    *,
    command_line: Sequence[str],
    gpus: int | None,
    memory: str | None,
    chip: str | None,
    like: str | None,
    rate: Sequence[str],
    cost: Sequence[str],
    driver: str | None,
    fault: Sequence[str],
    log: str,
    lift: Sequence[str],
    turn: Sequence[str],
    cdi: str | None,
    join: int | None,
    shell: bool,
) -> None:
    """Run COMMAND on a node of software GPUs.

    COMMAND and what it starts, limosa included, see GPUs that do not exist: a
    driver in software, on the machine's memory, with the real driver's
    checkpoint calls and failures. Processes outside do not see them. The node
    ends with its last process. Needs root.

    Inside a node and without COMMAND: --fault, --lift and --turn change this
    node. Then its faults are listed, each with the calls that it has met.

    Exit code: COMMAND's. 126, 127: it cannot be started.
    """
    from limosa.errors import GpuUnavailable, UsageError
    from limosa_softgpu import node
    from limosa_softgpu.spec import DRIVER_VERSION, make_spec

    of_a_new_one = gpus is not None or memory or chip or like or rate or cost or driver or log
    if node.inside() and not command_line and not shell:
        if of_a_new_one:
            raise UsageError(
                detail="--gpus, --memory, --chip, --like, --rate, --cost, --driver and --log make a node: name a "
                "COMMAND for it"
            )
        try:
            _change(fault, lift, turn)
            if cdi:
                _write_cdi(report, cdi)
            found = _faults()
        except OSError as error:  # everybody in the node may write to its files
            detail = f"the node's {error.filename or 'folder'}: {error.strerror}"
            raise GpuUnavailable(detail=detail, hint="exit, and start a new one") from error
        report.result(found, lambda console: _draw(console, found))
        return
    if lift or turn:
        raise UsageError(detail="--lift and --turn change the node that they are called in, and this is none")
    if bool(command_line) == shell:
        raise UsageError(detail="name a COMMAND to run in the node, or --shell, and only one of these")
    argv = [os.environ.get("SHELL") or "/bin/sh"] if shell else list(command_line or ())
    if join is not None:
        if of_a_new_one or fault or cdi:
            raise UsageError(detail="--join runs COMMAND in a node that is there: no options of a new one")
        node.join_node(join)
        report.close()
        _become(report, argv)
        return
    gpus = 1 if gpus is None else gpus
    spec = make_spec(
        gpus,
        [parse_size(part, "--memory") for part in (memory or "2GiB").split(",")],
        [part.strip().upper() for part in (chip or "H200").split(",")],
        like=like.lower() if like else None,
        speeds=rate or (),
        costs=cost or (),
        driver_version=driver or DRIVER_VERSION,
        faults=fault or (),
        log=log,
    )
    node.enter(spec)
    if cdi:
        _write_cdi(report, cdi)
    if shell:
        own = os.path.dirname(sys.executable)  # `limosa` and its `python3` there are these
        if own not in os.environ.get("PATH", "").split(os.pathsep):
            os.environ["PATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PATH"))))
        report.tell(f"a shell on a node of {gpus} software GPU{'s' if gpus > 1 else ''}; exit leaves it")
    report.close()
    _become(report, argv)


def _write_cdi(report: Report, path: str) -> None:
    """Write the CDI spec of the node that this process is in."""
    from pathlib import Path

    from limosa.cdi import write_spec
    from limosa.errors import PermissionDenied
    from limosa_softgpu.cdi import KIND, node_spec

    try:
        write_spec(node_spec(), Path(path))
    except OSError as error:
        raise PermissionDenied(detail=f"--cdi {path}: {error.strerror}", hint="sudo, or another FILE") from error
    report.tell(f"containers that are started in this node get its GPUs by {KIND}=0, … ({path})")


def _become(report: Any, argv: list[str]) -> None:
    """Replace this process by a command of the node."""
    from limosa_softgpu import node

    try:
        node.run_here(argv)
    except OSError as error:
        report.tell(f"{argv[0]}: {error.strerror}")
        report.exit_code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED

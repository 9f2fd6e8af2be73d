"""``limosa doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limosa.cli import words
from limosa.cli.options import CRIU_PATH
from limosa.cli.output import Report, plain
from limosa.cli.verb import flag, verb

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from limosa.operation.doctor import Diagnosis

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@verb(
    flag("--fix", help="Fetch a CRIU that works, build what is missing; as root: set up containers."),
    flag("--leave-containers", help="With --fix: leave container runtimes, and their CDI specs, as they are."),
    CRIU_PATH,
)
def command(report: Report, *, fix: bool, leave_containers: bool, criu: Path | None) -> None:
    """Say what works on this machine, what does not, and what to do about it.

    It tries CRIU: it dumps and restores a small process. -v tells more.

    Exit code 0: all that this machine needs works. 24: no working CRIU.
    12: a GPU or its driver cannot do it. 11: not permitted. 15: the runtime
    folder is full.
    """
    from limosa.operation.doctor import doctor

    found = doctor(fix=fix, criu=str(criu) if criu else None, log=report.tell, leave_containers=leave_containers)
    checks = [{k: v for k, v in c.items() if k != "exit_code"} for c in plain(found.checks)]
    report.result(
        {"ok": found.ok, "checks": checks}, lambda c: _draw(c, found, report.verbose), exit_code=found.exit_code
    )


def _draw(console: Console, found: Diagnosis, verbose: int = 0) -> None:
    """A line a check, and its way out below; with ``-v`` what is known beyond that."""
    from rich.text import Text

    from limosa.operation.doctor_gpu import Status

    width = max(len(c.name) for c in found.checks)
    for check in found.checks:
        line = Text(f"{check.status:<5}", style=_STYLE[check.status])
        line.append(f"{check.name:<{width}}  {words.clean(check.detail)}", style="default")
        console.print(line, soft_wrap=True)
        if check.more and verbose:
            console.print(Text(f"{'':<5}{'':<{width}}  {words.clean(check.more)}"), soft_wrap=True)
        if check.fix and check.status != Status.OK:
            console.print(Text(f"{'':<5}{'':<{width}}  → {words.clean(check.fix)}"), soft_wrap=True)
    console.print("all that this machine needs works" if found.ok else "not everything that is needed works")

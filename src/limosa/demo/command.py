"""``limosa demo``."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from limosa.cli.options import FormatOption, Quiet, Verbose
from limosa.cli.output import Format, Report, reporting
from limosa.cli.signals import cancelling

if TYPE_CHECKING:
    from rich.console import Console

    from limosa.demo.disturb import DemoResult, Show


def command(
    *,
    steps: Annotated[
        int | None, typer.Option("--steps", min=50, help="Training steps (default: 400; 1000 on GPUs).")
    ] = None,
    pace: Annotated[float, typer.Option("--pace", min=0, help="Seconds of rest after each.")] = 0.02,
    numpy: Annotated[bool, typer.Option("--numpy", help="NumPy on the CPU, also where PyTorch is installed.")] = False,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Disturb a real training and compare its bits with an undisturbed twin's.

    PyTorch with DataLoader workers where it is installed, else NumPy. With two
    GPUs: move there and back, suspend and resume, checkpoint, kill, restore.
    With one the last two, with none the last, on the CPU.

    Exit code 1: the bits differ.
    """
    with reporting("demo", fmt, quiet, verbose) as report:
        from limosa.demo.disturb import run

        with cancelling(report) as cancel, Screen(report) as screen:
            result = run(screen.show(cancel), steps=steps, pace=pace, only_numpy=numpy)
        report.result(result, lambda console: _table(result, console), exit_code=result.exit_code)


class Screen:
    """What is seen while the demo runs: two bars on a terminal, lines elsewhere. All on stderr."""

    def __init__(self, report: Report):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._report = report
        live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not report.quiet
        columns = (TextColumn("{task.description:<12}"), BarColumn(bar_width=30), MofNCompleteColumn())
        console = Console(stderr=True, highlight=False, markup=False)
        extra = (TimeElapsedColumn(), TextColumn("{task.fields[doing]}", markup=False))
        self._bars = Progress(*columns, *extra, console=console, disable=not live)
        self._live = live
        self._tasks = {name: self._bars.add_task(name, total=None, doing="") for name in ("undisturbed", "disturbed")}

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, cancel: threading.Event) -> Show:
        """How the demo talks to this screen."""
        from limosa.demo.disturb import Show
        from limosa.progress import Progress

        def tell(text: str) -> None:
            if self._live:
                self._bars.console.print(text)
            else:
                self._report.tell(text)

        def steps(name: str, done: int, total: int) -> None:
            self._bars.update(self._tasks[name], completed=done, total=total, doing="")

        def progress(event: Progress) -> None:
            text = f"{event.step} {event.message}".strip()
            self._bars.update(self._tasks["disturbed"], doing=text[:40])
            if not self._live and event.done is None:
                self._report.detail(text)

        return Show(tell=tell, steps=steps, progress=progress, cancel=cancel)


def _table(result: DemoResult, console: Console) -> None:
    from rich.table import Table

    where = " and ".join(dict.fromkeys(result.gpus)) if result.gpus else "the CPU"
    table = Table(title=f"{result.framework} training with two data workers on {where}", title_justify="left")
    for name in ("disturbance", "at step", "took", "stood still", "what happened"):
        table.add_column(name, justify="left" if name in ("disturbance", "what happened") else "right")
    for did in result.did:
        table.add_row(did.operation, str(did.step), f"{did.seconds:.2f} s", f"{did.pause_seconds:.2f} s", did.text)
    if result.did:
        console.print(table)
    for other in result.not_done:
        console.print(f"not done: {other.operation}: {other.why}")
    undisturbed, disturbed = result.last_loss
    console.print(f"last loss, undisturbed: {undisturbed}")
    console.print(f"last loss, disturbed:   {disturbed}")
    if result.same_bits:
        console.print(f"all {result.steps} losses are the same to the bit")
    else:
        console.print(f"THE LOSSES DIFFER from step {result.first_difference} on")

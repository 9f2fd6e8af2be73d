"""``limosa demo``."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import click

from limosa.cli.options import Seconds
from limosa.cli.output import Report
from limosa.cli.signals import cancelling
from limosa.cli.verb import flag, option, verb

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from limosa.demo.disturb import DemoResult, Show


@verb(
    option("--steps", metavar="N", type=click.IntRange(min=50), help="Training steps (default: 400; 1000 on GPUs)."),
    option("--pace", metavar="SECONDS", type=Seconds(), default=0.02, show_default=True, help="Rest after each step."),
    flag("--numpy", help="Use NumPy on the CPU, even if PyTorch is installed."),
)
def command(report: Report, *, steps: int | None, pace: float, numpy: bool) -> None:
    """Disturb a real job and compare its bits with an undisturbed twin's.

    With two GPUs, a PyTorch training (without PyTorch: a program on device
    memory) is moved there and back, suspended, resumed, checkpointed, killed
    and restored. With one GPU, it is not moved. With none, all of this
    happens on two software GPUs (needs root). Two ranks that talk over NCCL
    follow, whose GPUs are swapped; then a training on the CPU is
    checkpointed, killed and restored.

    Exit code 1: the bits differ.
    """
    from limosa.demo.disturb import run, usable_gpus
    from limosa.demo.node import end_helpers, go_on_in_a_node, why_here

    why = why_here()
    if not numpy and not usable_gpus()[0]:
        why = go_on_in_a_node(_briefly(usable_gpus()[1]), _again(steps, pace, report))
    try:
        with cancelling(report) as cancel, Screen(report) as screen:
            result = run(screen.show(cancel), steps=steps, pace=pace, only_numpy=numpy, why_no_gpus=why)
    finally:
        if why_here():  # the node is the demo's own
            end_helpers()
    report.result(result, lambda console: _table(result, console), exit_code=result.exit_code)


def _again(steps: int | None, pace: float, report: Report) -> list[str]:
    """The arguments with which the demo starts anew on a node."""
    given = ["--pace", str(pace), "--format", report.fmt.value, *["-v"] * report.verbose]
    return given + (["--steps", str(steps)] if steps is not None else []) + (["-q"] if report.quiet else [])


def _briefly(no_gpus: str) -> str:
    """Why there is no GPU, for a sentence: that no driver answers is nothing that a machine without a GPU lacks."""
    from limosa.operation.doctor_gpu import gpu_present

    return no_gpus if gpu_present() else "there is no NVIDIA GPU here"


class Screen:
    """What is seen while the demo runs: a bar for each run on a terminal, lines elsewhere. All on stderr."""

    def __init__(self, report: Report):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._report = report
        live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not report.quiet
        columns = (TextColumn("{task.description:<15}"), BarColumn(bar_width=30), MofNCompleteColumn())
        console = Console(stderr=True, highlight=False, markup=False)
        extra = (TimeElapsedColumn(), TextColumn("{task.fields[doing]}", markup=False))
        self._bars = Progress(*columns, *extra, console=console, disable=not live)
        self._live = live
        self._tasks: dict[str, TaskID] = {}

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
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=total, doing="")
            self._bars.update(self._tasks[name], completed=done, total=total, doing="")

        def progress(event: Progress) -> None:
            text = f"{event.step} {event.message}".strip()
            if self._tasks:
                self._bars.update(list(self._tasks.values())[-1], doing=text[:40])
            if not self._live and event.done is None:
                self._report.detail(text)

        return Show(tell=tell, steps=steps, progress=progress, cancel=cancel)


def _table(result: DemoResult, console: Console, *, ranks: bool = False) -> None:
    from rich.table import Table

    where = " and ".join(f"{result.gpus.count(n)} × {n}" for n in dict.fromkeys(result.gpus)) or "the CPU"
    hashes = result.framework == "cuda"
    what = "a program on device memory" if hashes else f"{result.framework} training with two data workers"
    if ranks:
        what = f"two ranks over NCCL ({'a program on device memory' if hashes else 'DistributedDataParallel'})"
    table = Table(title=f"{what} on {where}", title_justify="left")
    for name in ("disturbance", "at step", "took", "stood still", "what happened"):
        table.add_column(name, justify="left" if name in ("disturbance", "what happened") else "right")
    for did in result.did:
        table.add_row(did.operation, str(did.step), f"{did.seconds:.2f} s", f"{did.pause_seconds:.2f} s", did.text)
    if result.did:
        console.print(table)
    for other in result.not_done:
        console.print(f"not done: {other.operation}: {other.why}")
    undisturbed, disturbed = result.last_loss
    one, many = ("hash", "hashes") if hashes else ("loss", "losses")
    console.print(f"last {one}, undisturbed: {undisturbed}")
    console.print(f"last {one}, disturbed:   {disturbed}")
    if result.same_bits:
        console.print(f"all {result.steps} {many} are the same to the bit")
    else:
        console.print(f"THE {many.upper()} DIFFER from step {result.first_difference} on")
    if result.ranks is not None:
        console.print()
        _table(result.ranks, console, ranks=True)
    if result.cpu is not None:
        console.print()
        _table(result.cpu, console)
    if result.software:
        console.print()
        console.print(f"These were software GPUs, not real ones: {result.software}. To see the real thing:")
        console.print("limosa demo on a machine with an NVIDIA GPU (two, to see it move) and driver 580 or newer.")

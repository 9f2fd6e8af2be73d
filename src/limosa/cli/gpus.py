"""``limosa gpus``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from limosa.cli import words
from limosa.cli.options import FormatOption, Quiet, Verbose
from limosa.cli.output import Format, reporting

if TYPE_CHECKING:
    from rich.console import Console

    from limosa.gpu import Inventory


def command(fmt: FormatOption = Format.text, quiet: Quiet = False, verbose: Verbose = 0) -> None:
    """List the GPUs of this machine and who holds memory on them.

    Suspended jobs hold nothing on a GPU, or with --release=memory-only their
    context: limosa ps shows them. With CUDA_VISIBLE_DEVICES set, all GPUs
    are listed all the same.
    """
    with reporting("gpus", fmt, quiet, verbose) as report:
        from limosa.gpu import inventory
        from limosa.operation.counting import completed

        found = completed(inventory())
        if found.software:
            report.tell("these are software GPUs, not real ones")
        report.result(found, lambda console: _draw(console, found))


def _draw(console: Console, found: Inventory) -> None:
    """A line a GPU, then a line for each process on it."""
    rows: list[tuple[Any, ...]] = []
    for gpu in found.gpus:
        notes = [n for n, on in (("MIG", gpu.mig), ("no persistence", not gpu.persistence)) if on]
        total = words.size(gpu.memory_total)
        name = gpu.name + (f" ({', '.join(notes)})" if notes else "")
        rows.append((gpu.index, words.size(gpu.memory_used), total, gpu.pci_bus_id, gpu.uuid, name))
        for process in gpu.processes:
            rows.append(("", words.size(process.memory_used), "", "", f"  process {process.pid}", ""))
    rows += [(index, "", "", "", "", "lost: it has fallen off the bus") for index in found.lost]
    words.table(console, ("GPU", "USED", "MEMORY", "BUS", "UUID", "NAME"), rows, right=("GPU", "USED", "MEMORY"))

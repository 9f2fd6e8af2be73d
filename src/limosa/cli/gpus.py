"""``limosa gpus``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from limosa.cli import words
from limosa.cli.output import Report, plain
from limosa.cli.table import table
from limosa.cli.verb import verb

if TYPE_CHECKING:
    from rich.console import Console

    from limosa.gpu import Inventory
    from limosa.operation.jobs import Holder

_NO_GPU = "none is needed for limosa demo and limosa softgpu --shell: they bring software GPUs (as root)"


@verb()
def command(report: Report) -> None:
    """List the GPUs of this machine and who holds memory on them.

    Each process is shown with its job's name or its command. "Limosa's own"
    is a helper process of Limosa. Suspended jobs hold no memory on a GPU
    (after suspend --release=memory-only, only their context): limosa ps
    lists them. CUDA_VISIBLE_DEVICES does not hide GPUs from this list.
    """
    from limosa.errors import DriverTooOld
    from limosa.gpu import inventory
    from limosa.operation.counting import completed
    from limosa.operation.doctor_gpu import gpu_present
    from limosa.operation.jobs import holders

    try:
        found = completed(inventory())
    except DriverTooOld as error:
        if not gpu_present():  # doctor misses no driver then
            error.hint = _NO_GPU
        raise
    whose = holders(p.pid for gpu in found.gpus for p in gpu.processes + gpu.mps_processes)
    if found.software:
        report.tell("these are software GPUs, not real ones")
    value = plain(found)
    for process in [p for gpu in value["gpus"] for p in gpu["processes"] + gpu["mps_processes"]]:
        process.update(plain(whose[process["pid"]]))
    report.result(value, lambda console: _draw(console, found, whose))


def _draw(console: Console, found: Inventory, whose: Mapping[int, Holder]) -> None:
    """A line a GPU, then a line for each process on it."""
    rows: list[tuple[Any, ...]] = []
    for gpu in found.gpus:
        notes = [n for n, on in (("MIG", gpu.mig), ("no persistence", not gpu.persistence)) if on]
        name = gpu.name + (f" ({', '.join(notes)})" if notes else "")
        used, total = words.size(gpu.memory_used), words.size(gpu.memory_total)
        rows.append((gpu.index, used, total, "", name, gpu.pci_bus_id, gpu.uuid))
        for process in gpu.processes + gpu.mps_processes:
            who = _who(whose[process.pid])
            rows.append(("", words.size(process.memory_used), "", process.pid, f"  {who}", "", ""))
    rows += [(index, "", "", "", "lost: it has fallen off the bus", "", "") for index in found.lost]
    table(
        console,
        ("GPU", "USED", "MEMORY", "PID", "NAME", "BUS", "UUID"),
        rows,
        right=("GPU", "USED", "MEMORY", "PID"),
        text=("NAME",),
        least=("UUID", "BUS", "MEMORY"),
    )


def _who(holder: Holder) -> str:
    """What a line about a process calls it."""
    if holder.limosa:
        return f"Limosa's own, for {holder.user}"
    command = words.command_line([os.path.basename(holder.command[0]), *holder.command[1:]]) if holder.command else "?"
    return f"{words.clean(holder.name)}: {command}" if holder.name else command

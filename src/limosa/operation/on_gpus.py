"""The owner of the memory on a GPU: a job, by name, or Limosa itself."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from limosa.operation.jobs import command_of, user_of
from limosa.process import records
from limosa.process.candidates import is_own
from limosa.process.tree import group_by_topmost


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory on a GPU, and the job that it belongs to."""

    pid: int  # the process
    job: int  # pid of the job's topmost process; the process itself where nobody started it by ``limosa run``
    name: str = ""  # the job's name, or ""
    user: str = ""  # the process's owner
    command: list[str] = []  # its argument vector; empty where it cannot be seen from here
    limosa: bool = False  # whether it is Limosa's own (the mover, the vault): nobody's job


def holders(pids: Iterable[int]) -> dict[int, Holder]:
    """Whose these processes are, by pid. Reads ``/proc`` and records; the driver is not asked."""
    wanted = set(pids)
    names = {record.root.pid: record.name for record in records.RunRecord.all()}
    root = {pid: top for top, members in group_by_topmost(wanted, names).items() for pid in members}
    return {pid: _holder(pid, root.get(pid, pid), names) for pid in sorted(wanted)}


def _holder(pid: int, job: int, names: dict[int, str]) -> Holder:
    if is_own(pid):
        return Holder(pid=pid, job=pid, user=user_of(pid), command=command_of(pid), limosa=True)
    return Holder(pid=pid, job=job, name=names.get(job, ""), user=user_of(pid), command=command_of(pid))

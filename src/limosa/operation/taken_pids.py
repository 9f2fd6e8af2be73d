"""Pids that an image needs and somebody has: waiting for them, and saying who has them and why.

Often it is the image's own job: still running (``--leave-running``), running again (restored before), or ended and not
reaped yet. Each of the three has another way out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from limosa.errors import LimosaError, Reason
from limosa.image import Manifest, TreeProcess
from limosa.operation.jobs import command_of
from limosa.process.identity import Identity, Stat, ending, read_stat
from limosa.process.records import RunRecord

_SHOWN = 5
_OWN_SECONDS = 0.5
"""How long the image's own job may take to begin to end; one that goes on is not waited for."""


def taken_pids(manifest: Manifest, patience: float, stop: Callable[[], bool] | None = None) -> list[Reason]:
    """Waits for the image's pids and thread ids to become free; names who holds them after that, or after ``stop``.

    Returns ``pid-taken`` for the first few of them; for the root alone, where the image's own job has it.
    """
    wanted = {p.pid: p for p in manifest.tree} | {t: p for p in manifest.tree for t in p.threads}
    begun, root = time.monotonic(), manifest.tree[0].pid
    while True:
        taken = sorted(n for n in wanted if os.path.exists(f"/proc/{n}"))
        waited = time.monotonic() - begun
        if not taken or waited > patience or (stop is not None and stop()):
            break
        if waited > _OWN_SECONDS and root in taken and _lives(root, wanted[root]):
            break
        time.sleep(0.02)
    if root in taken and (own := _own_job(root, wanted[root])) is not None:
        return [own]
    return [_own_job(n, wanted[n]) or _somebody(n) for n in taken[:_SHOWN]]


def _own_job(number: int, process: TreeProcess) -> Reason | None:
    """Where the image's own job has the number: in which of the three ways."""
    try:
        stat = read_stat(process.pid)
    except LimosaError:
        return None  # only a thread id is taken, by somebody else
    same = stat.start_time == process.start_time
    who = f"pid {number}" + (f" (a thread of {process.pid})" if number != process.pid else "")
    if stat.ended:
        if not same:
            return None
        parent = _name(stat.ppid)
        text = f"{who} is the image's own process: it has ended, and its parent {parent} has not reaped it yet"
        return _reason(number, text, f"wait until process {stat.ppid} reaps it, or end that one")
    if not process.command or command_of(process.pid) != process.command:
        return None
    called = _job_name(stat)
    if same:
        text = f"{who} is the image's own job{called}: it still runs, as it has since before this image was made"
        return _reason(number, text, "end it first, if it is to go on from this image")
    text = f"{who} is taken by the same program{called}, started since: the job seems to run again (restored already?)"
    hint = (
        "limosa ps shows it; limosa recover if a restore has died; else end it first, if it is to go on from this image"
    )
    return _reason(number, text, hint)


def _lives(number: int, process: TreeProcess) -> bool:
    """Whether the image's own job has the number and gives no sign of ending."""
    own = _own_job(number, process)
    try:
        return own is not None and not read_stat(number).ended and not ending(number)
    except LimosaError:
        return False


def _somebody(number: int) -> Reason:
    try:
        stat = read_stat(number)
        who = f"{stat.name}, state {stat.state}, parent {stat.ppid}"
    except LimosaError:
        who = "it has just ended"
    return _reason(
        number, f"pid {number} is taken ({who})", "wait until it has ended; a zombie goes when its parent reaps it"
    )


def _reason(number: int, text: str, hint: str) -> Reason:
    return Reason(id="pid-taken", text=text, exit_code=23, hint=hint, pid=number)


def _name(pid: int) -> str:
    try:
        return f"{pid} ({read_stat(pid).name})"
    except LimosaError:
        return str(pid)


def _job_name(stat: Stat) -> str:
    """The name it was given by ``limosa run`` or got back by ``limosa restore``, for a sentence."""
    record = RunRecord.of(Identity(stat.pid, stat.start_time))
    return f" {record.name!r}" if record is not None and record.name else ""

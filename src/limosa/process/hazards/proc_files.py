"""Files and folders of a process in procfs: CRIU opens them anew by their path, ``/proc/PID/…``.

Those of the job's processes come back with them, and so do those of a process that has ended. Measured with CRIU
4.2.1: files are opened before threads are made, and a working directory ``/proc/PID`` is written down wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from limosa.errors import Reason
from limosa.process.observation import JobObservation, ProcessObservation

_THREAD = re.compile(r"(\d+)/task/(\d+)(/|\Z)")
_OF_A_PROCESS = re.compile(r"(\d+)(/.*)?", re.DOTALL)  # and not "4711 (deleted)": that one has ended


def proc_hazards(obs: JobObservation) -> list[Reason]:
    """Return what the job has open in ``/proc/PID`` and could not be restored.

    Returns:
        ``proc-thread``, ``proc-folder`` (13) and ``proc-outside`` (13, forceable).
    """
    threads = {t.tid: p for p in obs.processes for t in p.threads if t.tid != p.pid}
    found: list[Reason] = []
    for process in obs.processes:
        for fd in process.fds:
            if _OF_A_PROCESS.fullmatch(fd.in_proc):
                where = f"descriptor {fd.fd} of process {process.title}"
                found += _one(obs, process, where, fd.in_proc, fd.watched_pid, threads)
        for what, path in (("working directory", process.cwd), ("root directory", process.file_root)):
            inside = path.removeprefix("/proc/")
            match = _OF_A_PROCESS.fullmatch(inside)
            if match is None or inside == path:
                continue
            where = f"the {what} of process {process.title}"
            if match[2] is None:
                text = f"{where} is {path}, which CRIU cannot restore"
                found.append(Reason(id="proc-folder", text=text, exit_code=13, pid=process.pid))
            else:
                found += _one(obs, process, where, inside, int(match[1]), threads)
    return found


def _one(
    obs: JobObservation,
    process: ProcessObservation,
    where: str,
    inside: str,
    watched: int,
    threads: dict[int, ProcessObservation],
) -> Iterator[Reason]:
    match = _THREAD.match(inside)
    number = int(inside.partition("/")[0])
    # In a pid namespace of its own the numbers are that one's: nobody outside of it is seen there.
    own = process.namespaces.get("pid") == obs.host.namespaces.get("pid")
    if (match is not None and match[1] != match[2]) or (own and number in threads):
        yield Reason(
            id="proc-thread",
            text=f"{where} is /proc/{inside}, of a thread, which CRIU opens before there are threads again",
            exit_code=13,
            hint="close it for the time of the checkpoint",
            pid=process.pid,
        )
    elif own and watched > 1 and watched not in obs.pids:
        yield Reason(
            id="proc-outside",
            text=f"{where} is /proc/{inside}, of process {watched}, which is not part of the job: it cannot be "
            "opened again once that process has ended",
            exit_code=13,
            hint="close it; --force=proc-outside where that process lives on until the restore",
            pid=process.pid,
            forceable=True,
        )

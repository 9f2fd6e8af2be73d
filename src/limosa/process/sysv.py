"""System V IPC objects that a job uses, from ``/proc/sysvipc`` (proc(5)) and its mappings."""

from __future__ import annotations

import os
import time

from limosa.process.observation import ProcessObservation, SysvObservation


def _rows(name: str) -> list[dict[str, int]]:
    """Return ``/proc/sysvipc/NAME``, one dictionary a line. It shows the IPC namespace of the reader."""
    try:
        with open(f"/proc/sysvipc/{name}", encoding="ascii") as file:
            head, *lines = file.read().splitlines()
    except (OSError, ValueError):
        return []
    keys = head.split()
    return [dict(zip(keys, map(int, line.split()), strict=False)) for line in lines]


def _started(start_time: int) -> float:
    """Return when a process started, in seconds since the epoch."""
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - uptime + start_time / os.sysconf("SC_CLK_TCK")


def read_sysv(processes: list[ProcessObservation]) -> None:
    """Fill ``sysv_ipc`` of every process.

    What is in an IPC namespace of its own is not noted: CRIU dumps that as a whole. Attached shared memory shows in the
    mappings. A message queue remembers who sent and received last; a semaphore set names no process at all, so one of
    the same user that came to be since the process started is noted as uncertain.

    Args:
        processes: the job's processes, with their mappings and namespaces.
    """
    queues, semaphores = _rows("msg"), _rows("sem")
    own = os.stat("/proc/self/ns/ipc").st_ino
    for process in processes:
        if process.namespaces.get("ipc", own) != own:
            continue
        for mapping in process.maps:
            if mapping.path.startswith("/SYSV"):
                process.sysv_ipc.append(SysvObservation(kind="shm", id=mapping.inode))
        for row in queues:
            if process.pid in (row.get("lspid"), row.get("lrpid")):
                word = "last sender" if row.get("lspid") == process.pid else "last receiver"
                process.sysv_ipc.append(SysvObservation(kind="msg", id=row["msqid"], evidence=word))
    if not (semaphores and processes):
        return
    root = processes[0]
    if root.namespaces.get("ipc", own) == own:
        born = _started(root.start_time)
        for row in semaphores:
            if row.get("cuid") == root.uid and row.get("ctime", 0) >= int(born):
                root.sysv_ipc.append(
                    SysvObservation(kind="sem", id=row["semid"], evidence="creator's user", certain=False)
                )

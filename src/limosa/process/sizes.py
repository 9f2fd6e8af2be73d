"""What CRIU limits: descriptors and mappings at a restore, pipes at a dump.

At a restore CRIU opens, in each process, all its descriptors, one more for every shared anonymous mapping, and one for
each run of neighbouring mappings of the same file (4.2.1). It raises its limit to ``fs.nr_open`` if it may
(CAP_SYS_RESOURCE); otherwise the hard limit applies.
"""

from __future__ import annotations

import os
import re
import resource

from limosa.errors import Reason
from limosa.process.observation import JobObservation
from limosa.process.slurp import pieces
from limosa.process.status import effective_capabilities

MOST_PIPES = 1024  # NR_PIPES_WITH_DATA of CRIU
ASK_FROM = 1000
"""Processes that could need no more than so many are not counted: every limit is higher."""
_OWN = 64  # CRIU's service descriptors, and what it has open for a moment
_CAP_SYS_RESOURCE = 1 << 24
_LINE = re.compile(rb"^(\S+)-\S+ (.)(.).(.) \S+ (\S+) (\d+) +(.*)$", re.MULTILINE)
_ANONYMOUS = (b"/dev/zero (deleted)", b"[anon_shmem", b"/SYSV")


def descriptors_needed(pid: int) -> int:
    """Return the limit of descriptors that CRIU needs to restore a process as it is now.

    Raises:
        OSError: it has gone, or may not be looked into.
    """
    numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
    runs = 0
    before: tuple[bytes, ...] = ()
    lines = (line for piece in pieces(f"/proc/{pid}/maps") for line in _LINE.findall(piece))
    for _, _, write, shared, device, inode, path in lines:
        if path.startswith(_ANONYMOUS):
            runs += not path.startswith(b"/SYSV")
        elif inode != b"0":
            run = (device, inode, shared, write if shared == b"s" else b"")
            runs += run != before
            before = run
    # Its own go behind the highest number, and that in steps of 128.
    return max(len(numbers) + runs + _OWN, (max(numbers, default=0) + _OWN + 127) // 128 * 128)


def could_need(descriptors: int, mappings: int) -> bool:
    """Whether a process with so many could need more than any limit there is; then it is worth counting."""
    return descriptors + mappings > ASK_FROM


def limit() -> int:
    """Return how many descriptors CRIU may have here, started by this process."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if effective_capabilities() & _CAP_SYS_RESOURCE:
        with open("/proc/sys/fs/nr_open", encoding="ascii") as file:
            most = max(most, int(file.read()))
    return most


def too_many(needed: int, who: str, pid: int = 0) -> Reason | None:
    """Return what stands against a restore that needs so many descriptors: ``restore-descriptors`` (13), or None."""
    most = limit()
    if needed <= most:
        return None
    text = f"{who} takes {needed:,} descriptors to restore (its own, and one for each shared or file mapping), and "
    text += f"CRIU may have {most:,} here"
    hint = f"raise the hard limit of open files to {needed} (ulimit -Hn, LimitNOFILE=), or --cap-add SYS_RESOURCE"
    return Reason(id="restore-descriptors", text=text, exit_code=13, hint=hint, pid=pid, forceable=True)


def checkpoint_sizes(obs: JobObservation) -> list[Reason]:
    """Return what a job has too much of to be written to disk, or to come back from there.

    Returns:
        ``restore-descriptors``, ``pipes`` (13).
    """
    found = []
    pipes = set()
    for process in obs.processes:
        pipes |= {fd.inode for fd in process.fds if fd.kind == "pipe" and not fd.flags & os.O_WRONLY}
        numbers = [len(process.fds), *(fd.fd for fd in process.fds)]
        if could_need(max(numbers), sum(m.count for m in process.maps)):
            try:
                reason = too_many(descriptors_needed(process.pid), f"process {process.title}", process.pid)
            except OSError:
                continue  # it has gone, or is somebody else's: told elsewhere
            found += [reason] if reason is not None else []
    if len(pipes) > MOST_PIPES:
        text = f"the job has {len(pipes):,} pipes, and CRIU can dump {MOST_PIPES:,} of a job"
        found.append(Reason(id="pipes", text=text, exit_code=13, hint="sockets have no such limit", forceable=True))
    return found

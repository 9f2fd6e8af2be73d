"""What a CRIU that was killed in the middle of a restore leaves: half-made processes that wait for it for ever.

They hold the job's pids, so that the next restore would find them taken. A killed dump leaves no process, only
sockets and a table (:mod:`limosa.process.criu.network`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from limosa.errors import Busy, LimosaError
from limosa.process.identity import Handle, Identity, read_stat

PATIENCE = 5.0  # seconds until a killed process must be gone


def find_unfinished(criu: Identity, pids: Iterable[int]) -> list[Identity]:
    """Return the processes that a restore has left half-made.

    Args:
        criu: the CRIU of that restore, as ``on_start`` named it.
        pids: the pids in the image.

    Returns:
        Those of CRIU's own session, and those with pids of the image that are younger than CRIU and belong to a session
        or group of CRIU or of the image (so that a stranger who took such a pid meanwhile is left alone). A restore
        that came to its end looks the same: whoever asks must know that it did not.
    """
    wanted = set(pids)
    groups = wanted | {criu.pid}
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(LimosaError):
            stat = read_stat(int(name))
            if stat.start_time < criu.start_time or stat.ended or stat.pid == criu.pid:
                continue
            if stat.sid == criu.pid or (stat.pid in wanted and (stat.sid in groups or stat.pgid in groups)):
                found.append(Identity(stat.pid, stat.start_time))
    return found


def end_unfinished(criu: Identity, pids: Iterable[int]) -> list[Identity]:
    """End what a killed restore has left half-made, and wait until it has ended.

    Args:
        criu: the CRIU of that restore.
        pids: the pids in the image.

    Returns:
        What was ended.

    Raises:
        Busy: that CRIU still runs.
        PermissionDenied: somebody else's processes.
    """
    if criu.alive():
        raise Busy(pid=criu.pid, by="a restore that is under way")
    ended: list[Identity] = []
    known = list(pids)
    deadline = time.monotonic() + PATIENCE
    while (found := find_unfinished(criu, known)) and time.monotonic() < deadline:
        for identity in found:
            with contextlib.suppress(LimosaError), Handle(identity) as handle:
                handle.signal(signal.SIGKILL)
                handle.wait(PATIENCE)
                ended.append(identity)
    return ended

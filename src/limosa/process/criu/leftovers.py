"""What CRIU leaves when it is killed in the middle of a restore: half-made processes that wait for it for ever.

They hold the job's pids, so that the next restore would find them taken. A killed dump leaves no process of the job's,
only sockets and a table (:mod:`limosa.process.criu.network`). Killed as it begins, CRIU may leave a child of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from limosa.errors import Busy, LimosaError
from limosa.process.identity import Handle, Identity, read_stat
from limosa.process.slurp import head
from limosa.process.tree import snapshot

PATIENCE = 5.0  # seconds until a killed process must be gone
_SLACK = 1.0  # seconds between clocks
STANDSTILL = 10.0  # seconds that a restore may be without any process
_MOST_ARGUMENTS = 1 << 12


class Standstill:
    """Notices a restore that would never end: CRIU waits for processes, and none that it has made is left.

    When one of its scripts fails CRIU ends what it has made and may miss the end of the last of them; it waits on a
    futex then for ever (4.2.1, seen some times in ten thousand disturbed restores). Nothing of the job is there, so
    that it can be ended.

    Args:
        pid: CRIU.
        began: whether it has made processes already, as far as the caller knows.
        patience: seconds without any after which it stands still.
    """

    def __init__(self, pid: int, *, began: bool = False, patience: float = STANDSTILL):
        self._pid, self._began, self._patience = pid, began, patience
        self._looked = 0.0
        self._since: float | None = None

    def __call__(self) -> bool:
        """Look, twice a second at most; True where it has stood still for too long."""
        now = time.monotonic()
        if now - self._looked < 0.5:
            return False
        self._looked = now
        if any(stat.ppid == self._pid for stat in snapshot().values()):
            self._began, self._since = True, None
        elif self._began and self._since is None:
            self._since = now
        return self._since is not None and now - self._since > self._patience


class StoppedChildren:
    """Ends the children that a CRIU which was killed has left stopped.

    CRIU tries the kernel's ptrace on a child of its own when it begins. If CRIU is killed meanwhile, that child stays
    stopped for ever and holds what CRIU had open: a runtime waits for the end of its connection to CRIU, and the
    container stays frozen (runc 1.1, seen).

    Args:
        belongs: whether a process is of that CRIU's, by its pid.
    """

    def __init__(self, belongs: Callable[[int], bool]):
        self._belongs, self._looked = belongs, time.monotonic()

    def __call__(self) -> None:
        """Look, once a second at most."""
        now = time.monotonic()
        if now - self._looked >= 1.0:
            self._looked = now
            self.end()

    def end(self) -> None:
        """End those that are there now."""
        for stat in snapshot().values():
            if not stat.stopped or _is_criu(stat.ppid) or not _is_criu(stat.pid) or not self._belongs(stat.pid):
                continue
            with contextlib.suppress(OSError, LimosaError), Handle(Identity(stat.pid, stat.start_time)) as handle:
                handle.signal(signal.SIGKILL)


def _is_criu(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(word.endswith(b"/criu") for word in head(f"/proc/{pid}/cmdline", _MOST_ARGUMENTS).split(b"\0"))
    return False


def find_unfinished(criu: Identity, pids: Iterable[int], until: float | None = None) -> list[Identity]:
    """Return the processes that a restore has left half-made.

    Args:
        criu: the CRIU of that restore, as ``on_start`` named it.
        pids: the pids in the image.
        until: the last word of that restore's log (seconds since 1970): who has begun later is a stranger who has got
            one of these pids, as a shell or the leader of its job.

    Returns:
        Those of CRIU's own session, and those with pids of the image that are younger than CRIU and belong to a session
        or group of CRIU or of the image (so that a stranger who took such a pid meanwhile is left alone). A restore
        that came to its end looks the same: whoever asks must know that it did not.
    """
    wanted = set(pids)
    groups = wanted | {criu.pid}
    booted, ticks = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(LimosaError):
            stat = read_stat(int(name))
            if stat.start_time < criu.start_time or stat.ended or stat.pid == criu.pid:
                continue
            if until is not None and booted + stat.start_time / ticks > until + _SLACK:
                continue
            if stat.sid == criu.pid or (stat.pid in wanted and (stat.sid in groups or stat.pgid in groups)):
                found.append(Identity(stat.pid, stat.start_time))
    return found


def end_unfinished(criu: Identity, pids: Iterable[int], until: float | None = None) -> list[Identity]:
    """End what a killed restore has left half-made, and wait until it has ended.

    Args:
        criu: the CRIU of that restore.
        pids: the pids in the image.
        until: as for :func:`find_unfinished`.

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
    while (found := find_unfinished(criu, known, until)) and time.monotonic() < deadline:
        for identity in found:
            with contextlib.suppress(LimosaError), Handle(identity) as handle:
                handle.signal(signal.SIGKILL)
                handle.wait(PATIENCE)
                ended.append(identity)
    return ended

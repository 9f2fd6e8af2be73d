"""Gates that somebody left closed: a job that stands still although nobody works on it."""

from __future__ import annotations

import contextlib
import os

from limosa.errors import LimosaError, Reason
from limosa.operation import claims
from limosa.operation.results import Recovered
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, under_shim
from limosa.process.candidates import candidates
from limosa.process.identity import Identity
from limosa.process.slurp import slurp

_ANSWER, _PATIENCE = 4.0, 1.0  # seconds


def closed_reason(pid: int) -> Reason:
    """The refusal for a process whose gate is closed before anything was done to it."""
    text = f"the gate of process {pid} is closed: somebody held it still and has not let it go on"
    return Reason(id="gate-closed", text=text, exit_code=19, hint="limosa recover opens it", pid=pid)


def open_left(*, dry_run: bool = False) -> list[Recovered]:
    """Opens the gates of processes that have all their memory and that nobody works on, or died working on.

    An operation claims a process before it closes its gate. One that died has left its claim and journal, which say
    more than the gate does.
    """
    found = []
    for pid in candidates():
        if not under_shim(pid) or not _is_in_reach(pid) or _is_claimed(pid):
            continue
        with contextlib.suppress(LimosaError, OSError), Shim.to_look(Identity.of(pid), _ANSWER, _PATIENCE) as shim:
            if shim.hello().stand is not Stand.CLOSED or _is_claimed(pid):
                continue
            entry = Recovered(kind="gate", pid=pid, state="running")
            found.append(entry)
            if dry_run:
                entry.did = f"would open the gate of process {pid}, which somebody left closed"
                continue
            try:
                shim.open_gate()
                entry.did = f"opened the gate of process {pid}, which somebody left closed"
            except LimosaError as error:
                entry.state, entry.error, entry.exit_code = "unknown", str(error), 40
    return found


def _is_in_reach(pid: int) -> bool:
    """Whether its socket has a name here, and claims on it would be seen.

    In another network namespace nobody need wait for it. One that was started with another runtime folder is somebody
    else's who keeps his claims there.
    """
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino:
            return False
        environment = slurp(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return False
    folders = [word.partition(b"=")[2] for word in environment if word.startswith(b"LIMOSA_RUNTIME_DIR=")]
    return not folders or folders[0] == os.environb.get(b"LIMOSA_RUNTIME_DIR", b"")


def _is_claimed(pid: int) -> bool:
    return any(pid == one.pid for claim in claims.everybodys(whole=True) for one in claim.pids)

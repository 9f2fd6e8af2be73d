"""Gates that somebody left closed: a job that stands still although nobody works on it."""

from __future__ import annotations

import contextlib

from limosa.errors import LimosaError, Reason
from limosa.operation import claims
from limosa.operation.results import Recovered
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, under_shim
from limosa.process.candidates import candidates
from limosa.process.identity import Identity

_ANSWER = 2.0  # seconds


def closed_reason(pid: int) -> Reason:
    """The refusal for a process whose gate is closed before anything was done to it."""
    text = f"the gate of process {pid} is closed: somebody held it still and has not let it go on"
    return Reason(id="gate-closed", text=text, exit_code=19, hint="limosa recover opens it", pid=pid)


def open_left(*, dry_run: bool = False) -> list[Recovered]:
    """Opens the gates of processes that have all their memory and that nobody works on, or died working on.

    Whoever works on a process has claimed it before its gate was closed; what died left its claim and journal, which
    say more than the gate does.
    """
    found = []
    for pid in candidates():
        if not under_shim(pid) or _is_claimed(pid):
            continue
        # One that cannot be reached at once is in another network namespace, or somebody asks it just now.
        with contextlib.suppress(LimosaError, OSError), Shim(Identity.of(pid), _ANSWER, 0.0) as shim:
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


def _is_claimed(pid: int) -> bool:
    return any(pid == one.pid for claim in claims.everybodys() for one in claim.pids)

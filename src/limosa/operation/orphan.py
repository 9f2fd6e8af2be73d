"""What the driver's worker starts when its controller has died in the middle: recover that one operation, silently."""

from __future__ import annotations

import time

from limosa.errors import worst
from limosa.operation import claims, journal
from limosa.operation.recover import recover
from limosa.operation.results import Recovered
from limosa.rights import become


def main(argv: list[str]) -> int:
    """Waits until the dead controller's journal can be taken (moments), then recovers it.

    Told an operation's id; or ``--as UID``, where root has a user look after all that he has left.
    """
    if argv[0] == "--as":
        become(int(argv[1]))
        return worst([r.exit_code for r in recover()])
    operation_id = argv[0]
    results: list[Recovered] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        results = recover(only=operation_id)
        if any(r.id for r in results):  # else its journal could not be looked at: for the moment, maybe
            return max(r.exit_code for r in results)
        if not journal.path_of(operation_id).exists():
            for claim in claims.stale():  # died between the end of its journal and that of its claim
                if claim.id == operation_id:
                    claim.release()
            return 0
        time.sleep(0.05)
    return max((r.exit_code for r in results), default=0)

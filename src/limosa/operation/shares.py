"""Device memory that several processes have: legacy IPC handles under the shim (``torch.multiprocessing``).

The shim gives such memory one number (``share``) in every process that has it. It can be parked where all of these
processes take part: it is then made and copied once, and mapped in each. Where one of them stands outside, it would go
on with the old memory and the others with the new.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from limosa.errors import LimosaError, NoSuchProcess
from limosa.parking.shim import Memory, Shim, under_shim
from limosa.process.identity import Identity

ANSWER_SECONDS = 2.0


def outside(shims: Mapping[int, Shim], pieces: Mapping[int, list[Memory]]) -> list[tuple[int, str]]:
    """What of the memory of these processes cannot be parked, because somebody else has it.

    Args:
        shims: connections to the processes that take part, by pid.
        pieces: their memory, by pid.

    Returns:
        Pairs: a process that takes part, what stands against it in words.
    """
    found = []
    for pid, shim in shims.items():
        shared = [m for m in pieces[pid] if m.share]
        if not shared:
            continue
        given = shim.sharers()
        for piece in shared:
            others = ({piece.owner} | given.get(piece.share, set())) - {0} - set(shims)
            having = sorted(other for other in others if _has(other, piece.share))
            if having:
                who = ", ".join(map(str, having))
                found.append((pid, f"process {pid} shares device memory with process {who}, which does not take part"))
            elif piece.shared:
                found.append((pid, f"process {pid} shares device memory by a legacy handle and by another way as well"))
    return found


def several(pieces: Mapping[int, list[Memory]]) -> bool:
    """Whether more than one of these processes has the same memory."""
    seen: set[int] = set()
    for own in pieces.values():
        mine = {m.share for m in own if m.share}
        if mine & seen:
            return True
        seen |= mine
    return False


def _has(pid: int, share: int) -> bool:
    with contextlib.suppress(NoSuchProcess):
        identity = Identity.of(pid)
        try:
            with Shim(identity, limit=ANSWER_SECONDS) as shim:
                return any(m.share == share for m in shim.memories())
        except LimosaError:
            return identity.alive() and under_shim(pid)  # it does not say: it may
    return False

"""Device memory that several processes have: legacy IPC handles under the shim (``torch.multiprocessing``).

The shim gives such memory one number (``share``) in every process that has it. It can be parked if all of these
processes take part: it is then made and copied once, and mapped in each. A process outside would go on with the old
memory, and the others with the new.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping

from limosa.errors import CannotBeMoved, LimosaError, NoSuchProcess
from limosa.parking.answers import Memory
from limosa.parking.shim import Shim, under_shim
from limosa.process.identity import Identity

ANSWER_SECONDS = 2.0


def outside(
    shims: Mapping[int, Shim], pieces: Mapping[int, list[Memory]], known: Mapping[int, Shim] | None = None
) -> list[tuple[int, str]]:
    """The memory of these processes (by pid) that cannot be parked because somebody else has it.

    ``known``: connections to some of those that do not take part: a shim serves one at a time.

    Returns pairs: a process that takes part, and what speaks against it in words.
    """
    found = []
    asked = {pid: _has(shim) for pid, shim in (known or {}).items()}
    for pid, shim in shims.items():
        shared = [m for m in pieces[pid] if m.share]
        if not shared:
            continue
        given = shim.sharers()
        for piece in shared:
            others = ({piece.owner} | given.get(piece.share, set())) - {0, -1} - set(shims)
            for other in others - set(asked):
                asked[other] = _having(other)
            having = sorted(other for other in others if asked[other](piece.share))
            if having:
                who = ", ".join(map(str, having))
                found.append((pid, f"process {pid} shares device memory with process {who}, which does not take part"))
            elif piece.shared:
                found.append((pid, f"process {pid} shares device memory by a legacy handle and by another way as well"))
    return found


def refuse_outside(shims: Mapping[int, Shim], known: Mapping[int, Shim] | None = None) -> None:
    """Asks all of them now, as :func:`outside`. Raises CannotBeMoved: somebody else has memory of theirs."""
    found = outside(shims, {pid: shim.memories() for pid, shim in shims.items()}, known)
    if found:
        raise CannotBeMoved(detail=found[0][1])


def one_each(share: Mapping[int, int], ids: Iterable[int], there: set[int]) -> list[int]:
    """Picks one of a process's pieces for each memory that is not in ``there`` yet, and adds it to ``there``.

    ``share`` has the number under which others have a piece, by its id; 0 or nothing: it is its own. A process may have
    the same memory twice: opened in two contexts.
    """
    found = []
    for id_ in ids:
        number = share.get(id_, 0)
        if number not in there:
            found.append(id_)
            there |= {number} - {0}
    return found


def join(parts: Iterable[tuple[Shim, dict[int, int]]]) -> None:
    """Makes one memory again of what several processes share, after each got memory of its own with the same contents.

    Of shared memory all get the descriptor of the first one, by the memory's number; the others' are closed. Raises
    CannotBeMoved: one of them makes its memory itself, and the others could not have that.
    """
    first: dict[int, int] = {}
    with_none: set[int] = set()
    for shim, target in parts:
        for piece in shim.memories():
            if not piece.share:
                continue
            if piece.share in with_none or (piece.share in first and piece.id not in target):
                text = f"process {shim.identity.pid} shares device memory, and one that has it did not see that GPU"
                raise CannotBeMoved(detail=text)
            if piece.id not in target:
                with_none.add(piece.share)
            elif piece.share in first:
                os.close(target[piece.id])
                target[piece.id] = os.dup(first[piece.share])
            else:
                first[piece.share] = target[piece.id]


def _has(shim: Shim) -> Callable[[int], bool]:
    return {m.share for m in shim.memories()}.__contains__


def _having(pid: int) -> Callable[[int], bool]:
    """Asks a process once which memory of others it has; one that does not say may have any."""
    with contextlib.suppress(NoSuchProcess):
        identity = Identity.of(pid)
        try:
            with Shim.to_look(identity, ANSWER_SECONDS) as shim:
                return _has(shim)
        except LimosaError:
            if identity.alive() and under_shim(pid):
                return lambda share: True
    return lambda share: False

"""Pieces of a process's memory: descriptors of them, and the way back into the process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from limosa.ipc.packet import close_all
from limosa.operation.parked.holders import Held
from limosa.parking.answers import Memory
from limosa.parking.protocol import Stand
from limosa.parking.residents import Residents
from limosa.parking.shim import Shim, ShimError

SLOWEST_COPY = 1e9  # bytes a second
COPY_SECONDS = float(os.environ.get("LIMOSA_COPY_SECONDS", "60"))
"""What a copy may take beside that before it counts as hung."""
TRIES = 5
"""How often pieces are asked for that the job frees meanwhile."""
_FREED = 400  # CUDA_ERROR_INVALID_HANDLE


def copy_limit(bytes_: int) -> float:
    """Seconds after which a copy counts as hung."""
    return COPY_SECONDS + bytes_ / SLOWEST_COPY


def export(shim: Shim, pieces: Sequence[Memory]) -> tuple[list[Memory], list[int]]:
    """Returns descriptors of these pieces, without those that the job has freed meanwhile."""
    for _ in range(TRIES):
        try:
            return list(pieces), shim.export([m.id for m in pieces])
        except ShimError as error:
            if error.fields.get("result") != _FREED:
                raise
        there = {m.id for m in shim.memories()}
        pieces = [m for m in pieces if m.id in there]
    # It frees all the time: what is there in one moment is asked for one by one.
    found = []
    for piece in pieces:
        try:
            found.append((piece, shim.export([piece.id])[0]))
        except ShimError as error:
            if error.fields.get("result") != _FREED:
                close_all([fd for _, fd in found])
                raise
    return [piece for piece, _ in found], [fd for _, fd in found]


def put_back(shim: Shim, pieces: Sequence[Held], fds: Sequence[int]) -> Stand:
    """Gives a process back what was taken from it; it is at home again, and its gate is closed.

    On a GPU that it did not see when it began it cannot import even that: it makes memory anew, which is filled.
    """
    stand, blind = shim.hello().stand, {gpu_ for gpu_ in {piece.gpu for piece in pieces} if not shim.sees(gpu_)}
    seen = [i for i, piece in enumerate(pieces) if piece.gpu not in blind]
    if seen:
        stand = shim.map([pieces[i].id for i in seen], [fds[i] for i in seen])
    there = {m.id for m in shim.memories() if not m.away} if blind else set()
    for gpu_ in sorted(blind):
        mine = [i for i, piece in enumerate(pieces) if piece.gpu == gpu_]
        gone = [i for i in mine if pieces[i].id not in there]  # an unmap that has failed in the middle leaves some
        sizes, made = [pieces[i].bytes for i in gone], shim.make([pieces[i].id for i in gone])
        residents = Residents()  # the mover that has served so far may be why there is a way back
        try:
            mover = residents.mover(shim.owner)
            for side, some in (("source", [fds[i] for i in gone]), ("made", made)):
                mover.take(side, some, sizes, gpu_)
            mover.copy([("source", "made", gpu_)], copy_limit(sum(sizes)))
        finally:
            close_all(made)
            residents.close()
        stand = shim.map([pieces[i].id for i in mine])
    return stand

"""What the mover does with host memory: pins it, and copies device memory there and back."""

from __future__ import annotations

import time
from typing import Any

from limosa.gpu.vmm import HostPiece, call
from limosa.parking.mover_memory import CHUNK, CHUNK_RATED, Streams
from limosa.parking.mover_session import Reply, Session
from limosa.parking.rate import Rate


def arena(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Map host memory that a descriptor leads to, pinned, as one piece: ``key``, ``bytes``, ``gpu``."""
    session.contexts.use(asked["gpu"])
    session.drop(asked["key"])
    session.pieces[asked["key"]] = [HostPiece(fds[0], asked["bytes"])]
    return {}


def host(session: Session, asked: dict[str, Any], fds: list[int]) -> Reply:
    """Copy keys to an arena ("out") or back ("in"), all at once.

    ``way``, ``copies`` (key, arena, offset, gpu), ``rate``.
    """
    rate = Rate(asked.get("rate", 0.0))
    begun, total = time.monotonic(), 0
    chunk = CHUNK_RATED if rate.bytes_per_second else CHUNK
    work = []
    for key, arena_, offset, gpu in asked["copies"]:
        at, spans = session.pieces[arena_][0].at + offset, []
        for piece in session.pieces.get(key, []):
            spans += [(piece.at + i, at + i, min(chunk, piece.bytes - i)) for i in range(0, piece.bytes, chunk)]
            at += piece.bytes
        work.append((gpu, spans))
    with Streams(session) as streams:
        for turn in range(max((len(spans) for _, spans in work), default=0)):
            for gpu, spans in work:
                if turn < len(spans):
                    device, there, size = spans[turn]
                    rate.spend(size)
                    stream = streams.next(gpu)
                    if asked["way"] == "out":
                        call("cuMemcpyDtoHAsync", there, device, size, stream)
                    else:
                        call("cuMemcpyHtoDAsync", device, there, size, stream)
                    total += size
    return {"seconds": time.monotonic() - begun, "bytes": total}


VERBS = {"arena": arena, "host": host}

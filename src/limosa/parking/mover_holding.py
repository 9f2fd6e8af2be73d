"""What the mover holds beside the vault: descriptors of jobs' memory, by key, whoever has given them may end.

Kept apart from what a session has mapped (``mover_memory.py``), which ends with its controller.
"""

from __future__ import annotations

import os

from limosa.parking.mover_session import Reply, Session, Shared
from limosa.parking.vault_main import Entry, let_ended_go


def put(session: Session, asked: dict[str, object], fds: list[int]) -> Reply:
    """Hold descriptors under ``key``, with a ``note``, instead of what it held."""
    entry = Entry(bytes(asked.get("note") or b""))  # type: ignore[call-overload]
    try:
        for fd in fds:
            entry.fds.append(os.dup(fd))
    except BaseException:
        entry.close()
        raise
    with session.shared.lock:
        before = session.shared.resident.pop(str(asked["key"]), None)
        session.shared.resident[str(asked["key"])] = entry
    if before is not None:
        before.close()
    return {"n": len(entry.fds)}


def get(session: Session, asked: dict[str, object], fds: list[int]) -> Reply:
    """Give away descriptors of what is held under ``key``; ``there`` is false where nothing is."""
    with session.shared.lock:
        entry = session.shared.resident.get(str(asked["key"]))
        if entry is None:
            return {"there": False}
        return {"there": True, "note": entry.note}, [os.dup(fd) for fd in entry.fds]


def unput(session: Session, asked: dict[str, object], fds: list[int]) -> Reply:
    """Let go of what is held under ``key``."""
    with session.shared.lock:
        entry = session.shared.resident.pop(str(asked["key"]), Entry())
    n = len(entry.fds)
    entry.close()
    return {"n": n}


def keys(session: Session, asked: dict[str, object], fds: list[int]) -> Reply:
    """Say what is held: how many descriptors by key."""
    with session.shared.lock:
        return {"keys": {key: len(entry.fds) for key, entry in session.shared.resident.items()}}


def look(shared: Shared) -> None:
    """Let go of what is held for processes that have ended."""
    with shared.lock:
        let_ended_go(shared.resident)


VERBS = {"put": put, "get": get, "unput": unput, "keys": keys}

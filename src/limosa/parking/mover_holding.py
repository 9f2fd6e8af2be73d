"""What the mover holds beside the vault: descriptors of jobs' memory, by key. Their giver may end.

It is kept apart from what a session has mapped (``mover_memory.py``), which ends with its controller.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from limosa.errors import FailedUndone
from limosa.ipc.packet import Given
from limosa.parking.mover_protocol import Unput
from limosa.parking.mover_session import Reply, Session, Shared, Verb
from limosa.parking.vault_main import Entry, let_ended_go
from limosa.parking.vault_protocol import Get, Keys, Put, Request


def put(session: Session, asked: Put, fds: Sequence[int]) -> Reply:
    """Hold descriptors instead of what the key held, which is let go of when all of them are here."""
    if len(fds) != asked.n:
        raise FailedUndone(f"{len(fds)} descriptors came of {asked.n}")
    entry = Entry(asked.note)
    try:
        for fd in fds:
            entry.fds.append(os.dup(fd))
    except BaseException:
        entry.close()
        raise
    with session.shared.lock:
        before = session.shared.resident.pop(asked.key, None)
        session.shared.resident[asked.key] = entry
    if before is not None:
        before.close()
    return {"n": len(entry.fds)}


def get(session: Session, asked: Get, fds: Sequence[int]) -> Reply:
    """Give away descriptors of what is held under ``key``; ``there`` is false where nothing is."""
    with session.shared.lock:
        entry = session.shared.resident.get(asked.key)
        if entry is None:
            return {"there": False}
        with Given() as given:
            for fd in entry.fds:
                given.add(Given([os.dup(fd)]))
            return {"there": True, "note": entry.note, "n": len(given)}, given.take()


def unput(session: Session, asked: Unput, fds: Sequence[int]) -> Reply:
    """Let go of what is held under ``key``."""
    with session.shared.lock:
        entry = session.shared.resident.pop(asked.key, Entry())
    n = len(entry.fds)
    entry.close()
    return {"n": n}


def keys(session: Session, asked: Keys, fds: Sequence[int]) -> Reply:
    """Say what is held: how many descriptors by key."""
    with session.shared.lock:
        return {"keys": {key: len(entry.fds) for key, entry in session.shared.resident.items()}}


def look(shared: Shared) -> None:
    """Let go of what is held for processes that have ended."""
    with shared.lock:
        let_ended_go(shared.resident)


VERBS: dict[type[Request], Verb] = {Put: put, Get: get, Unput: unput, Keys: keys}

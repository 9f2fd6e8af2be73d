"""Claims: who works on which job, and which GPU's free memory is spoken for.

A claim is a file ``<runtime>/<uid>/claims/<id>.json`` that everybody may read. All claims are looked at and made under
one machine-wide lock (``<runtime>/lock``), held for milliseconds, so that two operations can neither take the same job
nor the same free gigabytes. A claim counts while its holder lives, and after that as long as its journal is there:
until the worker of a killed holder, or ``limosa recover``, has finished or undone what it was about.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from limosa.errors import Busy, LimosaError
from limosa.process import records
from limosa.process.identity import Identity

_KIND = "claims"
_LOCK_WAIT = 10.0  # seconds; a holder needs milliseconds


class Claim(msgspec.Struct, kw_only=True):
    """What one operation has spoken for.

    Attributes:
        id: the operation's id.
        operation: the verb.
        holder: the process that made it.
        pids: the processes it works on.
        gpus: bytes by GPU UUID that must stay free for it (its destination, and its way back).
        paths: image folders it writes or restores.
    """

    id: str
    operation: str
    holder: Identity
    pids: list[Identity] = []
    gpus: dict[str, int] = {}
    paths: list[str] = []
    since: float = msgspec.field(default_factory=time.time)

    def save(self) -> None:
        """Writes or rewrites the claim."""
        records.write_atomic(records.own_folder(_KIND) / f"{self.id}.json", msgspec.json.encode(self))

    def release(self) -> None:
        """Removes the claim, whoever's folder it lies in; one that cannot be removed is emptied and claims nothing."""
        for _, folder in records.folders(_KIND):
            records.remove_or_empty(folder / f"{self.id}.json")


def everybodys() -> list[Claim]:
    """Every claim that can be read. A claim by a user on a process that is not his is not believed."""
    return [
        claim
        for owner, folder in records.folders(_KIND)
        for path in sorted(folder.glob("*.json"))
        if (claim := _believed(path, owner)) is not None
    ]


def _believed(path: Path, owner: int) -> Claim | None:
    """What a claim's file says, as far as its owner may say it: hostile, like all that others write.

    A user may speak for his own processes and, while his own process holds the claim, for room on GPUs and for folders.
    """
    data = records.read_owned(path, owner)
    try:
        claim = msgspec.json.decode(data, type=Claim) if data is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if claim is None or claim.id != path.stem or any(size < 0 for size in claim.gpus.values()):
        return None
    if owner != 0:
        claim.pids = [p for p in claim.pids if _owner(p.pid) == owner]
        if lives(claim.holder) and _owner(claim.holder.pid) != owner:
            claim.gpus, claim.paths = {}, []
    return claim


def on(tree: Iterable[Identity]) -> Claim | None:
    """The claim of another operation, living or dead, on one of these processes."""
    pids = set(tree)
    return next((claim for claim in everybodys() if pids & set(claim.pids)), None)


def being_worked_on() -> set[int]:
    """Processes that somebody works on now: their shims are his, and answer nobody else until he lets go of them."""
    return {process.pid for claim in everybodys() if lives(claim.holder) for process in claim.pids}


def lives(holder: Identity) -> bool:
    """Whether a claim's holder lives; one that may not be looked at does."""
    try:
        return holder.alive()
    except (LimosaError, PermissionError):
        return True


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """The lock under which claims are made.

    Raises:
        Busy: somebody has held it for ten seconds.
    """
    path = records.runtime_dir().path / "lock"
    try:
        # Without O_CREAT first: fs.protected_regular refuses O_CREAT on others' files in sticky folders.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_WAIT
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(f"{path} has been held by another process for {_LOCK_WAIT:g} s", pid=0) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def make(claim: Claim, check: Callable[[], None] = lambda: None) -> Claim:
    """Claims jobs (and images), or says who has them.

    Args:
        claim: what to claim.
        check: called under the lock before the claim is written (is there room?); what it raises is passed on.

    Raises:
        Busy: another operation works on one of them, or died working on it (the hint says ``limosa recover``).
    """
    wanted = set(claim.pids)
    with machine_lock():
        for other in everybodys():
            if other.id == claim.id:
                continue
            shared = wanted & set(other.pids)
            paths = set(claim.paths) & set(other.paths)
            if not shared and not paths:
                continue
            if lives(other.holder):
                who = f"{other.operation} by process {other.holder.pid}"
                if shared:
                    raise Busy(pid=next(iter(shared)).pid, by=who)
                raise Busy(f"{next(iter(paths))} is being worked on by {who}", pid=0)
            if _has_journal(other.id):
                pid = next(iter(shared)).pid if shared else 0
                raise Busy(
                    f"a {other.operation} that died has left "
                    + (f"process {pid}" if shared else str(next(iter(paths))))
                    + " in the middle",
                    hint="limosa recover",
                    pid=pid,
                )
            other.release()
        check()
        claim.save()
    return claim


def reserved(uuid: str, but: str = "") -> int:
    """Bytes of that GPU that others speak for: operations under way, and those that are still to be recovered."""
    return sum(c.gpus.get(uuid, 0) for c in everybodys() if c.id != but and (lives(c.holder) or _has_journal(c.id)))


def stale() -> list[Claim]:
    """Claims whose holder is dead and which have no journal: litter. Emptied ones of the caller's own are removed."""
    records.remove_emptied(records.own_folder(_KIND), "*.json")
    return [c for c in everybodys() if not lives(c.holder) and not _has_journal(c.id)]


def _has_journal(operation_id: str) -> bool:
    # Journals are 0600 and their folder 0755: that one exists, and is not empty (finished), can be seen by all.
    for _, folder in records.folders("journals"):
        with contextlib.suppress(OSError):
            if os.stat(folder / f"{operation_id}.jsonl").st_size:
                return True
    return False

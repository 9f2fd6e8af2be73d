"""Claims: who works on which job, and which GPU's free memory is spoken for.

A claim is a file ``claims/<id>.json`` in its maker's folder (``places``) that everybody may read. It counts while its
holder lives, and after that as long as its journal is there: until the worker of a killed holder, or ``limosa
recover``, has finished or undone what it was about.

**Two never both have a job, and nobody can hold up another user.** Users share no lock. Among one user's own, and
among root's, a lock is held from the first look to the last (``flock`` on a file that only he can open). Between users
a claim is made by writing and then looking:

1. Look at everybody's claims. If another has the job: Busy.
2. Write the claim (renamed into place, whole).
3. Look again. If another has the job now, remove the claim, wait some random milliseconds, begin anew; for a second
   at most, then Busy.

Say that A and B both got past 3 with the same job, and that A wrote first. B looked after it wrote, so after A wrote. A
that got past 3 has not removed its claim, so B saw it, and did not get past 3: a contradiction. It rests on this: a
name that was renamed into a folder is in every listing of it that is begun later, and B believes A's claim. Only
its own user and root may work on a process, and both are believed about it (``everybodys``). Both may give way again
and again. That ends in Busy for both after a second, and nothing is touched. Room on GPUs is looked
at in step 3 as well, when one's own claim can be seen by others.

An image may be restored several times at once, where each restore makes a container of its own (``shared``): these
claims of one folder do not keep each other out, and all others do: a checkpoint into it, its removal, a restore under
the job's own pids. What only one of them can have besides is claimed by name: the container's name, its bundle, a port
of the machine.

A claim in a container is not seen outside, nor the other way round: between these stands a lock of the kernel's
(``across_namespaces.py``).
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Collection, Iterable
from typing import Annotated

import msgspec

from limosa.errors import Busy, CannotBeMoved, LimosaError
from limosa.operation import across_namespaces
from limosa.process import belief, runtime
from limosa.process.belief import Id, PathText, Processes, Sizes, Time, Word
from limosa.process.identity import Identity
from limosa.process.places import own_folder

_KIND = "claims"
_PATIENCE = 1.0  # seconds for which claims that were written at the same time give way to each other


class Claim(msgspec.Struct, kw_only=True):
    """What one operation has spoken for."""

    id: Id  # the operation's id
    operation: Word  # the verb
    holder: Identity  # the process that made it
    pids: list[Identity] = []  # the processes it works on
    gpus: Sizes = {}  # bytes by GPU UUID that must stay free for it (its destination, and its way back)
    # image folders it writes, removes or restores, by all their names
    paths: Annotated[list[PathText], msgspec.Meta(max_length=16)] = []
    shared: bool = False  # whether it only reads these: others that do are not kept out
    # what it brings into being, or takes, that there is one of on the machine: "container podman:train", "port 80"
    names: Annotated[list[PathText], msgspec.Meta(max_length=4096)] = []
    # what is there already, and others may use at the same time: but not while one makes it ("volume data")
    uses: Annotated[list[PathText], msgspec.Meta(max_length=4096)] = []
    since: Time = msgspec.field(default_factory=time.time)
    owner: int = -1  # whose it is. This and the next two are for whoever reads it to say, whatever the file says.
    alive: bool = True  # whether its holder lives, and is the owner's
    left: bool = False  # whether its holder is dead and has left a journal

    def save(self) -> None:
        """Writes or rewrites the claim."""
        runtime.write_atomic(own_folder(_KIND) / f"{self.id}.json", msgspec.json.encode(self))

    def release(self) -> None:
        """Removes the claim from the caller's folder; one that cannot be removed is emptied and claims nothing."""
        across_namespaces.let_go(self.id)
        released(self.id)


def released(operation_id: str) -> None:
    """Removes the caller's claim of an operation that is over."""
    belief.remove(_KIND, f"{operation_id}.json", os.geteuid())


def names_of(path: str | os.PathLike[str]) -> set[str]:
    """What a folder may be called in a claim: as it was named, and without links."""
    names = {os.path.abspath(path)}
    with contextlib.suppress(OSError):  # a link that the caller may not follow, as of another's /proc/PID/root
        names.add(os.path.realpath(path))
    return names


def everybodys(*, whole: bool = False, of: Iterable[Identity] = ()) -> list[Claim]:
    """Every claim that counts, as far as its owner may make it.

    ``whole``: that there is no claim will be believed, also of the users of these processes (``of``): FailedUndone
    where nobody can say what is claimed.
    """
    caller, processes = os.geteuid(), Processes()
    journals: set[tuple[int, str]] | None = None
    found = []
    notes = dict.fromkeys(belief.read(_KIND, whole=whole))
    for uid in {processes.owner_of(one) for one in of} - {-1, 0, caller}:
        notes |= dict.fromkeys(belief.read(_KIND, uid, whole=whole))
    for note in notes:
        claim = belief.decoded(note.data, Claim)
        if claim is None or f"{claim.id}.json" != note.name:
            continue
        claim.owner = note.owner
        claim.alive = processes.speaks_for(note.owner, claim.holder) and lives(claim.holder)
        if note.owner != 0:
            claim.pids = [p for p in claim.pids if processes.owner_of(p) == note.owner]
        claim.left = False
        if not claim.alive:
            journals = belief.named("journals", whole=whole) if journals is None else journals
            claim.left = (note.owner, f"{claim.id}.jsonl") in journals
            if not claim.left and note.owner != caller:
                continue
            if note.owner not in (0, caller):  # to be recovered: that is between him, his processes and root
                claim.gpus, claim.paths, claim.names, claim.uses = {}, [], [], []
        found.append(claim)
    return found


def on(tree: Iterable[Identity]) -> Claim | None:
    """The claim of another operation, living or dead, on one of these processes; FailedUndone: nobody can say."""
    pids = set(tree)
    return next((claim for claim in everybodys(whole=True, of=pids) if not pids.isdisjoint(claim.pids)), None)


def being_worked_on() -> set[int]:
    """Processes that somebody works on now: he has their shims, which answer nobody else until he releases them."""
    return {process.pid for claim in everybodys() if claim.alive for process in claim.pids}


def in_the_way(claim: Claim, paths: Collection[str], *, shared: bool = False) -> str:
    """Which of these folders another's claim speaks for; "" where it is none.

    ``shared``: they are only to be read. A user speaks for folders of his, and for those that he could make: for all
    others he could do nothing either. The folders looked at are the caller's own, by the names that he has for them
    (``names_of``).
    """
    for path in () if shared and claim.shared else sorted(set(paths) & set(claim.paths)):
        if claim.owner in (0, os.geteuid()) or _could_make(path, claim.owner):
            return path
    return ""


def _name_in_the_way(claim: Claim, other: Claim) -> str:
    """What only one can have and another's claim speaks for; "" where it is nothing.

    Only root brings containers back, so nobody else has a say in it.
    """
    if other.owner not in (0, os.geteuid()):
        return ""
    taken = set(claim.names) & {*other.names, *other.uses} | set(claim.uses) & set(other.names)
    return min(taken, default="")


def _could_make(path: str, uid: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.stat(path).st_uid == uid
    with contextlib.suppress(OSError, ValueError):
        above = os.stat(os.path.dirname(path))
        return above.st_uid == uid or bool(above.st_mode & 0o002)
    return False


def lives(process: Identity) -> bool:
    """Whether a process lives; one that may not be looked at does."""
    try:
        return process.alive()
    except (LimosaError, PermissionError):
        return True


def make(claim: Claim, check: Callable[[], None] = lambda: None, *, past_dead: bool = False) -> Claim:
    """Claims jobs (and images), or says who has them; see the module.

    ``check`` is called when the claim is written (is there room?); what it raises is passed on, and the claim is gone.
    ``past_dead``: what an operation that died has left in the middle keeps nobody out.
    Raises Busy (another works on one of them, or died working on it), FailedUndone (nobody can say what is claimed) and
    CannotBeMoved (others could not read this one).
    """
    claim.paths = sorted(set().union(*map(names_of, claim.paths)))
    if belief.decoded(msgspec.json.encode(claim), Claim) is None:  # an image may name more than there can be
        raise CannotBeMoved(detail="what is to be claimed is too long, or too much, to be written down")
    with runtime.lock(_KIND):
        end = time.monotonic() + _PATIENCE
        tries = 0
        while True:
            tries, begun = tries + 1, time.monotonic()
            before = now = everybodys(whole=True, of=claim.pids)
            _refuse(claim, before, past_dead)
            claim.save()
            try:
                now = everybodys(whole=True, of=claim.pids)
                _refuse(claim, now, past_dead)
                across_namespaces.hold(claim.id, claim.pids)
                check()
                return claim
            except BaseException as error:
                claim.release()
                came = {(c.owner, c.id) for c in now} - {(c.owner, c.id) for c in before} - {(os.geteuid(), claim.id)}
                if not came or not isinstance(error, LimosaError) or time.monotonic() > end:
                    raise
            # Longer than a look takes, on a busy machine as well: else both look again while both have written.
            looked = max(0.002, time.monotonic() - begun)
            time.sleep(random.uniform(0, min(_PATIENCE / 3, looked * 2**tries)))  # noqa: S311 - who goes first


def refuse(claim: Claim, *, past_dead: bool = False) -> None:
    """Raises Busy as ``make`` does, and claims nothing."""
    claim.paths = sorted(set().union(*map(names_of, claim.paths)))
    _refuse(claim, everybodys(whole=True, of=claim.pids), past_dead)


def _refuse(claim: Claim, others: Iterable[Claim], past_dead: bool) -> None:
    """Raises Busy for what somebody else has; removes a claim of the caller's own whose operation is gone."""
    wanted = set(claim.pids)
    for other in others:
        both = wanted & set(other.pids)
        thing = in_the_way(other, claim.paths, shared=claim.shared) or _name_in_the_way(claim, other)
        if (other.id == claim.id and other.owner == os.geteuid()) or not (both or thing):
            continue
        pid = min(both).pid if both else 0
        if other.alive:
            who = f"{other.operation} by process {other.holder.pid}"
            raise Busy(pid=pid, by=who) if both else Busy(f"{thing} is being worked on by {who}", pid=0)
        if other.left and past_dead:
            continue
        if other.left:
            what = f"process {pid}" if both else thing
            raise Busy(f"a {other.operation} that died has left {what} in the middle", hint="limosa recover", pid=pid)
        other.release()


def reserved(uuid: str, but: str = "", most: int = 1 << 50, *, whole: bool = True) -> int:
    """Bytes of that GPU that others than ``but`` speak for: operations under way, and those still to be recovered.

    Nobody speaks for more than ``most``, its size. ``whole``: FailedUndone where nobody can say what is claimed; False
    for a way back, which is gone whatever cannot be read.
    """
    by_owner: dict[int, int] = {}
    for claim in everybodys(whole=whole):
        if claim.id != but and (claim.alive or claim.left):
            by_owner[claim.owner] = by_owner.get(claim.owner, 0) + claim.gpus.get(uuid, 0)
    return sum(min(size, most) for size in by_owner.values())


def stale() -> list[Claim]:
    """The caller's claims whose holder is dead and which have no journal: litter. Emptied ones are removed."""
    runtime.remove_emptied(own_folder(_KIND), "*.json")
    return [c for c in everybodys(whole=True) if c.owner == os.geteuid() and not c.alive and not c.left]

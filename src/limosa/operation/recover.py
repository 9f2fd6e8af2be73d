"""``recover``: finish or undo what a dead operation left, from its journal and from what the driver says.

A journal whose lock can be taken has lost its operation. What is done with it:

- move, suspend, resume: where everything was restored already, the job is unlocked (finished); else every process is
  led back to the state and the GPU it had (:func:`driver_steps.bring_back`, the same as any undo).
- checkpoint: CRIU, if it still runs, is waited for (its action script finds nobody to ask and lets the job run on).
  Where the job lives it is brought back to running; a committed image is kept, an unfinished folder is removed.
  Connected sockets that a killed CRIU left in repair mode are taken out of it, and its nftables table is removed.
- restore: where the tree is there it is finished (restore, unlock) if it fits, else ended: the image is the copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from limosa import gpu
from limosa.errors import (
    Busy,
    DriverHung,
    FailedUndone,
    LeftSuspended,
    LimosaError,
    NoCudaState,
    PermissionDenied,
    UndoFailed,
    UsageError,
)
from limosa.image import unfinished
from limosa.operation import (
    across_namespaces,
    claims,
    container_gpus,
    driver_steps,
    drivers,
    journal,
    recover_containers,
)
from limosa.operation.communicators import closing as communicators
from limosa.operation.journal import Journal, Member, Noted
from limosa.operation.parked import holders
from limosa.operation.parked.gates import any_waits, open_left
from limosa.operation.parked.recovering import go_back, let_go
from limosa.operation.recover_images import CRIU_PATIENCE, entry_of, remove_drafts
from limosa.operation.recover_users import recover_users
from limosa.operation.remove_image import remove_image
from limosa.operation.results import Recovered
from limosa.operation.step import Left
from limosa.operation.verbs import verb_of
from limosa.parking.patience import Patience
from limosa.parking.shim import under_shim
from limosa.process.identity import Identity
from limosa.process.limits import many_descriptors
from limosa.process.records import SuspendRecord
from limosa.process.runtime import remove_half_written
from limosa.process.status import uids_of
from limosa.progress import Progress, ProgressFn, silent
from limosa.terms import JobState

_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_NO_JOBS = "limosa recover names no job: it looks at all"


@many_descriptors()
def recover(
    folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    *,
    dry_run: bool = False,
    progress: ProgressFn = silent,
    only: str | None = None,
) -> list[Recovered]:
    """Finishes or undoes what dead operations left, and cleans up after them: an entry for each thing found.

    What could not be done, or not be looked at, is in ``error``, with exit code 40 (or 41, where a job stays suspended
    for want of room). ``folders``: where to look for unfinished images besides: of no journal,
    after a restart of the machine, say. ``only``: the id of the one operation to look at.

    Raises:
        UsageError, PermissionDenied: a folder that was named is none, or may not be read. Nothing was done.
    """
    found: list[Recovered] = []
    folders = [folders] if isinstance(folders, (str, os.PathLike)) else folders
    for folder in folders:
        _refuse_no_folder(Path(folder))
    try:
        _everything(found, folders, dry_run, progress, only)
    except (FailedUndone, OSError) as error:  # nobody can say what else there is: no file can be opened any more, say
        found.append(_unread(error))
    for one in found:
        if one.image and not os.path.lexists(one.image):  # never begun, or removed just now: ``did`` says so
            one.image = ""
    return found


def _everything(
    found: list[Recovered],
    folders: Sequence[str | os.PathLike[str]],
    dry_run: bool,
    progress: ProgressFn,
    only: str | None,
) -> None:
    """Works through all that there is, and adds what was done; FailedUndone: what is noted cannot be read."""
    all_read = _round(found, dry_run, progress, only)
    patience = time.monotonic() + CRIU_PATIENCE
    # A journal that cannot be read may look like one that somebody has taken.
    while all_read and only is None and not dry_run and _others_at_work(found) and time.monotonic() < patience:
        # The worker of a killed limosa ends its call and recovers by itself: what it is at is not left until then.
        progress(Progress("recover", message="waiting for a worker that recovers already"))
        time.sleep(0.05)
        all_read = _round(found, dry_run, progress, only, {one.id for one in found})
    if all_read and only is None:
        found += map(_would_wait if dry_run else _still_held, _others_at_work(found))
    if only is None:
        if not dry_run:
            holders.forget_finished()
            remove_half_written()
            SuspendRecord.all()  # on the way it removes those of jobs that have ended
        for claim in claims.stale():
            if not dry_run:
                claim.release()
            did = "would remove" if dry_run else "removed"
            found.append(Recovered(kind="record", id=claim.id, operation=claim.operation, did=f"{did} a stale claim"))
        hung: dict[int, int] = {}
        found += open_left(lambda pid: _state_of(pid, hung), dry_run=dry_run)
    for folder in folders:
        found += _unfinished_in(Path(folder), dry_run, list(found))


_patience = Patience(12.0)
MOST_HUNG = 3
"""Calls of which a user has the driver not come back, and each a worker: then it is asked of his no more."""


def _state_of(pid: int, hung: dict[int, int]) -> gpu.State | None:
    """What the driver says of a process of anybody's, for which it is not waited for long."""
    uid, begun = uids_of(pid)[0], time.monotonic()
    if hung.get(uid, 0) >= MOST_HUNG:
        raise FailedUndone(f"it did not answer for others of user {uid}, and was not asked again")
    try:
        with drivers.using(None) as driver:
            with contextlib.suppress(NoCudaState):  # it was seen to say so once of one that has some
                return driver.state(pid, timeout=_patience.left(uid, 5.0))
            return driver.state(pid, timeout=_patience.left(uid, 5.0))
    except NoCudaState:
        return None
    except DriverHung:
        hung[uid] = hung.get(uid, 0) + 1
        _patience.waited(uid, time.monotonic() - begun)
        raise


def _refuse_no_folder(folder: Path) -> None:
    """Raises where a folder that was named is none or may not be read: a job's name, say."""
    try:
        unfinished(folder)
    except OSError as error:
        text = f"{folder} cannot be read: {error.strerror}"
        if error.errno in _NO_FOLDER:
            text = f"there is no folder {folder}" if error.errno == errno.ENOENT else text
            raise UsageError(detail=text, hint=_NO_JOBS) from error
        if isinstance(error, PermissionError):
            raise PermissionDenied(detail=text) from error


def _unread(error: Exception) -> Recovered:
    return Recovered(kind="record", error=f"{error}; run it again", exit_code=40)


def _unfinished_in(folder: Path, dry_run: bool, before: Sequence[Recovered]) -> list[Recovered]:
    """Removes the unfinished folders there that nobody works on; those of another machine are left alone."""
    found = []
    try:
        listed = unfinished(folder)
    except OSError as error:
        text = f"{folder} cannot be read: {error.strerror}"
        return [Recovered(kind="folder", image=str(folder), error=text, exit_code=40)]
    except PermissionDenied as error:  # it has become a link of another user's
        return [Recovered(kind="folder", image=str(folder), error=str(error), exit_code=error.exit_code)]
    for litter in listed:
        if any(str(litter.path) in one.did for one in before):
            continue  # a whole dump of a job that is gone: the pass before has said so, and only rm removes it
        entry = Recovered(kind="folder", id=litter.operation, image=str(litter.path))
        if litter.state == "dead":
            entry.did = f"{'would remove' if dry_run else 'removed'} {litter.path}, which was never finished"
            if not dry_run:
                try:
                    remove_image(litter.path, litter_only=True)
                except (LimosaError, OSError) as error:
                    entry.did, entry.error, entry.exit_code = "", str(error), getattr(error, "exit_code", 40)
        else:
            entry.did = f"left {litter.path} alone: " + (
                "it is being written" if litter.state == "alive" else "another machine may be writing it"
            )
        found.append(entry)
    return found


def _round(
    found: list[Recovered], dry_run: bool, progress: ProgressFn, only: str | None, known: Collection[str] = ()
) -> bool:
    """Works through every journal that nobody has taken, but for the known; whether all of them could be read."""
    all_read = True
    try:
        for dead in journal.dead(only):
            try:
                if dead.header.id in known:
                    continue
                if dry_run:
                    step = next((s.step for s in journal.under_way() if s.id == dead.header.id), "")
                    found.append(entry_of(dead, did=f"would finish or undo it (last step: {step})"))
                else:
                    found.append(_one(dead, progress))
            finally:
                dead.close()
    except (FailedUndone, OSError) as error:  # a journal that cannot be read keeps nothing else from being done
        found.append(_unread(error))
        all_read = False
    if only is None:
        found += recover_users([s for s in journal.dead_of_others() if s.id not in known], dry_run=dry_run)
    return all_read


def _others_at_work(found: list[Recovered]) -> list[journal.Summary]:
    """Operations of ours whose owner is dead and whose journal somebody else holds: its worker, or who recovers it."""
    known = {one.id for one in found}
    mine = [s for s in journal.under_way() if s.owner == os.geteuid()]
    return [s for s in mine if not s.alive and s.id not in known]


def _would_wait(one: journal.Summary) -> Recovered:
    """Says of an operation that its worker finishes or undoes it."""
    pid = one.pids[0] if one.pids else 0
    did = "would wait for its worker, which finishes or undoes it"
    return Recovered(kind="operation", id=one.id, operation=one.operation, pid=pid, did=did, state="unknown")


def _still_held(one: journal.Summary) -> Recovered:
    """Says of an operation that nobody else could look at that its worker does not come to an end."""
    return Recovered(
        kind="operation",
        id=one.id,
        operation=one.operation,
        pid=one.pids[0] if one.pids else 0,
        did="left it alone",
        state="unknown",
        error="its worker is still in a call of the driver, or recovers it; run it again",
        exit_code=40,
    )


def _one(dead: Journal, progress: ProgressFn) -> Recovered:
    """Works through one journal; it is removed where that succeeds and kept where it does not."""
    how: dict[str, Callable[[Journal, gpu.Driver, ProgressFn], Recovered]] = {
        "checkpoint": recover_containers.recover_checkpoint,
        "restore": recover_containers.recover_restore,
    }
    if dead.of_another_boot:  # no process of it lives
        did = ["the machine was started again"] + (remove_drafts(dead) if dead.header.image else [])
        result = entry_of(dead, did="; ".join(did), state="gone")
        dead.finish()
        return result
    try:
        with (
            across_namespaces.held(dead.header.id, [m.identity for m in dead.header.members]),
            drivers.using(None) as driver,
        ):
            result = how.get(dead.header.operation, _going)(dead, driver, progress)
    except Busy as error:
        dead.close()
        return entry_of(dead, did="left it alone", state="unknown", error=str(error), exit_code=error.exit_code)
    except LeftSuspended as error:
        result = entry_of(dead, did="left it suspended", state="checkpointed", error=str(error), exit_code=41)
    except Exception as error:
        driver_verb = dead.header.operation not in how
        if not driver_verb or any(m.identity.alive() for m in dead.header.members):
            return _failed(dead, error)
        result = entry_of(dead, did="the job has ended meanwhile", state="gone")
    kept = []
    try:
        let_go(dead.header.id, dead.header.members)
    except (LimosaError, OSError) as error:  # what it did is done; what is held goes later
        kept.append(f"{error}; run it again")
    try:
        dead.finish()
    except OSError as error:
        kept.append(f"its journal stays: {error}")
    claims.released(dead.header.id)
    if kept:
        result.error, result.exit_code = "; ".join(filter(None, (result.error, *kept))), result.exit_code or 40
    return result


def _failed(dead: Journal, error: Exception) -> Recovered:
    """It stays for another try, with its journal."""
    dead.close()
    lost = _lost(error)
    if lost is not None:
        root = dead.header.roots[0].pid if dead.header.roots else lost.fields["pid"]
        text = f"job {root}: {lost.message}; {lost.hint} (kill -KILL {root}), recover exits with 40 as long as it lives"
        return entry_of(dead, did="could not bring it back", state="unknown", error=text, exit_code=lost.exit_code)
    code = error.exit_code if isinstance(error, UndoFailed) else 40
    text = str(error)
    if dead.began(Noted.JOIN):
        text += "; the job is where it was to go, and waits. Nothing is lost: mend that, and run it again"
    elif living := [root.pid for root in dead.header.roots if root.alive() and not _goes_on(dead, root)]:
        pids = " ".join(map(str, living))
        text += "; mend that, and run it again. A job that the driver refuses each time is lost: "
        text += f"end the job (kill -KILL {pids}): recover exits with 40 as long as it lives"
    return entry_of(dead, did="could not bring it back", state="unknown", error=text, exit_code=code)


def _goes_on(dead: Journal, root: Identity) -> bool:
    """Whether this job of several has let go: all of it is under the shim, and every gate is open."""
    members = [m for m in dead.header.members if (m.root or m.pid) == root.pid]
    with contextlib.suppress(LimosaError):
        return bool(members) and all(under_shim(m.pid) for m in members) and not any_waits(members)
    return False


def _lost(error: BaseException | None) -> holders.LostMemory | None:
    """Whether it is, or came of, device memory that nobody has any more."""
    while error is not None and not isinstance(error, holders.LostMemory):
        error = error.__cause__ or error.__context__
    return error


def _may_wait(members: Sequence[Member]) -> bool:
    """Whether any is at its gate, or says nothing."""
    try:
        return any_waits(members)
    except LimosaError:
        return True


def _going(dead: Journal, driver: gpu.Driver, progress: ProgressFn) -> Recovered:
    """Finishes a ``move``, ``suspend`` or ``resume`` where one of its steps says so, the last first; else undoes it."""
    header = dead.header
    alive = [m for m in header.members if m.identity.alive()]
    if not alive:
        return entry_of(dead, did="the job has ended", state="gone")
    states = {m.pid: driver_steps.settled_state(driver, m.pid, progress) for m in alive}
    parked = dead.began(Noted.PARK) or dead.began(Noted.MAP) or _may_wait(alive)
    left = Left(dead=dead, driver=driver, alive=alive, states=states, parked=parked)
    for step in reversed(verb_of(header.operation).steps):
        if (finished := step.goes_on(left)) is not None:
            if finished.state == JobState.RUNNING:
                driver_steps.leave_where_it_is(alive, alive, driver_steps.by_progress(progress))
                for root in header.roots:
                    SuspendRecord(root=root).forget()
                communicators.back(alive)
                container_gpus.tell_as_found(alive, header.configured)
            return entry_of(dead, did=finished.did, state=finished.state)
    home = partial(driver_steps.bring_back, driver, header.members, dead, header.id, progress)
    suspended: LeftSuspended | None = None
    try:
        if parked:
            go_back(dead, home)
        else:
            home()
    except LeftSuspended as error:  # another job of the same operation may run
        suspended = error
    for step in reversed(verb_of(header.operation).steps):
        step.mend(left)
    if suspended is not None:
        raise suspended
    for root in header.roots:
        ran = journal.common_state(m for m in alive if (m.root or m.pid) == root.pid) == JobState.RUNNING
        record = SuspendRecord.of(root) if ran else None
        if record is not None and record.since >= header.since:  # of an undo that left it suspended, and failed later
            record.forget()
    return entry_of(dead, did="undid it", state=journal.common_state(alive))

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
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from limosa import gpu
from limosa.errors import CannotBeMoved, FailedUndone, LeftSuspended, LimosaError, UndoFailed
from limosa.image import open_image, unfinished
from limosa.image.manifest import LOG_NAME
from limosa.image.read import partial_name
from limosa.image.remove import remove as remove_folder
from limosa.operation import claims, driver_steps, journal, room
from limosa.operation.journal import Journal, Member
from limosa.operation.leftovers import end_rest, let_go_on, release_network
from limosa.operation.parked import holders, left_closed, saving
from limosa.operation.parked.gates import any_waits
from limosa.operation.parked.recovering import all_in_arenas, bring_home
from limosa.operation.remove_image import log_folder, remove_image
from limosa.operation.restore import end_tree, started_at
from limosa.operation.results import Recovered
from limosa.operation.rewind import Rewind
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, under_shim
from limosa.process.criu import leftovers
from limosa.process.criu.run import RESTORE_LOG
from limosa.process.identity import Handle, Identity
from limosa.process.records import EndedRecord, RunRecord, SuspendRecord
from limosa.process.tree import job_tree
from limosa.progress import Progress, ProgressFn, silent

_FOR_USERS = frozenset({"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH"})
_CRIU_PATIENCE = 900.0  # seconds; a dump of hundreds of gigabytes to a slow disk takes minutes


def recover(
    folders: Sequence[str | os.PathLike[str]] = (),
    *,
    dry_run: bool = False,
    progress: ProgressFn = silent,
    only: str | None = None,
) -> list[Recovered]:
    """Finishes or undoes what dead operations left, and cleans up after them.

    Args:
        folders: where to look for unfinished images besides: of no journal, after a restart of the machine, say.
        dry_run: only say what there is.
        progress: told what is being waited for.
        only: the id of the one operation to look at.

    Returns:
        An entry for each thing found. None of it raises: what could not be done is in ``error``, with exit code 40 (or
        41, where a job stays suspended for want of room).
    """
    found = _round(dry_run, progress, only)
    patience = time.monotonic() + _CRIU_PATIENCE
    while only is None and not dry_run and _others_at_work(found) and time.monotonic() < patience:
        # The worker of a killed limosa recovers by itself: what it is at is not left until it is done.
        progress(Progress("recover", message="waiting for a worker that recovers already"))
        time.sleep(0.05)
        found += _round(dry_run, progress, only, {one.id for one in found})
    if only is None:
        if not dry_run:
            holders.forget_finished()
            SuspendRecord.all()  # on the way it removes those of jobs that have ended
        for claim in claims.stale():
            if not dry_run:
                claim.release()
            did = "would remove" if dry_run else "removed"
            found.append(Recovered(kind="record", id=claim.id, operation=claim.operation, did=f"{did} a stale claim"))
        found += left_closed.open_left(dry_run=dry_run)
    for folder in folders:
        found += _unfinished_in(Path(folder), dry_run, list(found))
    for one in found:
        if one.image and not os.path.lexists(one.image):  # never begun, or removed just now: ``did`` says so
            one.image = ""
    return found


def _unfinished_in(folder: Path, dry_run: bool, before: Sequence[Recovered]) -> list[Recovered]:
    """Removes the unfinished folders there that nobody works on; those of another machine are left alone."""
    found = []
    try:
        listed = unfinished(folder)
    except OSError as error:
        return [Recovered(kind="folder", image=str(folder), error=f"cannot be read: {error.strerror}", exit_code=1)]
    for litter in listed:
        if any(str(litter.path) in one.did for one in before):
            continue  # a whole dump of a job that is gone: the pass before has said so, and only rm removes it
        entry = Recovered(kind="folder", id=litter.operation, image=str(litter.path))
        if litter.state == "dead":
            entry.did = f"{'would remove' if dry_run else 'removed'} {litter.path}, which was never finished"
            if not dry_run:
                try:
                    remove_image(litter.path)
                except (LimosaError, OSError) as error:
                    entry.did, entry.error, entry.exit_code = "", str(error), getattr(error, "exit_code", 1)
        else:
            entry.did = f"left {litter.path} alone: " + (
                "it is being written" if litter.state == "alive" else "another machine may be writing it"
            )
        found.append(entry)
    return found


def _round(dry_run: bool, progress: ProgressFn, only: str | None, known: Collection[str] = ()) -> list[Recovered]:
    """Works through every journal that nobody has taken, but for those that were looked at before."""
    found: list[Recovered] = []
    for dead in journal.dead(only):
        if dead.header.id in known:
            dead.close()
        elif dry_run:
            text = next((s.text for s in journal.under_way() if s.id == dead.header.id), "")
            found.append(_entry(dead, did=f"would finish or undo: {text}"))
            dead.close()
        else:
            found.append(_one(dead, progress))
    for left in journal.dead_of_others() if only is None else []:
        if left.id not in known:
            found.append(_as_its_owner(left, dry_run))
    return found


def _as_its_owner(left: journal.Summary, dry_run: bool) -> Recovered:
    """Has a user's operation recovered with that user's rights: what his journal says is his word, not root's."""
    user = f"uid {left.owner}"
    entry = Recovered(kind="operation", id=left.id, operation=left.operation, pid=left.pids[0] if left.pids else 0)
    if dry_run:
        entry.did = f"would have {user} finish or undo: {left.text}"
        return entry
    try:
        group = pwd.getpwuid(left.owner).pw_gid
    except KeyError:
        group = left.owner
    command = [sys.executable, "-m", "limosa.operation.orphan", left.id]
    # The user owns what runs: he may read its environment, and write to a terminal that it has.
    environment = {k: v for k, v in os.environ.items() if k in _FOR_USERS or k.startswith("LIMOSA_")}
    try:
        done = subprocess.run(
            command, user=left.owner, group=group, extra_groups=[], cwd="/", env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            timeout=_CRIU_PATIENCE,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        entry.error, entry.exit_code = f"{user} cannot run limosa here: {error}", 40
        return entry
    entry.exit_code = done.returncode if done.returncode in (0, 41) else 40
    entry.did = f"{user} has finished or undone it" if done.returncode == 0 else ""
    if done.returncode:
        entry.error = f"limosa recover, as {user}, ended with {done.returncode}"
    return entry


def _others_at_work(found: list[Recovered]) -> bool:
    """Whether somebody else recovers an operation of ours: its journal is there, locked, and its owner dead."""
    known = {one.id for one in found}
    mine = [s for s in journal.under_way() if s.owner == os.geteuid()]
    return any(not s.alive and s.id not in known for s in mine)


def _entry(dead: Journal, **fields: object) -> Recovered:
    header = dead.header
    pid = header.roots[0].pid if header.roots else 0
    return Recovered(
        kind="operation",
        id=header.id,
        operation=header.operation,
        pid=pid,
        image=header.image,
        **fields,  # type: ignore[arg-type]
    )


def _one(dead: Journal, progress: ProgressFn) -> Recovered:
    """Works through one journal; it is removed where that succeeds and kept where it does not."""
    how: dict[str, Callable[[Journal, gpu.Driver, ProgressFn], Recovered]] = {
        "checkpoint": _checkpoint,
        "restore": _restore,
    }
    if dead.of_another_boot:  # no process of it lives
        did = ["the machine was started again"] + (_remove_drafts(dead) if dead.header.image else [])
        result = _entry(dead, did="; ".join(did), state="gone")
        dead.finish()
        return result
    driver = gpu.Driver()
    try:
        result = how.get(dead.header.operation, _driver_verb)(dead, driver, progress)
    except LeftSuspended as error:
        result = _entry(dead, did="left it suspended", state="checkpointed", error=str(error), exit_code=41)
    except Exception as error:
        driver_verb = dead.header.operation not in how
        if not driver_verb or any(m.identity.alive() for m in dead.header.members):
            return _failed(dead, error)
        result = _entry(dead, did="the job has ended meanwhile", state="gone")
    finally:
        driver.close()
    holders.forget(dead.header.id)
    dead.finish()
    for claim in claims.everybodys():
        if claim.id == dead.header.id:
            claim.release()
    return result


def _failed(dead: Journal, error: Exception) -> Recovered:
    """It stays for another try, with its journal."""
    dead.close()
    lost = _lost(error)
    if lost is not None:
        root = dead.header.roots[0].pid if dead.header.roots else lost.fields["pid"]
        text = f"job {root}: {lost.message}; {lost.hint} (kill -KILL {root}), recover exits with 40 as long as it lives"
        return _entry(dead, did="could not bring it back", state="unknown", error=text, exit_code=lost.exit_code)
    code = error.exit_code if isinstance(error, UndoFailed) else 40
    text = str(error)
    if living := [root.pid for root in dead.header.roots if root.alive()]:
        pids = " ".join(map(str, living))
        text += f"; if it says so again, end the job (kill -KILL {pids}): recover exits with 40 as long as it lives"
    return _entry(dead, did="could not bring it back", state="unknown", error=text, exit_code=code)


def _lost(error: BaseException | None) -> holders.LostMemory | None:
    """Whether it is, or came of, device memory that nobody has any more."""
    while error is not None and not isinstance(error, holders.LostMemory):
        error = error.__cause__ or error.__context__
    return error


def _driver_verb(dead: Journal, driver: gpu.Driver, progress: ProgressFn) -> Recovered:
    header = dead.header
    alive = [m for m in header.members if m.identity.alive()]
    if not alive:
        return _entry(dead, did="the job has ended", state="gone")
    states = {m.pid: driver_steps.settled_state(driver, m.pid, progress) for m in alive}
    record = SuspendRecord.of(header.roots[0]) if header.roots and header.operation == "suspend" else None
    if record is not None and record.since >= header.since and _is_suspended(record, alive, states):
        state = "checkpointed" if record.release == "all" else "parked"
        return _entry(dead, did="it was suspended: finished", state=state)
    if dead.began("park") or dead.began("map") or any_waits(alive):
        finished = bring_home(dead, lambda: driver_steps.bring_back(driver, header.members, dead, header.id, progress))
        if finished:
            for root in header.roots:
                SuspendRecord(root=root).forget()
        did = "every gate is open: finished" if finished else "undid it"
        return _entry(dead, did=did, state=journal.common_state(alive))
    coming = header.operation in ("move", "resume") and not dead.began("undo")
    if coming and all(s in ("locked", "running") and dead.began("restore", pid) for pid, s in states.items()):
        for member in alive:
            if states[member.pid] == "locked":
                driver.unlock(member.pid, limit=driver_steps.CALL_SECONDS)
        for root in header.roots:
            SuspendRecord(root=root).forget()
        return _entry(dead, did="everything was restored: unlocked it (finished)", state="running")
    driver_steps.bring_back(driver, header.members, dead, header.id, progress)
    if header.operation == "suspend":  # what the arena was to take has not gone there
        holders.forget_arenas([m for m in header.members if m.was == "running" and not m.away])
    return _entry(dead, did="undid it", state=journal.common_state(alive))


def _is_suspended(record: SuspendRecord, alive: Sequence[Member], states: Mapping[int, str]) -> bool:
    """Whether all is as the record says, which is written last: when vault and job have the arena."""
    if record.release != "all":
        return any_waits(alive)
    return all(state == "checkpointed" for state in states.values()) and all_in_arenas(alive)


# --- checkpoint -----------------------------------------------------------------------------------------------


def _checkpoint(dead: Journal, driver: gpu.Driver, progress: ProgressFn) -> Recovered:
    header = dead.header
    _wait_for_criu(dead, "dump", progress)
    committed = _committed(dead)
    if committed and header.roots:  # CRIU may have killed it, and a large tree takes a while to be gone
        with contextlib.suppress(LimosaError), Handle(header.roots[0]) as handle:
            handle.wait(2.0)
    job_lives = bool(header.roots) and header.roots[0].alive()
    did = []
    if job_lives or not committed:  # where the job is in its image alone, the table keeps its peers waiting for it
        _release_network(dead)
    if job_lives:
        with contextlib.suppress(OSError, LimosaError):
            EndedRecord(root=header.roots[0], image="").forget()
        try:
            _its_memory_back(dead, lambda: driver_steps.bring_back(driver, header.members, dead, header.id, progress))
        except LeftSuspended:
            if not committed:
                _remove_drafts(dead)  # the job is there: nobody needs what was not finished
            raise
        did.append("the job runs on")
    else:
        if committed:
            end_rest(header.tree)
        holders.forget(header.id)
        did.append("the job has ended")
    if committed:
        did.append(f"image {header.image} is whole and was kept")
    elif not job_lives and dead.began("post-dump"):
        # The dump was complete and the job is gone all the same: this may be the last copy.
        did.append(f"kept {header.draft or header.image}, which was not committed: limosa rm removes it")
    else:
        did += _remove_drafts(dead)
    state = "running" if job_lives else "gone"
    if job_lives and header.members and all(m.was == "checkpointed" for m in header.members):
        state = "checkpointed"
    return _entry(dead, did="; ".join(did), state=state)


def _its_memory_back(dead: Journal, driver_home: Callable[[], None]) -> None:
    """Brings back what the driver carries, then what was taken away or let go of the parked way."""
    if dead.began("park"):
        bring_home(dead, driver_home)
    else:
        driver_home()
    saving.keep_again(dead)


def _remove_drafts(dead: Journal) -> list[str]:
    """Removes the unfinished folder of this operation."""
    header = dead.header
    did = []
    with contextlib.suppress(OSError):
        for folder in unfinished(Path(header.image).parent):
            # Without a marker it died between making the folder and marking it; the name tells whose it was.
            nameless = folder.state == "dead" and not folder.operation
            ours = nameless and folder.path.name.startswith(partial_name(Path(header.image).name, ""))
            if folder.operation == header.id or str(folder.path) == header.draft or ours:
                try:
                    remove_folder(folder.path)
                    did.append(f"removed {folder.path}")
                except (LimosaError, OSError) as error:
                    did.append(f"could not remove {folder.path} ({error}): limosa rm removes it")
    return did


def _committed(dead: Journal) -> bool:
    """Whether the image that the journal announced is there."""
    record = dead.last("commit")
    if record is None:
        return False
    with contextlib.suppress(LimosaError, OSError), open_image(dead.header.image, trust=False) as image:
        return image.id == record.data.get("image_id")
    return False


def _release_network(dead: Journal) -> None:
    """A CRIU that was killed has left the job's connections shut: open them again."""
    header = dead.header
    for folder in (header.draft, header.image):
        log_fd = log_folder(folder) if folder else -1
        if log_fd >= 0:
            break
    try:
        release_network(header.tree, log_fd, header.roots[0].pid)
    finally:
        if log_fd >= 0:
            os.close(log_fd)


def _wait_for_criu(dead: Journal, step: str, progress: ProgressFn) -> None:
    """Waits until the CRIU that the journal names has ended."""
    notes = [r for r in dead.records if r.step == step and r.data.get("criu")]
    if not notes:
        return
    who = Identity.from_str(str(notes[-1].data["criu"]))
    deadline = time.monotonic() + _CRIU_PATIENCE
    standstill = leftovers.Standstill(who.pid, began=True)
    while who.alive():
        if step == "criu-restore" and standstill():
            with contextlib.suppress(LimosaError), Handle(who) as handle:
                handle.signal(signal.SIGKILL)
        if time.monotonic() > deadline:
            raise CannotBeMoved(detail=f"CRIU (process {who.pid}) still runs", hint="wait for it, then limosa recover")
        progress(Progress("recover", message=f"waiting for CRIU (process {who.pid})"))
        time.sleep(0.05)


# --- restore --------------------------------------------------------------------------------------------------


def _restore(dead: Journal, driver: gpu.Driver, progress: ProgressFn) -> Recovered:
    header = dead.header
    _wait_for_criu(dead, "criu-restore", progress)
    root = _restored_root(dead)
    if root is None:
        if not _criu_was_done(dead):  # else it ran, and has ended since: its files are its own
            _end_half_made(dead)
            _undo_rewinds(dead)
        return _entry(dead, did="nothing runs; the image is the copy", state="gone")
    if not _criu_was_done(dead):
        _still_an_image(dead)
        end_tree(driver, root.pid, header.members, 0.0, root)
        _end_half_made(dead)
        _undo_rewinds(dead)
        return _entry(dead, did="ended the half of a tree that CRIU had restored; the image is the copy", state="gone")
    try:
        members = _finish(dead, driver, root, progress)
    except LimosaError as error:
        _still_an_image(dead)
        end_tree(driver, root.pid, header.members, 0.0, root)
        _undo_rewinds(dead)
        return _entry(dead, did=f"ended the tree, the image is the copy ({error})", state="gone")
    with contextlib.suppress(LimosaError, OSError), open_image(header.image, trust=False) as image:
        job = image.manifest.job
        if job.run or job.name:
            name = job.name or f"restored-{root.pid}"
            command = list(image.manifest.tree[0].command)
            RunRecord(root=root, name=name, command=command, log=job.log or "", cwd=job.cwd).save()
    dead.header.roots = [root]
    return _entry(
        dead, did="finished it: the job runs" + (f" ({len(members)} with CUDA)" if members else ""), state="running"
    )


def _still_an_image(dead: Journal) -> None:
    """The tree may be ended only where its image is there to be restored again.

    Raises:
        DamagedImage: it is not: the tree is left as it is.
    """
    with open_image(dead.header.image, trust=False):
        pass


def _end_half_made(dead: Journal) -> None:
    """Ends what a CRIU that was killed has left half-made under the image's pids."""
    notes = [r for r in dead.records if r.step == "criu-restore" and r.data.get("criu")]
    if not notes:
        return
    pids: list[int] = []
    with contextlib.suppress(LimosaError, OSError), open_image(dead.header.image, trust=False) as image:
        pids = [p.pid for p in image.manifest.tree]
    leftovers.end_unfinished(Identity.from_str(str(notes[-1].data["criu"])), pids)


def _restored_root(dead: Journal) -> Identity | None:
    """The topmost restored process: as journalled, else whoever has its pid and began while CRIU was at work.

    CRIU's log begins with its run and grows until it ends: a process that is older or younger is a stranger.
    """
    if dead.header.roots:
        return dead.header.roots[0] if dead.header.roots[0].alive() else None
    first = next((r for r in dead.records if r.step == "criu-restore" and r.phase == "begin"), None)
    if first is None:
        return None
    try:
        found = Identity.of(first.pid)
        last_word = os.stat(Path(dead.header.image, LOG_NAME, RESTORE_LOG)).st_mtime
    except (LimosaError, OSError):
        return None
    wall = started_at(found) + time.time() - time.monotonic()
    return found if dead.header.since - 1 <= wall <= last_word + 1 else None


def _criu_was_done(dead: Journal) -> bool:
    """Whether CRIU had let the tree go: it says so last of all, and before that whatever is there is a half."""
    if any(r.step == "criu-restore" and r.phase == "done" for r in dead.records):
        return True
    with contextlib.suppress(OSError), open(Path(dead.header.image, LOG_NAME, RESTORE_LOG), "rb") as log:
        if os.fstat(log.fileno()).st_mtime >= dead.header.since:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            return b"Restore finished successfully" in log.read()
    return False


def _finish(dead: Journal, driver: gpu.Driver, root: Identity, progress: ProgressFn) -> list[Member]:
    members = dead.header.members
    let_go_on(job_tree(root))
    if not members:
        return []
    pids = {i.pid: i for i in job_tree(root)}
    for member in members:
        if member.pid not in pids:
            raise UndoFailed(what="restore", detail="", undo_detail=f"process {member.pid} was not restored")
        member.identity = pids[member.pid]
    states = {m.pid: driver_steps.settled_state(driver, m.pid, progress) for m in members}
    closed = _closed(members)
    asleep = [m for m in members if states[m.pid] == "checkpointed"]
    if asleep:
        room.check(gpu.inventory(), asleep, dead.header.id)
        for member in asleep:
            driver_steps.restore_one(driver, member, member.map)
    for member in members:
        if driver_steps.settled_state(driver, member.pid, progress) == "locked":
            driver.unlock(member.pid, limit=driver_steps.CALL_SECONDS)
    for shim in closed:
        with shim:
            shim.open_gate()
    return members


def _closed(members: Sequence[Member]) -> list[Shim]:
    """The shims of those that have their memory and whose gate is closed; not where one's memory is not there yet.

    Raises:
        FailedUndone: the device memory of one of them has not come: the image is read again as a whole.
    """
    found: list[Shim] = []
    for member in members:
        try:
            shim = Shim(member.identity)
        except LimosaError as error:
            if under_shim(member.pid):
                raise FailedUndone(f"the shim of process {member.pid} does not answer ({error})") from error
            continue
        found.append(shim)
        stand = shim.hello().stand
        if stand is Stand.AWAY:
            for one in found:
                one.close()
            raise FailedUndone(f"the device memory of process {member.pid} was not there yet")
        if stand is Stand.OPEN:
            found.pop().close()
    return found


def _undo_rewinds(dead: Journal) -> None:
    for record in reversed(dead.records):
        if record.step == "rewind" and record.phase == "begin":
            data = record.data
            msgspec.convert(data, Rewind).undo()

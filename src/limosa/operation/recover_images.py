"""``recover`` for the verbs with images: checkpoints and restores that were killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from limosa import gpu
from limosa.errors import CannotBeMoved, FailedUndone, LeftSuspended, LimosaError, UndoFailed
from limosa.image import open_image, unfinished
from limosa.image.files import no_more_files
from limosa.image.manifest import LOG_NAME
from limosa.image.read import partial_name
from limosa.image.remove import remove as remove_folder
from limosa.image.trust import open_named
from limosa.operation import driver_steps, places, room, shm
from limosa.operation.communicators import closing as communicators
from limosa.operation.journal import Journal, Member, Noted, Phase
from limosa.operation.leftovers import end_rest, has_ended, let_go_on, release_network
from limosa.operation.parked import holders, saving
from limosa.operation.parked.gates import gate_was_opened
from limosa.operation.parked.parkable import hello_of
from limosa.operation.parked.recovering import go_back, go_on
from limosa.operation.remove_image import log_folder
from limosa.operation.restored import end_tree, keep_record, started_on
from limosa.operation.results import Recovered
from limosa.operation.rewind import Rewind
from limosa.operation.step import STILL
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim
from limosa.process.criu import leftovers
from limosa.process.criu.run import DUMP_LOG, RESTORE_LOG
from limosa.process.identity import Handle, Identity
from limosa.process.openat import closing, open_in
from limosa.process.records import EndedRecord
from limosa.process.tree import job_tree
from limosa.progress import Progress, ProgressFn
from limosa.structs import ready

_LAST_WORDS = 1 << 20  # bytes of CRIU's log: after these words it names each process that it ends
CRIU_PATIENCE = 900.0  # seconds; a dump of hundreds of gigabytes to a slow disk takes minutes


def entry_of(dead: Journal, **fields: object) -> Recovered:
    """What is said of an operation that was recovered."""
    header = dead.header
    pid = header.roots[0].pid if header.roots else 0
    known = {"id": header.id, "operation": header.operation, "pid": pid, "image": header.image}
    return Recovered(kind="operation", **known, **fields)  # type: ignore[arg-type]


# --- checkpoint -----------------------------------------------------------------------------------------------


def recover_checkpoint(dead: Journal, driver: gpu.Driver, progress: ProgressFn) -> Recovered:
    """Brings a job back that was being written, where it has not ended with its image whole.

    Raises LeftSuspended (no room on its GPU any more), or what kept it from being brought back: its journal stays.
    """
    header = dead.header
    _wait_for_criu(dead, "dump", progress)
    committed = is_committed(dead)
    leaves = committed and not header.leave_running and _was_ended(dead)  # it is in its image, and nowhere else
    job_lives = bool(header.roots) and not (leaves and has_ended(header.roots[0])) and header.roots[0].alive()
    # Its children may live on without it; they are in no image then, or in one that is a copy.
    job_lives = job_lives or (not leaves and any(m.identity.alive() for m in header.members))
    _take_names_away(dead, "lost")
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
                remove_drafts(dead)  # the job is there: nobody needs what was not finished
            raise
        if dead.began(Noted.COMMUNICATORS):
            communicators.back([m for m in header.members if m.was != gpu.State.CHECKPOINTED])
        did.append("the job runs on")
    else:
        if leaves:
            end_rest(header.tree)
        holders.forget(header.id)
        did.append("the job has ended")
    if committed:
        did.append(f"image {header.image} is whole and was kept")
    elif not job_lives and dead.began(Noted.POST_DUMP):
        # The dump was complete and the job is gone all the same: this may be the last copy.
        did.append(f"kept {header.draft or header.image}, which was not committed: limosa rm removes it")
    else:
        did += remove_drafts(dead)
    state = "running" if job_lives else "gone"
    if job_lives and header.members and all(m.was == gpu.State.CHECKPOINTED for m in header.members):
        state = "checkpointed"
    return entry_of(dead, did="; ".join(did), state=state)


def _was_ended(dead: Journal) -> bool:
    """Whether the job was being ended, or has been; else what it has done since is in no image.

    CRIU asks whether the image was committed, and lets the job go on where nobody answers.
    """
    if dead.began(Noted.FREEZE):  # a container: it stands still until it is ended
        return not went_on(dead)
    said = b""
    with _log_of(dead) as fd, contextlib.suppress(OSError), open(open_in(fd, DUMP_LOG, os.O_RDONLY), "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_WORDS))
        said = log.read(_LAST_WORDS)
    return b"Unfreezing tasks into 2" in said  # TASK_DEAD


def _its_memory_back(dead: Journal, driver_home: Callable[[], None]) -> None:
    """Brings back what the driver carries, then what was taken away or let go of the parked way."""
    left: LeftSuspended | None = None
    try:
        if dead.began(Noted.PARK) and not go_on(dead):
            go_back(dead, driver_home)
        elif not dead.began(Noted.PARK):
            driver_home()
    except LeftSuspended as error:
        left = error  # others of it were suspended before, and have let go of their arenas
    saving.keep_again(dead)
    if left is not None:
        raise left


def remove_drafts(dead: Journal) -> list[str]:
    """Removes the unfinished folder of this operation. FailedUndone: this process can open no file more."""
    header = dead.header
    did: list[str] = []
    parent = Path(header.image).parent
    try:
        listed = unfinished(parent)
    except OSError as error:
        if no_more_files(error):
            raise FailedUndone(f"what was not finished in {parent} cannot be looked for: {error.strerror}") from error
        return did
    except LimosaError:
        return did
    for folder in listed:
        # Without a marker it died between making the folder and marking it; the name tells whose it was.
        nameless = folder.state == "dead" and not folder.operation
        ours = nameless and folder.path.name.startswith(partial_name(Path(header.image).name, ""))
        if folder.operation == header.id or str(folder.path) == header.draft or ours:
            try:
                remove_folder(folder.path, litter_only=True)
                did.append(f"removed {folder.path}")
            except (LimosaError, OSError) as error:
                if no_more_files(error):
                    raise FailedUndone(f"{folder.path}, which was not finished, stays: {error}") from error
                did.append(f"could not remove {folder.path} ({error}): limosa rm removes it")
    return did


def went_on(dead: Journal) -> bool:
    """Return whether a container that stood still may have been let go on: what it has done since is in no image."""
    return any(r.step == Noted.UNDO and r.data.get("name") == STILL for r in dead.records)


def is_committed(dead: Journal) -> bool:
    """Return whether the image that an operation was writing is there, whole."""
    record = dead.last(Noted.COMMIT)
    if record is None:
        return False
    with contextlib.suppress(LimosaError, OSError), open_image(dead.header.image, trust=False) as image:
        return image.id == record.data.get("image_id")
    return False


def _release_network(dead: Journal) -> None:
    """A CRIU that was killed has left the job's connections shut: open them again."""
    with _log_of(dead) as log_fd:
        release_network(dead.header.tree, log_fd, dead.header.roots[0].pid)


@contextlib.contextmanager
def _log_of(dead: Journal) -> Iterator[int]:
    """The folder with CRIU's log of a dump; -1 where there is none."""
    with contextlib.ExitStack() as stack:
        log_fd = -1
        for folder in filter(None, (dead.header.draft, dead.header.image)):
            # Where others can change names another image may stand there, or a log that names another job's table.
            with contextlib.suppress(LimosaError, OSError), closing(open_named(folder)) as image_fd:
                log_fd = stack.enter_context(log_folder(image_fd))
            if log_fd >= 0:
                break
        yield log_fd


def criu_of(dead: Journal, step: str) -> Identity | None:
    """Who CRIU was in a step, or the runtime that called it; None where none was started."""
    notes = [r for r in dead.records if r.step == step and r.data.get("criu")]
    return Identity.from_str(str(notes[-1].data["criu"])) if notes else None


def _wait_for_criu(dead: Journal, step: str, progress: ProgressFn) -> None:
    who = criu_of(dead, step)
    if who is None:
        return
    deadline = time.monotonic() + CRIU_PATIENCE
    standstill = leftovers.Standstill(who.pid, began=True)
    while who.alive():
        if step == Noted.CRIU_RESTORE and standstill():
            with contextlib.suppress(LimosaError), Handle(who) as handle:
                handle.signal(signal.SIGKILL)
        if time.monotonic() > deadline:
            raise CannotBeMoved(detail=f"CRIU (process {who.pid}) still runs", hint="wait for it, then limosa recover")
        progress(Progress("recover", message=f"waiting for CRIU (process {who.pid})"))
        time.sleep(0.05)


# --- restore --------------------------------------------------------------------------------------------------


def recover_restore(dead: Journal, driver: gpu.Driver, progress: ProgressFn) -> Recovered:
    """Lets a restored job run if all of it is there. Otherwise ends the rest of it: the image is the copy."""
    header = dead.header
    _wait_for_criu(dead, "criu-restore", progress)
    if _criu_was_done(dead):
        _take_names_away(dead, "lost")
    root = _restored_root(dead)
    if root is None:
        said = ""
        if not _criu_was_done(dead):  # else it ran, and has ended since: its files are its own
            _end_half_made(dead)
            said = _undo_files(dead)
        return entry_of(dead, did=f"nothing runs; the image is the copy{said}", state="gone")
    if not _criu_was_done(dead):
        still_an_image(dead)
        end_tree(driver, root.pid, header.members, 0.0, root)
        _end_half_made(dead)
        did = "ended the half of a tree that CRIU had restored; the image is the copy"
        return entry_of(dead, did=did + _undo_files(dead), state="gone")
    ran = has_run(dead, root)
    try:
        members = finish(dead, driver, root, progress, ran=ran)
    except LimosaError as error:
        if ran:  # it may run: forward, or not at all
            raise gate_was_opened("restore", str(error)) from error
        still_an_image(dead)
        end_tree(driver, root.pid, header.members, 0.0, root)
        did = f"ended the tree, the image is the copy ({error})"
        return entry_of(dead, did=did + _undo_files(dead), state="gone")
    with contextlib.suppress(LimosaError, OSError), open_image(header.image, trust=False) as image:
        keep_record(image.manifest, root)
    dead.header.roots = [root]
    did = "finished it: the job runs" + (f" ({len(members)} with CUDA)" if members else "")
    return entry_of(dead, did=did, state="running")


def still_an_image(dead: Journal) -> None:
    """Raises DamagedImage where a tree may not be ended: its image is not there to be restored again."""
    with open_image(dead.header.image, trust=False):
        pass


def _end_half_made(dead: Journal) -> None:
    """Ends what a CRIU that was killed has left half-made under the image's pids."""
    who = criu_of(dead, Noted.CRIU_RESTORE)
    if who is None:
        return
    pids: list[int] = []
    with contextlib.suppress(LimosaError, OSError), open_image(dead.header.image, trust=False) as image:
        pids = [p.pid for p in image.manifest.tree]
    until = dead.records[-1].time
    with contextlib.suppress(OSError):
        until = os.stat(Path(dead.header.image, LOG_NAME, RESTORE_LOG)).st_mtime
    leftovers.end_unfinished(who, pids, until)


def _restored_root(dead: Journal) -> Identity | None:
    """The topmost restored process: as journalled, else whoever has its pid and began while CRIU was at work.

    CRIU's log begins with its run and grows until it ends: a process that is older or younger is a stranger.
    """
    if dead.header.roots:
        return dead.header.roots[0] if dead.header.roots[0].alive() else None
    first = next((r for r in dead.records if r.step == Noted.CRIU_RESTORE and r.phase == Phase.BEGIN), None)
    if first is None:
        return None
    try:
        found = Identity.of(first.pid)
        last_word = os.stat(Path(dead.header.image, LOG_NAME, RESTORE_LOG)).st_mtime
    except (LimosaError, OSError):
        return None
    wall = started_on(found)
    return found if dead.header.since - 1 <= wall <= last_word + 1 else None


def _criu_was_done(dead: Journal) -> bool:
    """Whether CRIU had let the tree go: it says so last of all, and before that whatever is there is a half."""
    if any(r.step == Noted.CRIU_RESTORE and r.phase == Phase.DONE for r in dead.records):
        return True
    with contextlib.suppress(OSError), open(Path(dead.header.image, LOG_NAME, RESTORE_LOG), "rb") as log:
        if os.fstat(log.fileno()).st_mtime >= dead.header.since:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            return b"Restore finished successfully" in log.read()
    return False


def finish(dead: Journal, driver: gpu.Driver, root: Identity, progress: ProgressFn, *, ran: bool) -> list[Member]:
    """Has the driver bring back what it has not yet, and opens the gates; returns the members.

    ``ran``: what :func:`has_run` has said. Raises what keeps the job from being whole.
    """
    members = dead.header.members
    if not members:
        return []
    let_go_on(job_tree(root))
    pids = {i.pid: i for i in job_tree(root)}
    if ran:  # and a process of it have ended since
        members = [m for m in members if m.pid in pids]
    for member in members:
        if member.pid not in pids:
            raise UndoFailed(what="restore", detail="", undo_detail=f"process {member.pid} was not restored")
        member.identity = pids[member.pid]
    states = {m.pid: driver_steps.settled_state(driver, m.pid, progress) for m in members}
    closed = _closed(members)
    asleep = [m for m in members if states[m.pid] == gpu.State.CHECKPOINTED]
    if asleep:
        room.check(gpu.inventory(), asleep, dead.header.id)
        for member in asleep:
            driver_steps.restore_one(driver, member, member.map, driver_steps.by_progress(progress))
    places.tell(dead.header.id, members, {shim.identity.pid: shim for shim in closed})
    for member in members:
        if driver_steps.settled_state(driver, member.pid, progress) == gpu.State.LOCKED:
            driver.unlock(member.pid, limit=driver_steps.CALL_SECONDS)
    with contextlib.ExitStack() as stack:
        for shim in closed:
            stack.enter_context(shim)
        for shim in closed:
            dead.note(Noted.OPEN, Phase.BEGIN, shim.identity.pid)
        for shim in closed:
            shim.open_gate()
    communicators.back(members)
    return members


def has_run(dead: Journal, root: Identity) -> bool:
    """Return whether a restored job was let go before its operation was killed: what it has done since is in no image.

    Of one whose memory was still to come a gate is closed, also where the driver has let it go. What is stopped goes
    on: it would not answer.
    """
    if dead.began(Noted.OPEN):
        return True
    if not dead.began(Noted.UNLOCK):
        return False
    there = {one.pid: one for one in job_tree(root)}
    let_go_on(there.values())
    with contextlib.ExitStack() as stack:
        for member in dead.header.members:
            if member.pid in there:
                member.identity = there[member.pid]
                with contextlib.suppress(CannotBeMoved):  # it does not answer: it may have run
                    answer = hello_of(member)
                    if answer is not None and stack.enter_context(answer[0]) and answer[1].stand is not Stand.OPEN:
                        return False
    return True


def _closed(members: Sequence[Member]) -> list[Shim]:
    """The shims of those that have their memory and whose gate is closed.

    FailedUndone: the memory of one is not there yet (the image is read again as a whole); CannotBeMoved: no answer.
    """
    found: list[Shim] = []
    try:
        for member in members:
            answer = hello_of(member)
            if answer is None:
                continue
            shim, said = answer
            found.append(shim)
            if said.stand is Stand.AWAY:
                raise FailedUndone(f"the device memory of process {member.pid} was not there yet")
            if said.stand is Stand.OPEN:
                found.pop().close()
    except BaseException:
        for one in found:
            one.close()
        raise
    return found


def _undo_files(dead: Journal) -> str:
    """Gives files their tails back. What their owner has exchanged since is told once, and not tried for ever."""
    said = ""
    for record in reversed(dead.records):
        if record.step == Noted.REWIND and record.phase == Phase.BEGIN:
            try:
                msgspec.convert(record.data, ready(Rewind)).undo()
            except FailedUndone as error:
                said += f"; {error}"
    _take_names_away(dead, "names", "lost")
    return said


def _take_names_away(dead: Journal, *kinds: str) -> None:
    """Removes the names of semaphores that were there for CRIU alone ("lost"), or for a job that did not come back."""
    for record in dead.records:
        if record.step == Noted.NAMES and record.phase == Phase.BEGIN:
            for kind in kinds:
                made = msgspec.convert(record.data.get(kind, {}), ready(shm.Made))
                shm.take_away(shm.of_note(made))

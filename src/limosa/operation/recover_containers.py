"""``recover`` for containers that were written to disk, or brought back, when ``limosa`` was killed.

What runtimes do goes on without it. So first their end is waited for; then a frozen container is let go on and brought
back as any job, and a container that was not made to its end is taken away: its image is the copy.
"""

from __future__ import annotations

import contextlib

import msgspec

from limosa import gpu
from limosa.containers.calls import settle
from limosa.containers.freezer import pause, thaw
from limosa.containers.runtime import Contained, Runtime, end
from limosa.containers.runtimes import runtime_of
from limosa.errors import CannotBeMoved, FailedUndone, LimosaError
from limosa.image import open_image
from limosa.operation import clones, container_gpus, driver_steps, recover_images
from limosa.operation.journal import Journal, Noted, Phase
from limosa.operation.leftovers import connections_go_on, end_rest, has_ended, let_go_on
from limosa.operation.parked.gates import gate_was_opened
from limosa.operation.recover_images import (
    CRIU_PATIENCE,
    criu_of,
    entry_of,
    finish,
    has_run,
    is_committed,
    still_an_image,
    went_on,
)
from limosa.operation.restored import end_tree, started_on
from limosa.operation.results import Recovered
from limosa.operation.step import STILL
from limosa.process.criu.lent import forget
from limosa.process.identity import Identity, ending
from limosa.process.tree import job_tree
from limosa.progress import Progress, ProgressFn
from limosa.structs import ready
from limosa.terms import JobState

_YOUNGER_SECONDS = 20.0


class _Written(msgspec.Struct):
    """What a journal says of a container that is written."""

    runtime: str = ""
    program: str = ""
    container: str = ""
    configured: dict[str, str] = {}
    notes: list[str] = []
    run: str = ""
    shut: bool = False
    folder: str = ""  # of the cgroup by which it was held


class _Made(msgspec.Struct):
    """What a journal says of a container that is made of an image."""

    runtime: str
    program: str
    made: str
    bundle: str
    volumes: list[str] = []
    called: str = ""  # the name that it is to have
    configured: dict[str, str] = {}
    notes: list[str] = []


def recover_checkpoint(dead: Journal, driver: gpu.Driver, progress: ProgressFn) -> Recovered:
    """Brings a job back that was being written; see ``recover_images``."""
    frozen, cut_off = dead.last(Noted.FREEZE), None
    written = msgspec.convert(frozen.data if frozen is not None else {}, ready(_Written))
    if frozen is not None:
        _wait_for_runtime(dead, Noted.DUMP, progress)
        root = dead.header.roots[0]
        if root.alive() and not _is_ending(dead) and not _ended_now(dead, written, root):
            try:
                connections_go_on(job_tree(root), shut=written.shut)
            except FailedUndone as error:
                cut_off = error
            let_go_on(job_tree(root))
            dead.try_note(Noted.UNDO, Phase.BEGIN, name=STILL)  # it computes on from here
            thaw(written.folder)
    entry = recover_images.recover_checkpoint(dead, driver, progress)
    if cut_off is not None:  # it runs, and recover can be run again
        raise cut_off
    if frozen is not None and entry.state == JobState.RUNNING:
        _pause(written)
        entry.did += _taken_for_dead(written)
    if frozen is not None and entry.state == JobState.GONE:
        root = dead.header.roots[0]
        if written.runtime and is_committed(dead) and not dead.header.leave_running:
            runtime = _runtime_of(written)
            found = runtime.find(written.container)
            # Else it was restored, or somebody has started it anew: it may have written since.
            same = found is not None and found.init in (None, root) and _is_the_same_run(found, written)
            if same and not went_on(dead):
                runtime.remove(written.container)  # what may have been told to end it, and not yet to take it away
            elif found is not None:
                entry.did += "; its container may have gone on, or been started anew, since, and stays"
        elif written.runtime and _began_anew(written, root):
            entry.did += "; somebody has started its container anew since"
    return entry


def _pause(written: _Written) -> None:
    """Whoever has paused it while it was held sees that it is."""
    if written.runtime:
        with contextlib.suppress(LimosaError, OSError):  # it goes on, as the job was to
            runtime = _runtime_of(written)
            pause(written.folder, lambda: runtime.is_paused(written.container))


def _ended_now(dead: Journal, written: _Written, root: Identity) -> bool:
    """Whether a container that has stood still since it was written, and that was being ended, has ended by this."""
    if not written.runtime or not is_committed(dead) or dead.header.leave_running or went_on(dead):
        return False
    if not ending(root.pid):
        try:
            if not _runtime_of(written).has_begun_to_end(written.container, root, written.folder):
                return False
        except (LimosaError, OSError):  # it goes on
            return False
    end_rest(dead.header.tree)  # before anything of it is let go: with version 1 the others would run a moment longer
    end(root, (written.folder,))
    return True


def _taken_for_dead(written: _Written) -> str:
    """What to know of a container that goes on, and that its runtime had begun to end."""
    name = written.runtime
    with contextlib.suppress(LimosaError, OSError):  # it is only told
        found = _runtime_of(written).find(written.container) if name else None
        if found is not None and found.ending:
            return f"; {name} takes it for dead: {name} kill ends it, {name} rm would forget it and let it run"
    return ""


def _runtime_of(written: _Written) -> Runtime:
    return runtime_of(written.runtime, written.program, written.configured, written.notes)


def _is_the_same_run(found: Contained, written: _Written) -> bool:
    """Whether a container that is there has not been started anew; not known where nothing was noted of that.

    containerd does not say of one whose task was taken away.
    """
    return not written.run or found.run == written.run or found.removed


def _began_anew(written: _Written, root: Identity) -> bool:
    """Whether a container runs that was not brought back: it knows nothing of what its former process had computed."""
    with contextlib.suppress(LimosaError, OSError):  # it is only told
        found = _runtime_of(written).find(written.container)
        return found is not None and found.init not in (None, root)
    return False


def _is_ending(dead: Journal) -> bool:
    """Whether its runtime was told to end it and has: what it has killed takes a moment."""
    return dead.began(Noted.COMMIT) and has_ended(dead.header.roots[0])


def recover_restore(dead: Journal, driver: gpu.Driver, progress: ProgressFn) -> Recovered:
    """Lets a restored job run if all of it is there, otherwise takes it away; see ``recover_images``."""
    begun = next((r for r in dead.records if r.step == Noted.CRIU_RESTORE and r.phase == Phase.BEGIN), None)
    if begun is None or "runtime" not in begun.data:
        return recover_images.recover_restore(dead, driver, progress)
    _wait_for_runtime(dead, Noted.CRIU_RESTORE, progress)
    made = msgspec.convert(begun.data, ready(_Made))
    runtime = runtime_of(made.runtime, made.program, made.configured, made.notes)
    roots = dead.header.roots or _came_back(dead, runtime, made)
    if roots and not roots[0].alive() and _was_let_go(dead):
        return entry_of(dead, did="it ran, and has ended since: its container stays", state="gone")
    if not roots or not roots[0].alive():
        still_an_image(dead)
        _take_away(dead, runtime, made)
        return entry_of(dead, did="nothing runs; the image is the copy", state="gone")
    root = roots[0]
    with contextlib.suppress(LimosaError, OSError):  # where it is needed, the driver says so
        container_gpus.give(root, dead.header.members)
    ran = has_run(dead, root)
    try:
        members = finish(dead, driver, root, progress, ran=ran)
    except LimosaError as error:
        if ran:
            raise gate_was_opened("restore", str(error)) from error
        still_an_image(dead)
        end_tree(driver, root.pid, dead.header.members, 0.0, root)
        _take_away(dead, runtime, made)
        return entry_of(dead, did=f"took the container away, the image is the copy ({error})", state="gone")
    # The driver may have brought it back and nobody have seen to that.
    tell = driver_steps.by_progress(progress)
    driver_steps.leave_where_it_is(members, members, tell)
    try:
        container_gpus.keep_only(root, members)
    except (LimosaError, OSError) as error:  # it runs, and goes on
        driver_steps.tell_what_stays(root.pid, error, tell)
    with contextlib.suppress(LimosaError, OSError), open_image(dead.header.image, trust=False) as image:
        if image.manifest.container is not None:
            clones.keep_record(image.manifest.container, root)
    if made.runtime == "containerd":
        container_gpus.tell_returned(root, members, made.configured)
    did = "finished it: the container runs" + (f" ({len(members)} with CUDA)" if members else "")
    return entry_of(dead, did=did, state="running")


def _came_back(dead: Journal, runtime: Runtime, made: _Made) -> list[Identity]:
    """The first process of a container that its runtime has brought back, as it has said, and that runs.

    One with CUDA waits for its memory: its image is the copy.
    """
    told = next((r for r in dead.records if r.step == Noted.CRIU_RESTORE and r.data.get("run")), None)
    if told is None:
        return []
    with open_image(dead.header.image, trust=False) as image:
        if any(process.cuda for process in image.manifest.tree):
            return []
    found = runtime.find(str(told.data.get("made")))
    if found is None or found.init is None or found.run != told.data["run"]:
        return []
    if made.called:
        with contextlib.suppress(LimosaError, OSError):  # it runs under the name that it was made with
            runtime.rename(found, made.called)
    return [found.init]


def _was_let_go(dead: Journal) -> bool:
    """Whether a container that was made may have run: what it has written is in no image."""
    if not any(r.step == Noted.CRIU_RESTORE and r.phase == Phase.DONE for r in dead.records):
        return False
    return not dead.header.members or dead.began(Noted.OPEN) or dead.began(Noted.UNLOCK)


def _take_away(dead: Journal, runtime: Runtime, made: _Made) -> None:
    """Takes away what was made under the operation's own name, or under the id that the runtime had said."""
    if made.runtime != "containerd" and criu_of(dead, Noted.CRIU_RESTORE) is None:
        return  # its runtime has not begun: it waits until it is noted
    for record in dead.records:
        if record.step == Noted.CRIU_RESTORE and isinstance(word := record.data.get("made"), str):
            if _is_anothers(dead, runtime, word, record.data.get("run")):
                return
            runtime.remove_made(word, made.bundle, dead.header.id if record.phase == Phase.BEGIN else "")
    begun = next(r.time for r in dead.records if r.step == Noted.CRIU_RESTORE)
    runtime.remove_volumes(made.volumes, begun - 1, dead.records[-1].time + _YOUNGER_SECONDS)


def _is_anothers(dead: Journal, runtime: Runtime, word: str, run: object) -> bool:
    """Whether a container was started by hand since: it has what it has written since in no image.

    Args:
        dead: the journal of the restore.
        runtime: the container's.
        word: which.
        run: of it, as its runtime has called the one that the restore has made; None where that is not known. That one
            has its first process at once, and limosa was alive then, or a moment before.
    """
    found = runtime.find(word)
    if found is None:
        return False
    if run and found.run:
        return found.run != run
    if found.init is None:
        return False
    return started_on(found.init) > dead.records[-1].time + _YOUNGER_SECONDS


def _wait_for_runtime(dead: Journal, step: Noted, progress: ProgressFn) -> None:
    """Waits for its end; nobody uses the CRIU that was lent to it any more then."""
    who = criu_of(dead, step)
    if who is not None:
        progress(Progress("recover", message=f"waiting for the container's runtime (process {who.pid})"))
        if not settle(who, CRIU_PATIENCE):
            text = f"the runtime (process {who.pid}), or what it has started, still runs"
            raise CannotBeMoved(detail=text, hint="wait for it, then limosa recover")
    forget(dead.header.id)

"""``wait`` and ``stop``: how a job ended, and ending it by signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

from limosa import gpu
from limosa.errors import Busy, CancelledUndone, JobSuspended, LimosaError, NoSuchProcess, PidReused, Zombie
from limosa.operation import claims, drivers
from limosa.operation.jobs import JobLike, job, rfc3339
from limosa.operation.options import check_seconds
from limosa.operation.results import StopResult, WaitResult
from limosa.process import records
from limosa.process.candidates import may_use_cuda
from limosa.process.exit_code import code_kept, exit_code
from limosa.process.identity import Handle, Identity, read_stat, refuse_ancestor
from limosa.process.tree import job_tree
from limosa.progress import Progress, ProgressFn, silent
from limosa.terms import Release

_STEP = 0.1  # seconds between looks
_KILLED_SECONDS = 30.0  # a process with a GPU takes up to seconds to end


def wait(
    which: JobLike, *, cancel: threading.Event | None = None, while_waiting: Callable[[], bool] | None = None
) -> WaitResult:
    """Waits until a job's topmost process has ended; its exit code where the kernel (6.15 on) or a checkpoint tells it.

    ``cancel``: set it to stop waiting (CancelledUndone: the job is as it was). ``while_waiting``: called again and
    again meanwhile; true where it has more to do at once. NoSuchProcess: there is no such job; what ``limosa.run`` gave
    back, or an identity, names one that has ended as well.
    """
    found = job(which)
    try:
        ended, code = _waited(found.root, cancel, while_waiting)
    except (NoSuchProcess, PidReused):
        if isinstance(which, (int, str)):
            raise
        ended, code = time.time(), code_kept(found.root)  # which process it was is known: there was one
    while while_waiting is not None and while_waiting():
        pass
    # A checkpoint that ended it has left a record.
    record = records.EndedRecord.of(found.root) if code in (None, 128 + signal.SIGKILL) else None
    image = record.image if record is not None and os.path.isdir(record.image) else ""
    return WaitResult(
        pid=found.root.pid, name=found.name, exit_code=None if image else code, ended=rfc3339(ended), image=image
    )


def _waited(
    root: Identity, cancel: threading.Event | None, while_waiting: Callable[[], bool] | None
) -> tuple[float, int | None]:
    """Waits until a process has ended: when that was, and its exit code."""
    with Handle(root) as handle:
        more = while_waiting is not None and while_waiting()
        while not handle.wait(0 if more else _STEP):
            if cancel is not None and cancel.is_set():
                raise CancelledUndone(f"no longer waiting for process {root.pid}")
            more = while_waiting is not None and while_waiting()
        return time.time(), exit_code(handle.fd)


def stop(
    which: JobLike,
    *,
    grace: float = 10.0,
    kill: bool = False,
    progress: ProgressFn = silent,
    cancel: threading.Event | None = None,
) -> StopResult:
    """Ends a job: SIGTERM to its topmost process, and after ``grace`` seconds SIGKILL to all that is left of it.

    Once the topmost process has ended its children are sent SIGTERM, too, unless they end with it. ``kill``: SIGKILL at
    once, also of a suspended job. ``cancel``: set it to stop waiting: nothing is killed then (CancelledUndone). Raises
    JobSuspended (it would not get to handle the signal), Busy (another operation works on it, or has left it in the
    middle), PermissionDenied.
    """
    check_seconds(grace=grace)
    found = job(which)
    refuse_ancestor(found.root)
    started = time.monotonic()
    tree = job_tree(found.root)
    claim = claims.on(tree)
    if claim is not None and claim.alive:
        raise Busy(pid=found.root.pid, by=f"{claim.operation} (process {claim.holder.pid})")
    if not kill:
        if claim is not None and claim.left:  # it may stand at its gate, and would be killed without having saved
            text = f"process {found.root.pid} is in the middle of a {claim.operation} that died"
            raise Busy(text, hint="limosa recover, then this again; --kill ends it as it is", pid=found.root.pid)
        _refuse_suspended(found.root, found.name, tree)
    killed: list[int] = []
    with Handle(found.root) as handle:
        if not kill:
            progress(Progress("stop", message=f"SIGTERM to process {found.root.pid}"))
            _send([found.root], signal.SIGTERM)
            tree = _wait_for(found.root, tree, started + grace, cancel)
        else:
            tree = _left(found.root, tree)
        if tree:
            progress(Progress("stop", message=f"SIGKILL to {len(tree)} process{'es'[: 2 * (len(tree) > 1)]}"))
            killed = [one.pid for one in tree]
            _send(tree, signal.SIGKILL)
            _wait_for(found.root, tree, time.monotonic() + _KILLED_SECONDS, None)
        handle.wait(_KILLED_SECONDS)
        seconds = time.monotonic() - started  # what comes now waits for its parent to reap it
        code = exit_code(handle.fd)
    return StopResult(pid=found.root.pid, name=found.name, exit_code=code, killed=killed, seconds=seconds)


def _refuse_suspended(root: Identity, name: str, tree: Iterable[Identity]) -> None:
    record = records.SuspendRecord.of(root)
    if record is not None and record.release != Release.ALL:  # the driver does not know of it
        raise JobSuspended(pid=root.pid, job=name or root.pid)
    pids = [one.pid for one in tree if may_use_cuda(one.pid)]
    if not pids:
        return
    try:
        with drivers.using(None) as driver:
            states = driver.states(pids, timeout=5.0)
    except LimosaError:  # no driver here; it may be suspended by one elsewhere (a node, a container)
        if record is not None:
            raise JobSuspended(pid=root.pid, job=name or root.pid) from None
        return
    known = [str(state) for state in states.values() if isinstance(state, str)]
    # Of those that were suspended. Others (workers that have only loaded the driver's library) have no state to tell.
    members = [] if record is None else [one.pid for one in record.members] or pids
    untold = any(pid in states and not isinstance(states[pid], str) for pid in members)
    if untold or gpu.State.LOCKED in known or gpu.State.CHECKPOINTED in known:
        raise JobSuspended(pid=root.pid, job=name or root.pid)


def _send(processes: Iterable[Identity], number: signal.Signals) -> None:
    for one in processes:
        with contextlib.suppress(NoSuchProcess, Zombie), Handle(one) as handle:
            handle.signal(number)
            if number == signal.SIGTERM and read_stat(one.pid).stopped:
                handle.signal(signal.SIGCONT)  # a stopped process takes no signal until it goes on


def _left(root: Identity, tree: Iterable[Identity]) -> list[Identity]:
    """Those of the tree that live, and what has been born below the root since."""
    with contextlib.suppress(NoSuchProcess, Zombie):
        tree = {*tree, *job_tree(root)}
    return sorted(one for one in set(tree) if claims.lives(one))


def _wait_for(root: Identity, tree: Iterable[Identity], until: float, cancel: threading.Event | None) -> list[Identity]:
    """Waits for all of them to end; those that have not."""
    told: set[Identity] = {root}
    while left := _left(root, tree):
        if cancel is not None and cancel.is_set():
            raise CancelledUndone(f"process {root.pid} was sent SIGTERM and nothing else; it may still be ending")
        if time.monotonic() > until:
            return left
        if root not in left:
            _send([one for one in left if one not in told], signal.SIGTERM)
            told |= set(left)
        tree = left
        time.sleep(_STEP)
    return []

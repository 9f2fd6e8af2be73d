"""Recognises a restored job, and ends one whose image is the copy."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial

from limosa import gpu
from limosa.errors import LimosaError, UndoFailed
from limosa.image import Manifest
from limosa.operation import driver_steps
from limosa.operation.journal import Member
from limosa.operation.parked.calls import together
from limosa.operation.parked.gates import leave
from limosa.parking.shim import Shim, under_shim
from limosa.process import device_nodes
from limosa.process.identity import Handle, Identity, read_stat
from limosa.process.records import EndedRecord, RunRecord
from limosa.process.tree import job_tree


def keep_record(manifest: Manifest, root: Identity) -> str:
    """Makes a restored job known again by its name, or "" if another has it; forgets the record of its end."""
    job = manifest.job
    if manifest.container is not None:
        return job.name  # its runtime knows it
    name = job.name if not any(r.name == job.name for r in RunRecord.all() if r.root != root) else ""
    with contextlib.suppress(OSError, LimosaError):
        if job.run or job.name:
            command = list(manifest.tree[0].command)
            called, sees = name or f"restored-{root.pid}", device_nodes.known(job.sees)
            RunRecord(root=root, name=called, command=command, log=job.log or "", cwd=job.cwd, sees=sees).save()
        EndedRecord(root=Identity(job.pid, manifest.tree[0].start_time), image="").forget()
    return name


def end_tree(
    driver: gpu.Driver, root_pid: int, members: Sequence[Member], not_before: float, root: Identity | None
) -> None:
    """Ends a restored tree while its image is the copy; UndoFailed: some of it lives on.

    A process whose CUDA state runs (of ``members``) is checkpointed before it is killed (measured: killing a live
    restored process hung the host on driver 595). Where ``root`` is not known, a process under its pid that is older
    than ``not_before`` (monotonic seconds) is somebody else and is left alone.
    """
    try:
        found = root or Identity.of(root_pid)
    except LimosaError:
        return
    if not found.alive() or (root is None and started_at(found) < not_before - 1):
        return
    tree = job_tree(found)
    answering = [m for m in members if m.identity.start_time and m.identity.alive() and not _stopped(m.pid)]
    states = {m.pid: driver_steps.settled_state(driver, m.pid) for m in answering}
    _unmap([m for m in answering if states[m.pid] == gpu.State.RUNNING])
    driver_steps.hold(driver, [m for m in answering if states[m.pid] in (gpu.State.RUNNING, gpu.State.LOCKED)], states)
    for identity in tree:
        with contextlib.suppress(LimosaError), Handle(identity) as handle:
            handle.signal(9)
    deadline = time.monotonic() + 10
    while any(i.alive() for i in tree):
        if time.monotonic() > deadline:
            left = ", ".join(str(i.pid) for i in tree if i.alive())
            raise UndoFailed(what="restore", detail="", undo_detail=f"processes {left} live on after SIGKILL")
        time.sleep(0.01)
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(found.pid, os.WNOHANG)  # ours to reap where we adopted it


def _unmap(members: Sequence[Member]) -> None:
    """Lets their libraries remove what came from the image: the driver checkpoints no process with imports."""

    def one(member: Member) -> None:
        with contextlib.suppress(LimosaError), Shim(member.identity) as shim:  # then the driver says what is the matter
            leave([(member, shim)])

    with contextlib.suppress(RuntimeError):  # no thread can be started: the driver says what is the matter
        together([partial(one, member) for member in members if under_shim(member.pid)])


def _stopped(pid: int) -> bool:
    """Whether it is stopped: the driver does not answer about it, and it is only to be ended."""
    try:
        return read_stat(pid).stopped
    except LimosaError:
        return False


def started_on(identity: Identity) -> float:
    """When a process was started, in seconds since the epoch; see :func:`started_at`."""
    return started_at(identity) + time.time() - time.monotonic()


def started_at(identity: Identity) -> float:
    """When a process was started, on the monotonic clock (clock ticks since boot, without time suspended)."""
    boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return identity.start_time / os.sysconf("SC_CLK_TCK") - boot

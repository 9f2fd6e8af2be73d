"""Which job is meant: a pid, a name given to ``run``, everything on a GPU, everything; whose a process is."""

from __future__ import annotations

import contextlib
import difflib
import os
import pwd
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from limosa import gpu
from limosa.containers import Containers
from limosa.containers.find import RUNTIMES
from limosa.errors import (
    DriverHung,
    GpuUnavailable,
    InvalidArgument,
    LimosaError,
    NoCudaState,
    NoSuchProcess,
    UsageError,
)
from limosa.operation.drivers import using
from limosa.process import records
from limosa.process.candidates import candidates, is_own
from limosa.process.identity import Identity, ancestors, pid_in
from limosa.process.namespaces import is_ours
from limosa.process.places import refuse_unusable
from limosa.process.slurp import MOST_COMMAND, head
from limosa.process.tree import group_by_topmost, snapshot, under_first
from limosa.terms import JobState


class Job(msgspec.Struct, frozen=True):
    """A job: its topmost process, and the name it was given, if any."""

    root: Identity
    name: str = ""


ANY_RUNTIME = "container"


class _Started(Protocol):
    """What ``limosa.run`` gives back, as far as it says which job it is."""

    @property
    def identity(self) -> Identity:
        """Its topmost process."""


JobLike = int | str | Identity | Job | _Started
"""What functions take for a job: pid, name or pid as text, identity, a Job, or what ``limosa.run`` gave back."""


def job(like: JobLike, *, containers: Containers | None = None) -> Job:
    """The job that is meant; ``containers``: those of this machine, where they were looked at just now.

    Raises:
        NoSuchProcess: no such pid or name.
        InvalidArgument: it names no job.
        PermissionDenied, UsageError: names are looked for in a folder that cannot be used.
    """
    if isinstance(like, Job):
        return like
    refuse_unusable()
    known = getattr(like, "identity", like)
    if isinstance(known, Identity):
        return Job(known, _name_of(known, containers))
    if isinstance(like, bool) or not isinstance(like, (int, str)):
        raise InvalidArgument(f"{like!r} is no job: a job is a pid, a name, or what limosa.run or limosa.resolve gave")
    pid = like if isinstance(like, int) else pid_in(like)
    if pid is None and (contained := in_container(str(like))) is not None:
        return contained
    if pid is None:
        try:
            record = records.job_named(str(like))
        except NoSuchProcess as error:
            error.hint = _instead(str(like)) or error.hint
            raise
        return Job(record.root, record.name)
    identity = Identity.of(pid)
    return Job(identity, _name_of(identity, containers))


def in_container(like: str) -> Job | None:
    """The job in a container: ``podman:train``, ``container:3f2a`` (of any runtime); None for what names none.

    Raises:
        NoSuchProcess: no such container runs.
        UsageError: several are meant, or there is no such runtime.
    """
    runtime, colon, word = like.partition(":")
    if not colon:
        return None
    if runtime == ANY_RUNTIME and ":" in word:  # --container podman:train
        return in_container(word)
    if runtime not in (*RUNTIMES, ANY_RUNTIME):
        near = difflib.get_close_matches(runtime, RUNTIMES, n=1)
        hint = f"did you mean {near[0]}:{word}?" if near else ""
        raise UsageError(detail=f"there is no runtime {runtime}; {', '.join(RUNTIMES)} are known", hint=hint)
    if not word:
        raise UsageError(detail=f"{like} names no container", hint=f"{like}NAME, or the beginning of its id")
    try:
        found = Containers().meant(word, "" if runtime == ANY_RUNTIME else runtime)
    except NoSuchProcess as error:
        error.hint = _instead(like) or error.hint
        raise
    assert found.init is not None
    return Job(found.init, found.called)


def refuse_twice(jobs: Sequence[Job]) -> None:
    """Raises UsageError where one job is named twice: it would be in its own way."""
    if len({one.root for one in jobs}) != len(jobs):
        raise UsageError(detail="the same job is named twice")


def _instead(typed: str) -> str:
    """What helps whoever has named no job that lives: a container is called so, or a checkpoint has ended it; or ""."""
    runtime, colon, word = typed.rpartition(":")
    try:
        return f"{Containers().meant(word).called} runs"
    except NoSuchProcess:
        pass
    except UsageError as several:
        return several.message
    for ended in reversed(records.EndedRecord.all()):
        any_runtime = not colon or runtime == ANY_RUNTIME
        is_meant = ended.name == typed or (any_runtime and ended.name.rpartition(":")[2] == word)
        if is_meant and os.path.isdir(ended.image):
            return f"a checkpoint ended it: limosa restore {shlex.quote(ended.image)}"
    return ""


def _name_of(identity: Identity, containers: Containers | None = None) -> str:
    """The name that it was given; of a container's first process what the container is called."""
    record = records.RunRecord.of(identity)
    if record is not None or is_ours(identity.pid, "mnt"):
        return record.name if record else ""
    found = (containers or Containers()).of(identity.pid)
    return found.called if found is not None and found.init == identity else ""


def resolve(
    specs: Sequence[JobLike] = (),
    *,
    on_gpu: str | None = None,
    everything: bool = False,
    driver: gpu.Driver | None = None,
) -> list[Job]:
    """The jobs that a command line names: by pid and name, all on a GPU (also suspended ones from there), or all.

    ``driver``: a client that the caller has; None: one for this call. Raises UsageError (nothing named, or the same job
    twice), NoSuchProcess (no such pid or name, or no job there) and GpuUnavailable.
    """
    if sum((bool(specs), on_gpu is not None, everything)) != 1:
        raise UsageError(detail="name jobs, or --gpu GPU, or --all (one of the three)")
    if specs:
        found = [job(s) for s in specs]
        refuse_twice(found)
        return found
    with using(driver) as asked:
        states = set(cuda_states(asked))
        wanted = states if everything else _on_gpu(asked, str(on_gpu))  # a job on the CPU alone has nothing to move
    jobs = []
    containers = Containers()
    for root in roots_of(wanted, states):
        with contextlib.suppress(NoSuchProcess):
            jobs.append(job(root, containers=containers))
    if not jobs:
        raise NoSuchProcess(f"no job on GPU {on_gpu}" if on_gpu is not None else "no job here holds CUDA state", pid=0)
    return jobs


def _on_gpu(driver: gpu.Driver, spec: str) -> set[int]:
    """The processes that hold memory on a GPU, and the suspended ones that came from there."""
    inventory = driver.inventory()
    uuid = gpu.find_gpu(inventory, spec).uuid
    there = {p.pid for g in inventory.gpus if g.uuid == uuid for p in g.processes if not is_own(p.pid)}
    return there | {m.pid for r in records.SuspendRecord.all() if uuid in r.bytes for m in r.members}


def roots_of(pids: Iterable[int], cuda: Collection[int] | None = None) -> list[int]:
    """The topmost ancestors, among these and the roots of ``run`` jobs, of these processes.

    Limosa's own ancestors are no jobs: a notebook that uses CUDA and starts ``limosa`` on its children is not in the
    way of seeing them. ``cuda``: all that hold CUDA state, where that was asked for just now.
    """
    refuse_unusable()
    own = {a.pid for a in ancestors()} | {os.getpid()}
    wanted = set(pids) - own
    runs = {r.root.pid for r in records.RunRecord.all()} - own
    holders = (set(cuda_states() if cuda is None else cuda) | wanted) - own
    parents = {pid: stat.ppid for pid, stat in snapshot().items()}
    firsts = {pid: first for pid, first in under_first(holders, parents).items() if first not in own}
    for pid, first in firsts.items():
        if first not in _ancestors(pid, parents):
            parents[pid] = first  # started from outside (podman exec)
    groups = group_by_topmost(holders | runs, runs | set(firsts.values()), parents)
    return sorted(root for root, members in groups.items() if wanted & ({root} | set(members)))


def _ancestors(pid: int, parents: Mapping[int, int]) -> set[int]:
    """A process and those above it."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def cuda_states(driver: gpu.Driver | None = None, silent: set[int] | None = None) -> dict[int, str]:
    """State of every process that holds CUDA state; "unknown" where the driver does not answer; empty without one.

    NVML does not show suspended ones, so the driver is asked about each process that has libcuda mapped.
    ``silent`` takes those about which it did not answer in time.
    """
    pids = [pid for pid in candidates() if pid != os.getpid()]
    if not pids:
        return {}
    found: dict[int, str] = {}
    with using(driver) as asked:
        try:
            states = asked.states(pids, timeout=2.0)
        except GpuUnavailable:
            return {}
    for pid, state in states.items():
        if silent is not None and isinstance(state, DriverHung):
            silent.add(pid)
        if not isinstance(state, (NoCudaState, NoSuchProcess)):
            found[pid] = JobState.UNKNOWN if isinstance(state, LimosaError) else str(state)
    return found


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory on a GPU, and the job that it belongs to."""

    pid: int  # the process
    job: int  # pid of the job's topmost process; the process itself where it is in no container or ``limosa run`` job
    name: str = ""  # the job's name, or what its container is called, or ""
    user: str = ""  # the process's owner
    command: list[str] = []  # its argument vector; empty where it cannot be seen from here
    limosa: bool = False  # whether it is Limosa's own (the mover, the vault): nobody's job


def holders(pids: Iterable[int]) -> dict[int, Holder]:
    """Whose these processes are, by pid. Reads ``/proc`` and records; the driver is not asked."""
    refuse_unusable()
    wanted = set(pids)
    names = {record.root.pid: record.name for record in records.RunRecord.all()}
    root = {pid: top for top, members in group_by_topmost(wanted, names).items() for pid in members}
    found = {}
    containers: Containers | None = None
    for pid in sorted(wanted):
        own = is_own(pid)
        top = pid if own else root.get(pid, pid)
        name = "" if own else names.get(top, "")
        if not own and top not in names and not is_ours(pid, "mnt"):
            containers = containers or Containers()
            box = containers.of(pid)
            if box is not None and box.init is not None:
                top, name = box.init.pid, box.called
        found[pid] = Holder(pid=pid, job=top, name=name, user=user_of(pid), command=command_of(pid), limosa=own)
    return found


def user_of(pid: int) -> str:
    """The process's owner by name (or uid where it has none)."""
    try:
        return user_name(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:
        return ""


def user_name(uid: int) -> str:
    """A user by name (or uid where it has none)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command_of(pid: int) -> list[str]:
    """The argument vector, or the kernel's name for it in brackets."""
    try:
        data = head(f"/proc/{pid}/cmdline", MOST_COMMAND)
    except OSError:
        return []
    if len(data) == MOST_COMMAND:
        data = data[: data.rfind(b"\0") + 1]  # as an image has it, see process/procfs.py
    return [part.decode(errors="replace") for part in data.rstrip(b"\0").split(b"\0")] if data else []


def rfc3339(seconds: float) -> str:
    """A time in seconds since the epoch as RFC 3339 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))

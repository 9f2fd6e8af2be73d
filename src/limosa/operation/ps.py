"""``ps``: every job on this machine, suspended ones included, and whether it could be moved."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from limosa import gpu
from limosa.containers import Containers
from limosa.errors import DriverHung, GpuUnavailable, LimosaError, NoSuchProcess, Reason
from limosa.operation import claims, drivers
from limosa.operation.communicators import asking
from limosa.operation.facts import Ask
from limosa.operation.jobs import Job, command_of, cuda_states, job, rfc3339, roots_of, user_of
from limosa.operation.journal import added_up
from limosa.operation.parked.aside import parked_reason
from limosa.operation.prepare import look
from limosa.operation.refusals import gpu_refusals
from limosa.operation.results import Ps
from limosa.operation.verbs import RESUME, SUSPEND
from limosa.operation.ways import way_of
from limosa.process import records
from limosa.process.candidates import is_own, may_be_seen, may_use_cuda
from limosa.process.tree import job_tree
from limosa.terms import JobState, Release, Route


def ps(driver: gpu.Driver | None = None) -> list[Ps]:
    """All jobs that hold CUDA state or were started by ``limosa run``.

    NVML does not show a suspended job; those are found by asking the driver (None: one for this call) about every
    process that has libcuda mapped, and their bytes and old GPU come from the record that ``suspend`` wrote.
    """
    with drivers.using(driver) as asked:
        silent: set[int] = set()
        states = cuda_states(asked, silent)
        runs = {r.root.pid for r in records.RunRecord.all()}
        records.SuspendRecord.all()  # on the way it removes those of jobs that have ended
        try:
            inventory = asked.inventory() if states else None
        except (GpuUnavailable, DriverHung):
            inventory = None
        containers = Containers()
        found = []
        for pid in roots_of(set(states) | runs, states):
            try:
                shown = _one(job(pid, containers=containers), states, inventory, asked, pid in runs, silent)
                found.append(msgspec.structs.replace(shown, container=_container(containers, pid)))
            except NoSuchProcess:
                continue  # it ended while we looked
            except LimosaError as error:
                found.append(_unreadable(pid, error))
            except Exception as error:  # what nobody foresaw of one job hides no other
                text = f"could not be looked at ({type(error).__name__}: {error})"
                found.append(_unreadable(pid, LimosaError(text)))
        return found


def _container(containers: Containers, pid: int) -> dict[str, str] | None:
    found = containers.of(pid)
    if found is None:
        return None
    return {key: getattr(found, key) for key in ("runtime", "id", "name", "pod", "namespace")}


def _unreadable(pid: int, error: LimosaError) -> Ps:
    reason = Reason(id=error.id, text=error.message, exit_code=error.exit_code or 1, hint=error.hint, pid=pid)
    return Ps(
        pid=pid, user=user_of(pid), command=command_of(pid), state=JobState.UNKNOWN, movable=False, reasons=[reason]
    )


def _one(
    which: Job,
    states: dict[int, str],
    inventory: gpu.Inventory | None,
    driver: gpu.Driver,
    by_run: bool,
    silent: Collection[int] = (),
) -> Ps:
    # One that was begun by the job itself (it calls Limosa) is no part of it.
    tree = {p.pid: p for p in job_tree(which.root) if not is_own(p.pid)}
    pids = list(tree)
    held = {
        (g.uuid, p.pid): g.used_by(p.pid)
        for g in (inventory.gpus if inventory else [])
        for p in g.processes
        if p.pid in pids
    }
    index = {g.uuid: g.index for g in (inventory.gpus if inventory else [])}
    record = records.SuspendRecord.of(which.root)
    in_tree = [states[p] for p in pids if p in states]
    suspended = bool(in_tree) and all(s == gpu.State.CHECKPOINTED for s in in_tree)
    other = claims.on(tree.values())
    under_way = {"operation": other.operation, "alive": other.alive} if other is not None else None
    worker = other.operation if other is not None and other.alive else ""
    ways = {p: way_of(tree[p], worker) for p in pids if p in states}
    parked = False
    reasons: list[Reason]
    comms = asking.Communicators()
    if in_tree:
        ask = Ask(verb=RESUME if suspended else SUSPEND, probe_memory=False, inventory=inventory, silent=silent)
        prepared = look(which, ask, driver)
        if any(m.away for m in prepared.members):
            parked, prepared = True, look(which, msgspec.structs.replace(ask, verb=RESUME), driver)
        reasons, comms = prepared.reasons, prepared.comms
        # What NVML does not count of those under the shim; of what is away it counts what has stayed.
        held |= {(u, m.pid): n for m in prepared.members if m.beside and not m.away for u, n in m.held.items()}
        if parked:
            reasons = [parked_reason([m for m in prepared.members if m.away]), *reasons]
        if prepared.inventory is not None and not suspended and not parked:
            known = {r.id for r in reasons}
            moving = gpu_refusals(prepared.inventory, prepared.members, moves=True, small=prepared.small)
            reasons = [*reasons, *(r for r in moving if r.id not in known)]
    elif unseen := [p for p in pids if not may_be_seen(p)]:
        text = f"process {unseen[0]} is {user_of(unseen[0])}'s: what it holds on a GPU cannot be looked at"
        hint = "sudo limosa ps -v" if os.geteuid() else "give limosa CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
        reasons = [Reason(id="permission", text=text, exit_code=11, hint=hint, pid=unseen[0])]
        in_tree = [JobState.UNKNOWN]
    elif any(may_use_cuda(p) for p in pids) and (why := _why_not(driver)):
        text = f"no driver can be asked here ({why}); if the job is in a container or a software node, run limosa there"
        reasons = [Reason(id="cannot-be-asked", text=text, exit_code=12, hint="limosa doctor", pid=which.root.pid)]
        parked = record is not None and record.release != Release.ALL
        suspended = record is not None and not parked
        in_tree = [JobState.CHECKPOINTED if suspended else JobState.UNKNOWN]
    else:
        reasons = [Reason(id="no-cuda-state", text="holds no CUDA state: nothing to move, can be checkpointed")]
    bytes_of = added_up({uuid: size} for (uuid, _), size in held.items())
    if record is not None and (suspended or (parked and not held)):
        bytes_of = dict(record.bytes)
    processes: list[dict[str, Any]] = [
        {
            "pid": p,
            "command": command_of(p),
            "state": states.get(p, ""),
            "memory_used": sum(size for (_, q), size in held.items() if q == p)
            or (sum(record.held.get(str(p), {}).values()) if suspended and record else 0),
            **(msgspec.structs.asdict(ways[p]) if p in ways else {}),
            **({"ranks": [_rank(r, index) for r in comms.ranks.get(p, [])]} if p in ways else {}),
        }
        for p in pids
    ]
    by_index = sorted(bytes_of.items(), key=lambda one: (index.get(one[0], len(index)), one[0]))
    told = {"since": rfc3339(record.since), "by": record.by, "release": record.release} if record else None
    return Ps(
        pid=which.root.pid,
        name=which.name,
        user=user_of(which.root.pid),
        command=command_of(which.root.pid),
        state=JobState.PARKED if parked else _overall(in_tree),
        gpus=[{"index": index.get(u, -1), "uuid": u, "memory_used": size} for u, size in by_index],
        processes=processes,
        communicators={"between": comms.n, "closed": comms.closed} if comms.n else None,
        movable=bool(in_tree) and not any(r.refuses for r in reasons),
        reasons=reasons,
        suspended=told if (suspended or parked) and record else None,
        under_way=under_way,
        started_by_run=by_run,
        way="" if not ways else Route.PARKED if all(w.way == Route.PARKED for w in ways.values()) else Route.DRIVER,
        parkable=sum(w.parkable for w in ways.values()),
    )


def _rank(one: asking.Rank, index: Mapping[str, int]) -> dict[str, Any]:
    return {**msgspec.structs.asdict(one), "gpu": index.get(one.gpu, -1)}


def _why_not(driver: gpu.Driver) -> str:
    """Why the driver answers nobody; "" where it does."""
    try:
        driver.available()
    except LimosaError as error:
        return error.message
    return ""


def _overall(states: list[str]) -> str:
    """One word for a tree: the state they share, else the one that needs looking at most."""
    if not states:
        return "running"
    for state in (JobState.FAILED, JobState.UNKNOWN, JobState.LOCKED):
        if state in states:
            return state
    if len(set(states)) == 1:
        return states[0]
    return JobState.CHECKPOINTED if gpu.State.RUNNING not in states else JobState.MIXED

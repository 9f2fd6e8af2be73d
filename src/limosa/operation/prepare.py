"""Before an operation: look at everything that could go wrong, and say it in words.

:func:`look` reads the job, the driver and NVML and returns a :class:`Prepared`: who the members are, their maps, every
reason against the operation, its steps and its cost. All verbs start from it; ``plan`` shows it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from limosa import gpu
from limosa.errors import (
    GpuUnavailable,
    InvalidMap,
    LimosaError,
    NoCudaState,
    NoSuchProcess,
    OwnAncestor,
    PermissionDenied,
    Reason,
    Refused,
    UsageError,
)
from limosa.operation import claims, estimate, idle, room
from limosa.operation.jobs import Job
from limosa.operation.journal import Member, added_up, common_state
from limosa.operation.parked import aside, parkable
from limosa.operation.refusals import gpu_refusals
from limosa.operation.results import Estimate, OtherWay, Plan
from limosa.operation.work import Clock
from limosa.process import device_nodes, hazards, records
from limosa.process.candidates import is_own
from limosa.process.identity import Identity, refuse_ancestor
from limosa.process.memory import grow_host_memory
from limosa.process.observe import JobObservation, observe
from limosa.process.procfs import read_maps
from limosa.process.slurp import slurp
from limosa.process.tree import job_tree


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job is to go: at most one of ``to`` and ``gpu_map``.

    Attributes:
        to: a GPU (index, UUID, PCI bus id).
        source: the GPU to clear (``--from``), needed where the job is on several.
        gpu_map: what changes, "0=1,1=0" or a mapping.
    """

    to: str | None = None
    source: str | None = None
    gpu_map: str | Mapping[str, str] | None = None


class Prepared(msgspec.Struct, kw_only=True):
    """What ``look`` found out about one job and one verb."""

    operation: str
    job: Job
    tree: list[Identity]
    members: list[Member] = []
    observation: JobObservation | None = None
    inventory: gpu.Inventory | None = None
    reasons: list[Reason] = []
    steps: list[str] = []
    host_bytes: int = 0
    leave_running: bool = False
    parked: int = 0  # bytes that the shim looks after
    release: str = "all"  # what a suspend gives back
    rate: float | None = None  # bytes a second of a checkpoint, while the job runs
    driver_fits: bool = True  # host memory would take what the shim looks after as well, by the driver
    needs_gate: bool = False  # a process of it would ask the driver while it is checkpointed, and end by that
    small: set[int] = msgspec.field(default_factory=set)  # processes that have left the driver no large allocation
    busy: bool = False  # another operation, of a living process, works on it
    done: bool = False  # it is as the verb wants it already
    nowhere: bool = False  # where it is to go makes no sense, so it cannot be there already

    @property
    def states(self) -> set[str]:
        """The states of its members before the operation."""
        return {m.was for m in self.members}

    @property
    def driver_can(self) -> bool:
        """Whether the driver could carry what the shim looks after, where the parked way is not open."""
        return self.driver_fits and not self.needs_gate

    @property
    def by_parking(self) -> bool:
        """Whether a part of it does not go by the driver."""
        return self.operation in estimate.PARKED and self.parked > 0

    def other_way(self) -> OtherWay | None:
        """What the way that is not taken would cost."""
        if self.release != "all":
            return None  # the driver gives back all or nothing
        how = (self.host_bytes, self.leave_running, self.parked)
        return estimate.other_way(self.operation, self.members, *how, rate=self.rate)

    def estimated(self) -> Estimate:
        """What it will cost."""
        how = (self.host_bytes, self.leave_running, self.parked)
        return estimate.of(self.operation, self.members, *how, release=self.release, rate=self.rate)

    @property
    def root(self) -> Identity:
        """The job's topmost process."""
        return self.job.root

    def refuse(self) -> None:
        """Raises what forbids the operation, if anything does.

        Raises:
            Refused: with id and exit code of the first reason.
        """
        if self.is_refused():
            raise self.refusal(self.reasons)

    def is_refused(self) -> bool:
        """Whether anything forbids it."""
        return any(r.refuses for r in self.reasons)

    def refusal(self, reasons: Sequence[Reason]) -> Refused:
        """The error for this job, for reasons of its own or of the one that it was to change places with."""
        error = Refused(reasons)
        error.job_state = common_state(self.members)
        return error

    def warnings(self) -> list[Reason]:
        """What was found and does not forbid it."""
        return [r for r in self.reasons if not r.refuses]

    def as_plan(self) -> Plan:
        """The result of ``plan`` and ``--dry-run``."""
        refused = self.is_refused()
        maps = {a: b for m in self.members for a, b in m.map.items()}
        return Plan(
            operation=self.operation,
            pid=self.root.pid,
            name=self.job.name,
            verdict="refused" if refused else "ok",
            reasons=sorted(self.reasons, key=lambda r: not r.refuses),
            steps=self.steps,
            estimate=Estimate(pause_seconds=0.0) if self.done else self.estimated(),
            map=maps,
            gpus=[] if self.operation == "suspend" else room.places(self.members),
            way="parked" if self.by_parking else "driver" if self.members else "host",
            other=None if self.done else self.other_way(),
            already=self.done,
        )


def look(
    operation: str,
    which: Job,
    *,
    driver: gpu.Driver,
    where: Where = Where(),  # noqa: B008 - frozen
    force: Collection[str] = (),
    more: Callable[[JobObservation, Sequence[Member]], Sequence[Reason]] = lambda *_: (),
    leave_running: bool = False,
    check_room: bool = True,
    probe_memory: bool = True,
    freed: Mapping[str, int] | None = None,
    clock: Clock | None = None,
    release: str = "all",
) -> Prepared:
    """Reads everything about one job for one verb; raises only where the job itself cannot be read.

    Args:
        operation: the verb.
        which: the job.
        driver: asked for states.
        where: where it is to go.
        force: ids of reasons that become warnings.
        more: further reasons from the observation and the members (an image's).
        leave_running: a checkpoint's option.
        check_room: False where several jobs change places and room is looked at for all of them together.
        freed: bytes by GPU UUID that other jobs of the same operation will have freed by then (negative: taken).
        probe_memory: where host memory looks short, touch and free what is missing and look again.
        clock: how long looking may take; None: as long as it takes.
        release: what a suspend is to give back.

    Raises:
        NoSuchProcess: it is gone, or a zombie.
        PermissionDenied: it cannot be read.
        CancelledUndone, TimedOutUndone: the ``clock`` says so.
    """
    clock = clock or Clock(operation)
    which.root.check()
    try:
        refuse_ancestor(which.root)
    except OwnAncestor as error:
        return Prepared(operation=operation, job=which, tree=[which.root], reasons=[as_reason(error)])
    tree = job_tree(which.root)
    observation = observe(which.root)
    prepared = Prepared(operation=operation, job=which, tree=tree, observation=observation, leave_running=leave_running)
    prepared.release = release
    reasons: list[Reason] = list(hazards.common_hazards(observation))
    other = claims.on(tree)
    at_work = [busy(other)] if other is not None else []
    reasons += at_work
    prepared.busy = other is not None and other.alive
    prepared.members, asked = find_members(driver, which.root, tree, observation, clock)
    clock.check()
    reasons += asked
    known: set[int] = set()
    calm: list[int] = []
    aside_bytes: dict[int, int] = {}
    if prepared.members:
        try:
            prepared.inventory = gpu.inventory()
            fill_in(prepared, where)
            if prepared.busy:  # its shims listen to whoever works on it, and what can be seen of it changes
                prepared.reasons = [*at_work, *asked]
                return prepared
            reasons += _not_ours_to_show(prepared.members)
            going, against, known, prepared.small = parkable.look(
                operation, prepared.members, software=prepared.inventory.software
            )
            if operation == "resume" or release == aside.MEMORY_ONLY:  # the driver checkpoints nothing then
                against = [r for r in against if r.id != "given-up"]
            prepared.parked = sum(going.values())
            calm = [pid for pid, size in going.items() if size]
            reasons += against
            aside_bytes, against = aside.look(operation, prepared.members, release)
            if operation == "move":  # goes from GPU to GPU
                aside_bytes = {m.pid: going.get(m.pid, 0) for m in prepared.members if m.changes_gpu}
            reasons += against
            if operation == "resume" or (operation == "move" and prepared.parked):
                reasons += aside.shut_to_movers(prepared.inventory, prepared.members)
            moves = any(m.changes_gpu for m in prepared.members)
            reasons += gpu_refusals(prepared.inventory, prepared.members, moves=moves, small=prepared.small)
        except (GpuUnavailable, InvalidMap, UsageError) as error:
            prepared.nowhere = True
            reasons.append(as_reason(error))
        branch = prepared.inventory.driver_major if prepared.inventory is not None else None
        if operation != "checkpoint":  # who is checkpointed has been at risk until now, and is after a resume no more
            calm += [m.pid for m in prepared.members if m.was == "checkpointed"]
        pids = [m.pid for m in prepared.members]
        against = hazards.cuda_hazards(observation, cuda_pids=pids, driver_branch=branch, calm=calm)
        prepared.needs_gate = "jax" not in force and any(
            hazards.asks_on(p) for p in observation.processes if p.pid in pids
        )
        # From outside shared events look like shared memory. The shim knows what is shared.
        against = [r for r in against if r.id != "cuda-ipc" or r.pid not in known]
        against = [_by_limosa_run(r) if r.id == "jax" and r.pid in known else r for r in against]
        # What an adapter knew of memory was lost when that was taken away: there is nothing left to keep by refusing.
        reasons += [r for r in against if r.id != "rdma" or operation != "resume"]
        if operation != "resume":
            needed = {m.pid: m.bytes for m in prepared.members if m.was != "checkpointed" and not m.away}
            left = {
                pid: 0 if release == aside.MEMORY_ONLY else size - aside_bytes.get(pid, 0)
                for pid, size in needed.items()
            }
            if operation == "checkpoint":  # what goes into the image as chunks does not go by the job's host memory
                left = {m.pid: sum((m.held | m.beside).values()) for m in prepared.members if m.pid in left}
            grow = partial(grow_host_memory, stop=clock.stop_asked)
            reasons += hazards.memory_hazards(observation, left, probe=probe_memory, grow=grow)
            prepared.driver_fits = left == needed or not hazards.memory_hazards(observation, needed)
            clock.check()
        if operation in ("move", "resume") and check_room and prepared.inventory is not None:
            vacated = added_up([room.held_now(prepared.members), freed or {}])
            short = room.shortage(prepared.inventory, prepared.members, "", vacated=vacated)
            if short:
                vacated = added_up([vacated, idle.spare(prepared.inventory, prepared.members)])
                short = room.shortage(prepared.inventory, prepared.members, "", vacated=vacated)
            if short:
                hint = "make room there (limosa ps shows who holds it), or choose another GPU"
                reasons.append(Reason(id="gpu-room", text=short, exit_code=14, hint=hint))
        if operation in ("suspend", "checkpoint") and prepared.inventory is not None:
            short = room.no_way_back(prepared.inventory, prepared.members)
            if short:
                reasons.append(Reason(id="gpu-room", text=f"it could not come back: {short}", exit_code=14))
    prepared.host_bytes = max(0, sum(p.rss_anon + p.shm_bytes for p in observation.processes))
    reasons += more(observation, prepared.members)
    if other is None and (other := claims.on(tree)) is not None:  # it has begun since
        at_work = [busy(other)]
        prepared.busy = other.alive
        reasons += at_work
    if prepared.busy:  # what else was seen is what that one does
        reasons = [*at_work, *asked]
    prepared.reasons = apply_force(reasons, force)
    return prepared


def find_members(
    driver: gpu.Driver,
    root: Identity,
    tree: Sequence[Identity],
    observation: JobObservation | None,
    clock: Clock | None = None,
) -> tuple[list[Member], list[Reason]]:
    """Asks the driver which processes of the tree hold CUDA state.

    One that cannot be asked is kept as a reason: what the others hold is known all the same.
    """
    clock = clock or Clock("plan")
    loaded = {p.pid for p in observation.processes if p.has_libcuda} if observation else {i.pid for i in tree}
    contexts = {p.pid: p.ppid for p in observation.processes if p.n_uvm_maps} if observation else {}
    members: list[Member] = []
    reasons: list[Reason] = []
    denied: list[Identity] = []
    if loaded and clock.left is not None:
        with contextlib.suppress(LimosaError):  # the first question pays for cuInit, whatever its own limit is
            driver.available(clock.at_most(clock.left))
        clock.check()
    for identity in tree:
        if identity.pid not in loaded or is_own(identity.pid):
            continue
        try:
            state = _state(driver, identity.pid, clock, sure=identity.pid not in contexts)
        except NoCudaState:
            denied += [identity] if identity.pid in contexts else []
            continue
        except NoSuchProcess:
            continue
        except LimosaError as error:
            reasons.append(
                Reason(
                    id="cannot-be-asked",
                    text=f"the driver does not tell the state of process {identity.pid}: {error}",
                    exit_code=11 if isinstance(error, PermissionDenied) else 12,
                    hint="limosa doctor",
                    pid=identity.pid,
                )
            )
            continue
        if state not in ("running", "locked", "checkpointed"):
            reasons.append(
                Reason(
                    id="state",
                    text=f"process {identity.pid} is {state}: the driver can do nothing with it",
                    exit_code=12,
                    pid=identity.pid,
                )
            )
        members.append(Member(identity=identity, was=state, root=root.pid))
    holders = {m.pid for m in members}
    for identity in denied:  # parents come before their children
        parent = contexts[identity.pid]
        if (parent in holders or _has_a_context(parent, tree)) and _is_forked(identity.pid, parent):
            holders.add(identity.pid)  # it inherits the mapping, and holds nothing
        else:
            reasons.append(
                Reason(
                    id="state-denied",
                    text=f"process {identity.pid} has what the driver maps for a context on a GPU (/dev/nvidia-uvm), "
                    "and the driver says that it holds no CUDA state: without its device memory it would be lost",
                    exit_code=12,
                    hint="run it again; a child of a CUDA process that has ended needs --force=state-denied",
                    pid=identity.pid,
                    forceable=True,
                )
            )
    return members, reasons


def _is_forked(pid: int, parent: int) -> bool:
    """Whether a process runs what its parent does: a program that was started anew has other addresses in its auxv."""
    try:
        return slurp(f"/proc/{pid}/auxv") == slurp(f"/proc/{parent}/auxv")
    except OSError:
        return True  # nobody can tell


def _has_a_context(pid: int, tree: Sequence[Identity]) -> bool:
    """Whether a process outside of the tree has what the driver maps for a context."""
    with contextlib.suppress(OSError):
        return pid not in {i.pid for i in tree} and read_maps(f"/proc/{pid}").uvm > 0
    return False


def _state(driver: gpu.Driver, pid: int, clock: Clock, *, sure: bool) -> str:
    """Its state; where that it holds none is not to be believed at once, the driver is asked again."""
    try:
        return str(driver.state(pid, timeout=clock.at_most(5.0)))
    except NoCudaState:
        if sure:
            raise
    return str(driver.state(pid, timeout=clock.at_most(5.0)))


def fill_in(prepared: Prepared, where: Where) -> None:
    """Completes the members: what they hold, which GPUs they can open, where they go.

    Raises:
        InvalidMap: the map cannot be.
        UnknownGpu: no such GPU.
        UsageError: the source is not clear.
    """
    inventory = prepared.inventory
    assert inventory is not None
    record = records.SuspendRecord.of(prepared.root, whole=True)
    sees = sees_of(prepared.root)
    nodes = minors(inventory) if sees else {}
    for member in prepared.members:
        member.sees, member.nodes = sees, nodes
        openable = openable_by(member, inventory)
        member.held = inventory.held({member.pid})
        member.home = {g.uuid: g.uuid for g in openable}
        if member.was == "checkpointed" and record is not None:
            member.held = dict(record.held.get(str(member.pid), {}))
            member.moved = dict(record.moved.get(str(member.pid), {}))
        elif member.was == "checkpointed":
            prepared.reasons.append(_unknown_size(member))
        member.map = dict(member.home)
    job_held = added_up(m.held for m in prepared.members)
    changes = changes_of(inventory, where, job_held)
    if not changes or (prepared.operation == "resume" and all(a == b for a, b in changes.items())):
        return  # where it was
    for member in prepared.members:
        openable = openable_by(member, inventory)
        names = {g.uuid for g in openable}
        own = {a: b for a, b in changes.items() if a in names or (b in names and not nodes)}
        if own:
            anywhere = inventory.gpus if nodes else None
            full = gpu.complete_map(own, openable, job_held, inventory.gpus, anywhere)
            member.map = {a: full.get(b, b) for a, b in member.home.items()}


def sees_of(root: Identity) -> str:
    """The file that says which GPUs a job sees; "" where ``limosa run --gpus`` hides none from it."""
    record = records.RunRecord.of(root)
    return device_nodes.known(record.sees) if record is not None else ""


def _not_ours_to_show(members: Sequence[Member]) -> list[Reason]:
    """The refusal where a job is to go to another GPU, and what it sees is somebody else's to change."""
    for member in members:
        whose = device_nodes.owner(member.sees)
        if member.sees and member.changes_gpu and os.geteuid() not in (0, whose):
            text = f"which GPUs process {member.pid} sees is for uid {whose} to change"
            return [Reason(id="permission", text=text, exit_code=11, hint="do it as that user or as root")]
    return []


def minors(inventory: gpu.Inventory) -> dict[str, int]:
    """Minor numbers of the GPUs' device nodes by UUID."""
    return {g.uuid: g.minor for g in inventory.gpus if g.minor is not None}


def openable_by(member: Member, inventory: gpu.Inventory) -> list[gpu.Gpu]:
    """The GPUs whose device nodes a process can open: as far as it is let, and of these what it sees."""
    seen = device_nodes.seen(member.sees) if member.sees else None
    return [g for g in gpu.openable(inventory, member.pid) if seen is None or g.minor in seen]


def changes_of(inventory: gpu.Inventory, where: Where, held: Mapping[str, int]) -> dict[str, str]:
    """What the user wants changed, as GPU UUIDs.

    Raises:
        InvalidMap: both a destination and a map, or the job is on several GPUs and none was named, or on none.
    """
    if where.gpu_map is not None and (where.to is not None or where.source is not None):
        raise InvalidMap(detail="name a destination (--to) or a map (--map), not both")
    if where.gpu_map is not None:
        if isinstance(where.gpu_map, str):
            return gpu.parse_map(where.gpu_map, inventory)
        pairs = where.gpu_map.items()
        return {gpu.find_gpu(inventory, a).uuid: gpu.find_gpu(inventory, b).uuid for a, b in pairs}
    if where.to is None:
        return {}
    source = gpu.find_gpu(inventory, where.source) if where.source is not None else None
    changes = gpu.changes_to(gpu.find_gpu(inventory, where.to), held, inventory.gpus, source)
    return {a: b for a, b in changes.items() if a != b}


def _unknown_size(member: Member) -> Reason:
    text = f"process {member.pid} was suspended by another tool: how much device memory it needs is not known"
    return Reason(id="unknown-size", text=text, hint="see that its GPU is free before you resume it", pid=member.pid)


def busy(claim: claims.Claim) -> Reason:
    """The reason where another operation, living or dead, has its hands on one of these processes."""
    if claim.alive:
        text = f"{claim.operation} by process {claim.holder.pid} works on this job"
        return Reason(id="busy", text=text, exit_code=19, hint="wait for it")
    text = f"a {claim.operation} that died has left this job in the middle"
    return Reason(id="busy", text=text, exit_code=19, hint="limosa recover")


def _by_limosa_run(jax: Reason) -> Reason:
    """JAX under the shim that has nothing to park: its gate stays open."""
    return msgspec.structs.replace(jax, hint="it has no memory that can be parked: try again once it computes")


def apply_force(reasons: Sequence[Reason], force: Collection[str]) -> list[Reason]:
    """Turns the named refusals into warnings.

    Raises:
        UsageError: a name that forces nothing, or a reason that cannot be forced.
    """
    result = []
    for reason in reasons:
        if reason.refuses and reason.id in force:
            if not reason.forceable:
                raise UsageError(detail=f"--force={reason.id}: this cannot be forced: {reason.text}")
            result.append(reason.as_warning())
        else:
            result.append(reason)
    return result


def processes(number: int) -> str:
    """So many processes, in words."""
    return "1 process" if number == 1 else f"{number} processes"


def refuse_no_text(folder: str | os.PathLike[str]) -> None:
    """Refuses a folder that could not be written down in records and answers, which are JSON.

    Raises:
        UsageError: one of its names is no UTF-8.
    """
    for name in sorted(claims.names_of(folder)):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UsageError(detail=f"{os.fsencode(name)!r} is no UTF-8: name another folder, or rename it") from None


def as_reason(error: LimosaError) -> Reason:
    """An error as a refusal."""
    return Reason(id=error.id, text=error.message, exit_code=error.exit_code, hint=error.hint)

"""The members of a job: what they hold, which GPUs they can open, and where they go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec

from limosa import gpu
from limosa.errors import DriverHung, InvalidMap, LimosaError, NoCudaState, NoSuchProcess, PermissionDenied, Reason
from limosa.operation import container_gpus
from limosa.operation.journal import Member, added_up
from limosa.operation.work import Clock
from limosa.parking.patience import Patience
from limosa.process import device_nodes, records, sees_inside
from limosa.process.candidates import is_own
from limosa.process.identity import Identity
from limosa.process.namespaces import is_ours
from limosa.process.observe import JobObservation
from limosa.process.procfs import read_maps
from limosa.process.slurp import slurp

_patience = Patience(12.0)
"""For processes about which the driver does not answer; whoever has one can keep it from answering."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job is to go: at most one of ``to`` and ``gpu_map``."""

    to: str | None = None  # a GPU (index, UUID, PCI bus id)
    source: str | None = None  # the GPU to clear (``--from``), needed where the job is on several
    gpu_map: str | Mapping[str, str] | None = None  # what changes, "0=1,1=0" or a mapping


def find_members(
    driver: gpu.Driver,
    root: Identity,
    tree: Sequence[Identity],
    observation: JobObservation | None,
    clock: Clock | None = None,
    silent: Collection[int] = (),
) -> tuple[list[Member], list[Reason]]:
    """Asks the driver which processes of the tree hold CUDA state; one that cannot be asked is kept as a reason.

    ``silent``: those about which it has not answered just now; it is not asked again. Nor is it about one that is seen
    to be stopped: it would answer when that goes on, and such a job is refused for that.
    """
    clock = clock or Clock("plan")
    mute = dict.fromkeys(silent, "it did not answer just now")
    mute |= {p.pid: "it is stopped" for p in (observation.processes if observation else ()) if p.state in "Tt"}
    users = {p.pid: p.uid for p in observation.processes} if observation else {}
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
        if identity.pid in mute:
            reasons.append(_untold(identity.pid, mute[identity.pid]))
            continue
        begun, uid = time.monotonic(), users.get(identity.pid)
        limit = 5.0 if uid is None else _patience.left(uid, 5.0)
        try:
            state = _state(driver, identity.pid, clock, limit, sure=identity.pid not in contexts)
        except NoCudaState:
            denied += [identity] if identity.pid in contexts else []
            continue
        except NoSuchProcess:
            continue
        except LimosaError as error:
            if isinstance(error, DriverHung) and uid is not None:
                _patience.waited(uid, time.monotonic() - begun)
            reasons.append(_untold(identity.pid, error))
            continue
        if state not in (gpu.State.RUNNING, gpu.State.LOCKED, gpu.State.CHECKPOINTED):
            text = f"process {identity.pid} is {state}: the driver can do nothing with it"
            reasons.append(Reason(id="state", text=text, exit_code=12, pid=identity.pid))
        members.append(Member(identity=identity, was=state, root=root.pid))
    holders = {m.pid for m in members}
    for identity in denied:  # parents come before their children
        parent = contexts[identity.pid]
        if (parent in holders or _has_a_context(parent, tree)) and _is_forked(identity.pid, parent):
            holders.add(identity.pid)  # it inherits the mapping, and holds nothing
        else:
            reasons.append(_denied(identity.pid))
    return members, reasons


def _untold(pid: int, why: LimosaError | str) -> Reason:
    text = f"the driver does not report the state of process {pid}: {why}"
    code = 11 if isinstance(why, PermissionDenied) else 12
    return Reason(id="cannot-be-asked", text=text, exit_code=code, hint=f"limosa doctor{_elsewhere(pid)}", pid=pid)


def _denied(pid: int) -> Reason:
    text = f"process {pid} has /dev/nvidia-uvm mapped, as on a GPU, but the driver "
    text += "says that it holds no CUDA state: if that is wrong, its device memory would be lost"
    hint = "try again; for a child of a CUDA process that has ended: --force=state-denied"
    hint += _elsewhere(pid)
    return Reason(id="state-denied", text=text, exit_code=12, hint=hint, pid=pid, forceable=True)


def _elsewhere(pid: int) -> str:
    """More of a hint where a process has mounts of its own, and so may have another driver; "" where it has ours."""
    return "" if is_ours(pid, "mnt") else f"; if it is in a node of software GPUs: limosa softgpu --join {pid} --shell"


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


def _state(driver: gpu.Driver, pid: int, clock: Clock, limit: float, *, sure: bool) -> str:
    """Its state; where that it holds none is not to be believed at once, the driver is asked again."""
    try:
        return str(driver.state(pid, timeout=clock.at_most(limit)))
    except NoCudaState:
        if sure:
            raise
    return str(driver.state(pid, timeout=clock.at_most(limit)))


def place(
    members: Sequence[Member], root: Identity, inventory: gpu.Inventory, where: Where, *, only_back: bool
) -> list[Reason]:
    """Completes a job's members: what they hold, which GPUs they can open, where they go.

    ``only_back``: a map that changes nothing is none: each goes where it was. Returns warnings, of which it is not
    known how much they hold, and refusals: which cannot leave their GPU. Raises InvalidMap, UnknownGpu, UsageError (the
    source is not clear).
    """
    unknown: list[Reason] = []
    record = records.SuspendRecord.of(root, whole=True)
    sees = sees_of(root)
    nodes = minors(inventory) if sees else {}
    for member in members:
        member.sees, member.nodes = sees, nodes
        member.sees_inside = "" if sees else sees_inside.file_of(member.pid)
        if member.sees_inside:
            member.nodes = minors(inventory)
        openable = openable_by(member, inventory)
        if not sees and container_gpus.is_boxed(member.pid, gpu.openable(inventory, member.pid), inventory):
            member.boxed, member.nodes = True, minors(inventory)
        member.held = inventory.held({member.pid})
        member.home = {g.uuid: g.uuid for g in openable}
        if member.was == gpu.State.CHECKPOINTED and record is not None:
            member.held = dict(record.held.get(str(member.pid), {}))
            member.moved = dict(record.moved.get(str(member.pid), {}))
        elif member.was == gpu.State.CHECKPOINTED:
            unknown.append(_unknown_size(member))
        member.map = dict(member.home)
    job_held = added_up(m.held for m in members)
    changes = changes_of(inventory, where, job_held)
    apart = _apart(members)
    if not apart and (not changes or (only_back and all(a == b for a, b in changes.items()))):
        return unknown  # where it was
    for member in members:
        openable = openable_by(member, inventory)
        names = {g.uuid for g in openable}
        own = {a: b for a, b in changes.items() if a in names or (b in names and not member.nodes)}
        if apart:
            there = {now: changes.get(was, was) for was, now in member.moved.items()}
            own = {**{a: b for a, b in own.items() if a not in there}, **there}
        if own:
            anywhere = inventory.gpus if member.nodes else None
            full = gpu.complete_map(own, openable, job_held, inventory.gpus, anywhere)
            member.map = {a: full.get(b, b) for a, b in member.home.items()}
            if member.sees_inside:  # its container is changed only where it lacks what it is to see
                member.boxed = member.boxed and not set(member.map.values()) <= {
                    g.uuid for g in gpu.openable(inventory, member.pid)
                }
        unknown += _kept_from(member, changes, inventory)
    return unknown


def _kept_from(member: Member, changes: Mapping[str, str], inventory: gpu.Inventory) -> list[Reason]:
    """That it holds memory on a GPU which it is to leave and cannot open: it has no way from there.

    The driver takes a map of those that it can open, so what was wanted would be left out, and the job stay.
    """
    if member.moved:
        return []  # its map is of where it was led since
    held = {a for a, b in changes.items() if a != b and member.held.get(a) and a not in member.home}
    is_ = "was" if member.was == gpu.State.CHECKPOINTED else "is"
    return [
        Reason(
            id="container-devices",
            text=f"process {member.pid} {is_} on GPU {one.index} and cannot open it any more",
            exit_code=13,
            hint="its device cgroup, and the nodes in its /dev, must let it have that GPU again",
            pid=member.pid,
        )
        for one in inventory.gpus
        if one.uuid in held
    ]


def _apart(members: Sequence[Member]) -> bool:
    """Whether a resume elsewhere was undone that had led some of them there: two may be known on one GPU.

    They go home, or where the map sends those that were at home.
    """
    asleep = [bool(member.moved) for member in members if member.was == gpu.State.CHECKPOINTED]
    return any(asleep) and not all(asleep)


def sees_of(root: Identity) -> str:
    """The file that says which GPUs a job sees; "" where ``limosa run --gpus`` hides none from it."""
    record = records.RunRecord.of(root)
    return device_nodes.known(record.sees) if record is not None else ""


def minors(inventory: gpu.Inventory) -> dict[str, int]:
    """Minor numbers of the GPUs' device nodes by UUID."""
    return {g.uuid: g.minor for g in inventory.gpus if g.minor is not None}


def openable_by(member: Member, inventory: gpu.Inventory) -> list[gpu.Gpu]:
    """The GPUs whose device nodes a process can open: as far as it is let, and of these what it sees."""
    seen = device_nodes.seen(member.sees) if member.sees else None
    if member.sees_inside:
        with contextlib.suppress(OSError, LimosaError):  # a move is refused then (what_it_sees)
            seen = sees_inside.seen(member.identity, member.sees_inside)
    return [g for g in gpu.openable(inventory, member.pid) if seen is None or g.minor in seen]


def changes_of(inventory: gpu.Inventory, where: Where, held: Mapping[str, int]) -> dict[str, str]:
    """What the user wants changed, as GPU UUIDs. InvalidMap: a destination and a map, or it is not clear from where."""
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

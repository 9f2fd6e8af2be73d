"""Reasons against restoring an image: checked before anything is started.

Pids that are taken, files that are gone or have changed, GPUs of another chip or without room, another driver, an older
CRIU; and which GPU of this machine each GPU of the image becomes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from limosa import gpu
from limosa.errors import GpuUnavailable, InvalidMap, LimosaError, NoWorkingCriu, Reason, UnknownGpu, WrongChip
from limosa.image import Manifest, open_image
from limosa.image.manifest import DevicePiece, GpuRecord
from limosa.image.verify import verify
from limosa.operation import container_options, container_plan, idle, locks, ports, shm
from limosa.operation.communicators import beside
from limosa.operation.journal import Member, added_up
from limosa.operation.members import Where, minors
from limosa.operation.prepare import refuse_no_text
from limosa.operation.refusals import MOVE_DRIVER, SUSPEND_DRIVER
from limosa.operation.restore_options import ImageFacts, Options, called_back, shape_of
from limosa.operation.results import Plan
from limosa.operation.rewind import changed_files
from limosa.operation.rules import apply_force, as_reason, to_come
from limosa.operation.taken_pids import taken_pids
from limosa.operation.verbs import RESTORE
from limosa.process import device_nodes, sizes
from limosa.process.cgroups import memory_levels
from limosa.process.criu.cgroup import entry_files
from limosa.process.criu.find import find as find_criu
from limosa.process.identity import Identity
from limosa.process.memory import grow_host_memory, host_memory, two
from limosa.terms import Verdict

_PID_SECONDS = 10.0


def look_at(image: str | os.PathLike[str], options: Options) -> Plan:
    """The result of ``plan restore``."""
    refuse_no_text(image)
    try:
        with open_image(image) as opened:
            manifest = opened.manifest
            if options.verify:
                verify(opened).check()
            facts = look(manifest, options)
            if manifest.container is None:
                facts.reasons += ports.in_the_way(opened.criu_fd)
    except LimosaError as error:
        if error.exit_code not in (11, 16):
            raise
        return Plan(operation="restore", pid=0, verdict=Verdict.REFUSED, reasons=[as_reason(error)])
    shape = shape_of(facts, manifest, options)
    return RESTORE.plan(shape, facts.reasons, pid=manifest.job.pid, name=called_back(manifest, options))


# --- looking --------------------------------------------------------------------------------------------------


def look(manifest: Manifest, options: Options, *, stop: Callable[[], bool] | None = None) -> ImageFacts:
    """Looks at everything; with ``stop``, gives pids ten seconds to become free, or less where that says so."""
    facts = ImageFacts(manifest=manifest)
    if border := _border(manifest):
        facts.reasons = [border]  # nothing else that would be found there is worth telling
        return facts
    reasons: list[Reason] = []
    if manifest.job.sees and not device_nodes.known(manifest.job.sees):
        text = "an older Limosa noted elsewhere which GPUs the job may see, and that is lost: it will see all of them"
        reasons.append(Reason(id="gpus-not-hidden", text=text))
    reasons += container_options.of_restore(options, manifest.container)
    if manifest.container is not None:
        record = container_options.as_asked(manifest.container, options)
        reasons += container_plan.return_reasons(record, options.name, options.bundle)
    else:
        reasons += _of_processes(facts, options, stop)
    reasons += _host_reasons(facts, options)
    contained = manifest.container is not None
    reasons += memory_reasons(manifest.host_bytes, options.cgroup, stop or (lambda: False), contained=contained)
    if any(p.cuda for p in manifest.tree):
        reasons += _gpu_reasons(facts, options)
    if manifest.container is not None:
        reasons += container_plan.record_stays(manifest.container, options.name, facts.members)
    facts.reasons = apply_force(reasons, options.force)
    return facts


def _of_processes(facts: ImageFacts, options: Options, stop: Callable[[], bool] | None) -> list[Reason]:
    """Pids, names and files of the machine."""
    manifest = facts.manifest
    reasons = list(taken_pids(manifest, 0.0 if stop is None else _PID_SECONDS, stop))
    reasons += shm.in_the_way(manifest.shm)
    comes_anew = {name for semaphore in manifest.shm for name in (*semaphore.names, *semaphore.lost)}
    changed, facts.rewind = changed_files(manifest, options.rewind_files, comes_anew)
    reasons += changed
    return reasons + locks.in_the_way(manifest)


def _border(manifest: Manifest) -> Reason | None:
    """Why an image from software GPUs cannot be restored on real ones, or the other way round.

    The GPUs are asked for again afterwards, for their room: pids may take seconds to become free, and memory with them.
    """
    if not any(p.cuda for p in manifest.tree):
        return None
    try:
        software: bool | None = gpu.inventory().software
    except GpuUnavailable:
        software = None
    if manifest.software_gpu and not software:
        there = "and the GPUs here are real" if software is False else "and there are no GPUs here"
        hint = "restore it in a node of software GPUs: limosa softgpu"
        return Reason(id="chip", text=f"the image is from a software GPU, {there}", exit_code=12, hint=hint)
    if software and not manifest.software_gpu:
        return Reason(id="chip", text="the image is from a real GPU, and the GPUs here are software", exit_code=12)
    return None


def _host_reasons(facts: ImageFacts, options: Options) -> list[Reason]:
    """Kernel, machine, CRIU, cgroup."""
    manifest = facts.manifest
    found: list[Reason] = []
    if manifest.machine and manifest.machine != platform.machine():
        text = f"the image is from a {manifest.machine} machine, this is {platform.machine()}"
        found.append(Reason(id="machine", text=text, exit_code=12))
    if manifest.kernel != platform.release():
        text = f"the image was made on kernel {manifest.kernel}, this is {platform.release()}"
        found.append(Reason(id="kernel", text=text))
    try:
        program = facts.program = find_criu(options.criu)
        if _version(program.version) < _version(manifest.criu):
            text = f"the image was made by CRIU {manifest.criu}, and the CRIU here is older ({program.version})"
            hint = "limosa doctor --fix, or --criu"
            found.append(Reason(id="criu-older", text=text, exit_code=24, hint=hint, forceable=True))
    except NoWorkingCriu as error:
        found.append(as_reason(error))
    if (short := sizes.too_many(manifest.descriptors, "the job")) is not None:
        found.append(short)
    if manifest.job.uid and os.geteuid() not in (0, manifest.job.uid):
        text = f"the job belongs to uid {manifest.job.uid}"
        found.append(Reason(id="permission", text=text, exit_code=11, hint="restore it as that user or as root"))
    return found


def memory_reasons(
    needed: int, group: str | None, stop: Callable[[], bool] = lambda: False, *, contained: bool = False
) -> list[Reason]:
    """Whether the machine, and the control group (None: the caller's), have room for what the image holds.

    An image is about as large as what its processes will have resident. ``stop``: make the machine grow no longer.
    ``contained``: they come back in a container's own group, which has had room for them.
    """
    found: list[Reason] = []
    try:
        entry_files(group)
    except LimosaError as error:
        return [as_reason(error)]
    relative = (group or "").removeprefix("/sys/fs/cgroup")
    levels = memory_levels(f"1:memory:{relative}\n0::{relative}" if group else Path("/proc/self/cgroup").read_text())
    for level in [] if contained else levels:
        if level.room is not None and level.room < needed:
            left, wanted = two(level.room, needed)
            text = f"the control group {level.path} has {left} of its memory limit left and about {wanted} are needed"
            hint = "raise its limit, or name another with --cgroup"
            found.append(Reason(id="cgroup", text=text, exit_code=15, hint=hint, forceable=True))
            break
    if not found and host_memory()[1] < needed and (available := grow_host_memory(needed, stop=stop)) < needed:
        left, wanted = two(available, needed)
        text = f"the machine has {left} of memory available and about {wanted} are needed"
        found.append(Reason(id="host-memory", text=text, exit_code=15, hint="end something", forceable=True))
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("-", maxsplit=1)[0].split(".") if part.isascii() and part.isdigit())


def _gpu_reasons(facts: ImageFacts, options: Options) -> list[Reason]:
    """Driver, chip, map and room; fills in the members."""
    manifest = facts.manifest
    try:
        inventory = facts.inventory = gpu.inventory()
    except GpuUnavailable as error:
        return [as_reason(error)]
    found: list[Reason] = []
    if inventory.driver_version != manifest.driver:
        text = f"the image was made with driver {manifest.driver}, and the driver here is {inventory.driver_version}"
        hint = "a driver restores only what it saved itself; --force=driver-version tries it all the same"
        found.append(Reason(id="driver-version", text=text, exit_code=12, hint=hint, forceable=True))
    try:
        facts.members = restored_members(manifest, inventory, options)
    except LimosaError as error:
        return [*found, as_reason(error)]
    moves = any(m.changes_gpu for m in facts.members)
    if inventory.driver_major < (MOVE_DRIVER if moves else SUSPEND_DRIVER):
        text = f"driver {inventory.driver_version} is too old for this"
        found.append(Reason(id="driver-too-old", text=text, exit_code=12))
    if short := idle.shortage_seen(inventory, facts.members, {}):
        hint = "make room there (limosa ps shows who holds it), or choose another GPU with --to"
        found.append(Reason(id="gpu-room", text=short, exit_code=14, hint=hint))
    return [*found, *beside.in_the_way(inventory, facts.members), *_ranks_to_come(manifest, inventory, facts.members)]


def _ranks_to_come(manifest: Manifest, inventory: gpu.Inventory, members: Sequence[Member]) -> list[Reason]:
    """Ranks get GPUs of another number, and some had not begun to use one: they would, on the one that they know."""
    then, here = ({g.uuid: g.index for g in gpus} for gpus in (manifest.gpus, inventory.gpus))
    stay = all(then.get(a) == here[b] for m in members for a, b in m.map.items() if m.held.get(a))
    late = [p.pid for p in manifest.tree if p.rank_to_come]
    if stay or not late:
        return []
    names = ", ".join(f"process {pid}" for pid in late[:5])
    hint = "restore it onto the GPUs of the same numbers, and move it when all ranks compute"
    return [to_come(f"{names} of the image, a rank, had", late[0], hint)]


def restored_members(manifest: Manifest, inventory: gpu.Inventory, options: Options) -> list[Member]:
    """The image's CUDA processes with the maps that put them on this machine's GPUs; InvalidMap, WrongChip.

    The driver wants exactly the GPUs that each process could open when it was checkpointed on the left. Those that are
    here too stay where they were unless told otherwise; those that are not (another machine) must be told, and only
    those on which the job held something.
    """
    then = {g.uuid: g for g in manifest.gpus}
    here = inventory.by_uuid()
    held = added_up(process.held for process in manifest.tree)
    changes = _changes(manifest, inventory, Where(to=options.to, source=options.source, gpu_map=options.gpu_map), held)
    chunked: dict[int, list[DevicePiece]] = {}
    for pid, piece in manifest.own_pieces():
        chunked.setdefault(pid, []).append(piece)
    chips = {uuid: g.name for uuid, g in then.items()}
    for source, target in changes.items():
        _same_chip(then, here, source, target)  # in the words of whoever asked for it
    members = []
    for process in manifest.tree:
        if not process.cuda:
            continue
        full = _placed(list(process.openable), changes, held, inventory, chips)
        for source, target in full.items():
            if source in process.held:
                _same_chip(then, here, source, target)
        of_chunks = added_up({piece.gpu: piece.bytes} for piece in chunked.get(process.pid, []))
        members.append(
            Member(
                identity=Identity(process.pid, 0),
                was="checkpointed",
                home=full,
                map=full,
                held={u: max(process.held.get(u, 0), of_chunks.get(u, 0)) for u in {*process.held, *of_chunks}},
                root=manifest.job.pid,
                sees=device_nodes.known(manifest.job.sees),
                nodes=minors(inventory) if manifest.container or device_nodes.known(manifest.job.sees) else {},
                boxed=manifest.container is not None,
            )
        )
    return members


def _same_chip(then: Mapping[str, GpuRecord], here: Mapping[str, gpu.Gpu], source: str, target: str) -> None:
    """Raises WrongChip where what was on one GPU of the image cannot be on one of here."""
    if source not in then:
        return
    a, b = then[source], here[target]
    if a.name != b.name or (a.memory_total and a.memory_total != b.memory_total):
        sizes = "" if a.name != b.name else " with another size of memory"
        raise WrongChip(detail=f"the image's GPU {a.index} is a {a.name}, GPU {b.index} here a {b.name}{sizes}")


def _changes(manifest: Manifest, inventory: gpu.Inventory, where: Where, held: Mapping[str, int]) -> dict[str, str]:
    """What the user wants, left sides being GPUs of the image (its index, or a UUID), right sides GPUs of here."""
    then = {str(g.index): g.uuid for g in manifest.gpus} | {g.uuid: g.uuid for g in manifest.gpus}

    def left(spec: str) -> str:
        spec = spec.strip()
        if spec in then:
            return then[spec]
        raise UnknownGpu(f"{spec!r} is no GPU of the image", hint="limosa inspect lists the image's", spec=spec)

    if where.gpu_map is not None:
        if where.to is not None or where.source is not None:
            raise InvalidMap(detail="name a destination (--to) or a map (--map), not both")
        pairs: Sequence[tuple[str, str]]
        if isinstance(where.gpu_map, str):
            parts = [part.partition("=") for part in where.gpu_map.split(",")]
            if any(not sep for _, sep, _ in parts):
                raise InvalidMap(detail=f"{where.gpu_map!r} is no map", hint="--map 0=1, or --map 0=1,1=0")
            pairs = [(a, b) for a, _, b in parts]
        else:
            pairs = list(where.gpu_map.items())
        wanted = [(left(a), gpu.find_gpu(inventory, b.strip()).uuid) for a, b in pairs]
        if len({a for a, _ in wanted}) != len(wanted):
            raise InvalidMap(detail="a GPU of the image is named twice")
        return dict(wanted)
    if where.to is None:
        return {}
    target = gpu.find_gpu(inventory, where.to).uuid
    sources = [left(where.source)] if where.source is not None else [u for u in held if u != target] or list(held)
    if len(sources) > 1:
        raise InvalidMap(detail="the job held memory on several GPUs", hint="name every change with --map")
    return {sources[0]: target} if sources else {}


def _placed(
    openable: list[str],
    changes: Mapping[str, str],
    held: Mapping[str, int],
    inventory: gpu.Inventory,
    chips: Mapping[str, str],
) -> dict[str, str]:
    """The full map for one process: told changes, then GPUs that stay, then fillers on what is free, chip by chip."""
    here = {g.uuid: g.name for g in inventory.gpus}
    full = {a: b for a, b in changes.items() if a in openable}
    if len(set(full.values())) != len(full):
        raise InvalidMap(detail="two GPUs are mapped to one")
    for uuid in openable:
        if uuid in full:
            continue
        if uuid in here and uuid not in full.values():
            full[uuid] = uuid
        elif held.get(uuid):
            index = next((g.index for g in inventory.gpus if g.uuid == uuid), None)
            if index is None:
                text, hint = f"{uuid}, which is not in this machine", "say where it goes: --to or --map"
            else:
                text, hint = f"GPU {index} too, where another one's is to go", "say where each goes: --map 0=1,1=0"
            raise InvalidMap(detail=f"the job held memory on {text}", hint=hint)
    for uuid in openable:
        if uuid not in full:
            left = [g for g in here if g not in full.values()]
            if not left:
                raise InvalidMap(detail="this machine has fewer GPUs than the job could open")
            fitting = [g for g in left if here[g] == chips.get(uuid, here[g])]
            if not fitting:
                text = f"the job could open a {chips[uuid]} that it held nothing on, and here is none left for it"
                raise WrongChip(detail=text)
            full[uuid] = next((g for g in fitting if g not in openable), fitting[0])
    return {uuid: full[uuid] for uuid in openable}

"""Another GPU for a job in a container that has the device nodes of some GPUs only.

The driver looks anew at each restore what a process can open. So the nodes are exchanged while the job is
checkpointed: the new GPU's are added right before the restore, and the old one's go once the driver has brought the job
back there. Each restore, also one that undoes, says anew which GPUs are to be seen; so nothing of it is journalled.

A runtime that can be told (containerd) is told once the operation has succeeded: what it notes is for the container's
next start.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from limosa import gpu
from limosa.containers import Container, Containers, containerd_record, devices
from limosa.errors import LimosaError, Reason
from limosa.operation.journal import Member
from limosa.process.candidates import candidates, is_own, may_use_cuda
from limosa.process.identity import Identity
from limosa.process.namespaces import is_ours, namespace_of

_one_at_a_time = threading.Lock()  # members share their container's /dev
RECORD = "container-record"
_Ask: TypeAlias = Callable[[Container, Collection[int], Collection[int]], str]
_Asked: TypeAlias = tuple[Member, Container | None, str | None]
"""A member, its container, and why its runtime is not told; "" for one that nobody can tell; None: it is told."""


def is_boxed(pid: int, openable: Sequence[gpu.Gpu], inventory: gpu.Inventory) -> bool:
    """Whether a process has a /dev of its own, in which it can open some of the GPUs, and we could change that."""
    return os.geteuid() == 0 and 0 < len(openable) < len(inventory.gpus) and not is_ours(pid, "mnt")


def add(member: Member, uuids: Iterable[str]) -> None:
    """Lets a member open these GPUs besides what it can open. OSError: its container cannot be given them."""
    if member.boxed and member.changes_gpu:
        with _one_at_a_time:
            devices.add(member.identity, _minors(member, uuids))


def leave(member: Member, uuids: Iterable[str]) -> None:
    """Takes from a member's container all GPUs of this operation but these. OSError: one stays."""
    if member.boxed and member.changes_gpu:
        with _one_at_a_time:
            known = _minors(member, {*member.home, *member.map.values()})
            devices.leave(member.identity, _minors(member, uuids), known)


def give(root: Identity, members: Iterable[Member]) -> None:
    """Lets a container that was brought back open the GPUs that its members are to be on. OSError: it cannot."""
    if wanted := _wanted(members):
        devices.add(root, wanted, anew=True)


def keep_only(root: Identity, members: Sequence[Member]) -> None:
    """Takes from a container that was brought back all GPUs but these. OSError: one stays.

    Its /dev is that of the image, and its device cgroup is what the runtime's record says of the container: it may name
    the GPU that the job had before it was moved.
    """
    if wanted := _wanted(members):
        devices.leave(root, wanted, {minor for m in members for minor in m.nodes.values()}, anew=True)


def _wanted(members: Iterable[Member]) -> list[int]:
    return sorted({m.nodes[uuid] for m in members for uuid in m.map.values() if uuid in m.nodes})


def _minors(member: Member, uuids: Iterable[str]) -> list[int]:
    return [member.nodes[uuid] for uuid in uuids if uuid in member.nodes]


def reasons(members: Sequence[Member], tree: Sequence[Identity], inventory: gpu.Inventory) -> list[Reason]:
    """What stands against giving containers the GPUs that maps lead to, and what is to be known of it."""
    found: list[Reason] = []
    containers: Containers | None = None
    told: set[str] = set()
    given: list[Member] = []
    for member in members:
        new = _new(member)
        if not member.boxed or not new:
            continue
        if why := devices.refusal(member.pid, _minors(member, new)):
            text = f"process {member.pid} cannot open {_called(new, inventory)}, and cannot be given it: {why}"
            hint = "choose a GPU that it can open"
            found.append(Reason(id="container-devices", text=text, exit_code=13, hint=hint, pid=member.pid))
            continue
        containers = containers or Containers()
        found += [r for r in _of_cgroup(member, containers) if r.id not in told]
        box = containers.of(member.pid)
        found += [r for r in _of_container(member, box, tree) if r.id not in told]
        told |= {r.id for r in found}
        given.append(member)
    asked = _asked(given, containers, containerd_record.refusal) if containers is not None else []
    return found + [_record(member, box, why, inventory) for member, box, why in asked]


def tell(members: Sequence[Member], found: Sequence[Reason], inventory: gpu.Inventory | None) -> list[Reason]:
    """Tells runtimes which GPUs their containers have now, once nothing can go wrong any more.

    Args:
        members: the processes that are there.
        found: what was to be known before.
        inventory: the GPUs.

    Returns:
        What is to be known now: of a container whose runtime was told, nothing.
    """
    if inventory is None or all(r.id != RECORD for r in found):
        return list(found)
    given = _given(members)
    try:
        asked = _asked(given, Containers(), containerd_record.tell)
    except (OSError, LimosaError) as error:  # the job is where it was to go, whatever cannot be read
        asked = [(given[0], None, str(error))]
    left = [_record(member, box, why, inventory) for member, box, why in asked if why is not None]
    return [*(r for r in found if r.id != RECORD), *left]


def tell_as_found(members: Iterable[Member], configured: Mapping[str, str]) -> None:
    """Tells runtimes, as :func:`tell` does, for an operation that has died; what cannot be told is let be.

    Args:
        members: the processes that are there.
        configured: by which variables the runtimes were configured for it.
    """
    given = _given(members)
    with contextlib.suppress(OSError, LimosaError):  # the job is where it was to go
        if given:
            _asked(given, Containers(), partial(containerd_record.tell, configured=configured))


def tell_returned(root: Identity, members: Sequence[Member], configured: Mapping[str, str] | None = None) -> str:
    """Tells the runtime of a container that was brought back which GPUs it has; why it was not told, "" where it was.

    Args:
        root: its first process.
        members: its processes that use GPUs.
        configured: by which variables the runtime is configured; None: the caller's.
    """
    try:
        box = Containers().of(root.pid)
        if box is None:
            return "nobody finds the container"
        known = {minor for m in members for minor in m.nodes.values()}
        return containerd_record.tell(box, _wanted(members), known, configured)
    except (OSError, LimosaError) as error:
        return str(error)


def are_given(members: Iterable[Member]) -> bool:
    """Whether containers are given another GPU."""
    return bool(_given(members))


def _given(members: Iterable[Member]) -> list[Member]:
    """Those whose containers were given another GPU."""
    return [m for m in members if m.boxed and _new(m)]


def _new(member: Member) -> set[str]:
    """The GPUs that a member goes to and cannot open."""
    return {uuid for uuid in member.map.values() if uuid not in member.home}


def _asked(members: Sequence[Member], containers: Containers, ask: _Ask) -> list[_Asked]:
    """Asks the runtime of each container of some members whether it knows of its GPUs."""
    boxes: dict[str, tuple[Container | None, list[Member]]] = {}
    for member in members:
        box = containers.of(member.pid)
        boxes.setdefault(box.id if box is not None else "", (box, []))[1].append(member)
    found: list[_Asked] = []
    for box, inside in boxes.values():
        why: str | None = ""
        if box is not None and box.runtime == "containerd" and not box.pod:
            wanted = {minor for m in inside for minor in _minors(m, m.map.values())}
            known = {minor for m in inside for minor in _minors(m, m.home)}
            why = ask(box, wanted, known) or None
        found.append((inside[0], box, why))
    return found


def _record(member: Member, box: Container | None, why: str | None, inventory: gpu.Inventory) -> Reason:
    """What is to be known of a restart."""
    who = box.called if box is not None else "the container"
    if why is None:
        gets = _called(member.map.values(), inventory)
        text = f"containerd's record of {who} changes as well: started again, it gets {gets}"
        return Reason(id=RECORD, text=text, pid=member.pid)
    because = f" (containerd cannot be told: {why})" if why else ""
    text = f"the runtime's record of {who} does not change{because}: started again, it gets what it was started with"
    return Reason(id=RECORD, text=text, pid=member.pid)


def _of_cgroup(member: Member, containers: Containers) -> list[Reason]:
    """What a container is let open, its cgroup says; where that is another's as well, it says it for both."""
    sharing = containers.sharing(member.pid)
    if len(sharing) < 2:
        return []
    both = ", ".join(one.called for one in sharing)
    text = f"containers {both} have one control group: each can open what one of them is given"
    hint = "start them with different linux.cgroupsPath"
    return [Reason(id="container-shared", text=text, exit_code=13, hint=hint, pid=member.pid)]


def _of_container(member: Member, box: Container | None, tree: Sequence[Identity]) -> list[Reason]:
    found: list[Reason] = []
    inside = {i.pid for i in tree}
    namespace = namespace_of(member.pid, "mnt")
    for pid in candidates():
        if pid in inside or is_own(pid) or namespace_of(pid, "mnt") != namespace or not may_use_cuda(pid):
            continue
        text = f"process {pid} of the same container may use its GPU as well, and would not go along"
        hint = f"name the container: {box.called}" if box is not None else "name the process above both"
        found.append(Reason(id="container-shared", text=text, exit_code=13, hint=hint, pid=pid))
        break
    if box is not None and box.pod:
        text = f"pod {box.namespace}/{box.pod} was given its GPU by a device plugin, which would not know of another"
        found.append(
            Reason(
                id="pod-devices", text=text, exit_code=13, hint="start it on that GPU", pid=member.pid, forceable=True
            )
        )
    return found


def _called(uuids: Iterable[str], inventory: gpu.Inventory) -> str:
    by_uuid = inventory.by_uuid()
    return ", ".join(f"GPU {by_uuid[uuid].index}" if uuid in by_uuid else uuid for uuid in sorted(uuids))

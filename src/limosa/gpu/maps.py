"""GPU maps: from what should change to the full permutation that the driver wants. Pure functions.

``cuCheckpointProcessRestore`` accepts a map only if its left sides are exactly the GPUs whose device nodes the job
could open when it was checkpointed, and if no two sources share a destination. The user says what should change. This
module fills in the rest so that nothing else of the job moves: a GPU that the map does not name stays where it is. If
it cannot stay, the added pairs start on GPUs on which the job holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from limosa.errors import InvalidMap, UnknownGpu, WrongChip
from limosa.gpu.gpus import Gpu


def identity_map(openable: Iterable[Gpu]) -> dict[str, str]:
    """Return the map in which every GPU stays (what a resume without a map passes: always an explicit one)."""
    return {gpu.uuid: gpu.uuid for gpu in openable}


def changes_to(
    destination: Gpu, held: Mapping[str, int], all_gpus: Sequence[Gpu], source: Gpu | None = None
) -> dict[str, str]:
    """Return the change that "move this job to that GPU" means.

    Args:
        destination: where it should go.
        held: GPU UUID → bytes that the job holds there.
        all_gpus: the GPUs of this machine.
        source: the one to leave, where the job is on several.

    Returns:
        One pair UUID → UUID; an identity pair where the job is there already.

    Raises:
        InvalidMap: the job is on no GPU, not on ``source``, or on several and no source was named.
    """
    names = {gpu.uuid: gpu for gpu in all_gpus}
    on = [uuid for uuid, used in held.items() if used > 0]
    if source is not None:
        if source.uuid not in on:
            raise InvalidMap(detail=f"the job holds nothing on {_called(source)}")
        return {source.uuid: destination.uuid}
    if not on:
        raise InvalidMap(detail="the job holds nothing on any GPU")
    if len(on) > 1:
        listed = ", ".join(_called(names[uuid]) if uuid in names else uuid for uuid in on)
        raise InvalidMap(
            detail=f"the job is on several GPUs ({listed}): say which should change",
            hint="--from GPU --to GPU, or --map a=b,c=d",
        )
    return {on[0]: destination.uuid}


def complete_map(
    changes: Mapping[str, str],
    openable: Sequence[Gpu],
    held: Mapping[str, int],
    all_gpus: Sequence[Gpu],
    destinations: Sequence[Gpu] | None = None,
) -> dict[str, str]:
    """Complete what should change to the full permutation of every GPU that the job can open.

    Args:
        changes: GPU UUID → GPU UUID; empty: nothing changes (the identity map).
        openable: the GPUs whose device nodes the job could open when it was checkpointed (now, for a running one).
        held: GPU UUID → bytes that the job holds there (for a suspended job: held when it was suspended).
        all_gpus: the GPUs of this machine.
        destinations: the GPUs that it will be able to open at its restore; None: the same as before.

    Returns:
        Each of the openable GPUs, in their order, with a destination of its own. Where ``destinations`` is None that
        is a permutation.

    Raises:
        UnknownGpu: a GPU is not one of this machine.
        WrongChip: different chips.
        InvalidMap: two sources on one GPU, a GPU that the job cannot open, nothing but identities,
            a GPU would have to give way on which the job holds something and of which nothing was said, or there
            are too few destinations.
    """
    names = {gpu.uuid: gpu for gpu in all_gpus}
    can_open = [gpu.uuid for gpu in openable]
    may_go_to = can_open if destinations is None else [gpu.uuid for gpu in destinations]
    _refuse_closed(changes.keys(), can_open, names)
    _refuse_closed(changes.values(), may_go_to, names)
    taken = _taken(changes, names)
    if changes and all(source == destination for source, destination in changes.items()):
        raise InvalidMap(detail="the map changes nothing: every GPU in it stays where it is")
    full = dict(changes)
    for uuid in can_open:
        if uuid not in full and uuid in may_go_to and uuid not in taken:
            full[uuid] = uuid
    free = [uuid for uuid in may_go_to if uuid not in full.values()]
    for uuid in [uuid for uuid in can_open if uuid not in full]:
        # This one has to give way: somebody comes to it, or it cannot be opened any more. The place that the first
        # of those who push it leaves is free, and of the same chip.
        start = uuid
        while start in taken:
            start = taken[start]
        if held.get(uuid, 0) > 0 and uuid in taken:
            raise InvalidMap(detail=_give_way(changes, start, uuid, names), hint=_closed(changes, start, uuid, names))
        fitting = [start] if start in free else [other for other in free if names[other].name == names[uuid].name]
        if not fitting:
            raise InvalidMap(detail=f"the job can open {_called(names[uuid])}, and no GPU is left to take its place")
        full[uuid] = fitting[0]
        free.remove(fitting[0])
    return {uuid: full[uuid] for uuid in can_open}


def _refuse_closed(uuids: Iterable[str], allowed: Sequence[str], names: Mapping[str, Gpu]) -> None:
    """Refuses GPUs that are not there, or that the job cannot open."""
    for uuid in uuids:
        if uuid not in names:
            raise UnknownGpu(spec=uuid)
        if uuid not in allowed:
            raise InvalidMap(
                detail=f"the job cannot open the device node of {_called(names[uuid])}",
                hint="it can be moved among the GPUs that it can open: "
                + (", ".join(str(names[other].index) for other in allowed if other in names) or "none"),
            )


def _taken(changes: Mapping[str, str], names: Mapping[str, Gpu]) -> dict[str, str]:
    """The source for each destination; refuses two on one, and another chip."""
    taken: dict[str, str] = {}
    for source, destination in changes.items():
        if destination in taken:
            raise InvalidMap(
                detail=f"{_called(names[taken[destination]])} and {_called(names[source])} "
                f"cannot both go to {_called(names[destination])}"
            )
        taken[destination] = source
        if names[source].name != names[destination].name:
            raise WrongChip(
                detail=f"{_called(names[source])} is a {names[source].name}, {_called(names[destination])} "
                f"a {names[destination].name}: a job can only move between GPUs of the same model"
            )
    return taken


def _give_way(changes: Mapping[str, str], start: str, end: str, names: Mapping[str, Gpu]) -> str:
    """Say that both have to be named."""
    return (
        f"the job holds memory on {_called(names[end])}, which would have to give way: say what becomes "
        f"of it ({_closed(changes, start, end, names)} exchanges them)"
    )


def _closed(changes: Mapping[str, str], start: str, end: str, names: Mapping[str, Gpu]) -> str:
    """Return the option with the changes and the pair that closes this chain."""
    pairs = [*changes.items(), (end, start)]
    return "--map " + ",".join(f"{names[a].index}={names[b].index}" for a, b in pairs)


def _called(gpu: Gpu) -> str:
    """Return how messages call a GPU."""
    return f"GPU {gpu.index}"

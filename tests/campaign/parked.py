"""The cases of the parked way: victims under the shim, and everything that has a part in holding their memory.

Beside what befalls every operation (``cases.py``): vault and mover are killed, alone and with another; the n-th call of
the driver by the mover, or by the shim in the job, fails; nobody has descriptors left; a gate does not close. Steps
come from ``parked.json``, which ``python -m campaign --way parked --record`` writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign.shapes import SHAPES

if TYPE_CHECKING:
    from campaign.cases import Case

STEPS = Path(__file__).with_name("parked.json")
VICTIMS = tuple(name for name, shape in SHAPES.items() if shape.shim and not (shape.ranks or shape.box))

BROKEN = {
    "recover-ready": ("move", "after put of the vault"),
    "recover-still": ("move", "after close_gate of the shim"),
    "recover-away": ("move", "before note restore begin"),
    "recover-there": ("move", "after map of the shim"),
    "recover-open": ("move", "after note open begin"),
    "recover-aside": ("suspend", "after note lock done"),
    "recover-kept": ("suspend", "after keep of the shim"),
    "recover-coming": ("resume", "before note restore begin"),
    "recover-back": ("resume", "before map of the shim"),
    "recover-memory": ("suspend-memory", "after keep of the shim"),
    "recover-memory-back": ("resume-memory", "before map of the shim"),
    "recover-written": ("leave-running", "before note restore begin"),
    "recover-restored": ("restore", "before note restore begin"),
}
"""What is left for ``recover``: the operation, and where it and its worker were killed."""

MEMORY_ONLY = ("suspend-memory", "resume-memory")
ON_DISK = ("leave-running", "restore")
OPERATIONS = ("move", "exchange", "swap", "suspend", "resume", "resume-to", *MEMORY_ONLY, *ON_DISK, *BROKEN)

POINTS = {
    "shim": (
        *("export", "close_gate", "open_gate", "unmap", "make", "map", "keep", "kept"),
        *("cut", "shut", "unique_ids", "join", "let"),
    ),
    "mover": ("prepare", "take", "make", "copy", "arena", "host", "drop", "close"),
    "vault": ("put", "get", "drop"),
}
"""Methods whose calls are points as well, by who is asked."""

MOVER = (
    "cuInit",
    "cuDevicePrimaryCtxRetain",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuStreamCreate",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuStreamSynchronize",
    "cuMemHostRegister",
    "cuMemUnmap",
    "cuMemRelease",
    "cuLaunchKernel",
)
"""Calls of the mover that are made to fail."""
JOB = (
    "cuMemExportToShareableHandle",
    "cuCtxSynchronize",
    "cuMemCreate",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
)
"""Calls of the shim, in the job."""
FAILS = ("result-2", "result-1", "result-999", "after-999", "hang", "hang-for-good", "delay", "crash-caller")
"""How a call fails; "crash-caller" ends whoever makes it, which is the mover, or the job."""

DRIVER = (
    *(f"result-{code}" for code in (1, 304, 600, 999)),
    *("after-999", "hang", "hang-for-good", "delay", "slow", "crash-target"),
)
"""How the driver's own halves fail beside it."""
AT_POINTS = (
    "kill-limosa",
    "kill-both",
    "kill-vault",
    "kill-mover",
    "kill-vault-mover",
    "kill-mover-both",
    "kill-vault-both",
    "sigint",
    "sigterm",
    "job-killed",
    "job-killed+kill-both",
    "job-killed+kill-mover",
    "stop",
    "stop-for-good",
    "job-nofile",
    "vault-nofile",
)
WHILE_CRIU_ASKS = ("kill-limosa", "kill-vault", "kill-mover", "kill-vault-mover")
BUSY = ("spin", "callback")
FILLED = ("move", "exchange", "resume", "resume-to")
MEASURED = "measured"


def churns(victim: str) -> bool:
    """Whether it allocates and frees all the time."""
    return any(part.churn for parts in SHAPES[victim].processes for part in parts)


def possible(operation: str, victim: str) -> bool:
    """Whether an operation can be done to that class of victim."""
    shape = SHAPES[victim]
    verb, place = BROKEN.get(operation, (operation, ""))
    if verb in MEMORY_ONLY and not all(any(part.pieces for part in parts) for parts in shape.processes):
        return False
    if not shape.pieces and any(f" {call} of " in place for call in ("put", "keep", "map")):
        return False
    gpus = shape.gpus
    if operation == "swap":
        return gpus == 1
    return operation != "exchange" or gpus == 2


def enumerate_all(known: dict[str, Any]) -> Iterator[Case]:
    """Every case of the parked way."""
    for operation, victim, steps in kinds(known, OPERATIONS, VICTIMS, possible):
        yield from cases_of(operation, victim, steps, _points(operation, victim, steps), calls(victim, steps))


def kinds(
    known: dict[str, Any], operations: Iterable[str], victims: Iterable[str], may: Callable[[str, str], bool]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each operation on each class of victim that was recorded, with its steps."""
    for operation in operations:
        for victim in victims:
            steps = known.get(f"{operation}/{victim}")
            if steps is not None and may(operation, victim):
                yield operation, victim, steps


def cases_of(operation: str, victim: str, steps: dict[str, Any], *own: Iterator[tuple[str, str]]) -> Iterator[Case]:
    """The cases of its own, then those that every job under the shim has."""
    from campaign.cases import Case

    for step, fault in itertools.chain(*own, driver(steps), disk(steps), whole(operation)):
        yield Case(operation, victim, step, fault)


def _points(operation: str, victim: str, steps: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from campaign.cases import ASKED, dashed

    restored = BROKEN.get(operation, (operation,))[0] == "restore"
    several = len(SHAPES[victim].processes) > 1
    between = False
    for name, n, living in steps["points"]:
        asked = name.startswith(ASKED)  # how often depends on CRIU
        step = f"point.{dashed(name)}.{n}"
        between = name == "before note restore begin" or (between and name != "before note restore done")
        for fault in AT_POINTS:
            if asked and fault not in WHILE_CRIU_ASKS:
                continue
            if fault == "job-nofile" and churns(victim):
                continue  # its own calls would fail
            if restored and fault.startswith(("job-", "stop")):
                continue  # there is nobody yet
            if operation.startswith("recover") and "vault-mover" in fault:
                continue  # limosa has been killed before: nobody else has the memory
            if all(one in living or one in ("kill", "both", "limosa") for one in doomed(fault)):
                yield step, fault
        if several and not restored and not asked:
            yield step, "member-killed"
            yield step, "member-killed+kill-both"
        # Not between the last look at the room and the restore: the driver poisons a job then.
        if operation in FILLED and not between and not name.startswith(("before note restore", "after note restore")):
            yield step, "fill-there"
            yield step, "fill-both"
        if name.startswith("before close_gate"):
            for fault in BUSY:
                yield step, fault


def doomed(fault: str) -> list[str]:
    """Who of Limosa's processes is killed."""
    return [word for part in fault.split("+") if part.startswith("kill-") for word in part.split("-")]


def calls(victim: str, steps: dict[str, Any], fails: Iterable[str] = FAILS) -> Iterator[tuple[str, str]]:
    """Calls of the driver by the mover, or by the shim in the job, that fail."""
    for who, functions in (("mover", MOVER), ("job", JOB)):
        if who == "job" and churns(victim):
            continue  # its own calls would fail
        for function in functions:
            for n in some(steps.get(MEASURED, {}).get(f"{who}.{function}", 0)):
                for fault in fails:
                    if who == "job" and fault.startswith("after-"):
                        continue  # nobody can know that a driver has done what it says it has not
                    yield f"{who}.{function}.{n}", fault
    for n in some(steps.get(MEASURED, {}).get("mover.cuMemCreate", 0)):
        yield f"mover.cuMemCreate.{n}", "memory-device"


def driver(steps: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The driver's own halves, under the parked way."""
    for call in ("lock", "checkpoint", "restore", "unlock"):
        for n in range(steps["calls"].count(call)):
            for fault in DRIVER:
                yield f"call.{call}.{n}", fault


def disk(steps: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A disk that fails."""
    for call, count in steps["disk"].items():
        for n in range(count) if count <= 6 else sorted({0, 1, count // 3, count // 2, count - 2, count - 1}):
            for fault in ("ENOSPC", "EIO", "ENOSPC-for-good"):
                yield f"disk.{call}.{n}", fault


def some(count: int) -> list[int]:
    """Of many alike the first, one in the middle and the last; of few all."""
    return list(range(count)) if count <= 3 else [0, count // 2, count - 1]


def whole(operation: str) -> Iterator[tuple[str, str]]:
    """What befalls an operation at no step in particular."""
    whos = ("limosa", "worker", "both", "mover", "vault", "mover-both")
    faults = ["none", *(f"random-kill-{who}.{n}" for who in whos for n in range(4))]
    faults += [f"random-{name}.{n}" for name in ("sigint", "sigterm") for n in range(3)]
    faults += [f"limosa-nofile.{n}" for n in range(5)]
    if not operation.startswith("recover"):
        faults += [f"timeout.{n}" for n in range(6)]
    for fault in faults:
        yield "run", fault

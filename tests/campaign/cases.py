"""Every case: (operation, class of victim, step, fault). A case's name replays it: ``make faults CASE=name SEED=n``.

Steps come from ``steps.json``, which ``make faults RECORD=1`` writes from undisturbed runs: the points that each
operation passes, the driver's calls it makes, its looks at NVML, its changes to the disk. A test compares it with what
the operations do now.
"""

from __future__ import annotations

import errno
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from campaign import containers, parked, ranks
from campaign.hazards import DONE, HAZARDS, INSIDE, STRUCK
from campaign.shapes import SHAPES

STEPS = Path(__file__).with_name("steps.json")

WITH_CRIU = ("checkpoint", "leave-running", "restore", "restore-to", "recover-checkpoint", "recover-restore")
DRIVER_ONLY = (
    "move",
    "swap",
    "suspend",
    "resume",
    "resume-to",
    "toggle-down",
    "toggle-up",
    "recover-move",
    "recover-suspend",
)
OPERATIONS = DRIVER_ONLY + WITH_CRIU
RARE = ("peers",)
"""Classes of victim that only their hazard befalls."""
VICTIMS = tuple(name for name, shape in SHAPES.items() if name not in RARE and not (shape.shim or shape.box))

RESULTS = (1, 2, 3, 100, 201, 304, 401, 600, 719, 801, 999)
"""Of each class of CUresult: argument, memory, no CUDA state, no device, context, system, state, time, dead context,
not supported, unknown."""
AFTER = (2, 304, 999)
STATES = (0, 1, 2, 3, 5, 77)
NVML_RESULTS = (3, 9, 10, 15, 17, 999)
ACTS = {"exits": "exit", "forks": "fork", "stopped": "stop"}

CALLS = {
    "available": "cuInit",
    "state": "cuCheckpointProcessGetState",
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
FILLED = ("move", "resume", "resume-to", "toggle-up", "leave-running", "restore", "restore-to")
"""Operations in the middle of which somebody takes all the memory that is free, there or there and here."""

NVML = "nvmlDeviceGetCount_v2"  # once in each look at all GPUs

ASKED = ("before answer", "after answer", "before action", "after action")  # how often depends on CRIU
RACING = ("after answer", "after action")  # CRIU and its script go on by themselves then


class Case(NamedTuple):
    """One run of the campaign.

    Attributes:
        operation: of ``OPERATIONS``.
        victim: of ``VICTIMS``.
        step: "point.NAME.N", "call.NAME.N", "inside.NAME.N" (in the middle of the driver's work), "nvml.N",
            "disk.CALL.N", "hazard", "run".
        fault: what goes wrong there.
    """

    operation: str
    victim: str
    step: str
    fault: str

    @property
    def name(self) -> str:
        """As it is typed."""
        return "/".join(self)

    @property
    def parked(self) -> bool:
        """Whether the victim runs under the shim."""
        return SHAPES[self.victim].shim

    @property
    def boxed(self) -> bool:
        """Whether the victim is a container."""
        return bool(SHAPES[self.victim].box)

    @classmethod
    def named(cls, name: str) -> Case:
        """The case of that name.

        Raises:
            ValueError: it is none.
        """
        case = cls(*name.split("/"))
        known = parked.OPERATIONS if case.parked else OPERATIONS
        if case.victim in ranks.VICTIMS:
            known = ranks.OPERATIONS
        if case.boxed:
            known = (*containers.OPERATIONS, *containers.HOLDING)
        if case.operation not in known or case.victim not in SHAPES:
            raise ValueError(f"{name!r} is no case")
        return case


def table(path: Path = STEPS) -> dict[str, Any]:
    """What was recorded: "operation/victim" → points, calls, nvml, disk."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def everything(ground: str = "soft", way: str = "driver") -> list[Case]:
    """Every case that there is on that ground, of jobs that go one way, or are of one kind."""
    if way == "parked":
        return list(parked.enumerate_all(table(parked.STEPS)))
    if way == "containers":
        return list(containers.enumerate_all(table(containers.STEPS)))
    if way == "ranks":
        found = ranks.enumerate_all(table(ranks.STEPS))
        return [case for case in found if ground != "real" or ranks.on_real_gpus(case)]
    return list(enumerate_all(table(), ground=ground))


def possible(operation: str, victim: str, ground: str = "soft") -> bool:
    """Whether an operation can be done to that class of victim there."""
    if victim == "host":  # no CUDA state: nothing to move
        return operation in WITH_CRIU and operation != "restore-to" and ground != "real"
    return ground != "host" and not (operation == "swap" and victim in ("two-gpus", "peers"))


def dashed(name: str) -> str:
    """A point's name without spaces."""
    return name.replace(" ", "-")


def enumerate_all(known: dict[str, Any], *, ground: str = "soft") -> Iterator[Case]:
    """Every case that there is on that ground."""
    for operation in OPERATIONS:
        for victim in VICTIMS:
            steps = known.get(f"{operation}/{victim}")
            if steps is None or not possible(operation, victim, ground):
                continue
            yield from _points(operation, victim, steps, ground)
            if ground == "soft" and victim != "host":
                yield from _calls(operation, victim, steps)
                yield from _inside(operation, victim, steps)
            yield from _disk(operation, victim, steps)
            yield from _whole(operation, victim, ground)
    if ground == "soft":
        yield from _hazards()


def _points(operation: str, victim: str, steps: dict[str, Any], ground: str) -> Iterator[Case]:
    names = [name for name, _, _ in steps["points"]]
    go_ahead = next((i for i, name in enumerate(names) if name.startswith("after answer")), len(names))
    restores = operation.startswith("restore")
    for i, (name, n, living) in enumerate(steps["points"]):
        step = f"point.{dashed(name)}.{n}"
        # CRIU is killed where it waits for an answer (docs/caveats.md says why nowhere else).
        waits = i < go_ahead or ("script" in living and not name.startswith(RACING))
        faults = ["kill-limosa", "sigint" if i % 3 else ("sigterm", "sighup")[i % 2]]
        if "worker" in living:
            faults += ["kill-worker", "kill-both"]
        if "criu" in living and (waits or restores):
            faults += ["kill-criu", "kill-all"]
        if "script" in living and not name.startswith(RACING):
            faults.append("kill-script")
        if i % 4 == 1 and not operation.startswith("recover"):
            faults.append("sigint-twice")
        if victim in ACTS:
            if operation.startswith(("restore", "recover-restore")):
                continue  # there is nobody who could do anything yet
            faults = [ACTS[victim], f"{ACTS[victim]}+kill-limosa"]
        elif not operation.startswith(("restore", "recover-restore")):
            faults.append("job-killed")
            if victim == "tree" and ground == "soft":
                faults += ["member-killed", "member-killed+kill-limosa"]
        if ground == "soft" and victim not in ACTS and operation in FILLED and _filled_at(name):
            faults += ["fill-there", "fill-both"]
        for fault in faults:
            yield Case(operation, victim, step, fault)


def _filled_at(point: str) -> bool:
    """Not between the last look at the room and the restore: the driver poisons a job then, and nobody can help it."""
    return point.startswith("after note") and point != "after note restore begin"


def _calls(operation: str, victim: str, steps: dict[str, Any]) -> Iterator[Case]:
    counts = Counter(steps["calls"])
    for call, function in CALLS.items():
        faults = [f"result-{code}" for code in RESULTS]
        faults += ["hang", "delay", "crash-caller", "crash-caller-after"]
        if call == "available":
            faults = ["result-999", "result-100", "hang", "delay", "crash-caller"]
        elif call == "state":
            faults += [f"state-{number}" for number in STATES]
        else:
            faults += [f"after-{code}" for code in AFTER]
            faults += ["hang-for-good", "crash-target", "crash-target-after", "slow", "lost-here", "lost-there"]
            if call == "checkpoint":
                faults.append("memory-host")
        assert function
        for n in range(counts[call]):
            for fault in faults:
                yield Case(operation, victim, f"call.{call}.{n}", fault)
    for n in range(counts["nvml"]):
        faults = [f"result-{code}" for code in NVML_RESULTS]
        for fault in [*faults, "hang", "hang-for-good", "delay", "crash-caller", "full", "blind"]:
            yield Case(operation, victim, f"nvml.{n}", fault)


def _inside(operation: str, victim: str, steps: dict[str, Any]) -> Iterator[Case]:
    counts = Counter(steps["calls"])
    for point, call in INSIDE.items():
        for n in range(counts[call]):
            for fault in STRUCK + (() if point in DONE else ("result-2", "result-999")):
                yield Case(operation, victim, f"inside.{point}.{n}", fault)


def _hazards() -> Iterator[Case]:
    """The driver's hazards, whenever an operation meets them."""
    for fault, hazard in HAZARDS.items():
        for operation in hazard.operations:
            for victim in hazard.victims or VICTIMS:
                ends = hazard.loses == "job" and victim == "exits"  # which loses it all the same
                if victim != "host" and possible(operation, victim) and not ends:
                    yield Case(operation, victim, "hazard", fault)


def _disk(operation: str, victim: str, steps: dict[str, Any]) -> Iterator[Case]:
    for call, count in steps["disk"].items():
        for n in _some(count):
            for fault in ("ENOSPC", "EIO", "ENOSPC-for-good"):
                yield Case(operation, victim, f"disk.{call}.{n}", fault)


def _some(count: int) -> list[int]:
    """Of many alike the first, some between and the last; of few all."""
    return list(range(count)) if count <= 8 else sorted({*range(4), count // 3, count // 2, *range(count - 4, count)})


def _whole(operation: str, victim: str, ground: str) -> Iterator[Case]:
    faults = ["none", *(f"random-kill-{who}.{n}" for who in ("limosa", "worker", "both") for n in range(3))]
    faults += [f"random-{name}.{n}" for name in ("sigint", "sigterm") for n in range(2)]
    faults.append("full-runtime")
    if not operation.startswith("recover"):
        faults += [f"timeout.{n}" for n in range(4)]
    if operation in ("checkpoint", "leave-running"):
        faults += ["full-disk.0", "full-disk.1", "file-size"]
    if operation in ("move", "resume-to", "restore-to") and victim not in ACTS:
        faults.append("refused-map")
    if operation in ("move", "suspend", "checkpoint") and victim not in ACTS:
        faults.append("busy-target")
    for fault in faults:
        yield Case(operation, victim, "run", fault)


def chosen(cases: list[Case], count: int, seed: int) -> list[Case]:
    """A sample of that many: each (operation, step, fault) once before any of them twice, classes of victim in turn.

    Operations and kinds of fault take turns, so that a small sample has all of them.
    """
    random_ = random.Random(seed)
    by_key: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        by_key.setdefault(key_of(case), []).append(case)
    picked: list[Case] = []
    used: Counter[str] = Counter()
    while len(picked) < min(count, len(cases)):
        groups: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
        for key in sorted(by_key):
            if by_key[key]:
                groups.setdefault((key[0], kind_of_fault(key[2])), []).append(key)
        for keys in groups.values():
            random_.shuffle(keys)
        turns = sorted(groups)
        random_.shuffle(turns)
        firsts = {kind: turn for turn in reversed(turns) for kind in turn}  # of each operation and each kind one
        turns.sort(key=lambda turn: turn not in firsts.values())
        while turns and len(picked) < count:
            for turn in list(turns):
                if len(picked) >= count:
                    break
                left = by_key[groups[turn].pop()]
                fewest = min(used[case.victim] for case in left)
                case = random_.choice([case for case in left if used[case.victim] == fewest])
                left.remove(case)
                used[case.victim] += 1
                picked.append(case)
                if not groups[turn]:
                    turns.remove(turn)
    return picked


def kind_of_fault(fault: str) -> str:
    """Of several that differ in a number, or in how often, one."""
    if fault in HAZARDS:
        return fault
    head = fault.partition(".")[0]
    kind, _, number = head.rpartition("-")
    return kind if number.isdigit() else head


def key_of(case: Case) -> tuple[str, str, str]:
    """Operation, step and fault, without which of several alike it is and whom it befalls."""
    return case.operation, _alike(case.step), case.fault


def once(cases: list[Case]) -> int:
    """How many runs it takes to have each (operation, step, fault) once."""
    return len({key_of(case) for case in cases})


def _alike(step: str) -> str:
    """The step without which of several alike it is."""
    return step.rpartition(".")[0] or step


ERRNO = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


def as_text(found: dict[str, Any]) -> str:
    """``steps.json``: a line for each operation and class of victim."""
    lines = [f"{json.dumps(name)}: {json.dumps(found[name], separators=(',', ':'))}" for name in sorted(found)]
    return "{\n" + ",\n".join(lines) + "\n}\n"

"""The cases of jobs of several ranks: all that befalls the parked way, and what befalls NCCL.

Ranks are killed and stopped in the middle; communicators fail to be closed or made again, at the n-th call on the whole
node; the agent's store goes; a rank hangs before a collective, is slow or dies in it; the two helpers are killed where
memory is parked. Steps come from ``ranks.json``, which ``python -m campaign --way ranks --record`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign import parked
from campaign.shapes import SHAPES

if TYPE_CHECKING:
    from campaign.cases import Case

STEPS = Path(__file__).with_name("ranks.json")
VICTIMS = tuple(name for name, shape in SHAPES.items() if shape.ranks)

BROKEN = {
    "recover-cut": ("move", "after cut of the shim"),
    "recover-shut": ("move", "after shut of the shim"),
    "recover-gone": ("move", "before note restore begin"),
    "recover-unjoined": ("move", "before join of the shim"),
    "recover-joined": ("move", "after join of the shim"),
    "recover-unlet": ("exchange", "before let of the shim"),
    "recover-asleep": ("suspend", "after note lock done"),
    "recover-woken": ("resume", "before join of the shim"),
    "recover-dumped": ("checkpoint", "after shut of the shim"),
    "recover-left": ("leave-running", "before join of the shim"),
    "recover-fetched": ("restore", "before join of the shim"),
}
"""What is left for ``recover``: the operation, and where it and its worker were killed."""

WITH_CRIU = ("checkpoint", "leave-running", "restore", "restore-to")
OPERATIONS = ("move", "exchange", "suspend", "resume", "resume-to", *WITH_CRIU, *BROKEN)

MADE = ("ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommDestroy", "ncclCommFinalize", "step:nccl-init")
"""What closes communicators and makes them again: no rank calls it by itself while it computes."""
MADE_FAILS = (
    *("result-ncclSystemError", "result-ncclInternalError", "result-ncclRemoteError"),
    *("hang", "hang-for-good", "delay", "slow", "crash-caller"),
)
COMPUTING = ("ncclAllReduce", "ncclGroupEnd", "step:nccl-launch", "step:nccl-collective", "step:nccl-sendrecv")
"""What ranks call all the time: it holds them up, or ends them, as it would without Limosa."""
COMPUTING_FAILS = ("hang", "hang-for-good", "delay", "slow", "crash-caller")
TIMES = range(4)

AT_POINTS = (
    *("kill-limosa", "kill-worker", "kill-both", "sigint", "sigterm", "sigint-twice", "job-killed"),
    *("member-killed", "member-killed+kill-both", "job-killed+kill-both"),
    *("stop", "stop-for-good", "stop+kill-both", "job-nofile"),
    *("store-gone", "store-gone+kill-both"),
)
WITH_HELPERS = ("kill-vault", "kill-mover", "kill-mover-both", "kill-vault-both", "member-killed+kill-mover")


def possible(operation: str, victim: str) -> bool:
    """Whether an operation can be done to that class of victim."""
    operation = BROKEN.get(operation, (operation,))[0]
    return operation != "exchange" or SHAPES[victim].gpus == 2


def calls(victim: str) -> tuple[str, ...]:
    """Functions of NCCL that ranks of that class call all the time."""
    ranks = SHAPES[victim].ranks
    assert ranks is not None
    none = {
        "step:nccl-sendrecv": not ranks.p2p,
        "ncclGroupEnd": not (ranks.p2p or ranks.groups),
        "step:nccl-launch": not ranks.nonblocking,
    }
    return tuple(name for name in COMPUTING if not none.get(name))


def starves(victim: str, fault: str) -> bool:
    """Whether the ranks end because their store is gone: they wait for each other there."""
    ranks = SHAPES[victim].ranks
    return fault.startswith("store-gone") and ranks is not None and ranks.meets > 0


def on_real_gpus(case: Case) -> bool:
    """Whether it can be tried on two real GPUs: nothing there makes NCCL, the driver or a disk fail, or fills a GPU."""
    pair = SHAPES[case.victim].gpus == 2
    return pair and case.step.startswith(("point.", "run")) and not case.fault.startswith(("fill", "job-nofile"))


def enumerate_all(known: dict[str, Any]) -> Iterator[Case]:
    """Every case of jobs of several ranks."""
    for operation, victim, steps in parked.kinds(known, OPERATIONS, VICTIMS, possible):
        own = (_points(operation, steps), _nccl(operation, victim, steps))
        yield from parked.cases_of(operation, victim, steps, *own)


def _points(operation: str, steps: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from campaign.cases import ASKED, dashed

    begun = BROKEN.get(operation, (operation,))[0]
    there = not begun.startswith("restore")
    between = False
    for name, n, living in steps["points"]:
        asked = name.startswith(ASKED)  # how often depends on CRIU
        step = f"point.{dashed(name)}.{n}"
        between = name == "before note restore begin" or (between and name != "before note restore done")
        for fault in (*AT_POINTS, *WITH_HELPERS):
            if asked and fault not in parked.WHILE_CRIU_ASKS:
                continue
            if not there and fault.startswith(("job-", "stop", "member-", "store-")):
                continue  # there is nobody yet
            if all(one in living or one in ("kill", "both", "limosa") for one in parked.doomed(fault)):
                yield step, fault
        # Not between the last look at the room and the restore: the driver poisons a job then.
        filled = begun in ("move", "resume", "resume-to") and not operation.startswith("recover")
        if filled and not between and not name.startswith(("before note restore", "after note restore")):
            yield step, "fill-there"
            yield step, "fill-both"


def _nccl(operation: str, victim: str, steps: dict[str, Any]) -> Iterator[tuple[str, str]]:
    measured = steps.get(parked.MEASURED, {})
    for function in MADE:
        for n in parked.some(measured.get(f"nccl.{function}", 0)):
            for fault in MADE_FAILS:
                yield f"nccl.{function}.{n}", fault
    if BROKEN.get(operation, (operation,))[0] in ("move", "exchange", "suspend", "checkpoint", "leave-running"):
        for function in calls(victim):
            for n in TIMES:
                for fault in COMPUTING_FAILS:
                    yield f"nccl.{function}.{n}", fault

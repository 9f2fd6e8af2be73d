"""The driver's hazards (``docs/softgpu.md``) as faults: what each does to a job, and how Limosa has to end then."""

from __future__ import annotations

from typing import NamedTuple

LOCKING = ("move", "swap", "suspend", "toggle-down", "checkpoint", "leave-running")
"""Operations that begin with a job that runs."""
BACK = ("move", "swap", "leave-running")
COMING = ("resume", "resume-to", "toggle-up", "restore", "restore-to", "recover-move", "recover-restore")
RESTORING = BACK + COMING
"""Operations that call the driver's restore."""
ALL = (*LOCKING, *COMING, "recover-suspend", "recover-checkpoint")


class Hazard(NamedTuple):
    """One hazard.

    Attributes:
        operations: those that can meet it.
        rules: what the node is told, beside ``hazard=NAME``.
        codes: exit codes that are right; empty: any that agrees with the state that is found.
        loses: "job": the driver never takes the job back. "process": it ends the process.
        early: it is on before the victim is brought to where the operation begins.
        victims: whom it befalls; empty: all.
        then: what else happens, as soon as a rule has had its turn.
    """

    operations: tuple[str, ...]
    rules: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    loses: str = ""
    early: bool = False
    victims: tuple[str, ...] = ()
    then: str = ""


SLOWLY = ("function=step:checkpoint-saved every=1 delay=0.3", "function=step:restore-claimed every=1 delay=0.3")
WAITING = ("function=step:checkpoint-saved hang", "function=step:restore-claimed hang")

HAZARDS: dict[str, Hazard] = {
    "collective-deadlocks-lock": Hazard(LOCKING, codes=(18,)),
    "vgpu": Hazard(LOCKING, codes=(12, 13)),
    "mig-not-supported": Hazard(LOCKING, codes=(12, 13)),
    "mps-not-supported": Hazard(LOCKING, codes=(12, 13)),
    "managed-not-supported": Hazard(LOCKING, codes=(13,)),
    "chips-differ": Hazard(("move", "swap", "resume-to", "restore-to"), codes=(21,)),
    "no-map-refused": Hazard(ALL, codes=(0,)),
    "needs-persistence": Hazard(RESTORING, codes=(21, 40)),
    "bus-id-remembered": Hazard(ALL, codes=(0,)),
    "thread-id-as-pid": Hazard(ALL, codes=(0,)),
    "thread-id-refused": Hazard(ALL, codes=(0,)),
    "init-slow": Hazard(ALL),
    "states-4-and-5": Hazard(ALL, rules=SLOWLY, codes=(0,)),
    "states-4-and-5+kill-limosa": Hazard(ALL, rules=WAITING, then="kill-limosa"),
    "states-4-and-5+kill-both": Hazard(ALL, rules=WAITING, then="kill-both"),
    "state-blocks-in-flight": Hazard(ALL, codes=(0,)),
    "state-blocks-in-flight-for-good": Hazard(ALL, codes=(12, 18, 21, 40)),
    "state-blocks-in-flight+kill-limosa": Hazard(ALL, then="kill-limosa"),
    "stays-locked-after-controller-death": Hazard(ALL),
    "stays-locked-after-controller-death+kill-both": Hazard(ALL, rules=WAITING, then="kill-both"),
    "lock-hangs-when-stopped": Hazard(LOCKING),
    "lock-hangs-when-stopped-for-good": Hazard(LOCKING, codes=(12, 18, 21, 40)),
    "multicast-hangs": Hazard(LOCKING),
    "multicast-hangs-for-good": Hazard(LOCKING, codes=(21, 40)),
    "kill-after-restore-hangs": Hazard((*LOCKING, "resume", "toggle-up", "restore", "recover-move")),
    "killed-by-cgroup": Hazard(LOCKING, codes=(10, 21), loses="process"),
    "first-synchronise-segfaults": Hazard(RESTORING, loses="process"),
    "synchronise-while-checkpointed-segfaults": Hazard(LOCKING, loses="process"),
    "restore-poisons": Hazard(RESTORING, loses="job"),
    "nccl-shared-memory-lost": Hazard((*LOCKING, *COMING[:5]), loses="job", early=True),
    "ipc-lost": Hazard((*LOCKING, *COMING[:5]), loses="job", early=True),
    "peer-large-allocation-lost": Hazard((*LOCKING, *COMING[:5]), loses="job", early=True, victims=("peers",)),
}

RELEASED = ("multicast-hangs", "lock-hangs-when-stopped", "state-blocks-in-flight")
"""Those that hang until they are switched off, which they are after a while."""

ONCE = ("restore-poisons", "killed-by-cgroup", "stays-locked-after-controller-death")
"""Those that befall one process, or one call."""

INSIDE = {
    "lock-begin": "lock",
    "lock-closed": "lock",
    "checkpoint-begin": "checkpoint",
    "checkpoint-saved": "checkpoint",
    "checkpoint-released": "checkpoint",
    "restore-begin": "restore",
    "restore-claimed": "restore",
    "restore-loaded": "restore",
    "unlock-begin": "unlock",
}
"""Points in the middle of the driver's work, and the call in which each is passed."""
DONE = ("checkpoint-released", "restore-loaded")
"""Those at which nothing can fail any more."""
STRUCK = ("crash-target", "hang", "hang-for-good", "delay", "slow", "hang+kill-limosa", "hang+kill-both", "hang+sigint")


def name_of(fault: str) -> str:
    """The name that the node knows a hazard by."""
    return fault.partition("+")[0].removesuffix("-for-good")

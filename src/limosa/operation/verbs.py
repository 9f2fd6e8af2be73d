"""The verbs: which steps each is made of, in their order.

To add a step, write a class in ``steps/`` and put it into its place here. A class that lacks something raises an error
when it is imported (``step.py``).
"""

from __future__ import annotations

from limosa.errors import UsageError
from limosa.operation.estimate import ARENA_RATE, COPY_RATE
from limosa.operation.step import Verb
from limosa.operation.steps import carry, communicators, driver, dump, from_image

MOVE = Verb(
    name="move",
    goes=True,
    comes=True,
    steps=(
        communicators.WayBackOfCommunicators(),
        carry.Prepare(),
        driver.ReadyMemory(),
        communicators.CloseCommunicators(),
        carry.Hold("device memory goes from GPU to GPU"),
        driver.Lock(),
        driver.Checkpoint(copies=COPY_RATE),
        carry.CopyWait(),
        driver.Restore(),
        driver.Unlock(),
        driver.LastLook(),
        carry.Arrive(),
        carry.Open(),
        communicators.JoinCommunicators(),
    ),
)
SUSPEND = Verb(
    name="suspend",
    goes=True,
    steps=(
        communicators.WayBackOfCommunicators(),
        carry.Prepare(),
        driver.ReadyMemory(),
        communicators.CloseCommunicators(),
        carry.Hold("device memory goes to pinned host memory"),
        driver.Lock(),
        driver.Checkpoint(copies=ARENA_RATE),
        carry.CopyWait(),
        driver.StaySuspended(),
    ),
)
RESUME = Verb(
    name="resume",
    comes=True,
    steps=(
        carry.Prepare(),
        carry.Fetch(),
        driver.Restore(copies=ARENA_RATE),
        driver.Unlock(),
        driver.LastLook(),
        carry.CopyWait(),
        carry.Arrive(stops=True),
        carry.Open(),
        communicators.JoinCommunicators(),
    ),
)
CHECKPOINT = Verb(
    name="checkpoint",
    image=True,
    goes=True,
    ends=True,
    steps=(
        communicators.WayBackOfCommunicators(),
        dump.Save(),
        driver.ReadyMemory(),
        communicators.CloseCommunicators(),
        dump.HoldForImage(),
        driver.Lock(),
        driver.Checkpoint(),
        carry.CopyWait(),
        dump.Leave(),
        dump.Dump(),
        dump.RestoreAgain(),
        dump.UnlockAgain(),
        dump.GoOn(),
        communicators.JoinAgain(),
        dump.Commit(),
        dump.SeeOff(),
    ),
)
RESTORE = Verb(
    name="restore",
    image=True,
    comes=True,
    ends=True,
    steps=(
        from_image.Sees(),
        from_image.CutBack(),
        from_image.Load(),
        from_image.Verified(),
        from_image.Names(),
        from_image.CriuRestore(),
        from_image.RestoreThere(),
        from_image.UnlockThere(),
        from_image.Loaded(),
        from_image.ArriveThere(),
        communicators.JoinCommunicators(),
    ),
)

TOGGLE = Verb(name="toggle", steps=())
"""A suspend or a resume: this one is only seen where nobody can say which, and it is refused."""

VERBS = {verb.name: verb for verb in (MOVE, SUSPEND, RESUME, TOGGLE, CHECKPOINT, RESTORE)}
"""All of them by name."""


def states_after() -> dict[str, str]:
    """The state of a job once a step is done, by what the journal says: "lock done"."""
    steps = [step for verb in VERBS.values() for step in verb.steps if step.after]
    return {f"{step.noted or step.name} done": step.after for step in steps}


def verb_of(name: str) -> Verb:
    """The verb of that name; UsageError: there is none, for a journal of another Limosa may name it."""
    try:
        return VERBS[name]
    except KeyError:
        raise UsageError(detail=f"this Limosa knows no operation {name!r}: another version began it") from None

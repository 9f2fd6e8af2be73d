"""The facts about a job: gathered once for one verb, and never judged here (``rules.py`` does that)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from limosa import gpu
from limosa.errors import GpuUnavailable, InvalidMap, LimosaError, Reason, UsageError
from limosa.operation import claims
from limosa.operation.jobs import Job
from limosa.operation.journal import Member
from limosa.operation.members import Where, find_members, place
from limosa.operation.options import check_force
from limosa.operation.parked import aside, parkable
from limosa.operation.step import Verb
from limosa.operation.work import Clock
from limosa.process.identity import Identity
from limosa.process.observe import JobObservation, observe
from limosa.process.tree import job_tree
from limosa.terms import Release


class Ask(msgspec.Struct, kw_only=True, frozen=True):
    """What is asked for, and how hard to look.

    Attributes:
        verb: what is to be done.
        where: where the job is to go.
        release: what a suspend is to give back.
        leave_running: a checkpoint's option.
        force: ids of reasons that become warnings.
        check_room: False where several jobs change places and room is looked at for all of them together.
        freed: bytes by GPU UUID that other jobs of the same operation will have freed by then (negative: taken).
        probe_memory: where host memory looks short, touch and free what is missing and look again.
        inventory: what NVML says, where it was asked just now; None: it is asked.
        more: further reasons from the observation and the members (an image's).
    """

    verb: Verb
    where: Where = Where()
    release: Release = Release.ALL
    leave_running: bool = False
    force: Collection[str] = ()
    check_room: bool = True
    freed: Mapping[str, int] = {}
    probe_memory: bool = True
    inventory: gpu.Inventory | None = None
    more: Callable[[JobObservation, Sequence[Member]], Sequence[Reason]] = lambda *_: ()

    def __post_init__(self) -> None:
        check_force(self.force)


class Facts(msgspec.Struct, kw_only=True):
    """What was found.

    Attributes:
        job: which.
        tree: its processes.
        observation: what ``/proc`` shows of them.
        claim: the operation that works on it, or has left it in the middle.
        members: the processes that hold CUDA state.
        unasked: of which the driver does not tell.
        inventory: what NVML says; None where it cannot be asked, or nobody has CUDA state.
        nowhere: why where it is, or is to go, makes no sense.
        unknown: members of which it is not known how much they hold.
        parked: what the shims say of the memory that they look after.
        arena: what lies in arenas, or is to go there.
    """

    job: Job
    tree: list[Identity]
    observation: JobObservation
    claim: claims.Claim | None = None
    members: list[Member] = []
    unasked: list[Reason] = []
    inventory: gpu.Inventory | None = None
    nowhere: LimosaError | None = None
    unknown: list[Reason] = []
    parked: parkable.Parkable = msgspec.field(default_factory=parkable.Parkable)
    arena: aside.InArena = msgspec.field(default_factory=aside.InArena)

    @property
    def busy(self) -> bool:
        """Whether somebody who lives works on it: what can be seen of it changes."""
        return self.claim is not None and self.claim.alive

    @property
    def parked_bytes(self) -> int:
        """What the shims look after."""
        return sum(self.parked.bytes.values())


def gather(which: Job, ask: Ask, driver: gpu.Driver, clock: Clock) -> Facts:
    """Reads the job, the driver and NVML.

    Raises:
        NoSuchProcess: it is gone, or a zombie.
        PermissionDenied: it cannot be read.
        CancelledUndone, TimedOutUndone: the ``clock`` says so.
    """
    tree = job_tree(which.root)
    facts = Facts(job=which, tree=tree, observation=observe(which.root), claim=claims.on(tree))
    facts.members, facts.unasked = find_members(driver, which.root, tree, facts.observation, clock)
    clock.check()
    if not facts.members:
        return facts
    verb, members = ask.verb, facts.members
    try:
        facts.inventory = ask.inventory or driver.inventory()
        only_back = verb.comes and not verb.goes
        facts.unknown = place(members, which.root, facts.inventory, ask.where, only_back=only_back)
        if not facts.busy:  # its shims listen to whoever works on it
            facts.parked = parkable.ask(members, software=facts.inventory.software)
            facts.arena = aside.ask(verb, members, ask.release)
    except (GpuUnavailable, InvalidMap, UsageError) as error:
        facts.nowhere = error
    return facts

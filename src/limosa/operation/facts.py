"""The facts about a job: gathered once for one verb, and never judged here (``rules.py`` does that)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from limosa import gpu
from limosa.errors import GpuUnavailable, InvalidMap, LimosaError, Reason, UsageError
from limosa.operation import claims
from limosa.operation.communicators import asking
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
    """What is asked for, and how hard to look."""

    verb: Verb  # what is to be done
    where: Where = Where()  # where the job is to go
    release: Release = Release.ALL  # what a suspend is to give back
    leave_running: bool = False  # a checkpoint's option
    force: Collection[str] = ()  # ids of reasons that become warnings
    check_room: bool = True  # False where several jobs change places and room is looked at for all of them together
    # bytes by GPU UUID that other jobs of the same operation will have freed by then (negative: taken)
    freed: Mapping[str, int] = {}
    probe_memory: bool = True  # where host memory looks short, touch and free what is missing and look again
    silent: Collection[int] = ()  # processes about which the driver has not answered just now
    inventory: gpu.Inventory | None = None  # what NVML says, where it was asked just now; None: it is asked
    # further reasons from the observation and the members (an image's)
    more: Callable[[JobObservation, Sequence[Member]], Sequence[Reason]] = lambda *_: ()

    def __post_init__(self) -> None:
        check_force(self.force)


class Facts(msgspec.Struct, kw_only=True):
    """What was found."""

    job: Job  # which
    tree: list[Identity]  # its processes
    observation: JobObservation  # what ``/proc`` shows of them
    claim: claims.Claim | None = None  # the operation that works on it, or has left it in the middle
    members: list[Member] = []  # the processes that hold CUDA state
    unasked: list[Reason] = []  # of which the driver does not tell
    inventory: gpu.Inventory | None = None  # what NVML says; None where it cannot be asked, or nobody has CUDA state
    nowhere: LimosaError | None = None  # why where it is, or is to go, makes no sense
    unknown: list[Reason] = []  # members of which it is not known how much they hold
    # what the shims say of the memory that they look after
    parked: parkable.Parkable = msgspec.field(default_factory=parkable.Parkable)
    arena: aside.InArena = msgspec.field(default_factory=aside.InArena)  # what lies in arenas, or is to go there
    comms: asking.Communicators = msgspec.field(default_factory=asking.Communicators)  # of NCCL's, as the shims say

    @property
    def busy(self) -> bool:
        """Whether somebody who lives works on it: what can be seen of it changes."""
        return self.claim is not None and self.claim.alive

    @property
    def parked_bytes(self) -> int:
        """What the shims look after."""
        return sum(self.parked.bytes.values())


def gather(which: Job, ask: Ask, driver: gpu.Driver, clock: Clock) -> Facts:
    """Reads the job, the driver and NVML. Raises NoSuchProcess, PermissionDenied, and what the clock does."""
    tree = job_tree(which.root)
    facts = Facts(job=which, tree=tree, observation=observe(which.root), claim=claims.on(tree))
    facts.members, facts.unasked = find_members(driver, which.root, tree, facts.observation, clock, ask.silent)
    clock.check()
    if not facts.members:
        return facts
    verb, members = ask.verb, facts.members
    try:
        facts.inventory = ask.inventory or driver.inventory()
        try:
            unknown = place(members, which.root, facts.inventory, ask.where, only_back=verb.takes_back)
            # Of a job with a claim it is Limosa that has left it so.
            facts.unknown = [r for r in unknown if r.refuses or facts.claim is None]
        except (InvalidMap, UsageError) as error:  # what the job is does not depend on where it is to go
            facts.nowhere = error
        if not facts.busy:  # its shims listen to whoever works on it
            facts.parked = parkable.ask(members)
            facts.comms = asking.ask(members)
            if facts.nowhere is None:
                facts.arena = aside.ask(verb, members, ask.release)
    except (GpuUnavailable, InvalidMap, UsageError) as error:
        facts.nowhere = error
    return facts

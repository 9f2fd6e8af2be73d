"""Before an operation: the findings about a job, and what speaks against the verb.

Facts are gathered once (``facts.py``), then judged (``rules.py``). All verbs start from here; ``plan`` shows it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from limosa import gpu
from limosa.errors import OwnAncestor, Reason, Refused, UsageError
from limosa.operation import claims
from limosa.operation.communicators import asking
from limosa.operation.container_plan import Boxed
from limosa.operation.facts import Ask, gather
from limosa.operation.jobs import Job
from limosa.operation.journal import Member, common_state
from limosa.operation.results import OtherWay, Plan
from limosa.operation.rules import as_reason, driver_fits, judge
from limosa.operation.step import Shape, Verb
from limosa.operation.work import Clock
from limosa.process.identity import Identity, refuse_ancestor
from limosa.process.observe import JobObservation
from limosa.terms import Release


class Prepared(msgspec.Struct, kw_only=True):
    """What ``look`` found out about one job and one verb."""

    verb: Verb
    job: Job
    tree: list[Identity]
    members: list[Member] = []
    observation: JobObservation | None = None
    inventory: gpu.Inventory | None = None
    reasons: list[Reason] = []
    host_bytes: int = 0
    leave_running: bool = False
    parked: int = 0  # bytes that the shim looks after
    release: Release = Release.ALL  # what a suspend gives back
    rate: float | None = None  # bytes a second of a checkpoint, while the job runs
    output: str = ""  # of a checkpoint, as it was named
    driver_fits: bool = True  # host memory would take what the shim looks after as well, by the driver
    small: set[int] = msgspec.field(default_factory=set)  # processes that have left the driver no large allocation
    # of NCCL's, as the shims say
    comms: asking.Communicators = msgspec.field(default_factory=asking.Communicators)
    busy: bool = False  # another operation, of a living process, works on it
    done: bool = False  # it is as the verb wants it already
    other: OtherWay | None = None  # what the driver would cost, of what is parked; told before that is taken away
    box: Boxed | None = None  # of a checkpoint: the container that the job is
    nowhere: bool = False  # where it is to go makes no sense, so it cannot be there already

    @property
    def states(self) -> set[str]:
        """The states of its members before the operation."""
        return {m.was for m in self.members}

    @property
    def shape(self) -> Shape:
        """What the words and the cost of its steps depend on."""
        return Shape(
            members=self.members,
            parked=self.parked,
            release=self.release,
            host_bytes=self.host_bytes,
            leave_running=self.leave_running,
            rate=self.rate,
            indices={g.uuid: g.index for g in self.inventory.gpus} if self.inventory else {},
            processes=len(self.tree),
            output=self.output,
            communicators=self.comms.n,
            within=self.comms.within,
            container=self.box.container.called if self.box is not None else "",
            log_goes=self.box is not None and self.box.contained.log_goes,
        )

    @property
    def root(self) -> Identity:
        """The job's topmost process."""
        return self.job.root

    def refuse(self) -> None:
        """Raises Refused, with id and exit code of the first reason, if anything forbids the operation."""
        if self.is_refused():
            raise self.refusal(self.reasons)

    def is_refused(self) -> bool:
        """Whether anything forbids it."""
        return any(r.refuses for r in self.reasons)

    def refusal(self, reasons: Sequence[Reason]) -> Refused:
        """The error for this job, for reasons of its own or of the one that it was to change places with."""
        error = Refused(reasons)
        error.job_state = common_state(self.members)
        return error

    def warnings(self) -> list[Reason]:
        """What was found and does not forbid it."""
        return [r for r in self.reasons if not r.refuses]

    def plan(self) -> Plan:
        """The result of ``plan`` and ``--dry-run``."""
        return self.verb.plan(self.shape, self.reasons, pid=self.root.pid, name=self.job.name, done=self.done)


def look(which: Job, ask: Ask, driver: gpu.Driver, clock: Clock | None = None) -> Prepared:
    """Reads everything about one job for one verb; raises only where the job itself cannot be read.

    That is NoSuchProcess (gone, or a zombie), PermissionDenied, and what the clock raises (None: no time limit).
    """
    clock = clock or Clock(ask.verb.name)
    which.root.check()
    try:
        refuse_ancestor(which.root)
    except OwnAncestor as error:
        return Prepared(verb=ask.verb, job=which, tree=[which.root], reasons=[as_reason(error)])
    facts = gather(which, ask, driver, clock)
    reasons = judge(facts, ask, clock)
    members, observation = facts.members, facts.observation
    return Prepared(
        verb=ask.verb,
        job=which,
        tree=facts.tree,
        members=members,
        observation=observation,
        inventory=facts.inventory,
        reasons=reasons,
        host_bytes=max(0, sum(p.rss_anon + p.shm_bytes for p in observation.processes)),
        leave_running=ask.leave_running,
        parked=facts.parked_bytes,
        release=ask.release,
        driver_fits=facts.busy or not ask.verb.goes or driver_fits(facts, ask),
        small=facts.parked.small,
        comms=facts.comms,
        busy=facts.busy,
        nowhere=facts.nowhere is not None or any(r.refuses for r in facts.unknown),
    )


def refuse_no_text(folder: str | os.PathLike[str]) -> None:
    """Raises UsageError for a folder that could not be written down in records and answers, which are JSON."""
    for name in sorted(claims.names_of(folder)):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UsageError(detail=f"{os.fsencode(name)!r} is no UTF-8: name another folder, or rename it") from None

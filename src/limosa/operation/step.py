"""What an operation is made of: steps, and verbs, which are lists of steps.

A step says in one place what it does and how that is undone, what ``plan`` says of it and what it costs, in what state
the job is once it is done, and what ``recover`` makes of an operation that died after it. :func:`run` does the steps of
a verb; ``plan``, the estimate, Ctrl-C, ``recover`` and ``docs/steps.md`` read the same lists.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from limosa.errors import Reason
from limosa.gpu import State
from limosa.operation.estimate import beside_context, device_bytes
from limosa.operation.journal import Journal, Member
from limosa.operation.results import Estimate, OtherWay, Plan
from limosa.operation.room import places
from limosa.operation.turns import COME
from limosa.operation.work import Work
from limosa.terms import Release, Route, Verdict

if TYPE_CHECKING:
    from limosa import gpu
    from limosa.parking.shim import Shim


class Shape(msgspec.Struct, kw_only=True, frozen=True):
    """What the words and the cost of a step depend on: all that is known of a job before anything is done."""

    members: Sequence[Member] = ()  # the processes that hold CUDA state
    # bytes that the shim looks after, or that an image holds as chunks; 0: the driver carries everything
    parked: int = 0
    release: Release = Release.ALL  # what a suspend gives back: all, or the memory alone
    host_bytes: int = 0  # memory of all processes that an image takes, device memory excluded
    leave_running: bool = False  # a checkpoint's option
    rate: float | None = None  # bytes a second at most for what a checkpoint copies while the job runs
    indices: Mapping[str, int] = {}  # the indices of GPUs by UUID, for words
    processes: int = 1  # how many there are in the tree
    output: str = ""  # the image's folder, as it was named
    files: Sequence[tuple[str, int]] = ()  # names of files that a restore cuts back, each with its size
    communicators: int = 0  # of NCCL's, between the job's processes
    within: bool = False  # whether one of them has several ranks of a communicator
    verify: bool = True  # whether a restore compares every hash first
    container: str = ""  # which one the job is, where an image is written or read: podman:train
    log_goes: bool = False  # whether what its runtime keeps of its output goes with it

    @property
    def bytes(self) -> int:
        """Device memory of all members."""
        return device_bytes(self.members)

    @property
    def beside(self) -> int:
        """What the driver has to carry beside what is parked."""
        return max(0, self.bytes - self.parked)

    @property
    def away(self) -> list[Member]:
        """The members whose memory alone is suspended."""
        return [m for m in self.members if m.away]

    @property
    def alone(self) -> bool:
        """Whether the memory goes, or comes back, without the driver's steps."""
        return self.release != Release.ALL or bool(self.away)

    @property
    def awake(self) -> list[Member]:
        """The members that are not suspended."""
        return [m for m in self.members if m.was != State.CHECKPOINTED]


class Left(msgspec.Struct, kw_only=True):
    """What a dead operation has left, for ``recover``."""

    dead: Journal  # its journal
    driver: gpu.Driver  # asked for states
    alive: list[Member]  # its members that live
    states: Mapping[int, str]  # their states by pid
    parked: bool  # whether gates were closed for it, or memory is away


class Finished(NamedTuple):
    """What ``recover`` has done where it went forward, in words, and the state of the job."""

    did: str
    state: str


class Op:
    """One operation under way: its work (clock, journal, claim, undo stack) and its members, which its steps share."""

    def __init__(self, work: Work, members: Sequence[Member]):
        self.work, self.members = work, list(members)

    @property
    def shims(self) -> Mapping[int, Shim]:
        """Connections to the processes' shims that it has at the moment, by pid: each serves one client at a time."""
        return {}

    @property
    def ranks(self) -> list[Member]:
        """Those that may have communicators to be closed, or to be made again."""
        return self.members

    @property
    def meets(self) -> bool:
        """Whether ranks may have to stop at the same call, or may have been stopped."""
        return bool(self.ranks)

    @property
    def closed(self) -> bool:
        """Whether communicators may be closed: by this operation, or by the one before it that took the job away."""
        return True

    @property
    def pauses(self) -> bool:
        """Whether the job stands still for it: one that was suspended before stands still for somebody else."""
        return any(m.was != State.CHECKPOINTED for m in self.members)


O = TypeVar("O", bound=Op)  # noqa: E741 - of a step

HOME, BACK, STILL = "driver", "parked", "still"
"""What the way back of all the driver's steps, that of memory that is carried beside them, and that of a container that
is held still, are called."""
NOTHING = ""
"""As ``undone``: there is nothing to undo (the docstring of the step says why)."""


def unsaid(step: object, shape: Shape) -> str:
    """As ``words`` of a step: nothing that anybody has to know."""
    return ""


def free(step: object, shape: Shape) -> float:
    """As ``cost`` of a step: nothing worth counting, or counted with another."""
    return 0.0


class Step(abc.ABC, Generic[O]):
    """One step. Steps have no state of their own: what they do they do to an :class:`Op`.

    What a class leaves out is an error when it is defined: a step that nobody can undo, plan or recover is none.
    """

    name: ClassVar[str]  # in the result's timings, in progress, and in the journal
    noted: ClassVar[str] = ""  # what the journal calls it where that is something else
    still: ClassVar[bool]  # whether the job stands still meanwhile
    tells: ClassVar[str] = ""  # what progress says of it
    after: ClassVar[str] = ""  # the state of the job once it is done; "": as before
    # what its undo is called in the journal. Steps with one undo between them share its name: it is made ready before
    # the first of them. ``NOTHING``, where there is nothing to undo.
    undone: ClassVar[str]
    left: ClassVar[str]  # what ``recover`` makes of an operation that died in it or after it, in words
    stops: bool = False  # whether the operation may be cancelled before it
    # what it waits for where several jobs are worked on side by side (``turns.py``); "": nothing
    turn: ClassVar[str] = ""

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__()
        if abstract:  # what some steps have in common
            return
        missing = [what for what in ("name", "still", "undone", "left") if not hasattr(cls, what)]
        missing += [what for what in ("words", "cost", "do") if getattr(cls, what) is getattr(Step, what)]
        if getattr(cls, "undone", NOTHING) != NOTHING and cls.undo is Step.undo:
            missing.append("undo")
        missing += [] if cls.__doc__ else ["what it does"]
        if missing:
            raise TypeError(f"the step {cls.__name__} does not say: {', '.join(missing)}")

    def applies(self, op: O) -> bool:
        """Whether it has anything to do for this job."""
        return True

    def size(self, op: O) -> int:
        """Bytes that it works through, for progress; 0 where that is not known."""
        return 0

    @abc.abstractmethod
    def words(self, shape: Shape) -> str:
        """What ``plan`` says of it; "" where it does nothing for such a job, or nothing that anybody has to know."""

    @abc.abstractmethod
    def cost(self, shape: Shape) -> float:
        """Estimated seconds."""

    @abc.abstractmethod
    def do(self, op: O) -> None:
        """Does it."""

    def undo(self, op: O) -> None:
        """Leads back to what was before it, however far it has come."""

    def release(self, op: O) -> None:
        """Lets go of what it has held for a way back, once the operation is done."""

    def goes_on(self, left: Left) -> Finished | None:
        """Finishes what an operation has begun that died after this step; None: it had not come so far."""
        return None

    def mend(self, left: Left) -> None:
        """What ``recover`` does for it where it undoes an operation, once driver and carriers have led the job home."""


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """What can be done to a job."""

    name: str  # as the command line and journals have it
    steps: tuple[Step[Any], ...]  # in their order
    image: bool = False  # whether it writes or reads an image
    goes: bool = False  # whether device memory leaves the GPUs that it is on
    comes: bool = False  # whether the job is on GPUs at its end: room there is needed
    ends: bool = False  # whether the job does not run before it, or after it, so that there is no pause

    @property
    def sets_aside(self) -> bool:
        """Whether device memory goes to host memory and stays there: a suspend."""
        return self.goes and not self.comes and not self.image

    @property
    def takes_back(self) -> bool:
        """Whether what was set aside comes back from there: a resume."""
        return self.comes and not self.goes and not self.image

    def words(self, shape: Shape) -> list[str]:
        """The steps in words, for ``plan``."""
        return [words for step in self.steps if (words := step.words(shape))]

    def estimate(self, shape: Shape) -> Estimate:
        """What it will cost, by the rates in ``estimate.py``."""
        costs = [(step, step.cost(shape)) for step in self.steps]
        size = shape.bytes + (shape.host_bytes if self.image else 0)
        size = max(shape.parked, device_bytes(shape.away)) if shape.alone else size
        pause = None if self.ends and not shape.leave_running else sum(cost for step, cost in costs if step.still)
        return Estimate(pause_seconds=pause, seconds=sum(cost for _, cost in costs), bytes=size)

    def other_way(self, shape: Shape) -> OtherWay | None:
        """What the way that is not taken would cost; None where there is but one (memory alone is parked, or ranks)."""
        if not shape.members or shape.away or shape.communicators or shape.release != Release.ALL:
            return None
        way = Route.DRIVER if shape.parked else Route.PARKED
        could = 0 if shape.parked else int(sum(map(beside_context, shape.members)))
        cost = self.estimate(msgspec.structs.replace(shape, parked=could))
        return OtherWay(way=way, pause_seconds=cost.pause_seconds, seconds=cost.seconds)

    def plan(self, shape: Shape, reasons: Sequence[Reason], *, pid: int, name: str, done: bool = False) -> Plan:
        """The result of ``plan`` and ``--dry-run``; ``done``: the job is as the verb wants it already."""
        members = shape.members
        return Plan(
            operation=self.name,
            pid=pid,
            name=name,
            verdict=Verdict.REFUSED if any(r.refuses for r in reasons) else Verdict.OK,
            reasons=sorted(reasons, key=lambda r: not r.refuses),
            steps=[] if done else self.words(shape),
            estimate=Estimate(pause_seconds=0.0) if done else self.estimate(shape),
            map={a: b for m in members for a, b in m.map.items()},
            gpus=places(members) if self.comes or self.image else [],
            way=Route.PARKED if shape.parked else Route.DRIVER if members else Route.HOST,
            other=None if done else self.other_way(shape),
            already=done,
        )

    def by_the_driver(self, members: Sequence[Member], parked: int) -> str:
        """What it costs that the driver carries what could be parked, for a sentence."""
        slow, fast = (self.estimate(Shape(members=members, parked=size)).seconds for size in (0, parked))
        return f"about {slow:.1f} s" + (f" instead of {fast:.1f} s" if f"{fast:.1f}" != f"{slow:.1f}" else "")


def run(verb: Verb, op: O) -> None:
    """Does the steps of a verb, each once its undo is made ready; then lets go of what was held for the way back.

    What a step raises, or a cancel between two, has :class:`Work` undo what was done.
    """
    work = op.work
    ready: list[str] = []
    for i, step in enumerate(verb.steps):
        if not step.applies(op):
            continue
        if step.stops:
            work.check()
        if step.turn:
            work.take_turn(step.turn)
        if step.still and op.pauses and work.paused_at is None:
            work.pause_begins()
        if step.undone != NOTHING and step.undone not in ready:
            ready.append(step.undone)
            work.push(step.undone, partial(step.undo, op))
        with work.timed(step.name, step.tells, step.size(op) or None) if step.tells else work.spent(step.name):
            step.do(op)
        if step.turn == COME:
            work.end_turn()
        if not any(later.still and later.applies(op) for later in verb.steps[i + 1 :]):
            work.pause_ends()
            work.end_turn()
    for name in reversed(ready):
        work.drop(name)
    with contextlib.ExitStack() as releases:  # the newest first; one that fails keeps no other from it
        for step in verb.steps:
            releases.callback(step.release, op)

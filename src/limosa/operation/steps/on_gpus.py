"""An operation on jobs that run here: what its steps share."""

from __future__ import annotations

from collections.abc import Sequence

from limosa.gpu import State
from limosa.operation.journal import Member
from limosa.operation.parked.bulk import Bulk
from limosa.operation.parked.carrier import Carrier
from limosa.operation.prepare import Prepared
from limosa.operation.step import Op, Verb
from limosa.operation.work import Work
from limosa.parking.shim import Shim
from limosa.terms import Release


class OnGpus(Op):
    """One operation on one job, or on several as one."""

    def __init__(self, work: Work, verb: Verb, prepared: Sequence[Prepared]):
        super().__init__(work, [m for p in prepared for m in p.members])
        self.verb, self.prepared, self.release = verb, prepared, prepared[0].release
        self.carrier: Carrier | None = None  # of what the shim looks after; None: the driver carries everything
        self.bulk: Bulk | None = None  # host memory that is ready for what the driver saves
        self.met = False  # whether its ranks were told to stop at the same call

    @property
    def pauses(self) -> bool:
        """A resume counts as a pause from its beginning."""
        return self.verb.takes_back or super().pauses

    @property
    def carried(self) -> Carrier:
        """The carrier, in a step that is done only where there is one."""
        assert self.carrier is not None
        return self.carrier

    @property
    def shims(self) -> dict[int, Shim]:
        """The connections to shims that the operation has, by pid: each serves one client at a time."""
        own = self.bulk.shims if self.bulk is not None else {}
        return {**own, **(self.carrier.shims if self.carrier is not None else {})}

    @property
    def by_driver(self) -> bool:
        """Whether the driver has a part in it: none where memory alone is suspended, or there is no CUDA state."""
        return self.release == Release.ALL and bool(self.members)

    @property
    def awake(self) -> list[Member]:
        """Those that are not suspended."""
        return [m for m in self.members if m.was != State.CHECKPOINTED and not m.away]

    @property
    def ranks(self) -> list[Member]:
        """One that stays suspended is not asked: an image's part may hold the one connection that its shim has."""
        return self.members if self.verb.takes_back else self.awake

    @property
    def meets(self) -> bool:
        """One that goes was asked before; of one that was taken away nobody knows it but its shim."""
        return len(self.ranks) > 1 or self.verb.takes_back or any(p.comms.within for p in self.prepared)

    @property
    def closed(self) -> bool:
        return self.met or self.verb.takes_back

    @property
    def asleep(self) -> list[Member]:
        return [m for m in self.members if not self.verb.takes_back or m.was == State.CHECKPOINTED]

    @property
    def locked(self) -> list[Member]:
        asleep = self.asleep
        return [m for m in self.members if m in asleep or m.was == State.LOCKED]

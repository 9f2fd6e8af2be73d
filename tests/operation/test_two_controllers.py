"""A killed limosa's worker may still be in the driver's restore while somebody else brings the job back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driver_double import GB, DriverDouble

from limosa.gpu import State
from limosa.operation import driver_steps
from limosa.operation.journal import Header, Journal, Member, Noted, Phase
from limosa.process.identity import Identity


def test_a_restore_by_another_in_the_same_moment_is_seen_and_led_home(
    gpu_like: Any, double: DriverDouble, own_runtime: Path
) -> None:
    """The driver refuses the second one. It says nothing of where the first one has led to: the journal does."""
    pid = gpu_like(on=0, size=GB)
    home = {uuid: uuid for uuid in double.uuids}
    away = dict(zip(double.uuids, reversed(double.uuids), strict=True))
    member = Member(identity=Identity.of(pid), home=home, map=away, held={double.uuids[0]: GB}, root=pid)
    me = Identity.of(os.getpid())
    journal = Journal.create(Header(id="move-1", operation="move", roots=[member.identity], controller=me))
    journal.note(Noted.RESTORE, Phase.BEGIN, pid)
    double.states[pid] = State.CHECKPOINTED
    restore, late = double.restore, [away]

    def after_the_other(pid: int, mapping: Mapping[str, str] | None = None, limit: float | None = None) -> None:
        while late:
            restore(pid, late.pop())  # the dead one's own call, begun before
        restore(pid, mapping, limit)

    double.restore = after_the_other  # type: ignore[method-assign]
    driver_steps.bring_back(double, [member], journal, "move-1")  # type: ignore[arg-type]
    assert double.where(pid) == [0]
    assert double.states[pid] == State.RUNNING
    journal.finish()

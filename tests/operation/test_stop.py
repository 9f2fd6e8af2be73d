"""``stop`` of a job that is suspended, or of which nobody can say whether it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from limosa.errors import DriverHung, GpuUnavailable, JobSuspended, LimosaError
from limosa.operation import ending
from limosa.process.identity import Identity
from limosa.process.records import SuspendRecord


@pytest.mark.parametrize("answer", [DriverHung(call="state", pid=1, seconds=5.0), GpuUnavailable(detail="no driver")])
@pytest.mark.parametrize("suspended", [True, False])
def test_what_was_suspended_is_not_ended_where_nobody_can_say_that_it_is_not(
    start: Callable[..., object], runtime: object, monkeypatch: pytest.MonkeyPatch, answer: LimosaError, suspended: bool
) -> None:
    root = Identity.of(start(["sleep", "60"], ready=None).pid)  # type: ignore[attr-defined]

    class Driver:
        def states(self, pids: list[int], timeout: float) -> dict[int, object]:
            if isinstance(answer, GpuUnavailable):
                raise answer
            return dict.fromkeys(pids, answer)

        def close(self) -> None:
            pass

    monkeypatch.setattr(ending.gpu, "Driver", Driver)
    monkeypatch.setattr(ending, "may_use_cuda", lambda _: True)
    if not suspended:
        ending._refuse_suspended(root, "", [root])
        return
    SuspendRecord(root=root).save()
    with pytest.raises(JobSuspended):
        ending._refuse_suspended(root, "", [root])

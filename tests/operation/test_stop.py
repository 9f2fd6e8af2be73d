"""``stop`` of a job that is suspended, or of which nobody can say whether it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from limosa.errors import DriverHung, GpuUnavailable, JobSuspended, LimosaError, NoCudaState
from limosa.operation import ending
from limosa.process.identity import Identity
from limosa.process.records import SuspendRecord


def test_a_worker_that_has_no_state_to_tell_keeps_no_job_from_being_stopped(
    start: Callable[..., object], runtime: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has resumed what Limosa suspended, and its record is still there."""
    root, worker = (Identity.of(start(["sleep", "60"], ready=None).pid) for _ in range(2))  # type: ignore[attr-defined]
    no_state = NoCudaState(call="state", pid=worker.pid, result="CUDA_ERROR_NOT_INITIALIZED", code=3, meaning="none")

    class Driver:
        def states(self, pids: list[int], timeout: float) -> dict[int, object]:
            return {root.pid: "running", worker.pid: no_state}

        def __enter__(self) -> Driver:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(ending.drivers, "driver", Driver)
    monkeypatch.setattr(ending, "may_use_cuda", lambda _: True)
    SuspendRecord(root=root, members=[root]).save()
    ending._refuse_suspended(root, "", [root, worker])


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

        def __enter__(self) -> Driver:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(ending.drivers, "driver", Driver)
    monkeypatch.setattr(ending, "may_use_cuda", lambda _: True)
    if not suspended:
        ending._refuse_suspended(root, "", [root])
        return
    SuspendRecord(root=root, members=[root]).save()
    with pytest.raises(JobSuspended):
        ending._refuse_suspended(root, "", [root])

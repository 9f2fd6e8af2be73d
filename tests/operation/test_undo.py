"""The undo stack of an operation: what was done last is undone first, whatever goes wrong meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from limosa.errors import FailedUndone, LeftSuspended, LimosaError, NoRoomOnHost, UndoFailed
from limosa.operation import work as work_module
from limosa.operation.work import Work


class Failing:
    """An operation that fails when all its steps are done; ``undone`` are those that were undone."""

    def __init__(self, verb: str = "move") -> None:
        self.work = Work(verb)
        self.undone: list[str] = []

    def step(self, name: str, undo: Callable[[], None] = lambda: None, called: str = "") -> None:
        def undoes() -> None:
            undo()
            self.undone.append(called or name)

        self.work.push(name, undoes)

    def fails(self, expected: type[LimosaError] = FailedUndone, match: str | None = None) -> None:
        with pytest.raises(expected, match=match), self.work:
            raise FailedUndone(what="move", detail="made to fail")


def test_what_was_done_last_is_undone_first() -> None:
    """The claim and what vault and mover hold are the first to come and have to be the last to go."""
    move = Failing()
    for name in ("claim", "parked", "driver", "target"):
        move.step(name)
    move.fails()
    assert move.undone == ["target", "driver", "parked", "claim"]


def test_of_two_undos_of_one_name_the_newest_is_dropped() -> None:
    move = Failing()
    move.step("driver", called="first")
    move.step("other")
    move.step("driver", called="second")
    move.work.drop("driver")
    move.work.drop("nothing of that name")
    move.fails()
    assert move.undone == ["other", "first"]


def test_an_undo_that_leaves_the_job_suspended_does_not_keep_the_rest_from_being_undone() -> None:
    def suspended() -> None:
        raise LeftSuspended(detail="no room", pid=1, job_state="checkpointed")

    move = Failing()
    move.step("claim")
    move.step("driver", suspended)
    move.fails(LeftSuspended)
    assert move.undone == ["claim"]


def test_after_an_undo_that_fails_nothing_more_is_undone_and_it_is_said() -> None:
    """What is below it may be what ``recover`` needs: the claim, what is held."""

    def fails() -> None:
        raise OSError("no")

    move = Failing()
    move.step("claim")
    move.step("driver", fails)
    move.fails(UndoFailed, match="driver: no")
    assert move.undone == []


def test_nothing_is_undone_where_nothing_fails() -> None:
    move = Failing()
    move.step("claim")
    with move.work:
        pass
    assert move.undone == []


@pytest.mark.parametrize("least", ["/image", "/runtime"])
def test_of_a_full_disk_the_folder_is_named(monkeypatch: pytest.MonkeyPatch, least: str) -> None:
    """What was written to is not always said, and the runtime folder is what nobody thinks of."""
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", "/runtime")
    monkeypatch.setattr(work_module, "_room", lambda folder: 0 if folder == least else 1)
    checkpoint = Failing("checkpoint")
    checkpoint.work._image = "/image/new"
    checkpoint.step("draft", lambda: monkeypatch.setattr(work_module, "_room", lambda _: 1))
    text = f"no room is left in {least} .No space left on device.: checkpoint was undone"
    with pytest.raises(NoRoomOnHost, match=text) as failed, checkpoint.work:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert failed.value.hint == f"df -h {least}"

"""What verbs are made of: a step that leaves something out does not load; one engine runs all."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import support

from limosa.errors import FailedUndone, UsageError
from limosa.operation.journal import Member
from limosa.operation.step import NOTHING, Op, Shape, Step, Verb, free, run, unsaid
from limosa.operation.steps import communicators
from limosa.operation.verbs import MOVE, VERBS, states_after, verb_of
from limosa.operation.work import Work
from limosa.process.identity import Identity

PROJECT = Path(support.__file__).parents[1]
ME = Member(identity=Identity.of(os.getpid()))


def test_the_page_of_steps_is_what_the_lists_say() -> None:
    page = runpy.run_path(str(PROJECT / "scripts/steps.py"))["page"]()
    assert (PROJECT / "docs/steps.md").read_text() == page, "run: python scripts/steps.py"


COMPLETE: dict[str, Any] = {
    "__doc__": "Something is done.",
    "name": "some",
    "still": False,
    "undone": "some",
    "left": "undone",
    "words": unsaid,
    "cost": free,
    "do": lambda self, op: None,
    "undo": lambda self, op: None,
}


@pytest.mark.parametrize("missing", ["name", "still", "undone", "left", "words", "cost", "do", "undo", "__doc__"])
def test_a_step_that_leaves_something_out_does_not_load(missing: str) -> None:
    with pytest.raises(TypeError, match="does not say"):
        type("Some", (Step,), {name: value for name, value in COMPLETE.items() if name != missing})
    assert type("Some", (Step,), COMPLETE)


def test_one_with_nothing_to_undo_needs_no_undo() -> None:
    without = {name: value for name, value in COMPLETE.items() if name != "undo"}
    assert type("Some", (Step,), {**without, "undone": NOTHING})


class Log(Op):
    """An operation that only notes what is done."""

    def __init__(self, work: Work):
        super().__init__(work, [ME])
        self.did: list[str] = []


def noted(name: str, *, still: bool = False, undone: str = NOTHING, fails: bool = False, applies: bool = True) -> Any:
    def do(self: object, op: Log) -> None:
        op.did.append(name)
        if fails:
            raise FailedUndone("it was not to be")

    return type(
        name,
        (Step,),
        {
            **COMPLETE,
            "name": name,
            "still": still,
            "undone": undone,
            "do": do,
            "applies": lambda self, op: applies,
            "undo": lambda self, op: op.did.append(f"undo {undone}"),
            "release": lambda self, op: op.did.append(f"release {name}"),
        },
    )()


def test_what_was_held_for_a_way_back_is_let_go_of_the_newest_first() -> None:
    with Work("move") as work:
        log = Log(work)
        run(Verb(name="move", steps=(noted("a", undone="x"), noted("b", undone="y"), noted("c", applies=False))), log)
    assert log.did == ["a", "b", "release c", "release b", "release a"]
    assert {"a", "b"} <= set(work.timings)
    assert "c" not in work.timings


def test_a_release_that_fails_keeps_no_other_from_its_own() -> None:
    fails = noted("b")
    type(fails).release = lambda self, op: 1 / 0
    with Work("move") as work, pytest.raises(ZeroDivisionError):
        run(Verb(name="move", steps=(noted("a"), fails, noted("c"))), log := Log(work))
    assert log.did == ["a", "b", "c", "release c", "release a"]


def test_steps_are_undone_the_newest_first_and_those_that_share_an_undo_once() -> None:
    steps = (noted("a", undone="x"), noted("b", undone="y"), noted("c", undone="x"), noted("d", undone="z", fails=True))
    work = Work("move")
    log = Log(work)

    def all_of_it() -> None:
        with work:
            run(Verb(name="move", steps=steps), log)

    with pytest.raises(FailedUndone):
        all_of_it()
    assert log.did == ["a", "b", "c", "d", "undo z", "undo y", "undo x"]


def test_the_pause_goes_from_the_first_step_that_holds_still_to_the_last_that_applies() -> None:
    seen: dict[str, bool] = {}

    def looks(name: str, **more: Any) -> Any:
        step = noted(name, **more)
        type(step).do = lambda self, op: seen.__setitem__(name, op.work.paused_at is not None)
        return step

    steps = (looks("a"), looks("b", still=True), looks("c"), looks("d", still=True), looks("e"), looks("f"))
    with Work("move") as work:
        run(Verb(name="move", steps=(*steps, noted("g", still=True, applies=False))), Log(work))
    assert seen == {"a": False, "b": True, "c": True, "d": True, "e": False, "f": False}
    assert work.timings["pause_seconds"] > 0


def test_the_example_of_a_new_step_is_one() -> None:
    """docs/adding-a-step.md, as it stands there: a step, and the real one in what it says of itself."""
    (code,) = re.findall(r"```python\n(.*?)```", (PROJECT / "docs/adding-a-step.md").read_text(), re.S)
    made: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "adding-a-step.md", "exec"), made)
    longer = msgspec.structs.replace(MOVE, steps=(made["CloseCommunicators"](), *MOVE.steps))
    shape = Shape(members=[ME, ME], parked=1 << 30, communicators=2)
    assert longer.words(shape) == ["close 2 NCCL communicators", *MOVE.words(shape)]
    more = (longer.estimate(shape).pause_seconds or 0) - (MOVE.estimate(shape).pause_seconds or 0)
    assert more == pytest.approx(made["CLOSING"])
    for name in ("WayBackOfCommunicators", "CloseCommunicators"):
        told, real = made[name], getattr(communicators, name)
        assert all(getattr(told, of) == getattr(real, of) for of in ("__doc__", "name", "still", "undone", "left"))
    assert made["CLOSING"] == communicators.CLOSING


def test_names_in_journals_are_those_of_the_version_before() -> None:
    """A journal of the version before is recovered, and one that it reads names what it knows."""
    assert states_after().items() >= {
        ("lock done", "locked"),
        ("checkpoint done", "checkpointed"),
        ("criu-restore done", "checkpointed"),
        ("restore done", "locked"),
        ("unlock done", "running"),
    }
    undone = {step.undone for verb in VERBS.values() for step in verb.steps}
    assert undone == {
        "communicators",
        "driver",
        "parked",
        "parked-target",
        "ready",
        "sees",
        "rewind",
        "chunks",
        "names",
        "tree",
        NOTHING,
    }


def test_an_operation_of_another_version_is_refused_with_words() -> None:
    with pytest.raises(UsageError, match="another version"):
        verb_of("teleport")

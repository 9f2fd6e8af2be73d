"""``recover`` takes a container away only where nobody has used it since."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import msgspec
import pytest

from limosa.containers.runtime import Contained
from limosa.operation import recover_containers
from limosa.operation.journal import Noted, Phase, Record
from limosa.operation.results import Recovered
from limosa.process.identity import Identity

ME = Identity.of(os.getpid())
ENDED = Identity(os.getpid(), 1)  # of somebody who had this pid before


BEGAN = Record(step=Noted.CRIU_RESTORE, phase=Phase.NOTE, data={"criu": ENDED.to_str()})


class Fake:
    """A runtime that has one container."""

    def __init__(self, found: Contained | None):
        self.found, self.removed = found, []

    def find(self, _: str) -> Contained | None:
        return self.found

    def remove(self, id_: str) -> None:
        self.removed.append(id_)

    def remove_made(self, word: str, *_: str) -> None:
        self.removed.append(word)

    def remove_volumes(self, names: list[str], since: float, until: float) -> None:
        assert since < until
        self.removed += names


class Dead:
    """A journal."""

    def __init__(self, *records: Record, leave_running: bool = False, members: tuple[int, ...] = ()):
        self.records = list(records)
        told = {"id": "x", "roots": [ENDED], "leave_running": leave_running, "members": members, "image": "/nowhere"}
        self.header: Any = type("Header", (), {**told, "operation": "restore", "tree": []})()

    def last(self, step: Noted) -> Record | None:
        return next((r for r in reversed(self.records) if r.step == step), None)

    def try_note(self, step: Noted, phase: Phase, pid: int = 0, **data: Any) -> None:
        self.records.append(Record(step=step, phase=phase, pid=pid, data=data))

    def began(self, step: Noted) -> bool:
        return any(r.step == step and r.phase == Phase.BEGIN for r in self.records)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake(Contained(id="one", name="one", init=None, run="first"))
    monkeypatch.setattr(recover_containers, "runtime_of", lambda *_: found)
    monkeypatch.setattr(recover_containers, "is_committed", lambda _: True)
    monkeypatch.setattr(recover_containers, "still_an_image", lambda _: None)
    gone = Recovered(kind="operation", id="x", state="gone", did="the job has ended")
    monkeypatch.setattr(recover_containers.recover_images, "recover_checkpoint", lambda *_: gone)
    return found


@pytest.mark.parametrize(
    ("run", "leave_running", "removed"),
    [("first", False, ["one"]), ("", False, ["one"]), ("second", False, []), ("first", True, [])],
)
def test_a_container_that_was_written(runtime: Fake, run: str, leave_running: bool, removed: list[str]) -> None:
    """It was killed to be removed: so it is. Not one that was left running, nor one that was started anew."""
    data = {"runtime": "podman", "container": "one", "run": run, "folder": "/nowhere"}
    dead: Any = Dead(Record(step=Noted.FREEZE, phase=Phase.BEGIN, data=data), leave_running=leave_running)
    recover_containers.recover_checkpoint(dead, None, lambda _: None)  # type: ignore[arg-type]
    assert runtime.removed == removed


def test_a_container_that_went_on_after_its_image_stays(runtime: Fake) -> None:
    data = {"runtime": "podman", "container": "one", "run": "first", "folder": "/nowhere"}
    went_on = Record(step=Noted.UNDO, phase=Phase.BEGIN, data={"name": "still"})
    dead: Any = Dead(Record(step=Noted.FREEZE, phase=Phase.BEGIN, data=data), went_on)
    entry = recover_containers.recover_checkpoint(dead, None, lambda _: None)  # type: ignore[arg-type]
    assert (runtime.removed, "stays" in entry.did) == ([], True)


@pytest.mark.parametrize(
    ("begun", "went_on", "committed", "ended"),
    [
        (True, False, True, True),
        (False, False, True, False),
        (True, True, True, False),
        (True, False, False, False),
    ],
)
def test_one_that_its_runtime_had_begun_to_end(
    runtime: Fake, monkeypatch: pytest.MonkeyPatch, begun: bool, went_on: bool, committed: bool, ended: bool
) -> None:
    """It is ended where it has stood still since its image."""
    monkeypatch.setattr(recover_containers, "is_committed", lambda _: committed)
    monkeypatch.setattr(recover_containers, "connections_go_on", lambda *_, **__: None)
    monkeypatch.setattr(runtime, "has_begun_to_end", lambda *_: begun, raising=False)
    data = {"runtime": "podman", "container": "one", "run": "first", "folder": "/nowhere"}
    dead: Any = Dead(Record(step=Noted.FREEZE, phase=Phase.BEGIN, data=data))
    if went_on:
        dead.records.append(Record(step=Noted.UNDO, phase=Phase.BEGIN, data={"name": "still"}))
    with subprocess.Popen(["/bin/sleep", "60"]) as job:
        dead.header.roots = [Identity.of(job.pid)]
        recover_containers.recover_checkpoint(dead, None, lambda _: None)  # type: ignore[arg-type]
        assert (job.poll() is not None) == ended
        assert any(r.step == Noted.UNDO for r in dead.records) != ended, "that it goes on is noted"
        job.kill()


@pytest.mark.parametrize(
    ("members", "after", "removed"),
    [
        ((), [], False),
        ((1,), [], True),
        ((1,), [Noted.UNLOCK], False),
        ((1,), [Noted.OPEN], False),
    ],
)
def test_a_container_that_came_back_and_has_ended(
    runtime: Fake, members: tuple[int, ...], after: list[Noted], removed: bool
) -> None:
    """It stays where it may have run: what it has written since is in no image."""
    data = {"runtime": "podman", "program": "", "made": "one", "bundle": "", "volumes": ["vol"]}
    dead: Any = Dead(
        Record(step=Noted.CRIU_RESTORE, phase=Phase.BEGIN, data=data),
        BEGAN,
        Record(step=Noted.CRIU_RESTORE, phase=Phase.DONE),
        *(Record(step=step, phase=Phase.BEGIN) for step in after),
        members=members,
    )
    entry = recover_containers.recover_restore(dead, None, lambda _: None)  # type: ignore[arg-type]
    assert entry.state == "gone"
    assert runtime.removed == (["one", "vol"] if removed else [])


@pytest.mark.parametrize(("run", "removed"), [("first", True), ("second", False)])
def test_a_container_that_was_started_anew_before_it_was_let_go(runtime: Fake, run: str, removed: bool) -> None:
    """It stood still, and somebody has restarted it: neither it nor its volumes are the half of a restore."""
    runtime.found = Contained(id="one", name="one", init=None, run=run)
    data = {"runtime": "podman", "program": "", "made": "other", "bundle": "", "volumes": ["vol"]}
    dead: Any = Dead(
        Record(step=Noted.CRIU_RESTORE, phase=Phase.BEGIN, data=data),
        BEGAN,
        Record(step=Noted.CRIU_RESTORE, phase=Phase.NOTE, data={"made": "one", "run": "first"}),
        Record(step=Noted.CRIU_RESTORE, phase=Phase.DONE),
        members=(1,),
    )
    recover_containers.recover_restore(dead, None, lambda _: None)  # type: ignore[arg-type]
    assert runtime.removed == (["other", "one", "vol"] if removed else ["other"])


@pytest.mark.parametrize(("ago", "runc_began", "removed"), [(5, True, True), (30, True, False), (5, False, False)])
def test_a_container_of_runcs_that_was_started_by_hand_since(
    runtime: Fake, ago: float, runc_began: bool, removed: bool
) -> None:
    """It has the name and the bundle of the one that a killed restore was making."""
    runtime.found = Contained(id="one", name="one", init=ME)
    data = {"runtime": "runc", "program": "", "made": "one", "bundle": ""}
    began = recover_containers.started_on(ME)
    dead: Any = Dead(Record(step=Noted.CRIU_RESTORE, phase=Phase.BEGIN, time=began - ago, data=data))
    if runc_began:
        dead.records.append(msgspec.structs.replace(BEGAN, time=began - ago))
    recover_containers.recover_restore(dead, None, lambda _: None)  # type: ignore[arg-type]
    assert runtime.removed == (["one"] if removed else [])


def test_one_of_which_its_runtime_does_not_say_which_run_it_was_stays(runtime: Fake) -> None:
    """containerd, whose task was taken away: by limosa, or by somebody who has had it run since."""
    runtime.found = Contained(id="one", name="one", init=None)
    data = {"runtime": "containerd", "container": "default/one", "run": "4711", "folder": "/nowhere"}
    dead: Any = Dead(Record(step=Noted.FREEZE, phase=Phase.BEGIN, data=data))
    entry = recover_containers.recover_checkpoint(dead, None, lambda _: None)  # type: ignore[arg-type]
    assert (runtime.removed, "stays" in entry.did) == ([], True)

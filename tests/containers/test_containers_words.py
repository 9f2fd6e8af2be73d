"""What is said of a container: who it is, what becomes of it, and what to type instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_containers_to_disk import Desk, desk_of, until

__all__ = ["desk_of"]
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]


@pytest.fixture(params=["podman", "runc"])
def desk(request: pytest.FixtureRequest, desk_of: Callable[[str], Desk]) -> Desk:
    return desk_of(request.param)


def test_it_is_said_that_it_is_removed_and_what_comes_back(desk: Desk) -> None:
    logs = {"own_log": True} if desk.runtime.name == "podman" else {}
    one = desk.job(**logs)
    called, gone = desk.called(one), ", its logs go too" if logs else ""
    until(lambda: desk.says(0, "ps")["jobs"])
    planned = desk.says(0, "plan", "checkpoint", called, "--output", desk.image())
    assert planned["steps"][-1] == f"remove {called}{gone}"
    kept = desk.says(0, "plan", "checkpoint", called, "--output", desk.image(), "--leave-running")
    assert not any("remove" in step for step in kept["steps"])
    said = desk.limosa("checkpoint", called, "--output", desk.image()).stdout
    ended = "is removed, its logs too" if logs else "is removed"
    assert f"{called} (process {one.pid}) {ended}\n" in said
    assert not desk.runtime.has(one.name)

    more = ["--name", desk.name("other")]
    if desk.runtime.name == "runc":
        more += ["--bundle", desk.runtime.same_bundle(one, desk.name("other"))]
    plan = desk.says(0, "plan", "restore", desk.image(), "--to", 1, *more)
    other = f"{desk.runtime.name}:{desk.name('other')}"
    assert plan["name"] == other
    assert {f"restore {other}", f"unlock {other}"} < set(plan["steps"])
    (record,) = [r for r in plan["reasons"] if r["id"] == "container-record"]
    assert desk.name("other") in record["text"]
    assert not [r for r in desk.says(0, "plan", "restore", desk.image())["reasons"] if r["id"] == "container-record"]
    came = desk.restore("--to", 1, *more[2:], name="other")
    assert [w["id"] for w in came["warnings"]] == ["container-record"]
    assert came["name"] == other


def test_it_is_named_whoever_names_it(desk: Desk) -> None:
    one = desk.job()
    called, name = desk.called(one), desk.name()
    until(lambda: desk.says(0, "ps")["jobs"])
    assert [job["name"] for job in desk.says(0, "ps")["jobs"]] == [called]
    held = [p for gpu in desk.says(0, "gpus")["gpus"] for p in gpu["processes"] if p["pid"] == one.pid]
    assert [(p["name"], p["job"]) for p in held] == [(called, one.pid)]
    for words in (["--gpu", 0], [one.pid], ["--all"], ["--container", called]):
        assert desk.limosa("suspend", *words).stdout.startswith(f"{called} (process {one.pid}) is suspended"), words
        assert desk.says(0, "resume", *words)["name"] == called

    for wrong in (name, f"docker:{name}"):
        said = desk.limosa("suspend", wrong, rc=10).stderr
        assert said.endswith(f"hint: {called} runs\n")
    error = desk.says(2, "logs", called)["error"]
    if desk.runtime.name == "podman":
        assert (error["message"], error["hint"]) == (f"podman keeps the output of {called}", f"podman logs {name}")
    else:
        assert error["hint"] == f"ls -l /proc/{one.pid}/fd/1 says where it goes"
    desk.checkpoint(one)
    said = desk.limosa("resume", called, rc=10).stderr
    assert said.endswith(f"hint: a checkpoint ended it: limosa restore {desk.image()}\n")
    if desk.runtime.name == "podman":
        error = desk.restore("--shell-job", "--log", "x", rc=2)["error"]
        assert error["hint"] == "leave out --shell-job; leave out --log"

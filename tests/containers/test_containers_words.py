"""What is said of a container: who it is, what becomes of it, and what to type instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_containers_to_disk import Desk, desk_of, until

__all__ = ["desk_of"]
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(240)]


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
